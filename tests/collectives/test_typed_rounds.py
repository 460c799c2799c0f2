"""Collectives of different verbs in one round, and rounds of several tickets at once."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import product

import pytest
import torch

from averaging import started
from fifo import FifoHub
from gradwire import QSGD, ConfigError, Options
from gradwire.aggregators import Aggregator, Attached, Context, Steps
from gradwire.codecs import DGC
from gradwire.collectives import (
    SUM,
    AllGather,
    AllReduce,
    Broadcast,
    Item,
    Part,
    ReduceScatter,
    Request,
    Round,
    program_for,
)
from gradwire.engine import Communicator, Owner
from gradwire.lang import rng
from gradwire.partition import Spec
from gradwire.transport import Hub
from gradwire.transport.loopback import Loopback
from products import EXHAUSTIVE
from ranks import as_threads, caught
from rooms.collectives import uncompressed
from stress.slow import Delays, Slow
from typed_values import check_reduced, generator, same_bits, values

NUMELS = [300, 0, 17, 640]  # of the scopes
ROUNDS = 2
Tensors = list[torch.Tensor]


class SlowHub(Hub):
    """A transport whose sends are late at random."""

    def transport(self, rank: int) -> Loopback:
        slow: Loopback = Slow(super().transport(rank), Delays(f"rank {rank}", sends=0.05))  # type: ignore[assignment]
        return slow


def lengths_of(numel: int, n: int) -> tuple[int, ...]:
    """Ragged lengths; the last one takes the rest."""
    parts = [numel // (2 * r + 2) for r in range(n - 1)]
    parts = parts if sum(parts) <= numel else [0] * (n - 1)
    return (*parts, numel - sum(parts))


def unlike(c: Context, number: int) -> list[Request]:
    """One parameter's requests of a round: every verb, uncompressed and through codecs."""
    g, n, root = c.gradient, c.world_size, (c.step + number) % c.world_size
    lengths = lengths_of(g.numel(), n)
    whole = (g * 100).long()
    return [
        AllReduce(g.clone(), "avg", of=c),
        AllReduce(g.clone(), "sum", codec=QSGD(), of=c, algorithm="ring"),
        AllReduce(whole.clone(), "max", of=c, algorithm="tree"),
        Broadcast(whole, root, of=c),
        Broadcast(g.clone(), root, codec=QSGD(), of=c, algorithm="tree"),
        ReduceScatter(g.clone(), "sum", lengths, of=c),
        ReduceScatter(g.double(), "min", lengths, of=c),
        AllGather(g[: lengths[c.rank]].clone(), lengths, of=c),
        AllGather(g.clone(), codec=DGC(), of=c, segments=2),
    ]


@dataclass(frozen=True, eq=False)
class Unlike(Aggregator):
    """Records the results of every round, and leaves the gradient unchanged."""

    found: list[Tensors] = field(default_factory=list)

    def variant(self, step: int, world_size: int) -> int:
        return step % world_size  # roots

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        self.found.clear()  # of the run on zeros
        for number in range(ROUNDS):
            results = yield [request for c in contexts for request in unlike(c, number)]
            self.found.append([t.clone() for t in results])
        return [c.gradient for c in contexts]


def scopes(
    comm: Communicator, owner: Owner, gradients: Sequence[torch.Tensor], serially: bool
) -> list[list[Tensors]]:
    """One scope per gradient, all at once or one after the other: scope -> round -> results."""
    aggregators = [Unlike() for _ in gradients]
    running = []
    for i, (aggregator, gradient) in enumerate(zip(aggregators, gradients, strict=True)):
        keys = rng.parameter_keys(0, f"p{i}", comm.rank)
        member = Attached(f"p{i}", (gradient.numel(),), aggregator, keys, i)
        ended = started(owner, [member], [gradient.clone()])
        running.append(ended)
        if serially:
            ended.result(30)
    for ended in running:
        ended.result(60)
    return [aggregator.found for aggregator in aggregators]


RUNS = [(2, 1, "queues"), (3, 2, "delays"), (4, 2, "stream_order")]
ALL = product([2, 3, 4], [1, 2], ["queues", "delays", "stream_order"])


@pytest.mark.parametrize(
    ("n", "window", "way"),
    [*RUNS, *(pytest.param(*case, marks=EXHAUSTIVE) for case in ALL if case not in RUNS)],
)
def test_unlike_verbs_share_a_round(n: int, window: int, way: str) -> None:
    made = generator()
    given = [[values(numel, torch.float32, made) for numel in NUMELS] for _ in range(n)]

    def body(comm: Communicator, serially: bool = False) -> list[list[Tensors]]:
        owner = comm.owner("a test", window=1 if serially else window)
        return scopes(comm, owner, given[comm.rank], serially)

    hub = SlowHub(n) if way == "delays" else None
    fifo = FifoHub(n) if way == "stream_order" else None
    found = as_threads(n, body, hub, fifo=fifo)
    alone = as_threads(n, lambda comm: body(comm, True))
    for rank, expected in zip(found, alone, strict=True):
        for scope, other in zip(rank, expected, strict=True):
            assert len(scope) == ROUNDS
            for results, others in zip(scope, other, strict=True):
                assert all(map(same_bits, results, others))
    for i in range(len(NUMELS)):
        for number in range(ROUNDS):
            check([rank[i][number] for rank in found], [rank[i] for rank in given], number)


