"""Blobs: large float tensors of which nothing is known but that a backward pass reduces.

They are compressed as a whole and with one codec, as QNCCL does (CGX 4.4): whatever parameters a
blob holds, blocks run across their borders, and nothing is kept from step to step. What FSDP
scatters may be better known: `layouts` say which parameters a tensor holds, and each goes through
its own codec then.

Random numbers derive from (seed, group, rank, number of the call), so they are reproducible as long
as calls come in the same order, as torch demands of them on every rank.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from gradwire.collectives import Item, Options, prepare
from gradwire.engine import Communicator, Outcome
from gradwire.groups import communicator, release
from gradwire.integrations.backend_layouts import Layouts, Part
from gradwire.integrations.backend_scope import is_float
from gradwire.integrations.backend_settings import Settings
from gradwire.integrations.backend_work import FutureWork, Unwaited
from gradwire.lang import rng
from gradwire.partition import Spec


class Blobs:
    """The compressed collectives of one process group.

    Args:
        group: whose.
        settings: how.

    Attributes:
        layouts: of what FSDP modules scatter, as far as they are registered.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.settings = settings
        self.layouts = Layouts()
        self._group = group
        self._watch = Unwaited()
        self._lock = threading.Lock()
        self._comm: Communicator | None = None
        self._calls = 0
        self._totals = {"calls": 0, "wire_bytes": 0, "raw_bytes": 0, "seconds": 0.0}

    def learn(self, layouts: Layouts, description: list[str]) -> None:
        """Use `layouts` from now on; `description` is what the ranks compare.

        Raises:
            ConfigError: ranks disagree.
        """
        self._engine().agree("what is registered", description)
        self.layouts.merge(layouts)

    def takes(self, kind: str, tensor: torch.Tensor) -> bool:
        """Whether a tensor that carries gradients is compressed; the same on every rank.

        Args:
            kind: what is asked for, "all_reduce" or "reduce_scatter".
            tensor: its input.
        """
        if self._group.size() == 1 or not is_float(tensor):
            return False
        large = tensor.numel() * tensor.itemsize >= max(self.settings.min_bytes, 1)
        blob = self.settings.codec is not None and large
        return blob or self.layouts.get(kind, tensor.numel()) is not None

    def all_reduce(self, tensor: torch.Tensor, average: bool) -> FutureWork:
        """Sum or average `tensor` over the ranks, in place; any layout in memory.

        Raises:
            ConfigError: the ranks' tensors differ in size or dtype.
            TransportError: the group is broken.
        """
        values = tensor.detach().contiguous().view(-1)
        parts = self._parts("all_reduce", values.numel(), values.numel())
        specs = [Spec(p.name, p.shard, values.dtype, p.codec) for p in parts]
        memory = [(piece, None) for piece in values.split([part.shard for part in parts])]

        def deliver() -> None:
            if values.data_ptr() != tensor.data_ptr():
                tensor.detach().copy_(values.view(tensor.shape))

        raw = 2 * values.nbytes * (self._group.size() - 1) // self._group.size()
        return self._start("all_reduce", specs, memory, average, raw, deliver, tensor)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, average: bool
    ) -> FutureWork:
        """Sum or average `input` over the ranks; rank n gets the n-th of equal shards.

        Args:
            output: contiguous; may be this rank's shard of `input`.
            input: contiguous, `world_size` times as many values.

        Raises:
            ConfigError, TransportError: as `all_reduce`.
        """
        rank, size = self._group.rank(), self._group.size()
        parts = self._parts("reduce_scatter", input.numel(), output.numel())
        sizes = [part.shard for part in parts]
        homes = output.detach().view(-1).split(sizes)
        # One part alone lies as the engine wants it; of several, each part's shards are gathered.
        columns = input.detach().view(size, -1).split(sizes, dim=1)
        memory = [(c.contiguous().view(-1), home) for c, home in zip(columns, homes, strict=True)]
        for values, home in memory:
            home.copy_(values.view(size, -1)[rank])
        specs = [Spec(p.name, p.shard * size, input.dtype, p.codec) for p in parts]
        raw = input.nbytes * (size - 1) // size
        return self._start("reduce_scatter", specs, memory, average, raw, _nothing, output)

    def _parts(self, kind: str, numel: int, shard: int) -> tuple[Part, ...]:
        """The parts of a tensor of `numel` values: those known, or itself as one blob."""
        known = self.layouts.get(kind, numel)
        if known is not None:
            return known
        if kind == "reduce_scatter":
            self.layouts.miss(numel)
        assert self.settings.codec is not None, "a blob was taken that has no codec"
        return (Part(kind, self.settings.codec, shard),)

    def _start(
        self,
        kind: str,
        specs: Sequence[Spec],
        memory: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        average: bool,
        raw_bytes: int,
        deliver: Callable[[], None],
        result: torch.Tensor,
    ) -> FutureWork:
        comm = self._engine()
        begun = time.perf_counter()
        collective = prepare(comm.blobs, specs, Options(), kind, result.device)
        with self._lock:
            step, self._calls = self._calls, self._calls + 1
        items = [
            Item(values, self._keys(spec.name, comm.rank), step, None, home)
            for spec, (values, home) in zip(specs, memory, strict=True)
        ]

        def finish(outcome: Outcome) -> None:
            deliver()
            with self._lock:
                self._totals["calls"] += 1
                self._totals["wire_bytes"] += outcome.wire_bytes
                self._totals["raw_bytes"] += raw_bytes
                self._totals["seconds"] += time.perf_counter() - begun

        return FutureWork(comm, collective.start(items, average), finish, [result], self._watch)

    def _keys(self, name: str, rank: int) -> rng.Keys:
        return rng.parameter_keys(self.settings.seed, f"{self._group.group_name}/{name}", rank)

    def _engine(self) -> Communicator:
        """Made on first use: then every rank of the group makes its own."""
        if self._comm is None:
            self._comm = communicator(self._group)
        return self._comm

    def stats(self) -> dict[str, Any]:
        """What blobs have cost so far.

        Returns:
            calls: collectives that were compressed.
            wire_bytes: sent by this rank, headers included.
            raw_bytes: what would have been sent uncompressed.
            ratio: raw_bytes / wire_bytes (None before anything was sent).
            seconds: from call to result, summed over calls (they overlap).
        """
        with self._lock:
            totals: dict[str, Any] = dict(self._totals)
        wire = totals["wire_bytes"]
        return {**totals, "ratio": totals["raw_bytes"] / wire if wire else None}

    def close(self) -> None:
        """End the engine; what is under way ends in a TransportError."""
        self._comm = None
        release(self._group)


def _nothing() -> None:
    pass
