"""Algorithms in two tiers on any machines: what each rank ends with, peers, bytes, memory."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from symbolic import run
from test_graphs import both_forms, check, columns_of, draw_sizes, longest_way

from gradwire.algorithms import (
    OF,
    REGISTRY,
    Algorithm,
    Hierarchical,
    HierarchicalAllGather,
    HierarchicalReduceScatter,
)
from gradwire.algorithms.holders import Holders
from gradwire.engine import Graph, Kind
from ranks import WORLD_SIZES

quickly = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
anywhere = st.lists(st.integers(0, 8), min_size=1, max_size=12)


def sent_to(graph: Graph) -> list[int]:
    return [graph.peer[t] for t, kind in enumerate(graph.kind) if kind is Kind.SEND]


@quickly
@given(
    nodes=anywhere,
    inside=st.sampled_from(["full", "codec"]),
    between=st.sampled_from(["sra", "grid"]),
    data=st.data(),
)
def test_on_any_machines(nodes: list[int], inside: str, between: str, data: st.DataObject) -> None:
    """Sums are complete and equal on all ranks, there is no deadlock, and bytes are accounted."""
    algorithm = Hierarchical(tuple(nodes), inside, between)
    check_all(algorithm, draw_sizes(data, algorithm.chunks(len(nodes))))


def test_a_machine_alone_in_its_row() -> None:
    """Its holders receive nothing there, and the machine's sums still travel on."""
    for inside in ("full", "codec"):
        algorithm = Hierarchical((1, 2, 2, 2, 1, 2, 3, 3), inside, "grid")
        assert [len(row) for row in algorithm.tiers(8).outermost] == [2, 1]
        check_all(algorithm, [[160] * algorithm.chunks(8)] * 2)


def check_all(algorithm: Hierarchical, sizes: list[list[int]]) -> None:
    nodes = algorithm.nodes
    sizes = both_forms(algorithm, sizes)
    check(algorithm, len(nodes), sizes)
    for rank in range(len(nodes)):
        assert_values_change_in_order(
            algorithm.build(rank, len(nodes), sizes), algorithm.chunks(len(nodes))
        )


def assert_values_change_in_order(graph: Graph, chunks: int) -> None:
    """Of two kernels on the values of one chunk, the later one waits for the earlier one, or for a
    payload that another rank made from its payload."""
    needs: list[set[int]] = [set() for _ in graph.kind]
    for task, dependents in enumerate(graph.dependents):
        for dependent in dependents:
            needs[dependent] |= needs[task] | {task}
    last: dict[tuple[int, int], int] = {}
    for task, kind in enumerate(graph.kind):
        if graph.peer[task] >= 0:
            continue
        covered = graph.writes[task] or graph.reads[task]
        places = {(graph.buffer_segment[b], graph.buffer_chunk[b] % chunks) for b in covered}
        for place in places:
            if place in last and kind is not Kind.DECODE:
                assert last[place] in needs[task], graph.describe(task)
            last[place] = task


