"""The outer weights of one fragment: how far a replica has gone, and where all of them meet."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence

import torch

from gradwire.aggregators import Attached
from gradwire.outer_loop.homes import Home

KEPT = ("theta", "velocity")


class Fragment:
    """What this rank keeps of a fragment, in fp32.

    Args:
        every: its weights, equal on all replicas.
        members: the states, as the engine has them, of those of which this rank has rows, by name.
        device: of what is kept.
        rule: of the outer step, as in `OuterSettings`.

    Attributes:
        homes: those of which this rank has rows.
        theta: the outer weights, by name, as the model's rows.
        velocity: their momentum; zeros at first.
        drift: the norm of theta - theta_r at the newest meeting.
    """

    def __init__(
        self,
        every: Sequence[Home],
        members: Mapping[str, Attached],
        device: torch.device,
        rule: str,
    ) -> None:
        self.every = list(every)
        self.homes = [home for home in every if home.name in members]
        self.members = [members[home.name] for home in self.homes]
        self.theta = {
            home.name: home.rows().to(device, torch.float32, copy=True).contiguous()
            for home in self.homes
        }
        self.velocity = {name: torch.zeros_like(values) for name, values in self.theta.items()}
        self.rule, self.drift = rule, 0.0

    def among(self, members: Mapping[str, Attached]) -> Fragment:
        """The same outer weights, with other states."""
        found = copy.copy(self)
        found.members = [members[home.name] for home in self.homes]
        return found

    def differences(self) -> tuple[list[torch.Tensor], str]:
        """theta - theta_r, flat, by weight; and the name of one that is not finite, or "". That
        one's difference is zeros, which harm no residual."""
        found, fault, squares = [], "", 0.0
        for home in self.homes:
            theta = self.theta[home.name]
            difference = theta - home.rows().to(theta.device, torch.float32)
            square = float(difference.square().sum(dtype=torch.float64))
            if square != square or square == float("inf"):
                fault = fault or home.name
                difference.zero_()
            else:
                squares += square
            found.append(difference.reshape(-1))
        self.drift = squares**0.5
        return found, fault

    def step(self, averages: Sequence[torch.Tensor], lr: float, momentum: float) -> None:
        """Nesterov's step of the outer weights, as torch.optim.SGD has it, or its sign; replaces
        `averages`."""
        for home, average in zip(self.homes, averages, strict=True):
            theta, velocity = self.theta[home.name], self.velocity[home.name]
            average = average.view(theta.shape)
            velocity.mul_(momentum).add_(average)
            # Product by product, as every machine rounds it: a fused one may differ in a bit.
            average.add_(velocity * momentum)
            theta.sub_((average.sign_() if self.rule == "sign" else average).mul_(lr))

    def mix(self, share: float) -> None:
        """Move the model's rows to the outer weights, but for a share of what they are."""
        for home in self.homes:
            rows, theta = home.rows(), self.theta[home.name].to(home.parameter.device)
            rows.copy_(theta.lerp(rows.to(torch.float32), share) if share else theta)

    def fingerprint(self) -> int:
        """A number of the outer weights and their momentum, equal where all their bits are."""
        found = 0
        for key in KEPT:
            for tensor in getattr(self, key).values():
                values = tensor.cpu().numpy()
                found = zlib.crc32(values.data.cast("B") if values.size else b"", found)
        return found

    def kept(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a state has of each weight: outer weights and momentum, by name."""
        return {name: {key: getattr(self, key)[name] for key in KEPT} for name in self.theta}
