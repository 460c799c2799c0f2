"""The laws of DESIGN.md for reduce-scatter and all-gather of shards, on one level and on several
machines: random runs, each of which asserts every law that it can.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from gradwire import QSGD, Options, codecs
from gradwire.codecs import Identity
from gradwire.collectives import AllGather, ReduceScatter
from gradwire.engine import Communicator
from gradwire.lang import layout
from gradwire.transport import Hub
from laws.drawing import Case, drawn, first, named
from laws.shards import (
    GAPS,
    INSIDE,
    MACHINES,
    PATTERNS,
    lengths_of,
    places,
    run,
    spread,
    stride_of,
    way,
)
from laws.travelling import MESSAGES, travelling
from laws.ways import CODECS, defined, kind, lost
from laws.ways import DTYPES as FLOATS
from products import EXHAUSTIVE
from ranks import as_threads
from typed_values import DTYPES, check_reduced, same_bits, values

STEPS = 2


@dataclass
class Found:
    """One rank's results of a step: its shard, its residual, and all shards gathered."""

    shard: torch.Tensor
    residual: torch.Tensor
    gathered: torch.Tensor
    faults: list[str] = field(default_factory=list)


def scatter_and_gather(
    comm: Communicator,
    given: torch.Tensor,
    residual: torch.Tensor,
    case: Case,
    scatters: Options,
    gathers: Options,
    gap: str = "side_by_side",
    home: bool = False,
) -> Found:
    """A reduce-scatter, and an all-gather of its shards; what lies between shards is unchanged."""
    n, codec, residual = comm.world_size, CODECS[case["codec"]], residual.clone()
    lengths = lengths_of(case["pattern"], n)
    stride, own = stride_of(lengths, gap), None
    memory = spread(given, lengths, stride, torch.nan)
    where = places(lengths, stride)
    own = memory[where[comm.rank]].clone() if home else None
    request = ReduceScatter(memory, case["op"], lengths, stride, residual, own, codec=codec)
    shard = run(comm, request, scatters).clone()
    into = torch.full_like(memory, torch.nan)
    gathered = run(comm, AllGather(shard.clone(), lengths, stride, into, codec=codec), gathers)
    faults, between = [], torch.ones(memory.numel(), dtype=torch.bool)
    for at in where:
        between[at] = False
    if gathered is not into:
        faults.append("it gathers elsewhere")
    for what, changed in (("reduce", memory), ("gather", into)):
        if not changed[between].isnan().all():
            faults.append(f"the {what} changes memory between shards")
    if own is not None and case["machines"] == "sra":
        if not same_bits(memory, spread(given, lengths, stride, torch.nan)):
            faults.append("values are changed beside a home")
        if not same_bits(own, shard):
            faults.append("the shard is not at home")
    return Found(shard, residual, torch.cat([gathered[at] for at in where]), faults)


AXES: dict[str, list[Any]] = {
    "machines": [*MACHINES],
    "inside": INSIDE,
    "codec": [name for name in CODECS if name not in ("qsgd3", "qsgd8", "qsgd2", "ternary")],
    "n": [1, 2, 3, 5, 8],
    "dtype": [*FLOATS],
    "pattern": [*PATTERNS][:3],
    "gap": GAPS,
    "home": [False, True],
    "messages": MESSAGES,
    "target": ["auto", "eager"],  # of one rank; the others use "auto"
    "segments": [1, 3, None],
    "op": ["sum", "avg"],
    "bad": [float("inf"), float("-inf"), float("nan")],
}
# Of a codec, every dtype and target is with tests/laws/test_codec_laws.py.
APART = [("codec", axis) for axis in ("machines", "messages", "n", "kind", "dtype", "target")]
APART += [("codec", axis) for axis in ("segments", "pattern", "gap", "bad")]


def cases(seed: int) -> list[Case]:
    def valid(case: Case) -> bool:
        return defined(case["codec"], way(case["machines"], 2).algorithm, "reduce_scatter")

    return drawn(AXES, seed, APART, valid, kind)


