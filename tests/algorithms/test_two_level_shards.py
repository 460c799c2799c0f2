"""Reduce-scatter and all-gather of shards in two levels, on any machines: what each rank ends with,
what crosses machines, bytes, rounds, memory."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic import run
from test_graphs import check, draw_sizes, longest_way
from test_hierarchical import assert_values_change_in_order, messages_and_sums, sent_to

from gradwire.algorithms import OF, HierarchicalAllGather, HierarchicalReduceScatter
from gradwire.algorithms.holders import Holders
from gradwire.engine import Kind
from ranks import WORLD_SIZES

quickly = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
anywhere = st.lists(st.integers(0, 5), min_size=1, max_size=10)
Sizes = list[list[int]]
Scatter = HierarchicalReduceScatter


def both(nodes: list[int] | tuple[int, ...]) -> list[HierarchicalAllGather | Scatter]:
    machines = tuple(nodes)
    return [HierarchicalAllGather(machines), *(Scatter(machines, how) for how in ("codec", "full"))]


def forms(algorithm: HierarchicalAllGather | Scatter, sizes: Sizes) -> Sizes:
    """Sizes, with the columns for full precision."""
    full = isinstance(algorithm, Scatter) and algorithm.inside == "full"
    return [segment + [4 * size for size in segment] * full for segment in sizes]


@quickly
@given(nodes=anywhere, data=st.data())
def test_on_any_machines(nodes: list[int], data: st.DataObject) -> None:
    """No deadlock, bytes are accounted, and each rank ends with what belongs to it."""
    n = len(nodes)
    everyone = dict.fromkeys(range(n), 1)
    plain = draw_sizes(data, n)
    for algorithm in both(nodes):
        sizes = forms(algorithm, plain)
        check(algorithm, n, sizes, whole=False)
        ranks = run(algorithm, sizes, n)
        for rank in ranks:
            assert_values_change_in_order(rank.graph, n)
            for (_, chunk), total in rank.values.items():
                if isinstance(algorithm, HierarchicalAllGather):
                    assert total == {chunk: 1}
                elif chunk == rank.number:
                    assert total == everyone
            if isinstance(algorithm, HierarchicalAllGather):
                assert rank.maker == ranks[0].maker


@quickly
@given(nodes=anywhere, data=st.data())
def test_a_shard_crosses_to_or_from_a_machine_once(nodes: list[int], data: st.DataObject) -> None:
    n = len(nodes)
    plain = draw_sizes(data, n)
    live = [(s, c) for s, segment in enumerate(plain) for c in range(n) if segment[c]]
    for algorithm in both(nodes):
        crossed: Counter[tuple[int, int, int]] = Counter()  # segment, shard, the other machine
        for rank in range(n):
            graph = algorithm.build(rank, n, forms(algorithm, plain))
            for task, kind in enumerate(graph.kind):
                ends = nodes[rank], nodes[graph.peer[task]]
                if kind is Kind.SEND and ends[0] != ends[1]:
                    (b,) = graph.message(task)
                    chunk = graph.buffer_chunk[b]
                    (other,) = {*ends} - {nodes[chunk]}
                    crossed[graph.buffer_segment[b], chunk, other] += 1
        expected = {(s, c, other): 1 for s, c in live for other in {*nodes} - {nodes[c]}}
        assert crossed == expected


@quickly
@given(nodes=anywhere)
def test_every_machine_has_a_holder_of_every_shard(nodes: list[int]) -> None:
    """The ranks of a machine hold equal numbers of other machines' shards, or one more or less."""
    holders, n = Holders(tuple(nodes)), len(nodes)
    held = {rank: holders.held(rank) for rank in range(n)}
    for ranks in holders.machines:
        elsewhere = [shard for shard in range(n) if shard not in ranks]
        assert sorted(shard for rank in ranks for shard in held[rank]) == elsewhere
        counts = [len(held[rank]) for rank in ranks]
        assert max(counts) - min(counts) <= 1
    for shard in range(n):
        assert sorted(holders.abroad(shard)) == [r for r in range(n) if shard in held[r]]


def test_alone_on_its_machine_it_is_sra() -> None:
    for n, order in product(WORLD_SIZES, (0, 1, -1)):
        sizes, nodes = [[160] * n, [16] * n], tuple(range(n))[::order] if order else ()
        for algorithm in both(nodes):
            gathers = isinstance(algorithm, HierarchicalAllGather)
            sra = OF["all_gather" if gathers else "reduce_scatter"]["sra"]
            assert algorithm.rounds(n) == sra.rounds(n)
            for rank in range(n):
                given = forms(algorithm, sizes)
                found, expected = algorithm.build(rank, n, given), sra.build(rank, n, sizes)
                assert messages_and_sums(found) == messages_and_sums(expected)
                assert algorithm.wire_bytes(rank, n, given) == sra.wire_bytes(rank, n, sizes)


def test_rounds_are_the_longest_way() -> None:
    for nodes in ("0", "00", "01", "001", "00000", "01233", "001122"):
        check_rounds(tuple(map(int, nodes)))


def check_rounds(nodes: tuple[int, ...]) -> None:
    n, machines = len(nodes), len(set(nodes))
    for algorithm in both(nodes):
        assert algorithm.rounds(n) == longest_way(algorithm, n, forms(algorithm, [[16] * n]))
        assert algorithm.rounds(n) == (machines > 1) + (machines < n)
        assert algorithm.rounds_between(n) == (machines > 1)


def test_equal_machines_have_equal_ranks() -> None:
    for machines, ranks in ((2, 2), (2, 3), (4, 2), (3, 4)):
        check_equal(machines, ranks)


def check_equal(machines: int, ranks: int) -> None:
    """Between machines a rank exchanges with its counterparts only; as many bytes as SRA in all."""
    n = machines * ranks
    nodes = tuple(rank // ranks for rank in range(n))
    for algorithm in both(nodes):
        sizes = forms(algorithm, [[160] * n])
        gathers = isinstance(algorithm, HierarchicalAllGather)
        for rank in range(n):
            peers = sent_to(algorithm.build(rank, n, sizes))
            others = [p for p in peers if nodes[p] != nodes[rank]]
            assert sorted(others) == [p for p in range(rank % ranks, n, ranks) if p != rank]
            inside = machines if gathers else 2  # messages to each neighbour
            assert len(peers) - len(others) == inside * (ranks - 1)
            if gathers or algorithm.inside == "codec":
                assert algorithm.wire_bytes(rank, n, sizes) == (n - 1) * (160 + 48)


def test_expected_time_counts_links_between_machines() -> None:
    for algorithm in both(tuple(rank // 2 for rank in range(8))):
        assert algorithm.seconds(8, 1e6, 1e-3, 8e-9) == pytest.approx(1e-3 + 0.75 * 8e-3)
    for algorithm in both((0, 0)):
        assert algorithm.seconds(2, 1e6, 1e-3, 8e-9) == 0.0


def test_memory_is_as_documented() -> None:
    """docs/reference/algorithms.md, in payloads, with three machines of two: as in SRA."""
    nodes, n = (0, 0, 1, 1, 2, 2), 6
    for algorithm in (HierarchicalAllGather(nodes), Scatter(nodes)):
        gathers = isinstance(algorithm, HierarchicalAllGather)
        held = len(algorithm.build(0, n, [[160] * n]).writer) / n
        assert held == pytest.approx(1 if gathers else 2 * (n - 1) / n)