def check(found: list[Tensors], given: Tensors, number: int) -> None:
    """A round's results on every rank, in the order of `unlike`."""
    n, numel = len(given), given[0].numel()
    lengths, root = lengths_of(numel, n), number % n
    average, coded, most, sent, sent_coded, _, _, gathered, _ = found[0]
    for same in (0, 1, 2, 3, 4, 7, 8):
        assert all(same_bits(rank[same], found[0][same]) for rank in found), same
    whole = [(g * 100).long() for g in given]
    check_reduced("avg", given, average, "avg")
    check_reduced("max", whole, most, "max")
    assert torch.equal(sent, whole[root])
    check_reduced("sum", given, torch.cat([rank[5] for rank in found]), "reduce_scatter")
    smallest = torch.cat([rank[6] for rank in found])
    check_reduced("min", [g.double() for g in given], smallest, "reduce_scatter")
    shards = [g[:length] for g, length in zip(given, lengths, strict=True)]
    assert torch.equal(gathered, torch.cat(shards))
    if numel:  # 4 bits of a range of 7, and of sums' in a ring
        assert float((sent_coded - given[root]).abs().max()) < 1
        assert float((coded - torch.stack(given).sum(0)).abs().max()) < 2 * n


def test_a_mistake_in_a_round_names_parameter_and_round() -> None:
    """An aggregator's mistakes fail before the round sends anything."""

    @dataclass(frozen=True)
    class Wrong(Aggregator):
        def aggregate(self, contexts: Sequence[Context]) -> Steps:
            c = contexts[0]
            yield [AllReduce(c.gradient.clone(), of=c)]
            yield [Broadcast(c.gradient.clone(), of=c), AllReduce(c.gradient.bool(), "sum", of=c)]
            return [c.gradient]

    def body(comm: Communicator) -> BaseException | None:
        member = Attached("w", (9,), Wrong(), rng.parameter_keys(0, "w", comm.rank))
        owner = comm.owner("a test")
        return caught(lambda: started(owner, [member], [torch.ones(9)]).result(30))

    errors = as_threads(3, body)
    assert any(isinstance(error, ConfigError) for error in errors)
    for error in errors:  # the first rank to meet it tells the others
        assert "w (2): all_reduce(sum) of torch.bool is not defined" in str(error)
        assert "round 1" in str(error)


def test_collectives_of_a_round_begin_in_one_order() -> None:
    """Whenever ranks have prepared them: who waits for a message has it all the same. Rings, for a
    rank sends its second message only when it has received the first."""
    n = 3

    def body(comm: Communicator) -> float:
        owner = comm.owner("a test")
        parts: list[Part] = []
        items: list[list[Item]] = []
        for i in range(2):
            spec = Spec(f"p{i}", 3000, torch.float32, uncompressed(SUM, torch.float32))
            options = Options(algorithm="ring", segments=1 + i)
            parts.append(Part(SUM, (spec,), options, torch.device("cpu")))
            items.append([Item(torch.ones(3000), rng.parameter_keys(0, spec.name, comm.rank), 0)])
        program = program_for(owner, [Round(tuple(parts))])
        program.begin()
        made, program.ready = program.prepared, Future()
        threading.Timer(0.1 * comm.rank, program.ready.set_result, [made]).start()
        ticket = owner.ticket()
        running = program.start_round(ticket, 0, items)
        ticket.close()
        for future in running:
            future.result(60)
        return sum(float(of_part[0].values.sum()) for of_part in items)

    assert as_threads(n, body, Hub(n, timeout=60)) == [2 * n * 3000.0] * n


def test_requests_in_two_levels_use_the_handles_machines() -> None:
    """A grid is for all_reduce only, and `inside` for verbs that sum values."""
    machines = Options(algorithm="hierarchical", nodes=(0, 0, 1), inside="full", between="grid")
    values = torch.zeros(6)
    found = [
        request.options(given)
        for given in (machines, Options(coordinated=True))
        for request in (
            AllGather(values, algorithm="hierarchical"),
            ReduceScatter(values, algorithm="hierarchical"),
            ReduceScatter(values),
        )
    ]
    plain = Options(algorithm="hierarchical")
    same = replace(plain, nodes=(0, 0, 1))
    assert found == [same, replace(same, inside="full"), Options(), plain, plain, Options()]


def test_a_tag_range_is_held_while_any_program_has_it() -> None:
    """Programs that differ in options of one rank alone have one digest."""
    owner = Communicator(Hub(1).transport(0)).owner("a test")
    spec = Spec("w", 64, torch.float32, QSGD())
    parts = [Part(SUM, (spec,), Options(threads=n), torch.device("cpu")) for n in (1, 2)]
    programs = [program_for(owner, [Round((part,))]) for part in parts]
    (held,) = {program.range for program in programs}
    for left in (2, 1, 0):
        gc.collect()
        assert owner.held[held] == left
        del programs[:1]
