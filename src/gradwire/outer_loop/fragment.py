"""The outer weights of one fragment: how far a replica has gone, and where all of them meet."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from gradwire.aggregators import Attached
from gradwire.outer_loop.homes import Home

KEPT = ("theta", "velocity")


class Kept(NamedTuple):
    """What is kept of a weight, in fp32, as the model's rows.

    Attributes:
        theta: the outer weights.
        velocity: their momentum; zeros at first.
        after: of the meeting that was applied last.
    """

    theta: torch.Tensor
    velocity: torch.Tensor
    after: object = None


class Fragment:
    """What this rank keeps of a fragment, in fp32.

    Args:
        every: its weights, equal on all replicas.
        members: the states, as the engine has them, of those of which this rank has rows, by name.
        device: of what is kept.
        rule: of the outer step, as in `OuterSettings`.

    Attributes:
        homes: those of which this rank has rows.
        weights: what is kept of these, by name.
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
        self.weights: dict[str, Kept] = {}
        for home in self.homes:
            theta = home.rows().to(device, torch.float32, copy=True).contiguous()
            self.weights[home.name] = Kept(theta, torch.zeros_like(theta))
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
            theta = self.weights[home.name].theta
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

    def step(
        self, averages: Sequence[torch.Tensor], lr: float, momentum: float, after: object
    ) -> None:
        """Nesterov's step of the outer weights, as torch.optim.SGD has it, or its sign. One that an
        interrupt broke off goes on where it was: each weight steps once `after` a meeting."""
        for home, average in zip(self.homes, averages, strict=True):
            kept = self.weights[home.name]
            if kept.after is after:
                continue
            average = average.view(kept.theta.shape)
            # Product by product, as every machine rounds it: a fused one may differ in a bit.
            velocity = (kept.velocity * momentum).add_(average)
            step = (velocity * momentum).add_(average)
            step = (step.sign_() if self.rule == "sign" else step).mul_(lr)
            self.weights[home.name] = Kept(kept.theta - step, velocity, after)

    def mix(self, share: float) -> None:
        """Move the model's rows to the outer weights, but for a share of what they are."""
        for home in self.homes:
            rows, theta = home.rows(), self.weights[home.name].theta.to(home.parameter.device)
            rows.copy_(theta.lerp(rows.to(torch.float32), share) if share else theta)

    def fingerprint(self) -> int:
        """A number of the outer weights and their momentum, equal where all their bits are."""
        found = 0
        for key in KEPT:
            for kept in self.weights.values():
                values = getattr(kept, key).cpu().numpy()
                found = zlib.crc32(values.data.cast("B") if values.size else b"", found)
        return found

    def kept(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a state has of each weight: outer weights and momentum, by name."""
        return {n: {key: getattr(one, key) for key in KEPT} for n, one in self.weights.items()}
