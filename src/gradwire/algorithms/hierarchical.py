"""Hierarchical (CGX 4.2, HIPRESS 5.1): reduce inside machines, then between them, on every rank.

N ranks on L machines; `nodes[r]` is the machine of rank r, any number. S is the number of ranks of
the largest machine. The values are cut into S shares, and each share into L parts: S * L chunks. On
a machine of g ranks, local rank k mod g is the *holder* of share k; its counterparts hold share k
on the other machines. So the ranks of a small machine hold several shares. The holder on machine l
owns part l. (gradwire/algorithms/tiers.py has the rule.)

Steps, for each segment:
  1. inside: each rank encodes the shares that it does not hold, and sends each to its holder, which
     adds them to its own values in the order of ranks. These *locals* travel through the codec
     (`inside="codec"`) or in full precision (`inside="full"`); then the uncompressed chunk c is
     chunk S * L + c of `sizes`.
  2. between: the holders of a share run a scatter-reduce-allgather of its parts, through the codec.
  3. inside: each holder forwards the results of its share, unchanged, to the machine's other ranks;
     all decode.

`between="grid"` splits step 2 in two: machines are arranged in rows; a *partial* is a share of a
share, sent to its holder in the row. The holder exchanges the sum with the other rows, and forwards
the results along its row. With R rows of C machines a rank has 2 (R + C - 2) messages instead of
2 (L - 1), with the same total bytes. All chunks from one rank to another travel in one message.

A value is encoded once between machines, twice on a grid, then once in the result; and once more
inside, without loss if in full precision.

Bytes sent by rank r: for each tier (inside, row, between) [what it sends to holders] + [what it
holds there] * (counterparts - 1). With equal machines that is, inside, (S-1)/S of the locals and
(S-1)/S P of results, and between machines 2 (L-1)/L P/S. Rounds: 2 per tier. Time counts only
links between machines, which the ranks of a machine share: for P payload bytes, 2 * alpha +
2 * (L-1)/L * P * beta; on a grid, 4 * alpha.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from gradwire.algorithms.halves import peers_after
from gradwire.algorithms.protocol import Sizes, message
from gradwire.algorithms.tiers import Prefix, Tiers, Unit
from gradwire.engine import Graph

INSIDE = ("codec", "full")
BETWEEN = ("auto", "sra", "grid")

# The choice between SRA and a grid without measurements: the cost of a message beside its bytes (to
# post, to notice, to check), and the latency.
MESSAGE_S = 5e-5
LATENCY_S = 1e-3


@dataclass(frozen=True)
class Hierarchical:
    """The algorithm on given machines.

    Attributes:
        nodes: machine of each rank; empty: every rank has its own machine.
        inside: how locals travel, "codec" or "full".
        between: how holders exchange, "sra" or "grid"; "auto" takes a grid where the messages that
            it saves cost more than its two extra rounds: from about 32 machines on.
    """

    nodes: tuple[int, ...] = ()
    inside: str = "codec"
    between: str = "auto"

    ROLES: ClassVar[tuple[str, ...]] = ("local", "partial", "contribution", "result")

    def chunks(self, world_size: int) -> int:
        return self.tiers(world_size).chunks

    def rounds(self, world_size: int) -> int:
        return 2 * sum(shares > 1 for shares in self.tiers(world_size).shares)

    def rounds_between(self, world_size: int) -> int:
        """The number of `rounds` between machines."""
        tiers = self.tiers(world_size)
        if self.machines(world_size) == 1:
            return 0
        return self.rounds(world_size) - 2 * (tiers.roles[0] == "local")

    def machines(self, world_size: int) -> int:
        """The number of machines."""
        return len(set(self.nodes)) if self.nodes else world_size

    def columns(self, world_size: int) -> int:
        """The number of columns of the grid; 0: no grid."""
        tiers = self.tiers(world_size)
        return tiers.shares[-2] if "partial" in tiers.roles else 0

    def tiers(self, world_size: int) -> Tiers:
        """The ranks, grouped in machines, the machines perhaps in rows."""
        assert len(self.nodes) in (0, world_size), (self.nodes, world_size)
        return self._tiers if self.nodes else self._arranged(range(world_size))

    @cached_property
    def _tiers(self) -> Tiers:
        machines: dict[int, tuple[int, ...]] = {}
        for rank, node in enumerate(self.nodes):
            machines[node] = (*machines.get(node, ()), rank)
        ranks = len(self.nodes)
        if len(machines) == ranks:
            return self._arranged(range(ranks))
        if len(machines) == 1 and self.inside == "codec":
            return Tiers(tuple(range(ranks)), ("contribution",))
        return self._arranged(list(machines.values()), "local")

    def _arranged(self, units: Sequence[Unit], *roles: str) -> Tiers:
        """The tiers between machines, with `units` inside."""
        count = len(units)
        columns = _columns(count)
        between = self.between if self.between != "auto" else _chosen(count, columns)
        if between == "sra" or columns == count:
            return Tiers(tuple(units), (*roles, "contribution"))
        rows = tuple(tuple(units[at : at + columns]) for at in range(0, count, columns))
        return Tiers(rows, (*roles, "partial", "contribution"))

    def build(self, rank: int, world_size: int, sizes: Sizes) -> Graph:
        """The graph of `rank`."""
        graph = Graph(self.ROLES)
        if world_size == 1:
            return graph
        tiers = self.tiers(world_size)
        listing = _Listing(graph, tiers, rank, sizes, self.inside == "full")
        last = 2 * tiers.depth - 1
        # Early steps of a segment precede late steps of the segment before it.
        for wave in range(len(sizes) + last):
            for step in range(last + 1):
                if 0 <= wave - step < len(sizes):
                    if step < tiers.depth:
                        listing.up(wave - step, step)
                    else:
                        listing.down(wave - step, last - step)
        return graph

    def hop(self, role: str, chunk: int, sender: int, receiver: int, world_size: int) -> int:
        """Tier by tier up, then with the results down again."""
        tiers = self.tiers(world_size)
        if role != "result":
            return tiers.roles.index(role)
        return 2 * tiers.depth - 1 - tiers.between(sender, receiver)

    def wire_bytes(self, rank: int, world_size: int, sizes: Sizes) -> int:
        """Bytes that `rank` sends, headers included."""
        if world_size == 1:
            return 0
        tiers = self.tiers(world_size)
        full = self.inside == "full"
        of_chunk = [0] * tiers.chunks, [0] * tiers.chunks  # bytes: as locals, through the codec
        for segment in sizes:
            for form, held in enumerate(of_chunk):
                first = tiers.chunks * (full and not form)
                for chunk, nbytes in enumerate(segment[first : first + tiers.chunks]):
                    held[chunk] += message(nbytes)
        total = 0
        for tier, role in enumerate(tiers.roles):
            others = len(tiers.group(rank, tier)) - 1
            sent = of_chunk[role != "local"]
            given = (c for prefix, _ in tiers.away(rank, tier) for c in tiers.chunks_of(prefix))
            kept = (c for prefix in tiers.held(rank, tier + 1) for c in tiers.chunks_of(prefix))
            total += sum(map(sent.__getitem__, given))
            total += others * sum(map(of_chunk[1].__getitem__, kept))
        return total

    def seconds(self, world_size: int, payload_bytes: float, alpha: float, beta: float) -> float:
        """Expected time between machines; see gradwire.algorithms.protocol."""
        machines = self.machines(world_size)
        share = (machines - 1) / machines
        return self.rounds_between(world_size) * alpha + 2 * share * payload_bytes * beta


def _columns(machines: int) -> int:
    """The columns of a grid: about the square root, preferably a divisor of `machines`."""
    root = math.isqrt(max(machines - 1, 0)) + 1
    near = (columns for columns in range(root, min(2 * root, machines)) if machines % columns == 0)
    return next(near, root)


def _chosen(machines: int, columns: int) -> str:
    """The faster of "sra" and "grid", by the number of messages per rank and the latency."""
    rows = -(-machines // columns)
    spared = (machines - 1) - (rows - 1) - (columns - 1)
    return "grid" if spared * MESSAGE_S > LATENCY_S else "sra"


class _Listing:
    """Appends the tasks of one rank to its graph.

    Args:
        full: whether locals are uncompressed.
    """

    def __init__(self, graph: Graph, tiers: Tiers, rank: int, sizes: Sizes, full: bool) -> None:
        self._graph = graph
        self._tiers = tiers
        self._rank = rank
        self._sizes = sizes
        self._full = full
        # (segment, prefix) -> the merge that summed it; segment -> prefixes that a merge encoded
        self._added: dict[tuple[int, Prefix], int] = {}
        self._summed: dict[int, set[Prefix]] = {}
        crowded = (t for t in range(tiers.depth) if len(tiers.group(rank, t)) > 1)
        self._last = next(crowded, 0)  # the tier whose results are not forwarded

    def up(self, s: int, tier: int) -> None:
        """Send what other ranks hold to them; receive and sum what this rank holds."""
        tiers, rank = self._tiers, self._rank
        given = [
            (prefix, holder)
            for prefix, holder in tiers.away(rank, tier)
            if prefix not in self._summed.get(s, ()) and self._live(s, prefix)
        ]
        if given:
            role = tiers.roles[tier]
            after = {self._added[s, p[:-1]] for p, _ in given if (s, p[:-1]) in self._added}
            made = [self._buffers(role, s, self._live(s, p), rank) for p, _ in given]
            self._graph.encode(s, [b for buffers in made for b in buffers], sorted(after))
            for (_, holder), buffers in zip(given, made, strict=True):
                self._graph.send(s, buffers, holder)
        for prefix in tiers.held(rank, tier + 1):
            before = self._added.get((s, prefix[:-1]))
            live = self._live(s, prefix)
            peers = [p for p in tiers.counterparts(rank, prefix[:-1]) if p != rank]
            for peer in peers_after(rank, peers) if live else ():
                self._graph.recv(s, self._buffers(tiers.roles[tier], s, live, peer), peer)
            if tier == tiers.depth - 1:
                if live:
                    self._merge(s, tier, prefix, live, self._results(s, prefix))
            elif peers and live:
                self._add(s, tier, prefix)
            elif before is not None:
                self._added[s, prefix] = before

    def _add(self, s: int, tier: int, prefix: Prefix) -> None:
        """Sum what a holder has received. What it sends on at the next tier is encoded by the same
        kernel, and first; locals in full precision have no such kernel."""
        tiers, rank = self._tiers, self._rank
        given = [
            (inner, holder)
            for inner, holder in tiers.away(rank, tier + 1)
            if inner[:-1] == prefix and self._live(s, inner)
        ]
        kept = self._live(s, prefix)
        if not (self._full and tiers.roles[tier] == "local") and given:
            chunks = [self._live(s, inner) for inner, _ in given]
            role = tiers.roles[tier + 1]
            made = [self._buffers(role, s, live, rank) for live in chunks]
            every = [chunk for live in chunks for chunk in live]
            self._merge(s, tier, prefix, every, [b for buffers in made for b in buffers])
            for (inner, holder), buffers in zip(given, made, strict=True):
                self._summed.setdefault(s, set()).add(inner)
                self._graph.send(s, buffers, holder)
            kept = sorted(set(kept) - set(every), key=kept.index)
        if kept:
            self._added[s, prefix] = self._merge(s, tier, prefix, kept, [])

    def _merge(
        self, s: int, tier: int, prefix: Prefix, chunks: Sequence[int], writes: Sequence[int]
    ) -> int:
        """Merge the counterparts' payloads of these chunks with the own values, in rank order."""
        tiers, rank = self._tiers, self._rank
        peers = [p for p in tiers.counterparts(rank, prefix[:-1]) if p != rank]
        reads = [self._buffers(tiers.roles[tier], s, chunks, peer) for peer in peers]
        before = self._added.get((s, prefix[:-1]))
        return self._graph.merge(
            s,
            [buffer for of_peer in reads for buffer in of_peer],
            writes,
            own=tiers.paths[rank][tier],
            final=tier == tiers.depth - 1,
            after=() if before is None else (before,),
        )

    def down(self, s: int, tier: int) -> None:
        """Forward the results that this rank holds; receive the others."""
        graph, tiers, rank = self._graph, self._tiers, self._rank
        for prefix in tiers.held(rank, tier + 1):
            results = self._results(s, prefix)
            peers = [p for p in tiers.counterparts(rank, prefix[:-1]) if p != rank]
            for peer in peers_after(rank, peers) if results else ():
                graph.send(s, results, peer)
        came = []
        for prefix, holder in tiers.away(rank, tier):
            results = self._results(s, prefix)
            if results:
                # Forwarded results are contiguous; others reuse the memory of what was sent.
                given = self._buffers(tiers.roles[tier], s, self._live(s, prefix), rank)[0]
                graph.recv(s, results, holder, reuses=given if tier == self._last else None)
                came.append(results)
        if tier:
            came = [[buffer for results in came for buffer in results]] if came else []
        for results in came:
            graph.decode(s, results)

    def _buffers(self, role: str, s: int, chunks: Sequence[int], source: int) -> list[int]:
        """The buffers of these chunks that a rank sends to holders."""
        beyond = self._tiers.chunks * (role == "local" and self._full)
        return [self._graph.buffer(role, s, c + beyond, source) for c in chunks]

    def _results(self, s: int, prefix: Prefix) -> list[int]:
        owners = self._tiers.owners
        return [self._graph.buffer("result", s, c, owners[c]) for c in self._live(s, prefix)]

    def _live(self, s: int, prefix: Prefix) -> list[int]:
        """The chunks of a prefix that are not empty."""
        return [chunk for chunk in self._tiers.chunks_of(prefix) if self._sizes[s][chunk]]
