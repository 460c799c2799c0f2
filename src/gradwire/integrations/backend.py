"""The drop-in backend: `init_process_group("gradwire")`, and the training script stays as it is.

A group wraps one of torch's own, over gloo for the CPU and NCCL for CUDA, which carries out every
operation that comes to it. What carries gradients of DDP and FSDP2 modules does not: they have
handles (backend_models.py). Blobs, which know tensors alone, are there for who asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire.errors import ConfigError
from gradwire.integrations.backend_blob import Blobs
from gradwire.integrations.backend_entry import NAME
from gradwire.integrations.backend_models import Models
from gradwire.integrations.backend_scope import averages, lacking
from gradwire.integrations.backend_settings import Settings, from_environment
from gradwire.integrations.scatter import Completed, Replicas, Scatter
from gradwire.transport.torch_p2p import TAG_BASE

Type = dist.ProcessGroup.BackendType
_F = TypeVar("_F", bound=Callable[..., Any])
Backends = dict[str, tuple[Type, Any]]  # device type -> type and instance of its backend


# torch.compile cannot look into a group; what it does is left as it is.
_untraced = cast("Callable[[_F], _F]", torch.compiler.disable)


class Group(dist.ProcessGroup):
    """A process group whose gradients travel compressed.

    Args:
        store: the group's.
        rank, size: as in torch.
        backends: what carries everything else; one for "cpu".
        settings: how it compresses; the same on every rank.

    Attributes:
        blobs: the collectives that are compressed without knowledge of parameters.
        models: the modules that have handles.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, backends: Backends, settings: Settings
    ) -> None:
        # Without the store: torch makes no group that Python may extend of one with a store.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        # Carries what the methods below leave alone, over the same backends: see `_passed_on`.
        self._plain = dist.ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._set_default_backend(backends.get("cuda", backends["cpu"])[0])
            for device, (kind, backend) in backends.items():
                group._register_backend(torch.device(device), kind, backend)
        self._backends = backends
        self.blobs = Blobs(self, settings)
        self.models = Models(self, settings)

    # ---- the two that may carry gradients

    @_untraced
    def allreduce(self, *args: Any, **options: Any) -> dist.Work:
        tensors, average = _asked(*args, **options)
        if self.settings.blob:
            work = self.blobs.all_reduced(tensors, average)
            if work is not None:
                return work
        else:
            record = self.models.reduces(tensors[0]) if len(tensors) == 1 else None
            mesh = None if record is None else record.mesh_info
            between = getattr(mesh, "replicate_process_group", None)
            if isinstance(between, Replicas):
                return between.allreduce(*args, **options)
        plain: dist.Work = self._plain_call("allreduce", *args, **options)
        return plain

    @_untraced
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        if self.settings.blob:
            work = self.blobs.scattered(output, input, averages(opts.reduceOp))
            if work is not None:
                return work
        else:
            record = self.models.reduces(input)
            if record is not None and isinstance(record._reduce_scatter_comm, Scatter):
                record._reduce_scatter_comm(output, input, self, opts.reduceOp)
                return Completed()
        new = hasattr(self._plain, "reduce_scatter_single")  # since torch 2.13
        name = "reduce_scatter_single" if new else "_reduce_scatter_base"
        plain: dist.Work = self._plain_call(name, output, input, opts)
        return plain

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _plain_call(self, name: str, *args: Any, **options: Any) -> Any:
        """torch's own, with torch's own return types."""
        if name not in ("send", "recv") or args[-1] < TAG_BASE:  # not the engine's
            self.models.left[name] += 1
        return getattr(self._plain, name)(*args, **options)

    @property
    def settings(self) -> Settings:
        """How it compresses what a script does not say."""
        return self.models.settings

    def blob(self, settings: Settings) -> None:
        """From now on compress blobs, as `settings` say; ranks have agreed on them."""
        self.models.settings = self.blobs.settings = settings

    # ---- what torch asks of a group

    def getBackendName(self) -> str:  # torch's spelling
        return NAME

    def get_group_store(self) -> dist.Store:
        return self._store

    def split_group(self, *args: Any, **options: Any) -> dist.ProcessGroup | None:
        child: dist.ProcessGroup | None = self._plain.split_group(*args, **options)
        if child is None:
            return None
        backends = {d.type: self._split_backend(child, d) for d in child._device_types}
        store = child.get_group_store()
        group = Group(store, child.rank(), child.size(), backends, self.settings)
        group._set_group_name(child.group_name)
        group._set_group_desc(child.group_desc)
        return group

    def _split_backend(self, child: dist.ProcessGroup, device: torch.device) -> tuple[Type, Any]:
        return self._backends[device.type][0], child._get_backend(device)

    def shutdown(self) -> None:
        self.models.tell()
        self.blobs.close()
        super().shutdown()

    def abort(self) -> None:
        self.blobs.close()
        for _, backend in self._backends.values():
            backend.abort()

    def stats(self) -> dict[str, Any]:
        """What this rank has sent compressed, and what else there was.

        Returns:
            calls: those of handles on DDP and FSDP2 modules (`Handle.stats`), and of blobs.
            wire_bytes, raw_bytes, ratio, seconds: as of `Handle.stats`.
            left_alone: name of an operation -> calls that were torch's.
        """
        models, blobs = self.models.totals(), self.blobs.totals()
        totals = {key: models[key] + blobs[key] for key in blobs}
        wire = totals["wire_bytes"]
        ratio = totals["raw_bytes"] / wire if wire else None
        return {**totals, "ratio": ratio, "left_alone": dict(self.models.left)}


