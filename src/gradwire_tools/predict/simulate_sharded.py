"""`gradwire sim --sharded`: rows of predictions of an FSDP2 step for each method.

A row: sharded (true), method, model, ranks, per_node, net, algorithm, numel, groups, seconds,
forward_seconds, backward_seconds, blocking, compute_seconds, wire_bytes, weights_wire_bytes,
gradients_wire_bytes, ratio, limit_seconds, of_limit, messages, exact, machine, and sweep and value
where a parameter was swept. docs/reference/simulator.md explains them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.aggregators import registry
from gradwire.codecs import Identity
from gradwire.errors import ConfigError
from gradwire.planner import WeightRules
from gradwire.planner.weights import in_blocks
from gradwire_tools.bench import workers
from gradwire_tools.bench.micro.kernels import check_threads
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.sharded import ShardedMethod
from gradwire_tools.predict import sim_sweep
from gradwire_tools.predict.sim_sweep import Point
from gradwire_tools.predict.simulate import WantedStep, known_curves
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
        blocking: see gradwire_tools.sim.sharded.ShardedScenario.
    """

    methods: Sequence[str] = ()
    forward: float | None = None
    blocking: bool = False


@stamped
def run(wanted: WantedSharded, advance: workers.Advance | None = None) -> Iterator[dict[str, Any]]:
    """Yield a row for each point of the sweep, algorithm and method.

    `advance` is called before every codec whose kernels are measured.

    Raises:
        ConfigError: an unknown name, an undefined combination or a number out of range. It is
            raised before anything is measured.
    """
    check_threads(wanted.threads)
    found = [sharded.parse(name) for name in wanted.methods]
    for method in found:
        method.check()
    points = [
        (point, method, _scenario(wanted, method, algorithm, point))
        for point in sim_sweep.points(wanted.sweep)
        for method in found
        for algorithm in (wanted.algorithms if method.ours else wanted.algorithms[:1])
    ]
    needed = dict.fromkeys(
        codec for *_, one in points for codec in codecs_of(one.groups, one.weights, one.gradients)
    )
    known = known_curves(needed, wanted.threads, wanted.file, wanted.fresh, advance)
    for point, method, scenario in points:
        yield {
            "sharded": True,
            "method": method.name,
            "model": wanted.model,
            **predict_sharded(scenario, known),
            "machine": known.machine,
            **point.keys,
        }


def _scenario(
    wanted: WantedSharded, method: ShardedMethod, algorithm: str, point: Point
) -> ShardedScenario:
    if point.name is not None and point.name not in SWEPT:
        raise ConfigError(
            f"--sweep {point.name}: with --sharded sweep one of {', '.join(SWEPT)}, and give "
            "options of codecs in --methods"
        )
    weights, gradients = sent_by(method)
    common = wanted.at(point, algorithm if method.ours else "sra")
    forward = common["backward"] / 2 if wanted.forward is None else wanted.forward
    return ShardedScenario(
        weights=weights,
        gradients=gradients,
        groups=models.groups(wanted.model),
        feedback=method.options.get("error_feedback", False),
        forward=point.number("forward", forward),
        blocking=wanted.blocking,
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
