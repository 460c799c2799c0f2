"""Compiling: programs of all ranks match, memory does not overlap, no row is lost."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from gradwire import QSGD, Options
from gradwire.codecs import Identity, TernGrad
from gradwire.collectives import Operation
from gradwire.engine import HEADER_BYTES, Kind
from gradwire.lang import layout
from gradwire.partition import Spec
from ranks import refuses
from rooms.collectives import (
    Calls,
    Capabilities,
    Program,
    Step,
    compile,
    covered_messages,
    placement,
)
from rooms.engine import ALIGNMENT, Topology

quickly = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
OPERATIONS = {
    "all_reduce": Operation("all_reduce", "avg"),
    "reduce_scatter": Operation("reduce_scatter", "sum"),
    "all_gather": Operation("all_gather"),
    "broadcast": Operation("broadcast"),
}
ALL: list[tuple[str, dict[str, Any]]] = [
    ("all_reduce", {"algorithm": "sra"}),
    ("all_reduce", {"algorithm": "ring"}),
    ("all_reduce", {"algorithm": "tree"}),
    ("all_reduce", {"algorithm": "parameter_server", "partitions": 3}),
    ("all_reduce", {"algorithm": "all_gather"}),
    ("all_reduce", {"algorithm": "hierarchical", "inside": "full"}),
    ("all_reduce", {"algorithm": "hierarchical", "inside": "codec"}),
    ("all_reduce", {"algorithm": "hierarchical", "between": "grid"}),
    ("all_reduce", {"algorithm": "sra", "coordinated": True}),
    ("reduce_scatter", {}),
    ("reduce_scatter", {"algorithm": "hierarchical", "inside": "full"}),
    ("reduce_scatter", {"algorithm": "hierarchical", "inside": "codec"}),
    ("all_gather", {}),
    ("all_gather", {"algorithm": "hierarchical"}),
    ("broadcast", {}),
    ("broadcast", {"algorithm": "tree"}),
]
every = pytest.mark.parametrize(("kind", "options"), ALL, ids=str)
specs_of = st.lists(
    st.builds(
        lambda numel, dtype, codec, feedback, rotation: Spec(
            "w", numel, dtype, codec, feedback, rotation
        ),
        st.integers(0, 3000).map(lambda n: n * 60),
        st.sampled_from([torch.float32, torch.bfloat16]),
        st.sampled_from([Identity(), QSGD(), TernGrad()]),
        st.booleans(),
        st.integers(0, 9),
    ),
    min_size=1,
    max_size=4,
)


@pytest.fixture(autouse=True)
def _small_messages_are_borrowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "BORROWED_BYTES", 1 << 10)


def programs(
    kind: str, specs: list[Spec], n: int, able: Capabilities | None = None, **options: Any
) -> list[Program]:
    """The programs of all ranks, two per machine."""
    machines = tuple(rank // 2 for rank in range(n))
    how = able or Capabilities(), Options(**options)
    places = [Topology(rank, n, machines) for rank in range(n)]
    return [compile(OPERATIONS[kind], specs, place, *how) for place in places]


@every
@quickly
@given(
    specs=specs_of,
    n=st.integers(1, 6),
    segments=st.sampled_from([None, 1, 3]),
    lends=st.booleans(),
    batched=st.booleans(),
)
@example(
    specs=[Spec("w", 60_000, torch.float32, QSGD())], n=6, segments=1, lends=True, batched=True
)
def test_laws_of_programs(
    kind: str,
    options: dict[str, Any],
    specs: list[Spec],
    n: int,
    segments: int | None,
    lends: bool,
    batched: bool,
) -> None:
    able = Capabilities(lenders=frozenset(range(n)) if lends else frozenset())
    given = {**options, "segments": segments, "batched": batched}
    made = programs(kind, specs, n, able, **given)
    check_both_ends(made)
    for rank, program in enumerate(made):
        check_memory(program, lends)
        check_calls(program, rank, specs, batched, options.get("inside") == "full")
    if lends:
        for program in programs(kind, specs, n, able, **{**given, "target": "triton"}):
            check_spacing(program)


def check_both_ends(made: list[Program]) -> None:
    """Both ends of a message have its bytes."""
    ends: dict[Kind, dict[tuple[int, int, int], int]] = {Kind.SEND: {}, Kind.RECV: {}}
    for rank, program in enumerate(made):
        g = program.graph
        for task, peer in enumerate(g.peer):
            if peer >= 0:
                way = (rank, peer) if g.kind[task] is Kind.SEND else (peer, rank)
                name = (*way, g.slot[task])
                ends[g.kind[task]][name] = sum(program.nbytes[b] for b in g.message(task))
        assert sum(program.nbytes[b] for b in g.sent()) == program.wire_bytes
    assert ends[Kind.SEND] == ends[Kind.RECV]


def check_memory(program: Program, lends: bool) -> None:
    """Messages have memory of their own."""
    g = program.graph
    reuses = {g.message(t): b for t, b in enumerate(g.reuses) if b >= 0}
    later = {b for message in reuses for b in message}
    own = [b for b in range(len(program.nbytes)) if not program.borrowed[b]]
    placed = sorted((program.offset[b], program.nbytes[b]) for b in own if b not in later)
    for (offset, nbytes), (following, _) in pairwise([*placed, (program.arena_bytes, 0)]):
        assert offset % ALIGNMENT == 0
        assert offset + nbytes <= following
    for message, first in reuses.items():
        if not program.borrowed[message[0]]:
            (earlier,) = {reads for reads in g.reads if reads[:1] == (first,)}
            assert program.offset[message[0]] == program.offset[first]
            assert bytes_of(program, message) <= bytes_of(program, earlier)
    for task, peer in enumerate(g.peer):
        if peer >= 0:
            for before, behind in pairwise(g.message(task)):
                assert program.offset[behind] == program.offset[before] + program.nbytes[before]
    assert any(program.borrowed) <= lends
    for buffer, borrowed in enumerate(program.borrowed):
        readers = [t for t, reads in enumerate(g.reads) if buffer in reads]
        assert program.readers[buffer] == len(readers)
        assert not borrowed or all(g.peer[t] < 0 for t in readers)


def check_spacing(program: Program) -> None:
    """Payloads of a sum are equally spaced, for triton."""
    g = program.graph
    for task, reads in enumerate(g.reads):
        if g.kind[task] is Kind.MERGE:
            of_peers = [program.offset[b] for b in reads[:: max(g.width(task), 1)]]
            assert len({b - a for a, b in pairwise(of_peers)}) <= 1, g.describe(task)


def bytes_of(program: Program, buffers: tuple[int, ...]) -> int:
    return sum(program.nbytes[b] for b in buffers)


def check_calls(program: Program, rank: int, specs: list[Spec], batched: bool, full: bool) -> None:
    """Calls cover the rows of each kernel."""
    g, calls = program.graph, program.calls
    chunks = len(program.sizes[0]) // (2 if full else 1)
    assert [i for of in calls.of for i in of] == list(range(len(calls.kernel)))
    assert [*calls.first, len(calls.rows)] == [0, *calls.last]  # consecutive
    assert batched or calls.last == [first + 1 for first in calls.first]
    for task, of in enumerate(calls.of):
        covered = covered_messages(g, task) if g.peer[task] < 0 else ()
        run = [(calls.kernel[call], calls.form[call]) for call in of]
        assert not batched or len(set(run)) == len(run)
        ends: dict[int, int] = {}
        home: dict[int, bool] = {}
        item, at_home = divided(calls, len(specs))
        for call in of:
            codec, dtype = program.kinds[calls.kernel[call]]
            for row in range(calls.first[call], calls.last[call]):
                spec = specs[item[row]]
                assert spec.dtype == dtype
                assert calls.form[call].endswith("_ef") == (
                    spec.feedback and "encode" in calls.form[call]
                )
                at = int(calls.rows["payload"][row])
                home[at] = bool(at_home[row])
                ends[at] = at + layout(codec, dtype).nbytes(int(calls.rows["numel"][row]))
        # Every payload byte of every message, except padding, belongs to one row.
        filled = sorted(ends.items())
        for b in covered:
            first, last = (program.offset[b] + more for more in (HEADER_BYTES, program.nbytes[b]))
            mine = [(at, end) for at, end in filled if first <= at < last]
            assert mine[0][0] == first
            assert {home[at] for at, _ in mine} == {g.buffer_chunk[b] % chunks == rank}
            tiled = zip([*(at for at, _ in mine[1:]), last], mine, strict=True)
            assert all(0 <= following - end < ALIGNMENT for following, (_, end) in tiled)
        assert len(filled) == sum(len(range(calls.first[c], calls.last[c])) for c in of)


def divided(calls: Calls, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Per row, its tensor's index among `count`, and whether this rank owns the row."""
    terms = calls.terms["values"].astype("i8")
    return terms % count, terms >= count