# Every operation that a group has, under the names that some torch from 2.9 on gives it.
_OPERATIONS = (
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "allreduce_coalesced",
    "alltoall",
    "alltoall_base",
    "barrier",
    "broadcast",
    "gather",
    "monitored_barrier",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single_coalesced",
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that passes a call on to the plain group.

    A group that Python extends must not inherit its operations: torch holds the GIL while it looks
    for Python's version of each, and goes on holding it while its own runs. gloo's threads want the
    GIL to let go of tensors, and hold meanwhile a lock that the operation waits for.
    """

    def method(self: Group, *args: Any, **options: Any) -> Any:
        return self._plain_call(name, *args, **options)

    method.__name__ = name
    return _untraced(method)


for _name in _OPERATIONS:
    if hasattr(dist.ProcessGroup, _name):
        setattr(Group, _name, _passed_on(_name))


def _asked(
    tensors: list[torch.Tensor] | torch.Tensor,
    opts: Any = dist.ReduceOp.SUM,
    timeout: timedelta | None = None,
    *,
    op: Any = None,
) -> tuple[list[torch.Tensor], bool | None]:
    """(tensors, whether their average is wanted, or their sum, or neither: None).

    torch's `allreduce` takes a tensor or a list; options, or an operation and a timeout.
    """
    wanted = opts.reduceOp if isinstance(opts, dist.AllreduceOptions) else opts
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return listed, averages(wanted if op is None else op)


# ---- how torch makes one


def make(options: Any, given: object) -> Group:
    """A group, as torch's `register_backend` with the extended API asks for it.

    Args:
        options: torch's description of the group.
        given: pg_options, for NCCL; None for its defaults.

    Raises:
        ConfigError: a variable of the environment is wrong, or ranks disagree on them.
    """
    rank, size = options.group_rank, options.group_size
    # A group may be made anew over the same store, where an earlier one's entries still are: gloo
    # would take the addresses that it finds there for its peers'.
    attempt = options.store.add(f"gradwire/attempts of {rank}", 1)
    store = options.store = dist.PrefixStore(f"gradwire/{attempt}/", options.store)
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    settings = _agreed(store, rank, size, "cuda" if has_nccl else "cpu")
    backends: Backends = {"cpu": (Type.GLOO, _gloo(options))}
    if has_nccl:
        backends["cuda"] = (Type.NCCL, _nccl(options, given))
    return Group(store, rank, size, backends, settings)


def _gloo(options: Any) -> Any:
    store = dist.PrefixStore("gloo/", options.store)
    backend = c10d.ProcessGroupGloo(
        store, options.group_rank, options.group_size, timeout=options.timeout
    )
    backend.options.global_ranks_in_group = options.global_ranks_in_group
    backend.options.group_name = options.group_id
    backend._set_sequence_number_for_group()
    return backend


def _nccl(options: Any, given: object) -> Any:
    store = dist.PrefixStore("nccl/", options.store)
    kind: Any = c10d.ProcessGroupNCCL.Options
    chosen: Any = given if isinstance(given, kind) else kind()
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    backend = c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, chosen)
    backend._set_sequence_number_for_group()
    return backend


def _agreed(store: dist.Store, rank: int, size: int, device_type: str) -> Settings:
    """The settings of the environment, if all ranks have the same, and the same kernels.

    Ranks that compress and ranks that do not would wait for each other, so this is settled at the
    start: rank 0 reads what every rank holds, and all read its verdict.
    """
    try:
        settings = from_environment(os.environ)
    except ConfigError as error:
        store.set("verdict" if rank == 0 else str(rank), f"rank {rank}: {error}")
        raise
    reason = lacking(device_type)
    mine = settings.describe() + ("" if reason is None else f", none on {device_type}: {reason}")
    store.set(str(rank), mine)
    if rank == 0:
        held = [store.get(str(other)).decode() for other in range(size)]
        odd = next((other for other in range(size) if held[other] != mine), None)
        said = "agreed" if odd is None else f"rank 0 has '{mine}', rank {odd} has '{held[odd]}'"
        store.set("verdict", said)
    found = store.get("verdict").decode()
    if found != "agreed":
        raise ConfigError(
            f"ranks disagree on the environment of the backend {NAME}: {found}. Set the same "
            "variables on every rank, and install the same packages"
        )
    return settings
