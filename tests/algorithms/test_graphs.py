"""Graphs of algorithms: their peers, rounds, times and memory; and the laws of every graph, which
test_schedules.py and test_hierarchical.py assert."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import strategies as st
from symbolic import Rank, name_of, run

from gradwire.algorithms import (
    REGISTRY,
    Algorithm,
    Coordinated,
    HierarchicalAllGather,
    HierarchicalReduceScatter,
    parameter_server,
    ring,
    tree,
)
from gradwire.engine import HEADER_BYTES, Graph, Kind
from ranks import WORLD_SIZES

PLAIN = {name: a for name, a in REGISTRY.items() if name != "hierarchical"}
every = pytest.mark.parametrize("algorithm", PLAIN.values(), ids=PLAIN)
payloads = st.sampled_from([0, 16, 160])


def draw_sizes(data: st.DataObject, chunks: int) -> list[list[int]]:
    row = st.lists(payloads, min_size=chunks, max_size=chunks)
    return data.draw(st.lists(row, min_size=1, max_size=3))


def both_forms(algorithm: Algorithm, sizes: list[list[int]]) -> list[list[int]]:
    """Sizes, with the columns for full precision, if any."""
    full = getattr(algorithm, "inside", "codec") == "full"
    return [segment + [4 * size for size in segment] * full for segment in sizes]


def check(
    algorithm: Algorithm, n: int, sizes: list[list[int]], verb: str = "all_reduce", root: int = 0
) -> list[Rank]:
    """The laws that depend on the graph alone: nobody waits for ever, bytes are accounted, and each
    rank ends with what belongs to it, decoded from the same payloads everywhere."""
    ranks = run(algorithm, sizes, n)
    for rank in ranks:
        graph = rank.graph
        assert algorithm.wire_bytes(rank.number, n, sizes) == bytes_sent(graph, sizes)
        if n == 1:
            continue
        for (_, chunk), total in rank.values.items():
            of = {"all_gather": [chunk], "broadcast": [root]}.get(verb, range(n))
            if verb != "reduce_scatter" or chunk == rank.number:
                assert total == dict.fromkeys(of, 1)
        assert rank.maker == ranks[0].maker or verb == "reduce_scatter"
        if verb == "broadcast":
            assert len(rank.maker) == sum(size > 0 for segment in sizes for size in segment)
        for task, kind in enumerate(graph.kind):
            if kind is Kind.MERGE and verb == "all_reduce":
                made = {name_of(graph, b) for b in graph.writes[task] or graph.reads[task]}
                assert graph.final[task] == (made <= makers(rank.maker))
    return ranks


def bytes_sent(graph: Graph, sizes: list[list[int]]) -> int:
    places = [(graph.buffer_segment[b], graph.buffer_chunk[b]) for b in graph.sent()]
    return sum(sizes[s][c] + HEADER_BYTES for s, c in places)


def makers(maker: dict[tuple[int, int], tuple[Any, ...]]) -> set[Any]:
    return {b for buffers in maker.values() for b in buffers}


def served(partitions: int) -> Any:
    """A parameter server with another number of chunks."""
    same = ("ROLES", "build", "hop", "wire_bytes", "rounds", "seconds")
    own = {name: getattr(parameter_server, name) for name in same}
    return SimpleNamespace(**own, chunks=lambda world_size: partitions)


def test_coordinated_ranks_have_one_receiver_at_a_time() -> None:
    """With a window of 1, messages that wait for the same messages go to the same peer."""
    inners = (REGISTRY["sra"], served(2), served(10))
    ranks = [(n, rank) for n in (2, 3, 5, 8) for rank in range(n)]
    for inner, (n, rank) in product(inners, ranks):
        algorithm = Coordinated(inner, window=1)
        sizes = [[160] * algorithm.chunks(n)] * 3
        graph = algorithm.build(rank, n, sizes)
        plain = inner.build(rank, n, sizes)
        assert sorted(columns_of(graph)) == sorted(columns_of(plain))
        released: dict[frozenset[int], set[int]] = {}
        for task, kind in enumerate(graph.kind):
            if kind is Kind.SEND:
                released.setdefault(frozenset(graph.after[task]), set()).add(graph.peer[task])
        assert all(len(peers) == 1 for peers in released.values()), released


def columns_of(graph: Graph) -> list[tuple[Any, ...]]:
    """All columns of each task except `after`."""
    return [
        (
            graph.describe(task),
            tuple(name_of(graph, b) for b in graph.reads[task]),
            tuple(name_of(graph, b) for b in graph.writes[task]),
            graph.own[task],
            graph.final[task],
            name_of(graph, graph.reuses[task]) if graph.reuses[task] >= 0 else (),
        )
        for task in range(len(graph))
    ]


@every
def test_rounds_are_the_longest_way(algorithm: Algorithm) -> None:
    for n in WORLD_SIZES:
        assert longest_way(algorithm, n, [[16] * algorithm.chunks(n)]) == algorithm.rounds(n), n


def longest_way(algorithm: Algorithm, n: int, sizes: list[list[int]]) -> int:
    """The number of messages on the longest chain over all ranks."""
    graphs = [algorithm.build(r, n, sizes) for r in range(n)]
    arrived: dict[tuple[Any, ...], int] = {}
    depth: dict[tuple[int, int], int] = {}
    total = sum(map(len, graphs))
    while len(depth) < total:
        for r, graph in enumerate(graphs):
            sources: list[list[int]] = [[] for _ in graph.kind]
            for i, dependents in enumerate(graph.dependents):
                for d in dependents:
                    sources[d].append(i)
            for i, kind in enumerate(graph.kind):
                if (r, i) in depth or any((r, j) not in depth for j in sources[i]):
                    continue
                here = max((depth[r, j] for j in sources[i]), default=0)
                if kind is Kind.RECV:
                    key = (graph.peer[i], r, name_of(graph, graph.message(i)[0]))
                    if key not in arrived:
                        continue
                    here = arrived[key]
                if kind is Kind.SEND:
                    arrived[r, graph.peer[i], name_of(graph, graph.message(i)[0])] = here + 1
                depth[r, i] = here
    return max(arrived.values(), default=0)


def test_expected_time_is_rounds_and_bytes() -> None:
    for algorithm, n in product(PLAIN.values(), WORLD_SIZES):
        assert algorithm.seconds(n, 0.0, alpha=1.0, beta=1.0) == algorithm.rounds(n)
        payload = 1 << 20
        sizes = [[payload // algorithm.chunks(n)] * algorithm.chunks(n)]
        sent = max(algorithm.wire_bytes(r, n, sizes) for r in range(n))
        # The busiest link's bytes, except for a tree, whose rank 0 first receives and then sends.
        expected = 2 * sent if algorithm is tree else sent
        assert algorithm.seconds(n, payload, 0.0, 1.0) == pytest.approx(expected, rel=0.01)
    sra = REGISTRY["sra"]
    assert sra.seconds(4, 1e6, alpha=1e-3, beta=8e-9) == pytest.approx(2e-3 + 1.5 * 1e6 * 8e-9)


def test_whom_a_rank_talks_to() -> None:
    """A tree has a root and every rank once; in a ring neighbours alone; servers spread."""
    for n in range(1, 70):
        found = [c for r in range(n) for c in tree.children(r, n)]
        assert sorted(found) == list(range(1, n))
        assert all(r in tree.children(tree.parent(r), n) for r in range(1, n))
    for rank in range(5):
        graph = ring.build(rank, 5, [[16] * 5])
        ends = {
            (kind, peer) for kind, peer in zip(graph.kind, graph.peer, strict=True) if peer >= 0
        }
        assert ends == {(Kind.SEND, (rank + 1) % 5), (Kind.RECV, (rank - 1) % 5)}
    assert parameter_server.servers(4, 2) == [0, 2]
    assert parameter_server.servers(4, 4) == [0, 1, 2, 3]
    assert parameter_server.servers(4, 8) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert parameter_server.seconds(4, 1e6, 0.0, 1.0, partitions=1) == pytest.approx(3e6)


PAIRS = (0, 0, 1, 1, 2, 2)  # three machines of two: as in SRA


def test_memory_is_as_documented() -> None:
    """docs/reference/algorithms.md: the most memory for messages on any rank, in payloads."""
    for algorithm, n, payloads in (
        (REGISTRY["sra"], 8, 22 / 8),
        (REGISTRY["ring"], 8, 22 / 8),
        (REGISTRY["tree"], 8, 4),
        (REGISTRY["parameter_server"], 8, 22 / 8),
        (REGISTRY["all_gather"], 8, 8),
        (REGISTRY["sra"], 2, 4 / 2),
        (REGISTRY["ring"], 3, 7 / 3),
        (REGISTRY["tree"], 5, 4),
        (REGISTRY["all_gather"], 3, 3),
        (HierarchicalAllGather(PAIRS), 6, 1),
        (HierarchicalReduceScatter(PAIRS), 6, 2 * 5 / 6),
    ):
        chunks = algorithm.chunks(n)
        sizes = [[1600] * chunks]
        held = max(len(algorithm.build(r, n, sizes).writer) for r in range(n))
        assert held / chunks == pytest.approx(payloads), (algorithm, n)


def test_a_value_of_sra_is_merged_once_and_decoded_by_the_others() -> None:
    for n in WORLD_SIZES:
        for rank in range(n):
            kinds = REGISTRY["sra"].build(rank, n, [[16] * n] * 3).kind
            assert kinds.count(Kind.MERGE) == kinds.count(Kind.ENCODE) == (0 if n == 1 else 3)
            assert kinds.count(Kind.DECODE) == 3 * (n - 1)