@pytest.mark.parametrize(
    "case",
    [*first(26, cases(0)), *first(0, [case for seed in range(1, 7) for case in cases(seed)])],
    ids=named,
)
def test_every_law(case: Case) -> None:
    n, dtype, draw = case["n"], FLOATS[case["dtype"]], random.Random(str(case))
    lengths = lengths_of(case["pattern"], n)
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    given = [values(sum(lengths), dtype, made) for _ in range(n)]
    kept = [values(sum(lengths), torch.float32, made) / 8 for _ in range(n)]
    sick, odd, at = draw.randrange(n), draw.randrange(n), draw.randrange(max(sum(lengths), 1))
    bad = [x.clone() for x in given]
    bad[sick][at : at + 1] = case["bad"]

    def plainly(comm: Communicator) -> Found:
        """Side by side, without a home; gathered on one level."""
        r = comm.rank
        options = way(case["machines"], n, case["inside"], segments=1)
        return scatter_and_gather(comm, given[r], kept[r], case, options, Options(segments=1))

    def oddly(comm: Communicator) -> list[Found]:
        """As the case says, twice, the second time in the same memory; then a bad value."""
        r = comm.rank
        how = {
            "segments": case["segments"],
            "target": case["target"] if r == odd else "auto",
        }
        scatters = way(case["machines"], n, case["inside"], **how)
        gathers = way(case["machines"], n, **how)
        form = case["gap"], case["home"]
        return [
            scatter_and_gather(comm, x, kept[r], case, scatters, gathers, *form)
            for x in (given[r], given[r], bad[r])
        ]

    plain = as_threads(n, plainly)
    with travelling(case["messages"], n, Counter(), lazy=draw.random() < 0.5) as how:
        found = as_threads(n, oddly, **how)
    faults = check_sums(case, given, kept, [steps[0] for steps in found], lengths)
    for expected, steps in zip(plain, found, strict=True):
        for step in steps[:STEPS]:
            faults += step.faults
            for what in ("shard", "residual", "gathered"):
                if not same_bits(getattr(step, what), getattr(expected, what)):
                    faults.append(f"another {what}")
    if sum(lengths):
        faults += check_bad([steps[STEPS] for steps in found], at, lengths, n)
    assert not faults, faults


def check_sums(
    case: Case,
    given: list[torch.Tensor],
    kept: list[torch.Tensor],
    found: list[Found],
    lengths: tuple[int, ...],
) -> list[str]:
    """Law 1, and law 2: what was reduced, and residuals after, are gradients and residuals before,
    except the part of the owner's residual, which stays."""
    faults = []
    before, after = [k.clone() for k in kept], [one.residual.clone() for one in found]
    for rank, own in enumerate(places(lengths, 0)):
        if not same_bits(after[rank][own], kept[rank][own]):
            faults.append(f"rank {rank}: the residual of its own shard changes")
        before[rank][own] = after[rank][own] = 0
        if not same_bits(found[rank].gathered, found[0].gathered):
            faults.append(f"rank {rank} gathers other values")
    brought = sum(x.double() + e.double() for x, e in zip(given, before, strict=True))
    left = sum(residual.double() for residual in after)
    reduced = torch.cat([one.shard for one in found])
    return [*faults, *lost(case, brought, reduced, left)]


def check_bad(found: list[Found], at: int, lengths: tuple[int, ...], n: int) -> list[str]:
    """Law 4: on the shard's owner, in every gathered result, and in no other shard or residual."""
    faults = []
    for rank, (one, own) in enumerate(zip(found, places(lengths, 0), strict=True)):
        if bool(one.shard.isfinite().all()) == (own.start <= at < own.stop):
            faults.append(f"rank {rank}: its shard is {one.shard.isfinite().all()}")
        if not one.residual.isfinite().all():
            faults.append(f"rank {rank}: its residual")
        for whose in places(lengths, 0):
            if bool(one.gathered[whose].isfinite().all()) == (whose.start <= at < whose.stop):
                faults.append(f"rank {rank}: gathered {whose}")
    return faults


# ---- uncompressed values


DENSE: dict[str, list[Any]] = {
    "machines": [*MACHINES],
    "inside": INSIDE,
    "op": [*DTYPES],
    "n": [1, 2, 3, 5, 8],
    "pattern": [*PATTERNS],
    "gap": GAPS,
    "home": [False, True],
    "segments": [1, 3],
}


