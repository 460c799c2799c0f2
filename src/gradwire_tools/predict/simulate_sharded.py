"""`gradwire sim --sharded`: rows of predictions of an FSDP2 step for each method.

A row: sharded (true), method, model, ranks, per_node, net, algorithm, numel, groups, seconds,
forward_seconds, backward_seconds, blocking, compute_seconds, wire_bytes, weights_wire_bytes,
gradients_wire_bytes, ratio, limit_seconds, of_limit, messages, exact, machine, with replicas
replicas, accumulate, deferred and replicas_wire_bytes, and sweep and value where a parameter was
swept. docs/laboratory/simulator.md explains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gradwire.aggregators import registry
from gradwire.codecs import Identity
from gradwire.errors import ConfigError
from gradwire.planner import WeightRules
from gradwire.planner.weights import in_blocks
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.sharded import ShardedMethod
from gradwire_tools.predict.sim_sweep import Point
from gradwire_tools.predict.simulate import Case, WantedStep
from gradwire_tools.sim import models
from gradwire_tools.sim.sharded import ShardedScenario, predict_sharded
from gradwire_tools.sim.shards import Coded, Gradients, Torch, Weights, codecs_of

KINDS = (
    row_kind(
        "sim --sharded",
        "sharded forward_seconds backward_seconds",
        "method:text model:text net:text algorithm:text ranks:positive per_node:positive "
        "seconds:amount forward_seconds:amount backward_seconds:amount compute_seconds:amount "
        "blocking:flag weights_wire_bytes:amount gradients_wire_bytes:amount ratio:amount? "
        "limit_seconds:amount?",
        "replicas:positive accumulate:positive deferred:flag replicas_wire_bytes:amount? "
        "machine:text? sweep:text value:plain",
    ),
)

SWEPT = ("ranks", "rate", "latency", "per_node", "cores", "forward", "backward", "segments")
_WIDTHS = {"fp32": Torch(4), "fp16": Torch(2), "bf16": Torch(2)}


@dataclass(frozen=True)
class WantedSharded(WantedStep):
    """The request for a step under FSDP2.

    Attributes:
        methods: names as of `bench train --sharded`; of torch's, the first algorithm has a row.
        forward: seconds of computing; None: half of `backward`.
        blocking, replicas, accumulate, undeferred: see
            gradwire_tools.sim.sharded.ShardedScenario.
    """

    methods: Sequence[str] = ()
    forward: float | None = None
    blocking: bool = False
    replicas: int = 1
    accumulate: int = 1
    undeferred: bool = False

    def cases(self, point: Point) -> Iterator[Case]:
        if point.name is not None and point.name not in SWEPT:
            raise ConfigError(
                f"--sweep {point.name}: with --sharded sweep one of {', '.join(SWEPT)}, and give "
                "options of codecs in --methods"
            )
        found = [sharded.parse(name) for name in self.methods]
        for method in found:
            method.check()
        for method in found:
            for algorithm in self.algorithms if method.ours else self.algorithms[:1]:
                one = self._scenario(method, algorithm, point)
                row = {"sharded": True, "method": method.name, "model": self.model}
                codecs = codecs_of(one.groups, one.weights, one.gradients, one.between)
                yield row, codecs, partial(predict_sharded, one)

    def _scenario(self, method: ShardedMethod, algorithm: str, point: Point) -> ShardedScenario:
        weights, hop = sent_by(method)
        full = "inside" in method.options
        common = self.at(point, algorithm if method.ours else "sra")
        forward = common["backward"] / 2 if self.forward is None else self.forward
        return ShardedScenario(
            weights=weights,
            gradients=Identity() if full else hop,
            hop=hop,
            replicas=self.replicas,
            accumulate=self.accumulate,
            deferred=not self.undeferred,
            groups=models.groups(self.model),
            feedback=method.options.get("error_feedback", False),
            forward=point.number("forward", forward),
            blocking=self.blocking,
            **common,
        )


def sent_by(method: ShardedMethod) -> tuple[Weights, Gradients]:
    """How a method, which was checked, sends weights and gradients."""
    if method.ratios is not None:
        return Torch(4, method.ratios[0]), Torch(4, method.ratios[1])
    if not method.ours:
        return _WIDTHS[str(method.weights)], _WIDTHS[str(method.gradients)]
    keep = method.options.get("keep", "payload")  # as `attach` decides where there is memory
    rules = WeightRules.of(method.weights, keep)
    coded = Coded(lambda dimensions, numel: rules.choose((), dimensions, numel), keep)
    weights: Weights = Torch(4) if method.weights is None else coded
    if method.gradients is None:
        return weights, Identity()
    aggregator: Any = registry.get(in_blocks(method.gradients))
    return weights, aggregator.codec
