"""What a handle says of itself: `print(handle)`.

It only looks at what this rank knows: nothing is sent, and no rank is waited for. What the first
step decides is named as not known before it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.aggregators import Aggregator, Dense, Encoded
from gradwire.collectives import AVERAGE, Operation, Options
from gradwire.collectives.compile import algorithm_of, cut
from gradwire.collectives.legal import FLOATS, uncompressed
from gradwire.collectives.packing import expected
from gradwire.engine import Communicator
from gradwire.engine.topology import Topology
from gradwire.lang import layout
from gradwire.lang.kernels import MEND
from gradwire.partition import Spec
from gradwire.planner import ParameterPlan, Plan

_SCATTER = Operation("reduce_scatter", "avg")
_UNKNOWN = "not known before the first step"


@dataclass(frozen=True)
class Expected:
    """What one step is to send from this rank.

    Attributes:
        wire_bytes: headers included; None: not known yet.
        raw_bytes: what uncompressed collectives would send.
    """

    wire_bytes: int | None
    raw_bytes: int

    def __add__(self, other: Expected) -> Expected:
        known = self.wire_bytes is not None and other.wire_bytes is not None
        wire = (self.wire_bytes or 0) + (other.wire_bytes or 0) if known else None
        return Expected(wire, self.raw_bytes + other.raw_bytes)


def expected_all_reduce(plan: Plan, comm: Communicator) -> Expected:
    """Of a step that averages all parameters at once, as DDP's buckets together hold them.

    More buckets have more headers. Where lengths depend on data, they are those that codecs expect.
    An aggregator of several rounds counts with the mean over ranks, as if all of its payloads were
    all-reduced.
    """
    times, topology = 2 * (comm.world_size - 1) / comm.world_size, _topology(comm)
    raw_bytes = round(times * sum(p.numel * p.dtype.itemsize for p in plan.parameters))
    asks = plan.options.algorithm == "hierarchical" and plan.options.nodes is None
    if asks and comm.opened_topology is None:  # ranks tell each other's machines as a group opens
        return Expected(None, raw_bytes)
    several = [p for p in plan.parameters if not isinstance(p.inner, (Encoded, Dense))]
    wire = sum(
        _wire_bytes(AVERAGE, specs, topology, options)
        for options, specs in _one_round(plan).items()
    )
    payloads = sum(p.aggregator.payload_bytes(p.shape, p.dtype) for p in several)
    return Expected(wire + round(times * payloads), raw_bytes)


def _one_round(plan: Plan) -> dict[Options, list[Spec]]:
    """What is averaged by one collective per bucket, by the options of that collective."""
    found: dict[Options, list[Spec]] = {}
    whole: dict[Aggregator, list[ParameterPlan]] = {}
    for p in plan.parameters:
        if isinstance(p.inner, Encoded) and p.inner.scope == "model":
            whole.setdefault(p.inner, []).append(p)
        elif isinstance(p.inner, (Encoded, Dense)):
            spec = _spec(p, p.numel, p.dtype, AVERAGE)
            found.setdefault(_options(p.inner, plan.options), []).append(spec)
    for inner, together in whole.items():
        dtype = torch.float32 if len({p.dtype for p in together}) > 1 else together[0].dtype
        spec = _spec(together[0], sum(p.numel for p in together), dtype, AVERAGE)
        found.setdefault(_options(inner, plan.options), []).append(spec)
    return found


def _options(aggregator: Aggregator, given: Options) -> Options:
    """The options of an aggregator's only collective."""
    algorithm = aggregator.algorithm if isinstance(aggregator, Encoded) else None
    return given if algorithm in (None, given.algorithm) else given.through(algorithm)


