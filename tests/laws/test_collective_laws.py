"""The laws of DESIGN.md for all-reduce: random runs, each of which asserts every law that it can.

A run is an algorithm, a codec, a dtype, a number of ranks and ragged sizes, beside axes that may
change no bit: company, segments, targets, and how messages travel. `make test` runs those that meet
most pairs of values, `make test-all` as many as meet every pair, for several seeds.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import gradwire as gw
from fifo import FifoHub
from gradwire import (
    QSGD,
    Codec,
    CodecError,
    Options,
    TransportError,
    all_reduce,
)
from gradwire.collectives import AVERAGE, SUM, Item, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from laws.drawing import Case, drawn, first, named
from laws.shards import way
from laws.travelling import MESSAGES, travelling
from laws.ways import CODECS, DTYPES, WAYS, defined, hierarchical, kind, lost
from ranks import as_threads, caught

EDGES = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1000, 1023, 1024, 1025, 5000]
AXES: dict[str, Any] = {
    "way": WAYS,
    "codec": CODECS,
    "n": [1, 2, 3, 5, 8],
    "dtype": DTYPES,
    "messages": MESSAGES,
    "target": ["auto", "eager"],  # of one rank; the others use "auto"
    "segments": [1, 3, None],
    "op": ["avg", "sum"],
    "residuals": ["before", "zero"],
    "bad": [float("inf"), float("-inf"), float("nan")],
}
# Of a codec, every dtype is with tests/laws/test_codec_laws.py.
APART = [("codec", axis) for axis in ("way", "messages", "n", "kind", "dtype", "bad", "segments")]


def cases(seed: int) -> list[Case]:
    def valid(case: Case) -> bool:
        return defined(case["codec"], WAYS[case["way"]](2).algorithm)

    return drawn({k: list(v) for k, v in AXES.items()}, seed, APART, valid, kind)


Tensors = list[torch.Tensor]


class Rank:
    """One rank of a run: its memory, and fused all-reduces of groups of its tensors."""

    def __init__(self, comm: Communicator, case: Case, options: Options, feedback: bool) -> None:
        self.comm, self.case, self.options, self.feedback = comm, case, options, feedback
        self.counted: list[tuple[int, int]] = []  # by the formula, and as sent
        self.varies = self.borrows = False

    def steps(
        self, data: list[list[Tensors]], before: Tensors, groups: list[list[int]]
    ) -> list[tuple[Tensors, Tensors]]:
        """The results and residuals after each step, with one collective per group of tensors."""
        codec, found = CODECS[self.case["codec"]], []
        residuals, tensors = [t.clone() for t in before], [torch.empty(0)] * len(before)
        for step, by_rank in enumerate(data):
            for i, given in enumerate(by_rank[self.comm.rank]):
                tensors[i] = tensors[i].copy_(given) if step else given.clone()
            for group in groups:
                self._reduce(tensors, residuals, group, codec, step)
            found.append(([t.clone() for t in tensors], [t.clone() for t in residuals]))
        return found

    def _reduce(
        self, tensors: Tensors, residuals: Tensors, group: list[int], codec: Codec, step: int
    ) -> None:
        specs = [
            Spec(f"p{i}", tensors[i].numel(), tensors[i].dtype, codec, self.feedback, i)
            for i in group
        ]
        items = [
            Item(
                tensors[i], rng.parameter_keys(0, f"p{i}", self.comm.rank), step,
                residuals[i] if self.feedback else None,
            )
            for i in group
        ]  # fmt: skip
        operation = AVERAGE if self.case["op"] == "avg" else SUM
        collective = prepare(self.comm.calls, specs, self.options, operation)
        outcome = collective.start(items).result(60)
        self.counted.append((collective.prepared[0][0].wire_bytes, outcome.wire_bytes))
        self.varies |= bool(collective.prepared[0][0].program.packings)
        self.borrows |= bool(collective.prepared[0][0].borrowed)


STEPS = 2  # the second in memory that the first has left


@pytest.mark.parametrize(
    "case",
    [*first(40, cases(0)), *first(0, [case for seed in range(1, 6) for case in cases(seed)])],
    ids=named,
)
def test_every_law(case: Case) -> None:
    n, dtype, draw = case["n"], DTYPES[case["dtype"]], random.Random(str(case))
    sizes = [*(draw.choice(EDGES) for _ in range(draw.randint(2, 5))), 1025]
    made = torch.Generator().manual_seed(draw.randrange(1 << 30))
    data = [
        [[torch.randn(m, generator=made).to(dtype) for m in sizes] for _ in range(n)]
        for _ in range(STEPS + 1)
    ]
    fed = case["residuals"] == "before"
    before = [[torch.randn(m, generator=made) * (0.1 * fed) for m in sizes] for _ in range(n)]
    order, cut = draw.sample(range(len(sizes)), len(sizes)), draw.randrange(len(sizes))
    sick, odd, at = draw.randrange(n), draw.randrange(n), draw.randrange(1025)
    data[STEPS][sick][-1][at] = case["bad"]
    algorithm = WAYS[case["way"]](n)

    def two_collectives(comm: Communicator) -> tuple[Rank, list[tuple[Tensors, Tensors]]]:
        """Plainly; without residuals, if these are zero."""
        options = replace(algorithm, segments=1)
        mine = Rank(comm, case, options, fed)
        groups = [order[:cut], order[cut:]]
        return mine, mine.steps(data, before[comm.rank], groups)[:STEPS]

    def at_once(comm: Communicator) -> tuple[Rank, list[tuple[Tensors, Tensors]]]:
        """With residuals, in another order, and as the case says."""
        target = case["target"] if comm.rank == odd else "auto"
        options = replace(algorithm, segments=case["segments"], target=target)
        mine = Rank(comm, case, options, True)
        return mine, mine.steps(data, before[comm.rank], [order[::-1]])

    plain, sent = as_threads(n, two_collectives), Counter[int]()
    with travelling(case["messages"], n, sent, lazy=draw.random() < 0.5) as how:
        found = as_threads(n, at_once, **how)

    faults = check_bytes(case, found, sent)
    last = before
    for step in range(STEPS):
        results, residuals = ([steps[step][i] for _, steps in found] for i in (0, 1))
        faults += check_sums(case, data[step], last, results, residuals)
        for (_, steps), mine, kept in zip(plain, results, residuals, strict=True):
            if fed or step == 0:
                same = zip(steps[step][0], mine, strict=True)
                faults += [f"step {step}: another result" for a, b in same if not torch.equal(a, b)]
            if fed:
                same = zip(steps[step][1], kept, strict=True)
                faults += [
                    f"step {step}: another residual" for a, b in same if not torch.equal(a, b)
                ]
        last = residuals
    for _, steps in found:  # law 4
        results, residuals = steps[STEPS]
        one_place = case["codec"] not in ("lowrank", "rotated")  # others spread it over a block
        if results[-1][at if one_place else slice(None)].isfinite().all():
            faults.append(f"{case['bad']} is lost")
        if not all(t.isfinite().all() for t in results[:-1]):
            faults.append(f"{case['bad']} is in another tensor")
        if n > 1 and not all(t.isfinite().all() for t in residuals):
            faults.append(f"{case['bad']} is in a residual")
    assert not faults, faults


def check_bytes(case: Case, found: list[Any], sent: Counter[int]) -> list[str]:
    """Law 5: the bytes of the formula are sent, unless lengths depend on data; those counted are
    those that a queue has carried. Messages are borrowed if they can be."""
    faults = []
    n, messages = case["n"], case["messages"]
    for rank, (mine, _) in enumerate(found):
        exact = not mine.varies or messages == "in_order"
        counted = [actual for _, actual in mine.counted]
        if exact and counted != [formula for formula, _ in mine.counted]:
            faults.append(f"rank {rank} sends {mine.counted}")
        if messages in ("queues", "staged") and sum(counted) != sent[rank]:
            faults.append(f"rank {rank} counts {sum(counted)} of {sent[rank]} bytes")
        if n > 1 and sum(counted) == 0 and case["way"] not in ("3_servers", "anywhere"):
            faults.append(f"rank {rank} sends nothing")
    if messages in ("borrowed", "shm"):
        # Where tasks wait for sends, these must end early, so nothing is borrowed.
        expected = n > 1 and "coordinated" not in case["way"]
        if any(mine.borrows for mine, _ in found) != expected:
            faults.append(f"borrowed: {not expected}")
    return faults


def check_sums(
    case: Case,
    data: list[Tensors],
    before: list[Tensors],
    results: list[Tensors],
    residuals: list[Tensors],
) -> list[str]:
    """Laws 1 and 2 for one step; all by rank, then by tensor."""
    faults, n = [], case["n"]
    for i, result in enumerate(results[0]):
        if not all(torch.equal(rank[i], result) for rank in results):
            faults.append(f"tensor {i}: replicas differ")
        if n == 1:  # nothing is sent, so nothing can be lost
            if not torch.equal(result, data[0][i]) or not torch.equal(
                residuals[0][i], before[0][i]
            ):
                faults.append(f"tensor {i}: changed by one rank alone")
            continue
        brought = sum(data[r][i].double() + before[r][i].double() for r in range(n))
        kept = sum(residuals[r][i].double() for r in range(n))
        faults += [f"tensor {i}: {fault}" for fault in lost(case, brought, result, kept)]
    return faults


# ---- failures


def reduce(comm: Communicator, way: str = "sra", numel: int = 5000) -> None:
    case = {"codec": "qsgd", "op": "avg"}
    mine = Rank(comm, case, WAYS[way](comm.world_size), False)
    mine.steps([[[torch.randn(numel)]] * comm.world_size], [torch.zeros(numel)], [[0]])


def shards(comm: Communicator, verb: str, machines: str) -> None:
    part, whole = torch.randn(1000), torch.randn(1000 * comm.world_size)
    how: dict[str, Any] = {"group": comm, "options": way(machines, comm.world_size)}
    if verb == "all_gather":
        gw.all_gather(whole, part, "qsgd", **how)
    else:
        gw.reduce_scatter(part, whole, "qsgd", **how)


# (a call, the rank that dies)
REDUCE = [(partial(reduce, way=way), number % 5) for number, way in enumerate(WAYS)]
SHARDS = [
    (partial(shards, verb=verb, machines=machines), dead)
    for verb in ("reduce_scatter", "all_gather")
    for machines, dead in (("sra", 1), ("pairs", 0), ("pairs", 4), ("in_turn", 2))
]


@pytest.mark.parametrize("in_order", [False, True], ids=["tags", "in_order"])
def test_law_10_a_dead_peer_is_named_by_every_survivor(in_order: bool) -> None:
    n = 5

    def faults_of(call: partial[None], dead: int) -> list[str]:
        hub, agreed = Hub(n, timeout=20), threading.Barrier(n)
        fifo = FifoHub(n, timeout=20) if in_order else None

        def body(comm: Communicator) -> list[BaseException | None]:
            call(comm)
            agreed.wait()  # all ranks have agreed, and this rank has everything
            if comm.rank == dead:
                (fifo or hub).kill(dead)
                return []
            return [caught(lambda: call(comm)) for _ in range(1 + in_order)]

        found = enumerate(as_threads(n, body, hub, fifo=fifo))
        told = [(rank, error) for rank, errors in found for error in errors]
        return [
            f"{call.keywords}: rank {rank} tells of {error!r}, not of rank {dead}"
            for rank, error in told
            if not isinstance(error, TransportError) or error.peer != dead
        ]

    given = REDUCE if in_order else REDUCE + SHARDS
    with ThreadPoolExecutor(len(given)) as pool:  # they wait most of the time
        faults = [fault for of in pool.map(lambda row: faults_of(*row), given) for fault in of]
    assert not faults, faults


# of the ranks' number, the algorithm, sender and receiver, a place in the message, and what is said
CORRUPTED = [
    (3, Options(), (1, 2), 150, "rank 1"),
    # two machines of two ranks, whose parts of share 1 are its chunks: rank 0 sends rank 1 both
    (4, hierarchical((0, 0, 1, 1)), (0, 1), 150, "message from rank 0 (segment 0, chunk 1)"),
    (4, hierarchical((0, 0, 1, 1)), (0, 1), -100, "message from rank 0 (segment 0, chunk 3)"),
]


@pytest.mark.parametrize(("n", "options", "ends", "at", "said"), CORRUPTED)
def test_law_10_a_corrupted_payload_ends_in_an_error_on_every_rank(
    n: int, options: Options, ends: tuple[int, int], at: int, said: str
) -> None:
    def corrupt(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if (source, destination) == ends and message.numel() > 200:
            message[at] ^= 4

    def body(comm: Communicator) -> BaseException | None:
        values = torch.randn(5000)
        return caught(lambda: all_reduce(values, QSGD(), group=comm, options=options))

    errors = as_threads(n, body, Hub(n, timeout=20, corrupt=corrupt))
    named = errors.pop(ends[1])
    assert isinstance(named, CodecError)
    assert said in str(named)
    assert "checksum differs" in str(named)
    assert all(isinstance(error, TransportError) for error in errors)


def test_a_broken_group_stays_broken() -> None:
    """Its peer never comes, so the first call ends when the transport's time is over."""
    hub = Hub(2, timeout=0.5)

    def body(comm: Communicator) -> None:
        if comm.rank == 0:
            for _ in range(2):
                assert isinstance(caught(lambda: reduce(comm, numel=300)), TransportError)

    as_threads(2, body, hub)