@pytest.mark.parametrize("case", first(14, drawn(DENSE, 0, [("machines", "n")])), ids=named)
def test_values_as_they_are_of_every_dtype(case: Case) -> None:
    """Beside an exact reference, or one in float64; and all of them gathered again."""
    n, op = case["n"], case["op"]
    lengths = lengths_of(case["pattern"], n)
    stride = stride_of(lengths, case["gap"])
    made = torch.Generator().manual_seed(n)
    given = [[values(sum(lengths), dtype, made) for dtype in DTYPES[op]] for _ in range(n)]

    def body(comm: Communicator) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        scatters = way(case["machines"], n, case["inside"], segments=case["segments"])
        gathers = way(case["machines"], n, segments=case["segments"])
        for mine in given[comm.rank]:
            memory = spread(mine, lengths, stride, 1)
            own = memory[places(lengths, stride)[comm.rank]].clone() if case["home"] else None
            request = ReduceScatter(memory, op, lengths, stride, home=own)
            shard = run(comm, request, scatters).clone()
            into = torch.ones_like(memory)
            run(comm, AllGather(shard.clone(), lengths, stride, into), gathers)
            found.append((shard, into))
        return found

    found = as_threads(n, body)
    for i, dtype in enumerate(DTYPES[op]):
        whole = torch.cat([rank[i][0] for rank in found])
        check_reduced(op, [rank[i] for rank in given], whole, str(dtype))
        expected = spread(whole, lengths, stride, 1)
        assert all(same_bits(rank[i][1], expected) for rank in found), dtype


# ---- law 5 between machines


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=EXHAUSTIVE) for s in range(4, 36))]
)
def test_law_5_what_crosses_machines_at_random(seed: int) -> None:
    """Every payload once per other machine, and every sum of a machine once."""
    draw = random.Random(seed)
    n = (2, 3, 5, 8)[seed % 4]
    nodes = tuple(draw.randrange(4) for _ in range(n))
    inside, segments = draw.choice(INSIDE), draw.choice([1, 3])
    lengths = tuple(draw.choice([0, 1, 129, 3000]) for _ in range(n))
    codec = draw.choice([Identity(), QSGD(), codecs.get("topk", density=0.05)])
    crossed: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def count(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if nodes[source] != nodes[destination]:
            with lock:
                crossed[nodes[source], nodes[destination]] += message.numel()

    made = torch.Generator().manual_seed(seed)
    given = [values(sum(lengths), torch.float32, made) for _ in range(n)]

    def two_levels(**how: Any) -> Options:
        return Options(algorithm="hierarchical", nodes=nodes, segments=segments, **how)

    def scatter(comm: Communicator) -> torch.Tensor:
        request = ReduceScatter(given[comm.rank].clone(), "sum", lengths, codec=codec)
        return run(comm, request, two_levels(inside=inside)).clone()

    shards = as_threads(n, scatter, Hub(n, 30, count))
    of_sums = dict(crossed)
    crossed.clear()
    as_threads(
        n,
        lambda comm: run(comm, AllGather(shards[comm.rank], lengths, codec=codec), two_levels()),
        Hub(n, 30, count),
    )
    spec = AllGather(shards[0], lengths, codec=codec).spec("w", 0, n)
    sizes = payloads(spec, n, segments)
    expected = {
        (one, other): sum(sizes[rank] for rank in range(n) if nodes[rank] == one)
        for one in {*nodes}
        for other in {*nodes} - {one}
    }
    assert dict(crossed) == {ends: nbytes for ends, nbytes in expected.items() if nbytes}
    assert of_sums == {(b, a): nbytes for (a, b), nbytes in expected.items() if nbytes}


def payloads(spec: Any, n: int, segments: int) -> list[int]:
    """Bytes of each shard's messages, headers included, from the layout of its codec alone."""
    from gradwire.algorithms.protocol import message
    from gradwire.partition import partition

    sizes = partition([spec], n, segments, shards=True).sizes
    if segments == 1:
        lay = layout(spec.codec, spec.dtype)
        assert sizes[0] == tuple(-(-lay.nbytes(m) // 16) * 16 if m else 0 for m in spec.lengths)
    return [sum(message(segment[c]) for segment in sizes) for c in range(n)]
