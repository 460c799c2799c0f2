"""Predict steps of replicas that meet every so many of them (`gradwire.outer`).

A meeting of a fragment is one scope of all its weights, which replicas begin together. What its
aggregators compute before its first round, the training thread does; the steps that go on meanwhile
hide of the rest as much as they compute. Then replicas tell each other that they have the averages,
in messages that wait for their receivers' word.

    words   = 2 latency + (ranks - 1) (WORD + HEADER_BYTES) / rate
    exposed = first + max(0, averages - first - delay * (forward + backward)) + words
    step    = forward + backward + exposed of all fragments / every

Not counted: optimizers; differences and outer steps, which read and write the weights; replicas
of which some are slower.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from gradwire.aggregators import Aggregator
from gradwire.engine import HEADER_BYTES
from gradwire.handles.arguments import Methods
from gradwire.lang import Codec
from gradwire.outer_loop.homes import Home, Replica, fragments_of
from gradwire.outer_loop.meeting import WORD
from gradwire.outer_loop.outer import plan_of
from gradwire.outer_loop.settings import OuterSettings
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import DdpScope, priced, scope_of
from gradwire_tools.sim.curves import Curves
from gradwire_tools.sim.predict import SimulatedStep, averaged, check_seconds


@dataclass(frozen=True)
class OuterScenario(SimulatedStep):
    """Replicas of one rank each, which meet.

    Attributes:
        settings, codec_options: how, and options of their codec.
        model: as `models.named` takes it.
        forward: seconds of computing before backward.

    Raises:
        ConfigError: an unknown model, fewer layers than fragments, a codec that is not defined in
            the algorithm, or a number out of range.
    """

    settings: OuterSettings
    model: str
    codec_options: Mapping[str, object] = field(default_factory=dict)
    forward: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("forward", self.forward)
        _ = self.scopes

    @cached_property
    def homes(self) -> list[Home]:
        """The model's weights."""
        return [
            Home(name, torch.empty(shape, dtype=torch.float32, device="meta"))
            for name, shape in models.named(self.model).items()
        ]

    @cached_property
    def scopes(self) -> list[DdpScope]:
        """The meetings of a round, as `gradwire.outer` would plan them."""
        names, how = [home.name for home in self.homes], self.settings
        parts = fragments_of(names, how.every, how.fragments)
        rules = Methods(how.codec, self.codec_options).rules()
        of = replace(how, fragments=len(parts)), self.ranks, self.options, 0
        plan = plan_of(Replica(self.homes, None, False), rules, *of)
        planned = {p.name: p for p in plan.parameters}
        members = (tuple(planned[name] for name in part) for part in parts)
        return [scope_of(0, one, self.ranks, plan.options) for one in members]

    @property
    def priced(self) -> set[Codec | Aggregator]:
        """The codecs and aggregators of which curves are needed."""
        return priced(self.scopes)


def predict_outer(scenario: OuterScenario, curves: Curves) -> dict[str, Any]:
    """Simulate the meetings of one round: of every fragment once.

    Returns:
        A row: the keys of `SimulatedStep.row` (seconds: a step, as a mean; limit_seconds: where
        meetings take what their bytes do), outer (true), model, numel, every, delay,
        forward_seconds; of a round hidden_seconds, exposed_seconds, compute_seconds, wire_bytes and
        messages (of rank 0); meeting_seconds and meeting_bytes of each fragment; needed_delay (that
        hides all, but for what is computed first); exact, as of `predict`.

    Raises:
        ConfigError: a codec has no curve.
    """
    curves, every, net = scenario.checked(curves), scenario.settings.every, scenario.net
    met = [averaged(scenario, [scope], curves, [0.0]) for scope in scenario.scopes]
    first = [scope.seconds(curves, scenario.ranks)[0] for scope in scenario.scopes]
    others, told = scenario.ranks - 1, WORD + HEADER_BYTES
    seconds = [one.seconds for one in met]
    nbytes = [one.keys["wire_bytes"] + others * told for one in met]
    wire = [one.moved * 8 / net.rate_bits_per_s + one.rounds * net.latency_s for one in met]
    computing = scenario.forward + scenario.backward
    hidden = scenario.settings.delay * computing
    words = 2 * net.latency_s + 8 * others * told / net.rate_bits_per_s if others else 0.0
    exposed = sum(f + max(0.0, s - f - hidden) + words for f, s in zip(first, seconds, strict=True))
    limit = computing + sum(max(0.0, one - hidden) + words for one in wire) / every
    longest = max(s - f for f, s in zip(first, seconds, strict=True))
    return {
        "outer": True,
        "model": scenario.model,
        "numel": sum(home.parameter.numel() for home in scenario.homes),
        **scenario.row(computing + exposed / every, limit, 0),
        "forward_seconds": scenario.forward,
        "every": every,
        "delay": scenario.settings.delay,
        "needed_delay": math.ceil(longest / computing) if computing else None,
        "meeting_seconds": [one + words for one in seconds],
        "meeting_bytes": nbytes,
        "hidden_seconds": sum(seconds) + words * len(met) - exposed,
        "exposed_seconds": exposed,
        "compute_seconds": sum(one.keys["compute_seconds"] for one in met),
        "wire_bytes": sum(nbytes),
        "messages": sum(one.keys["messages"] + others for one in met),
        "exact": all(one.keys["exact"] for one in met),
    }