def expected_scatter(
    pieces: Sequence[tuple[ParameterPlan, tuple[int, ...], torch.dtype]],
    comm: Communicator | None,
    between: Communicator | None,
    shard: int,
    options: Options,
) -> Expected:
    """Of a step in which FSDP2 scatters one group of parameters.

    Args:
        pieces: of each parameter: its plan, how many values each rank gets, and in which dtype.
        comm: over which they are scattered; None: that is left alone.
        between: over which replicas average the own shards (HSDP); None: not at all.
        shard: this rank's.
    """
    raw = sum(max(lengths) * dtype.itemsize for _, lengths, dtype in pieces)  # of a padded shard
    found = Expected(0, 0)
    if comm is not None:
        specs = [
            dataclasses.replace(_spec(p, sum(lengths), dtype, _SCATTER), lengths=lengths)
            for p, lengths, dtype in pieces
        ]
        wire = _wire_bytes(_SCATTER, specs, _topology(comm), options)
        found += Expected(wire, raw * (comm.world_size - 1))
    if between is not None:
        own = [(p, lengths[shard], dtype) for p, lengths, dtype in pieces if lengths[shard]]
        specs = [_spec(*one, AVERAGE) for one in own]
        through = options.through("sra")
        wire = _wire_bytes(AVERAGE, specs, _topology(between), through) if specs else 0
        found += Expected(wire, 2 * raw * (between.world_size - 1) // between.world_size)
    return found


def _spec(p: ParameterPlan, numel: int, dtype: torch.dtype, operation: Operation) -> Spec:
    """What travels of a parameter."""
    if dtype.is_complex:  # in pairs
        numel, dtype = 2 * numel, dtype.to_real()
    if isinstance(p.inner, Dense) and p.inner.dtype is not None:
        dtype = p.inner.dtype
    codec = p.codec if dtype in FLOATS else None
    codec = uncompressed(operation, dtype) if codec is None else codec
    return Spec(p.name, numel, dtype, codec, p.feedback, p.rotation)


def _wire_bytes(
    operation: Operation, specs: Sequence[Spec], topology: Topology, options: Options
) -> int:
    algorithm = algorithm_of(operation, topology, options)
    parts = cut(operation, specs, algorithm, topology.world_size, options, topology.in_memory)
    return algorithm.wire_bytes(topology.rank, topology.world_size, expected(parts)[0])


def _topology(comm: Communicator) -> Topology:
    return comm.opened_topology or Topology(comm.rank, comm.world_size)


def summary(
    what: str,
    plan: Plan,
    rank: int,
    comms: Sequence[Communicator],
    expected: Expected,
    stats: dict[str, Any],
    ranks: int,
) -> str:
    """The text.

    Args:
        what: is attached, in words.
        plan: in force.
        rank, ranks: of those that have a part in an average.
        comms: over which gradients travel.
        expected: of a step.
        stats: the handle's.
    """
    rows = _groups(plan, rank, ranks)
    of = "" if plan.weights is None else " of gradients"
    lines = [
        headline(what, plan, rank, ranks),
        *_table(["codec", "parameters", "values", "bits per value", "error feedback"], rows),
        f"  bytes{of} per step and rank: {_sent(expected, ranks)}",
    ]
    if stats["steps"]:
        each = f"{stats['wire_bytes'] / stats['steps']:,.0f} bytes{of}"
        if plan.weights is not None:
            each += f" and {stats['weights_wire_bytes'] / stats['steps']:,.0f} of weights"
        lines.append(f"  so far: {stats['steps']:,} steps, {each} per step and rank")
    run = f"  algorithm: {plan.options.algorithm}; transport: "
    used = [comm for comm in comms if comm.world_size > 1] or comms[:1]
    lines.append(run + ", ".join(dict.fromkeys(map(transport_name, used))))
    lines.append(f"  {_residual_line(plan, rank, ranks, stats['residual_bytes'])}")
    if plan.weights is not None:
        lines.append(f"  {_weights_line(plan, stats)}")
    if plan.rules.uncompiled:
        lines.append(
            "  no compiled kernels, so bf16 is sent in place of slow interpreted codecs: "
            f"{plan.rules.uncompiled}; {MEND}"
        )
    return "\n".join(lines)


def unfit(plan: Plan, reduced: Mapping[str, torch.dtype]) -> list[str]:
    """Lines about parameters whose dtype, or that of their gradients, no codec takes.

    Args:
        reduced: the dtype of gradients, by name, where it may be another.
    """
    pairs = [(p.dtype, reduced.get(p.name, p.dtype)) for p in plan.parameters]
    found = Counter(dtype for pair in pairs for dtype in {*pair}.difference(FLOATS))
    said = "uncompressed, since codecs take float32, float16 and bfloat16 alone"
    return [f"{said}: {n:,} parameters in {dtype}" for dtype, n in found.items()]


def headline(what: str, plan: Plan, rank: int, ranks: int) -> str:
    """The first line of `summary`."""
    size = f"{len(plan.parameters)} parameters, {sum(p.numel for p in plan.parameters):,} values"
    return f"gradwire on {what}: {size}; rank {rank} of {ranks}; plan {plan.version}"


def _groups(plan: Plan, rank: int, ranks: int) -> list[list[str]]:
    """A row for each codec or aggregator, those of most values first."""
    groups: dict[Aggregator, list[ParameterPlan]] = {}
    for p in plan.parameters:
        groups.setdefault(p.aggregator, []).append(p)
    rows = []
    for group in sorted(groups.values(), key=lambda g: -sum(p.numel for p in g)):
        values = sum(p.numel for p in group)
        bits = 8 * sum(_payload_bytes(p) for p in group) / max(values, 1)
        feedback = "yes" if group[0].feedback else "no"
        rows.append(
            [str(group[0].inner), f"{len(group):,}", f"{values:,}", f"{bits:.3g}", feedback]
        )
    return rows


def _payload_bytes(p: ParameterPlan) -> float:
    if p.codec is not None:
        return layout(p.codec, p.dtype).expected_nbytes(p.numel)
    return p.aggregator.payload_bytes(p.shape, p.dtype)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    found = []
    for row in (titles, *rows):
        first, *others = (
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        found.append("  " + "  ".join([first, *others]).rstrip())
    return found


def _sent(expected: Expected, ranks: int) -> str:
    if ranks == 1:
        return "0: one rank sends nothing"
    raw = f"{expected.raw_bytes:,} uncompressed"
    if expected.wire_bytes is None:
        return f"{_UNKNOWN} ({raw})"
    less = expected.raw_bytes / max(expected.wire_bytes, 1)
    ratio = f", {less:.1f} times as many" if expected.wire_bytes else ""
    return f"about {expected.wire_bytes:,} expected ({raw}{ratio})"


def _residual_line(plan: Plan, rank: int, ranks: int, now: int) -> str:
    """Of what aggregators keep: now, and with all that they declare."""
    whole = sum(
        math.prod(declared.local(rank, ranks)) * declared.dtype.itemsize
        for p in plan.parameters
        for declared in p.aggregator.states(p.shape).values()
    )
    if not whole and not now:
        return "residuals: none"
    later = "" if now else f" before the first step, {whole:,} bytes from then on"
    return f"residuals and other state of this rank: {now:,} bytes{later}"


def _weights_line(plan: Plan, stats: dict[str, Any]) -> str:
    """Of the codecs of weights, and of the memory of what is kept of them."""
    assert plan.weights is not None
    coded = [p for p in plan.parameters if p.weight is not None]
    bits = 8 * sum(layout(p.weight, p.dtype).expected_nbytes(p.numel) for p in coded if p.weight)
    values = sum(p.numel for p in coded)
    text = f"weights: {values:,} values in codecs, {bits / max(values, 1):.3g} bits per value"
    kept = {
        "payload": "the compressed model",
        "reference": "the decoded model, and differences to it are sent",
    }.get(str(plan.weights.keep))
    if kept is None:
        return f"{text}; nothing is kept of them between gathers"
    now = stats["weights_kept_bytes"]
    when = "" if now or stats["steps"] else " before the first step"
    return f"{text}; every rank keeps {kept}: {now:,} bytes{when}"


def transport_name(comm: Communicator) -> str:
    """What carries a group's messages, as far as it is known without waiting for anybody."""
    if comm.world_size == 1:
        return "none, as there is one rank"
    if comm.keeps_order:
        return "the process group's own, in stream order"
    transport = comm.opened
    if transport is None:
        return _UNKNOWN
    name = getattr(transport, "name", type(transport).__name__)
    return f"{name} (shared memory)" if name == "shm" else str(name)
