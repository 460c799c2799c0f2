"""The drop-in backend: `init_process_group("gradwire")`, with no other change to a training script.

A group wraps a torch group, over gloo for the CPU and NCCL for CUDA, and passes operations on to
it, except those that carry gradients of DDP and FSDP2 modules, which have handles
(models.py). In blob mode, which is off by default, it compresses tensors without knowledge
of their parameters (blob.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from gradwire.backend.blob import Blobs
from gradwire.backend.entry import NAME
from gradwire.backend.models import Models, lacking
from gradwire.backend.settings import Settings, from_environment
from gradwire.errors import ConfigError
from gradwire.handles import torch_versions
from gradwire.handles.fsdp import collective_of
from gradwire.handles.metrics import times_less
from gradwire.handles.scatter import Completed, Replicas, Scatter
from gradwire.transport.torch_p2p import TAG_BASE

Type = dist.ProcessGroup.BackendType
_F = TypeVar("_F", bound=Callable[..., Any])
Backends = dict[str, tuple[Type, Any]]  # device type -> type and instance of its backend


# torch.compile cannot trace a group's methods.
_untraced = cast("Callable[[_F], _F]", torch.compiler.disable)


class Group(dist.ProcessGroup):
    """A process group that compresses gradients.

    Args:
        store: the group's.
        rank, size: as in torch.
        backends: torch's backends, for all other operations; one for "cpu".
        settings: of compression; equal on every rank.

    Attributes:
        blobs: the compressed collectives of blob mode.
        models: the modules that have handles.
    """

    def __init__(
        self, store: dist.Store, rank: int, size: int, backends: Backends, settings: Settings
    ) -> None:
        # Without the store: torch's constructor for Python subclasses takes none.
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._store = store
        # For operations that are passed on, over the same backends: see `_passed_on`.
        self._plain = dist.ProcessGroup(store, rank, size)
        for group in (self, self._plain):
            group._set_default_backend(backends.get("cuda", backends["cpu"])[0])
            for device, (kind, backend) in backends.items():
                group._register_backend(torch.device(device), kind, backend)
        self._backends = backends
        self.models = Models(self, settings)
        self.blobs = Blobs(self, self.models)

    # ---- the two operations that may carry gradients

    @_untraced
    def allreduce(self, *args: Any, **options: Any) -> dist.Work:
        tensors, op = _asked(*args, **options)
        work: dist.Work | None = None
        if self.settings.blob:
            work = self.blobs.all_reduced(tensors, op)
        elif len(tensors) == 1:
            record = self.models.reduces(tensors[0])
            mesh = None if record is None else record.mesh_info
            between = getattr(mesh, "replicate_process_group", None)
            if isinstance(between, Replicas):
                work = between.allreduce(*args, **options)
        return self._plain_call("allreduce", *args, **options) if work is None else work

    @_untraced
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        work: dist.Work | None = None
        if self.settings.blob:
            work = self.blobs.scattered(output, input, _reduction(opts.reduceOp))
        else:
            record = self.models.reduces(input)
            scatter = None if record is None else collective_of(record, "reduce_scatter")
            if isinstance(scatter, Scatter):
                scatter(output, input, self, opts.reduceOp)
                work = Completed()
        name = torch_versions.reduce_scatter_name()
        return self._plain_call(name, output, input, opts) if work is None else work

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]

    def _plain_call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call torch's operation; returns its result."""
        if name not in ("send", "recv") or args[-1] < TAG_BASE:  # the engine's are not counted
            self.models.left[name] += 1
        return getattr(self._plain, name)(*args, **options)

    @property
    def settings(self) -> Settings:
        """The settings of compression for models without a registration."""
        return self.models.settings

    # ---- the interface of torch's process groups

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
        self.models.log_pending()
        self.blobs.close()
        super().shutdown()

    def abort(self) -> None:
        self.blobs.close()
        for _, backend in self._backends.values():
            backend.abort()

    def stats(self) -> dict[str, Any]:
        """This rank's totals of compressed collectives, and counts of all other operations.

        Returns:
            calls: those of handles on DDP and FSDP2 modules (`Handle.stats`), and of blobs.
            wire_bytes, raw_bytes, ratio, seconds: as of `Handle.stats`.
            left_alone: name of an operation -> number of calls passed on to torch.
        """
        totals = {key: of + self.blobs.totals[key] for key, of in self.models.totals().items()}
        ratio = times_less(totals["raw_bytes"], totals["wire_bytes"])
        return {**totals, "ratio": ratio, "left_alone": dict(self.models.left)}


def _passed_on(name: str) -> Callable[..., Any]:
    """A method that passes a call on to the plain group.

    A Python subclass of ProcessGroup must not inherit operations: torch's C++ trampoline takes the
    GIL to look for a Python override, and holds it while the inherited operation runs. gloo's
    threads need the GIL to release tensors, while they hold a lock that the operation waits for: a
    deadlock.
    """

    def method(self: Group, *args: Any, **options: Any) -> Any:
        return self._plain_call(name, *args, **options)

    method.__name__ = name
    return _untraced(method)


for _name in torch_versions.passed_on():
    setattr(Group, _name, _passed_on(_name))


def _asked(
    tensors: list[torch.Tensor] | torch.Tensor,
    opts: Any = dist.ReduceOp.SUM,
    timeout: timedelta | None = None,
    *,
    op: Any = None,
) -> tuple[list[torch.Tensor], str | None]:
    """(tensors, "avg", "sum" or None for another reduction).

    torch's `allreduce` takes a tensor or a list, and options or an operation and a timeout.
    """
    wanted = opts.reduceOp if isinstance(opts, dist.AllreduceOptions) else opts
    listed = [tensors] if isinstance(tensors, torch.Tensor) else tensors
    return listed, _reduction(wanted if op is None else op)


def _reduction(op: object) -> str | None:
    """ "avg" or "sum"; None for other reductions."""
    named = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
    return next((name for name, known in named.items() if op == known), None)


# ---- construction


def make(options: Any, given: object) -> Group:
    """Make a group: the creator function for torch's `register_backend` with the extended API.

    Args:
        options: torch's description of the group.
        given: pg_options, for NCCL; None for its defaults.

    Raises:
        ConfigError: an environment variable is invalid, or ranks disagree on them.
    """
    rank, size = options.group_rank, options.group_size
    # A group may be made again over the same store. The prefix keeps gloo from reading the
    # addresses of an earlier group's peers.
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
    torch_versions.number_from_zero(backend)
    return backend


def _nccl(options: Any, given: object) -> Any:
    store = dist.PrefixStore("nccl/", options.store)
    kind: Any = c10d.ProcessGroupNCCL.Options
    chosen: Any = given if isinstance(given, kind) else kind()
    chosen._timeout = options.timeout
    chosen.global_ranks_in_group = options.global_ranks_in_group
    chosen.group_name = options.group_id
    backend = c10d.ProcessGroupNCCL(store, options.group_rank, options.group_size, chosen)
    torch_versions.number_from_zero(backend)
    return backend


def _agreed(store: dist.Store, rank: int, size: int, device_type: str) -> Settings:
    """The settings of the environment, if they and the available kernels agree on all ranks.

    A rank that compresses and a rank that does not would wait for each other. So rank 0 compares
    the settings of all ranks at the start, and all ranks read its verdict.
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
