"""The drop-in backend: `init_process_group("gradwire")`, and the training script stays as it is.

A group wraps one of torch's own, over gloo for the CPU and NCCL for CUDA, which carries out every
operation but two: all-reduces and reduce-scatters (FSDP's) of large float tensors, with SUM or AVG,
issued by a backward pass. Those go through `Blobs`. What is registered (`gw.register`)
is compressed parameter by parameter instead.
"""

from __future__ import annotations

import functools
import logging
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
from gradwire.integrations.backend_scope import (
    averages,
    in_backward,
    lacking,
    mirrors_backward,
)
from gradwire.integrations.backend_settings import Settings, from_environment

log = logging.getLogger("gradwire")

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
        settings: of blobs; the same on every rank.

    Attributes:
        blobs: the compressed collectives.
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
        self._lacking = functools.cache(lacking)
        self._announced = False

    # ---- the two that carry gradients

    @_untraced
    def allreduce(self, *args: Any, **options: Any) -> dist.Work:
        tensors, average = _asked(*args, **options)
        if len(tensors) == 1 and average is not None and self.blobs.takes("all_reduce", tensors[0]):
            mirrors = not in_backward() and mirrors_backward()
            if (mirrors or in_backward()) and self._is_ours(tensors[0]):
                work = self.blobs.all_reduce(tensors[0], average)
                if mirrors:
                    work.wait()  # there is no end of a backward pass to raise an error
                return work
        return self._plain.allreduce(*args, **options)

    @_untraced
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        opts: dist.ReduceScatterOptions | None = None,
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        average = averages(opts.reduceOp)
        if (
            average is not None
            and in_backward()
            and self.blobs.takes("reduce_scatter", input)
            and _are_shards(output, input, self.size())
            and self._is_ours(input)
        ):
            return self.blobs.reduce_scatter(output, input, average)
        return self._plain_reduce_scatter(output, input, opts)

    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]  # before torch 2.13

    @property
    def _plain_reduce_scatter(self) -> Callable[..., dist.Work]:
        new: Callable[..., dist.Work] | None = getattr(self._plain, "reduce_scatter_single", None)
        return new or self._plain._reduce_scatter_base

    def _is_ours(self, tensor: torch.Tensor) -> bool:
        """Whether there are kernels for it; where not, that is said once."""
        reason = self._lacking(tensor.device.type)
        if reason is not None and not self._announced:
            self._announced = True
            log.warning("gradwire: gradients on %s go uncompressed: %s", tensor.device.type, reason)
        return reason is None

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
        group = Group(store, child.rank(), child.size(), backends, self.blobs.settings)
        group._set_group_name(child.group_name)
        group._set_group_desc(child.group_desc)
        return group

    def _split_backend(self, child: dist.ProcessGroup, device: torch.device) -> tuple[Type, Any]:
        return self._backends[device.type][0], child._get_backend(device)

    def shutdown(self) -> None:
        self.blobs.close()
        super().shutdown()

    def abort(self) -> None:
        self.blobs.close()
        for _, backend in self._backends.values():
            backend.abort()

    def stats(self) -> dict[str, Any]:
        """What has been sent in blob mode: see `Blobs.stats`."""
        return self.blobs.stats()


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
        return getattr(self._plain, name)(*args, **options)

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


def _are_shards(output: torch.Tensor, input: torch.Tensor, size: int) -> bool:
    return (
        output.is_contiguous()
        and input.is_contiguous()
        and output.dtype == input.dtype
        and input.numel() == size * output.numel()
    )


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