def test_a_step_fills_in_addresses_alone() -> None:
    specs = [
        Spec("w", 1000, torch.float32, QSGD(), feedback=True),
        Spec("b", 7, torch.float32, QSGD()),
    ]
    program = programs("all_reduce", specs, 2)[0]
    numbers = [np.array([10**k, 3 * 10**k], dtype="u8") for k in range(5, 11)]
    step = Step(*numbers)._replace(residuals=np.array([7000, 0], dtype="u8"))
    one, two = (program.calls.table(step, arena) for arena in (0, 1 << 20))
    for name in one.dtype.names:
        moved = (1 << 20) if name in ("payload", "source") else 0
        assert (two[name] == one[name] + np.uint64(moved)).all()
    item, own = divided(program.calls, len(specs))
    assert set(one["residual"][item == 1].tolist()) == {0}
    assert own.any()
    assert not own.all()
    expected = np.where(own, step.homes[item], step.values[item])
    assert (one["values"] == expected + program.calls.rows["values"]).all()


def test_a_program_depends_on_its_arguments_alone() -> None:
    specs = [Spec("w", 300_000, torch.float32, QSGD())]
    one, two = (programs("all_reduce", specs, 3, Capabilities(fifo=True), segments=2) for _ in "12")
    for a, b in zip(one, two, strict=True):
        assert a is not b
        assert (a.offset, a.nbytes, a.stages) == (b.offset, b.nbytes, b.stages)
        assert a.stages
        assert (a.graph.reads, a.graph.slot) == (b.graph.reads, b.graph.slot)
    assert not programs("all_reduce", specs, 3, segments=2)[0].stages


def test_checksums_where_messages_leave_the_machine() -> None:
    specs = [Spec("w", 1000, torch.float32, QSGD())]
    for able, asked, found in (
        (Capabilities(), None, True),
        (Capabilities(in_memory=True), None, False),
        (Capabilities(in_memory=True), True, True),
        (Capabilities(), False, False),
    ):
        assert programs("all_reduce", specs, 2, able, checksum=asked)[0].checksum is found
    refused = partial(programs, "all_reduce", specs, 2, Capabilities(fifo=True), checksum=True)
    refuses("host cannot compare a checksum", refused)
