"""All algorithms over all ranks: no deadlock, complete sums, bytes accounted; so are schedules, as
in-order batches without tags; and the slots of messages."""

from __future__ import annotations

import pytest
import symbolic_schedule
import test_graphs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic import begin, key_of
from test_graphs import both_forms, draw_sizes, served

from gradwire.algorithms import (
    OF,
    REGISTRY,
    Algorithm,
    Coordinated,
    Hierarchical,
    HierarchicalAllGather,
    HierarchicalReduceScatter,
)
from gradwire.algorithms.broadcast import ScatterAllGather, Tree
from gradwire.engine import Graph, Kind
from rooms.engine import lower

WORLDS = [1, 2, 3, 4, 5, 8]
quickly = settings(
    max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def machines(n: int, of: int, inside: str) -> Hierarchical:
    return Hierarchical(tuple(r // of for r in range(n)), inside)


HALVES = {verb: OF[verb]["sra"] for verb in ("reduce_scatter", "all_gather")}
ALGORITHMS = {
    **{name: lambda n, a=a: a for name, a in REGISTRY.items()},
    "two_servers": lambda n: served(2),
    "many_servers": lambda n: served(2 * n + 1),
    "coordinated": lambda n: Coordinated(REGISTRY["sra"]),
    "coordinated_closely": lambda n: Coordinated(REGISTRY["sra"], window=1),
    "coordinated_servers": lambda n: Coordinated(served(3), window=3),
    "pairs": lambda n: machines(n, 2, "full"),
    "threes": lambda n: machines(n, 3, "codec"),
    "one_machine": lambda n: machines(n, n, "full"),
    "in_turn": lambda n: Hierarchical(tuple(r % 3 for r in range(n)), "codec"),
    "broadcast": lambda n: ScatterAllGather(root=n // 2),
    "broadcast_tree": lambda n: Tree(root=n - 1),
    **{f"half_{name}": lambda n, a=a: a for name, a in HALVES.items()},
    "gather_pairs": lambda n: HierarchicalAllGather(tuple(r // 2 for r in range(n))),
    "gather_in_turn": lambda n: HierarchicalAllGather(tuple(r % 3 for r in range(n))),
    "scatter_pairs": lambda n: HierarchicalReduceScatter(tuple(r // 2 for r in range(n)), "full"),
    "scatter_in_turn": lambda n: HierarchicalReduceScatter(tuple(r % 3 for r in range(n))),
    **{f"coordinated_half_{name}": lambda n, a=a: Coordinated(a) for name, a in HALVES.items()},
}


def even_sizes(algorithm: Algorithm, n: int, segments: int) -> list[list[int]]:
    return both_forms(algorithm, [[16] * algorithm.chunks(n)] * segments)


def verb_of(name: str) -> str:
    if name.startswith("broadcast"):
        return "broadcast"
    if name.startswith("gather_") or name.endswith("half_all_gather"):
        return "all_gather"
    scatters = name.startswith("scatter_") or name.endswith("half_reduce_scatter")
    return "reduce_scatter" if scatters else "all_reduce"


def check(name: str, sizes: list[list[int]], n: int) -> None:
    """Graphs obey their laws, and schedules compute the same sums."""
    algorithm = ALGORITHMS[name](n)
    ranks = test_graphs.check(algorithm, n, sizes, verb_of(name), getattr(algorithm, "root", 0))
    scheduled = symbolic_schedule.run(algorithm, sizes, n)
    for found, expected in zip(scheduled, ranks, strict=True):
        assert found.values == expected.values
        assert found.maker == expected.maker
        assert found.held == expected.held


def check_slots(algorithm: Algorithm, sizes: list[list[int]], n: int) -> None:
    """The numbers of messages are equal at both ends, and unique per link."""
    ranks = begin(algorithm, sizes, n)
    sent, received = (
        {
            key_of(rank, task): rank.graph.slot[task]
            for rank in ranks
            for task, found in enumerate(rank.graph.kind)
            if found is kind
        }
        for kind in (Kind.SEND, Kind.RECV)
    )
    assert sent == received
    links: dict[tuple[int, int], list[int]] = {}
    for (sender, receiver, *_), slot in sent.items():
        links.setdefault((sender, receiver), []).append(slot)
    for slots in links.values():
        assert sorted(slots) == list(range(len(slots)))
    for rank in ranks:
        own = [slots for ends, slots in links.items() if rank.number in ends]
        assert rank.graph.slots == max(map(len, own), default=0)
        kernels = [t for t, peer in enumerate(rank.graph.peer) if peer < 0]
        assert all(rank.graph.slot[task] == -1 for task in kernels)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_nobody_waits_for_ever(name: str) -> None:
    """Also if chunks of some segments are empty, and not sent."""
    large = [16] if name in ("ring", "tree", "hierarchical", "broadcast_tree") else []
    for number, n in enumerate(WORLDS + large, [*ALGORITHMS].index(name)):
        algorithm = ALGORITHMS[name](n)
        sizes = even_sizes(algorithm, n, segments=(1, 2, 4)[number % 3])
        check(name, sizes, n)
        check_slots(algorithm, sizes, n)

    @quickly
    @given(n=st.integers(1, 9), data=st.data())
    def whatever_is_empty(n: int, data: st.DataObject) -> None:
        algorithm = ALGORITHMS[name](n)
        sizes = both_forms(algorithm, draw_sizes(data, algorithm.chunks(n)))
        check(name, sizes, n)
        check_slots(algorithm, sizes, n)

    whatever_is_empty()


def test_kernels_of_a_segment_run_beside_messages_of_another() -> None:
    for name in ("sra", "ring", "parameter_server", "hierarchical", "in_turn"):
        check_overlap(ALGORITHMS[name](4), n=4, segments=4)


def check_overlap(algorithm: Algorithm, n: int, segments: int) -> None:
    """Every kernel except those of the first and the last segment overlaps with a batch."""
    sizes = even_sizes(algorithm, n, segments)
    for rank, stages in enumerate(symbolic_schedule.schedules(algorithm, sizes, n)):
        graph = algorithm.build(rank, n, sizes)
        posted = 0
        for stage in stages:
            inner = any(0 < graph.segment[task] < segments - 1 for task in stage.kernels)
            assert posted > stage.ended or not inner, stages
            posted += bool(stage.messages)
        assert posted <= segments * max(1, algorithm.rounds(n))


def test_a_single_segment_costs_a_batch_a_round() -> None:
    for name in ("sra", "ring", "tree", "parameter_server", "all_gather", "hierarchical"):
        algorithm = REGISTRY[name]
        for n in (2, 4, 8):
            plans = symbolic_schedule.schedules(algorithm, even_sizes(algorithm, n, 1), n)
            batches = max(sum(bool(s.messages) for s in plan) for plan in plans)
            # No rank takes part in all rounds of a tree.
            rounds = algorithm.rounds(n)
            assert batches <= rounds if name == "tree" else batches == rounds


def test_a_hop_that_does_not_rise_is_found() -> None:
    graph = Graph("ab")
    came, made = graph.buffer("a", 0, 0, 1), graph.buffer("b", 0, 0, 0)
    graph.recv(0, came, peer=1)
    graph.merge(0, [came], [made], own=0)
    graph.send(0, made, peer=1)
    lower(graph, 0, lambda role, *_: int(role == "b"))
    with pytest.raises(AssertionError, match="hop is not above"):
        lower(graph, 0, lambda *_: 0)