def test_equal_machines_have_equal_ranks() -> None:
    shapes = [(2, 2), (2, 3), (4, 2), (6, 3), (9, 1)]
    for shape, inside, between in product(shapes, ("full", "codec"), ("sra", "grid")):
        machines, ranks = shape
        n = machines * ranks
        algorithm = Hierarchical(tuple(r // ranks for r in range(n)), inside, between)
        sizes = both_forms(algorithm, [[160] * algorithm.chunks(n)])
        assert algorithm.chunks(n) == n
        graphs = [algorithm.build(r, n, sizes) for r in range(n)]
        assert len({len(graph) for graph in graphs}) == 1
        assert len({algorithm.wire_bytes(r, n, sizes) for r in range(n)}) == 1
        columns = algorithm.columns(n) or machines
        away = machines - 1 if columns == machines else columns + machines // columns - 2
        for r, graph in enumerate(graphs):
            beside = [p for p in sent_to(graph) if p // ranks == r // ranks]
            # Between machines, a rank exchanges messages only with its counterparts.
            others = [p for p in sent_to(graph) if p // ranks != r // ranks]
            assert len(beside) == 2 * (ranks - 1)
            assert len(others) == 2 * away
            assert all((p - r) % ranks == 0 for p in others)


def test_a_small_machine_holds_as_many_shares() -> None:
    """Three ranks on one machine, two on the next: rank 3 has two shares, rank 4 one."""
    algorithm = Hierarchical((0, 0, 0, 1, 1))
    tiers = algorithm.tiers(5)
    assert tiers.shares == (3, 2)
    assert [tiers.held(r, 1) for r in range(5)] == [
        [(0,)], [(1,)], [(2,)], [(0,), (2,)], [(1,)],
    ]  # fmt: skip
    # the last share's parts are rank 2's and rank 3's
    assert tiers.owners == [0, 1, 2, 3, 4, 3]
    sizes = [[160] * 6]
    found = {r: sent_to(algorithm.build(r, 5, sizes)) for r in range(5)}
    assert sorted(found[2]) == [0, 0, 1, 1, 3, 3]
    assert sorted(found[3]) == [0, 0, 2, 2, 4, 4, 4]


def messages_and_sums(graph: Graph) -> list[tuple[Any, ...]]:
    """All tasks except decodes, which are fewer here."""
    return sorted(task for task in columns_of(graph) if not task[0].startswith("decode"))


def test_one_machine_alone() -> None:
    for inside in ("full", "codec"):
        algorithm = Hierarchical((7,) * 4, inside)
        sizes = both_forms(algorithm, [[160] * 4])
        assert algorithm.rounds(4) == 2
        assert algorithm.rounds_between(4) == 0
        for rank in run(algorithm, sizes, 4):
            assert len(sent_to(rank.graph)) == 6


def test_rows_and_columns() -> None:
    """Near the square root, preferably a divisor."""
    expected = {1: 0, 2: 0, 4: 2, 5: 3, 6: 3, 7: 3, 12: 4, 16: 4, 127: 12, 128: 16}
    algorithm = Hierarchical(between="grid")
    assert {machines: algorithm.columns(machines) for machines in expected} == expected
    for machines, columns in expected.items():
        assert algorithm.rounds(machines) == (4 if columns else 2 * (machines > 1))


def test_a_grid_is_chosen_where_it_spares_messages() -> None:
    found = [n for n in range(1, 200) if Hierarchical().columns(n)]
    assert found[0] == 32
    assert set(range(40, 200)) <= set(found)


def test_memory_is_as_documented() -> None:
    """docs/reference/algorithms.md, three machines of two; results that are not forwarded reuse
    locals' memory."""
    machines, ranks = 3, 2
    for inside in ("codec", "full"):
        algorithm = Hierarchical((0, 0, 1, 1, 2, 2), inside)
        graph = algorithm.build(0, 6, both_forms(algorithm, [[160] * 6]))
        reused = {b for t, first in enumerate(graph.reuses) if first >= 0 for b in graph.writes[t]}
        roles = [role for b, role in enumerate(graph.buffer_role) if b not in reused]
        assert roles.count("local") / 6 == pytest.approx(2 * (ranks - 1) / ranks)
        between = (3 * machines - 2) / machines / ranks
        assert (len(roles) - roles.count("local")) / 6 == pytest.approx(between)


# ---- shards: reduce-scatter and all-gather in two tiers ----------------------------------------

Scatter = HierarchicalReduceScatter


def both(nodes: list[int] | tuple[int, ...]) -> list[HierarchicalAllGather | Scatter]:
    machines = tuple(nodes)
    return [HierarchicalAllGather(machines), *(Scatter(machines, how) for how in ("codec", "full"))]


@quickly
@given(nodes=anywhere, data=st.data())
def test_a_shard_crosses_to_or_from_a_machine_once(nodes: list[int], data: st.DataObject) -> None:
    n = len(nodes)
    plain = draw_sizes(data, n)
    live = [(s, c) for s, segment in enumerate(plain) for c in range(n) if segment[c]]
    for algorithm in both(nodes):
        crossed: Counter[tuple[int, int, int]] = Counter()  # segment, shard, the other machine
        for rank in range(n):
            graph = algorithm.build(rank, n, both_forms(algorithm, plain))
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


@quickly
@given(nodes=anywhere, data=st.data())
def test_shards_on_any_machines(nodes: list[int], data: st.DataObject) -> None:
    """No deadlock, bytes are accounted, and each rank ends with what belongs to it."""
    n = len(nodes)
    plain = draw_sizes(data, n)
    for algorithm in both(nodes):
        sizes = both_forms(algorithm, plain)
        gathers = isinstance(algorithm, HierarchicalAllGather)
        for rank in check(algorithm, n, sizes, "all_gather" if gathers else "reduce_scatter"):
            assert_values_change_in_order(rank.graph, n)


def test_rounds_of_shards_are_the_longest_way() -> None:
    for text in ("0", "00", "01", "001", "00000", "01233", "001122"):
        nodes = tuple(map(int, text))
        n, machines = len(nodes), len(set(nodes))
        for algorithm in both(nodes):
            assert algorithm.rounds(n) == longest_way(
                algorithm, n, both_forms(algorithm, [[16] * n])
            )
            assert algorithm.rounds(n) == (machines > 1) + (machines < n)
            assert algorithm.rounds_between(n) == (machines > 1)


def test_shards_of_equal_machines_have_equal_ranks() -> None:
    """Between machines a rank exchanges with its counterparts only; as many bytes as SRA in all."""
    for machines, ranks in ((2, 2), (2, 3), (4, 2), (3, 4)):
        n = machines * ranks
        nodes = tuple(rank // ranks for rank in range(n))
        for algorithm, rank in product(both(nodes), range(n)):
            sizes = both_forms(algorithm, [[160] * n])
            gathers = isinstance(algorithm, HierarchicalAllGather)
            peers = sent_to(algorithm.build(rank, n, sizes))
            others = [p for p in peers if nodes[p] != nodes[rank]]
            assert sorted(others) == [p for p in range(rank % ranks, n, ranks) if p != rank]
            inside = machines if gathers else 2  # messages to each neighbour
            assert len(peers) - len(others) == inside * (ranks - 1)
            if gathers or algorithm.inside == "codec":
                assert algorithm.wire_bytes(rank, n, sizes) == (n - 1) * (160 + 48)


# ---- all three ----------------------------------------------------------------------------------


def test_alone_on_its_machine_it_is_sra() -> None:
    for n, order in product(WORLD_SIZES, (0, 1, -1)):
        plain, nodes = [[160] * n, [16] * n], tuple(range(n))[::order] if order else ()
        gather, *scatters = both(nodes)
        for algorithm, sra in (
            (Hierarchical(nodes), REGISTRY["sra"]),
            (gather, OF["all_gather"]["sra"]),
            *((scatter, OF["reduce_scatter"]["sra"]) for scatter in scatters),
        ):
            sizes = both_forms(algorithm, plain)
            assert algorithm.rounds(n) == sra.rounds(n)
            for rank in range(n):
                found, expected = algorithm.build(rank, n, sizes), sra.build(rank, n, plain)
                assert messages_and_sums(found) == messages_and_sums(expected)
                assert algorithm.wire_bytes(rank, n, sizes) == sra.wire_bytes(rank, n, plain)


def test_expected_time_counts_links_between_machines() -> None:
    nodes = tuple(rank // 2 for rank in range(8))
    rows: list[tuple[Algorithm, float]] = [
        (Hierarchical(nodes), 2e-3 + 1.5 * 8e-3),
        (Hierarchical(nodes, between="grid"), 4e-3 + 1.5 * 8e-3),
        *((algorithm, 1e-3 + 0.75 * 8e-3) for algorithm in both(nodes)),
    ]
    for algorithm, expected in rows:
        assert algorithm.seconds(8, 1e6, 1e-3, 8e-9) == pytest.approx(expected)
    for algorithm in both((0, 0)):
        assert algorithm.seconds(2, 1e6, 1e-3, 8e-9) == 0.0
