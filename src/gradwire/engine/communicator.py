"""What a process group's collectives share: an executor, memory, agreement between ranks."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

from gradwire.engine.executor import Executor
from gradwire.engine.in_order import InOrder
from gradwire.engine.pool import Pool
from gradwire.engine.streams import on
from gradwire.errors import ConfigError
from gradwire.transport import Transport
from gradwire.transport.link import Link

# A job's tag: 9 bits of its plan, 20 bits that count. Agreements use the tags from there on.
_COUNTED = 1 << 20
_PLANS = 1 << 9
_AGREE_TAG = _COUNTED * _PLANS
_CHECK_BYTES = 40


class Communicator:
    """The engine of one process group on one rank.

    Args:
        transport: moves the bytes.
        in_flight: how many collectives may own memory at a time (two overlap encoding with
            sending).
        links: what carries messages between tensors of a device in stream order; None: nothing
            does, so that they go by way of `transport`. All ranks ask, and are told alike.

    Attributes:
        executor: runs the graphs whose messages go by `transport`.
        preparing: held while something is looked up in `kept`, or agreed on.
        kept: what is prepared once and used every step, by what it is for; the least used first.
    """

    def __init__(
        self,
        transport: Transport,
        in_flight: int = 2,
        links: Callable[[torch.device], Link | None] = lambda device: None,
    ) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.executor = Executor(transport, in_flight)
        self._links = links
        self._in_order: dict[torch.device, InOrder | None] = {}
        self._in_memory: bool | None = None
        self.kept: OrderedDict[Hashable, object] = OrderedDict()
        self.preparing = threading.RLock()
        self._lock = threading.Lock()
        self._jobs = 0
        self._tags = 0
        self._agreements = 0
        self._agreed: set[bytes] = set()
        self._pools: dict[tuple[torch.device, bool], Pool] = {}
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def close(self) -> None:
        """End the threads; collectives under way are abandoned."""
        self.executor.close()
        self._links = lambda device: None  # nothing of ours may keep a process group alive
        for in_order in self._in_order.values():
            if in_order is not None:
                in_order.close()
        with self._lock:
            for pool in self._pools.values():
                pool.close()
        self.transport.close()

    def in_order(self, device: torch.device) -> InOrder | None:
        """What runs the graphs of tensors on `device` where their messages keep a stream's order,
        else None. All ranks ask at once the first time.

        Raises:
            TransportError: the ranks do not find together.
        """
        if device not in self._in_order:
            link = self._links(device)
            made = None if link is None else InOrder(link, self.stream(device))
            self._in_order[device] = made
        return self._in_order[device]

    # ---- numbers that are the same on all ranks, because collectives start in the same order ----

    def sequence(self, plan: int, tags: int) -> tuple[int, int]:
        """The number of the next collective, and the first of `tags` tags of its own.

        The low bits of a tag count, so that no two messages in flight share one. The high bits
        are of the plan: ranks that by mistake run different collectives at a time then wait in
        vain, which ends in an error, rather than receive a message of another size, which gloo
        punishes by aborting the process (all but one mistake in 512).

        Raises:
            ConfigError: more ranks and segments than there are tags.
        """
        if tags > _COUNTED // 4:
            raise ConfigError(f"a collective of {tags} messages: use fewer segments")
        with self._lock:
            number, first = self._jobs, self._tags
            if first + tags > _COUNTED:
                first = 0
            self._jobs += 1
            self._tags = first + tags
        return number, plan % _PLANS * _COUNTED + first

    # ---- agreement ---------------------------------------------------------------------------

    def agree(self, what: str, description: list[str], once: bool = False) -> int:
        """Make sure that every rank holds the same `description`; each call is a round trip.

        With `once`, what was agreed on before needs none.

        Returns:
            The first 8 bytes of the description's digest: what message headers carry.

        Raises:
            ConfigError: on every rank, naming the first line that differs and who holds what.
            TransportError: a peer did not answer.
        """
        lines = [f"world size {self.world_size}", what, *description]
        body = "\n".join(lines).encode()
        digest = hashlib.blake2b(body, digest_size=32).digest()
        number = int.from_bytes(digest[:8], "little")
        if once and digest in self._agreed:
            return number
        record = digest + len(body).to_bytes(_CHECK_BYTES - len(digest), "little")
        records = self.exchange(record, [_CHECK_BYTES] * self.world_size)
        if any(other[:32] != digest for other in records):
            sizes = [int.from_bytes(other[32:], "little") for other in records]
            bodies = self.exchange(body, sizes)
            raise ConfigError(self._difference([b.decode().split("\n") for b in bodies]))
        self._agreed.add(digest)
        return number

    def exchange(self, mine: bytes, sizes: list[int]) -> list[bytes]:
        """Every rank's bytes, in rank order; `sizes` are their lengths."""
        tag = _AGREE_TAG + self._agreements % _COUNTED
        self._agreements += 1
        peers = [p for p in range(self.world_size) if p != self.rank]
        data = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        inbox = {p: torch.empty(sizes[p], dtype=torch.uint8) for p in peers}
        receives = [self.transport.irecv(inbox[p], p, tag) for p in peers]
        sends = [self.transport.isend(data, p, tag) for p in peers]
        for pending in (*receives, *sends):
            pending.wait()
        return [
            mine if p == self.rank else inbox[p].numpy().tobytes() for p in range(self.world_size)
        ]

    def _difference(self, bodies: list[list[str]]) -> str:
        longest = max(map(len, bodies))
        padded = [body + ["(nothing)"] * (longest - len(body)) for body in bodies]
        line = next(i for i in range(longest) if len({body[i] for body in padded}) > 1)
        other = next(
            r for r in range(self.world_size) if padded[r][line] != padded[self.rank][line]
        )
        return (
            f"ranks disagree on {bodies[self.rank][1]}: rank {self.rank} has "
            f"'{padded[self.rank][line]}', rank {other} has '{padded[other][line]}'. "
            "Give every rank the same model, options and seed"
        )

    def in_memory(self) -> bool:
        """Whether no message of any rank leaves the memory of one machine: all ranks answer alike.

        The first call is a round trip, which all ranks take together.

        Raises:
            TransportError: a peer did not answer.
        """
        if self._in_memory is None:
            mine = bytes([self.transport.in_memory])
            self._in_memory = all(map(any, self.exchange(mine, [1] * self.world_size)))
        return self._in_memory

    # ---- memory ------------------------------------------------------------------------------

    def pool(self, device: torch.device, staging: bool = False) -> Pool:
        """The arenas on `device`; or, for `staging`, those that messages to and from it wait in."""
        pinned = staging and device.type == "cuda"
        place = torch.device("cpu") if staging else device
        stream = None if staging else self.stream(device)
        # What kernels on the CPU write, peers on this machine may read where it lies.
        lends = device.type == "cpu" and not staging

        def make(nbytes: int) -> torch.Tensor:
            store = self.transport.store if lends else None
            arena = None if store is None else store.take(nbytes)
            if arena is not None:
                return arena
            # In the side stream's own memory: no other stream's work may still use it.
            with on(stream):
                return torch.empty(nbytes, dtype=torch.uint8, device=place, pin_memory=pinned)

        def unmake(arena: torch.Tensor) -> None:
            store = self.transport.store if lends else None
            if store is not None:
                store.give(arena)

        with self._lock:
            return self._pools.setdefault((device, staging), Pool(make, unmake))

    @property
    def peak_bytes(self) -> int:
        """The most memory that collectives owned at one time, in bytes, of each kind."""
        with self._lock:
            return sum(pool.peak_bytes for pool in self._pools.values())

    def stream(self, device: torch.device) -> torch.cuda.Stream | None:
        """The side stream of this group's kernels on `device`; None on the CPU."""
        if device.type == "cpu":
            return None
        with self._lock:
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            return self._streams[device]
