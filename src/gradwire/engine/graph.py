"""The task graph of a collective, as columns: five kinds of task.

The kinds are CaSync's primitives (HiPress 3.1):

    encode   values of some chunks -> their payloads
    merge    payloads, with or without own values -> their sum: as values, or as a payload and what
             that decodes to
    decode   payload -> values
    send     payload -> a peer
    recv     a peer -> payload

A merge is one kernel: it decodes, sums in the order in which it lists its payloads, and encodes
again, block by block. It replaces the values by the sum, or by what the sum's payload decodes to.

Tasks and buffers are numbers. A *buffer* is the payload of one chunk of one segment in memory, with
its header. Tasks list the buffers that they read and write, which gives the dependencies. Adjacent
buffers may travel as one message: a send and its recv then list all of them, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from itertools import pairwise

Opening = tuple[tuple[tuple[int, ...], int | None], ...]


class Kind(Enum):
    ENCODE = "encode"
    DECODE = "decode"
    MERGE = "merge"
    SEND = "send"
    RECV = "recv"


class Graph:
    """The tasks of one collective on one rank, in an algorithm's order.

    A task depends on the tasks that write what it reads, and on the tasks in its `after`;
    algorithms state dataflow only. Ready tasks start, and receives are awaited, in the order of the
    list, so an algorithm lists its tasks in the order in which it expects them to become ready. The
    orders of all ranks must be consistent: a message that is listed earlier on one rank must not
    depend on one that is listed later on another.

    `encode`, `merge`, `decode`, `send` and `recv` append a task and return its number.

    Args:
        roles: names for what payloads hold ("contribution", "result"). Their order numbers
            messages, see `slot`.

    Attributes:
        kind: per task, its kind.
        segment: per task, its pipeline unit.
        reads: per task, the buffers that it reads. A merge lists the first peer's payloads of all
            chunks that it produces, then the next peer's of the same chunks, and so on; it sums in
            that order of peers.
        writes: per task, the buffers that it fills. A merge without writes leaves the sum in the
            values.
        peer: the other rank of a send or recv; -1 for kernels.
        own: for a merge, the position of the own values in the sum; -1: it sums payloads only.
        final: for a merge, whether it produces the result: an average is divided here.
        after: per task, further tasks that must end first: they change the values, or use the link.
            A send ends when its transport reports so: for a message that the peer reads in place,
            with its last reader.
        reuses: for a recv, the first buffer of an earlier message, which only sends read and whose
            memory the new message may take: no rank sends the new one before all receivers have
            the earlier one. -1: none.
        buffer_role: per buffer, what its payload holds.
        buffer_segment: per buffer, its pipeline unit.
        buffer_chunk: per buffer, its share of the values.
        buffer_source: per buffer, the rank that encoded it.
        writer: per buffer, the task that fills it; -1: none yet.
    """

    def __init__(self, roles: Sequence[str]) -> None:
        self.roles = tuple(roles)
        self.kind: list[Kind] = []
        self.segment: list[int] = []
        self.reads: list[tuple[int, ...]] = []
        self.writes: list[tuple[int, ...]] = []
        self.peer: list[int] = []
        self.own: list[int] = []
        self.final: list[bool] = []
        self.after: list[tuple[int, ...]] = []
        self.reuses: list[int] = []
        self.buffer_role: list[str] = []
        self.buffer_segment: list[int] = []
        self.buffer_chunk: list[int] = []
        self.buffer_source: list[int] = []
        self._buffers: dict[tuple[str, int, int, int], int] = {}
        self.writer: list[int] = []

    def __len__(self) -> int:
        """How many tasks there are."""
        return len(self.kind)

    # ---- listing -------------------------------------------------------------------------------

    def buffer(self, role: str, segment: int, chunk: int, source: int) -> int:
        """The number of a buffer; equal arguments give the same one."""
        known = self._buffers.setdefault((role, segment, chunk, source), len(self.writer))
        if known == len(self.writer):
            assert role in self.roles, f"{role!r} is none of the algorithm's {self.roles}"
            self.buffer_role.append(role)
            self.buffer_segment.append(segment)
            self.buffer_chunk.append(chunk)
            self.buffer_source.append(source)
            self.writer.append(-1)
        return known

    def encode(self, segment: int, writes: Sequence[int], after: Sequence[int] = ()) -> int:
        return self._add(Kind.ENCODE, segment, writes=writes, after=after)

    def merge(
        self,
        segment: int,
        reads: Sequence[int],
        writes: Sequence[int] = (),
        own: int | None = None,
        final: bool = False,
        after: Sequence[int] = (),
    ) -> int:
        # Only own values have a residual, which takes the error of encoding.
        assert not writes or own is not None, f"segment {segment}: encodes a sum without own values"
        place = -1 if own is None else own
        return self._add(Kind.MERGE, segment, reads, writes, own=place, final=final, after=after)

    def decode(self, segment: int, reads: Sequence[int], after: Sequence[int] = ()) -> int:
        return self._add(Kind.DECODE, segment, reads, after=after)

    def send(
        self, segment: int, buffer: int | Sequence[int], peer: int, after: Sequence[int] = ()
    ) -> int:
        reads = (buffer,) if isinstance(buffer, int) else buffer
        return self._add(Kind.SEND, segment, reads=reads, peer=peer, after=after)

    def recv(
        self, segment: int, buffer: int | Sequence[int], peer: int, reuses: int | None = None
    ) -> int:
        earlier = -1 if reuses is None else reuses
        writes = (buffer,) if isinstance(buffer, int) else buffer
        return self._add(Kind.RECV, segment, writes=writes, peer=peer, reuses=earlier)

    def _add(
        self,
        kind: Kind,
        segment: int,
        reads: Sequence[int] = (),
        writes: Sequence[int] = (),
        peer: int = -1,
        own: int = -1,
        final: bool = False,
        reuses: int = -1,
        after: Sequence[int] = (),
    ) -> int:
        task = len(self.kind)
        self.kind.append(kind)
        self.segment.append(segment)
        self.reads.append(tuple(reads))
        self.writes.append(tuple(writes))
        self.peer.append(peer)
        self.own.append(own)
        self.final.append(final)
        self.reuses.append(reuses)
        self.after.append(tuple(after))
        for buffer in reads:
            assert self.writer[buffer] >= 0, (
                f"{self.describe(task)}: listed before the writer of a buffer that it reads"
            )
        for buffer in writes:
            assert self.writer[buffer] < 0, (
                f"{self.describe(task)}: writes a buffer that another task has written"
            )
            self.writer[buffer] = task
        for earlier in after:
            assert 0 <= earlier < task, (
                f"{self.describe(task)}: listed before a task that it waits for"
            )
        return task

    def reordered(self, order: Sequence[int], gates: Sequence[Sequence[int]]) -> Graph:
        """These tasks in another order, where task t also waits for `gates[t]`.

        `order` lists all tasks. It and the gates use this graph's task numbers. Buffers keep their
        numbers.
        """
        graph = Graph(self.roles)
        for buffer in self._buffers:
            graph.buffer(*buffer)
        place = {task: number for number, task in enumerate(order)}
        for task in order:
            what = (self.kind[task], self.segment[task], self.reads[task], self.writes[task])
            how = (self.peer[task], self.own[task], self.final[task], self.reuses[task])
            graph._add(*what, *how, [place[t] for t in (*self.after[task], *gates[task])])
        return graph

    # ---- once all tasks are listed -------------------------------------------------------------

    @cached_property
    def dependents(self) -> list[list[int]]:
        """For each task, the tasks that wait for it."""
        found: list[list[int]] = [[] for _ in self.kind]
        for task, needs in enumerate(self._needs):
            for need in needs:
                found[need].append(task)
        return found

    @cached_property
    def waits(self) -> list[int]:
        """For each task, how many tasks it waits for."""
        return list(map(len, self._needs))

    @cached_property
    def _needs(self) -> list[set[int]]:
        columns = zip(self.reads, self.after, strict=True)
        return [{*map(self.writer.__getitem__, reads), *after} for reads, after in columns]

    @cached_property
    def opening(self) -> Opening:
        """The tasks that can begin at once, as steps: receives to post, and then a source, which is
        a task without dependencies (None: no source is left).

        Receives keep the list's order. They should be posted early, for transports that need both
        ends ready; yet posting all of them would delay the first source. So a share of them
        precedes each source.
        """
        kinds, waits = self.kind, self.waits
        receives = [task for task, kind in enumerate(kinds) if kind is Kind.RECV]
        sources = [t for t, kind in enumerate(kinds) if kind is not Kind.RECV and not waits[t]]
        if not sources:
            return ((tuple(receives), None),)
        cuts = [len(receives) * place // len(sources) for place in range(len(sources) + 1)]
        shares = [tuple(receives[begin:end]) for begin, end in pairwise(cuts)]
        return tuple(zip(shares, sources, strict=True))

    @cached_property
    def slot(self) -> list[int]:
        """For each send and recv, the number of its message among those from its sender to its
        receiver, ordered by role, segment and chunk; -1 for kernels. Both ends compute the same
        number."""
        number = {role: n for n, role in enumerate(self.roles)}
        role = [number[role] for role in self.buffer_role]
        links: dict[tuple[int, bool], list[tuple[int, int, int, int]]] = {}
        for task, peer in enumerate(self.peer):
            if peer >= 0:
                b = self.message(task)[0]
                name = role[b], self.buffer_segment[b], self.buffer_chunk[b], task
                links.setdefault((peer, self.kind[task] is Kind.SEND), []).append(name)
        found = [-1] * len(self.kind)
        for messages in links.values():
            messages.sort()
            for place, (*_, task) in enumerate(messages):
                found[task] = place
            alike = [task for (*a, _), (*b, task) in pairwise(messages) if a == b]
            assert not alike, f"{self.describe(alike[0])}: another message has the same name"
        return found

    @cached_property
    def slots(self) -> int:
        """One more than the greatest slot."""
        return max(self.slot, default=-1) + 1

    def sent(self) -> list[int]:
        """The buffers of every send, in order; law 5 counts their bytes."""
        return [
            b for task, kind in enumerate(self.kind) if kind is Kind.SEND for b in self.reads[task]
        ]

    def message(self, task: int) -> tuple[int, ...]:
        """The buffers that a send or recv moves; the first identifies the message."""
        return self.reads[task] or self.writes[task]

    def together(self, task: int) -> list[tuple[int, ...]]:
        """The buffers that a kernel writes, grouped by the first message that sends them."""
        left = dict.fromkeys(self.writes[task])
        found = []
        for dependent in self.dependents[task] if len(left) > 1 else ():
            message = self.reads[dependent]
            if self.kind[dependent] is Kind.SEND and all(buffer in left for buffer in message):
                found.append(message)
                for buffer in message:
                    del left[buffer]
        return [*found, *((buffer,) for buffer in left)]

    def width(self, task: int) -> int:
        """How many chunks a merge produces, which is how many of its reads are one peer's."""
        return len({self.buffer_chunk[buffer] for buffer in self.reads[task]})

    def origin(self, buffer: int) -> int:
        """A number of the payload in a buffer: of the rank that encoded it, and of its role. The
        same on all ranks; no rank encodes a value twice in one role."""
        place = self.roles.index(self.buffer_role[buffer])
        return self.buffer_source[buffer] * len(self.roles) + place

    def describe(self, task: int) -> str:
        """A task in words."""
        direction = {Kind.SEND: " to rank", Kind.RECV: " from rank"}.get(self.kind[task], "")
        peer = "" if self.peer[task] < 0 else f" {self.peer[task]}"
        return f"{self.kind[task].value}{direction}{peer}, segment {self.segment[task]}"
