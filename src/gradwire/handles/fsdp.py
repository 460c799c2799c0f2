"""FSDP2's groups of parameters: the only file that uses FSDP2's private names.

An FSDP module has groups of parameters. Each group is reduce-scattered through a replaceable
object. The tensor that this object gets does not tell which parameters it contains, since
parameters without a gradient are left out. Their list is an argument of the function that calls the
object, and is read from its frame.
"""

from __future__ import annotations

import copy
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api, _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPStateContext

from gradwire.errors import ConfigError
from gradwire.handles.torch_versions import SUPPORTED, parameter_groups_of

FSDPAllGather = _fsdp_api.AllGather
FSDPReduceScatter = _fsdp_api.ReduceScatter
Allocates = _fsdp_collectives.DefaultAllocMixin  # either's memory, as torch does

_ARGUMENT = "fsdp_params"
_REDUCTIONS = (
    ("reduce_scatter_group", "reduce_scatter_input"),
    ("all_reduce_group", "reduce_output"),
)
# The undecorated function, whose code object frames refer to.
foreach_reduce = inspect.unwrap(_fsdp_collectives.foreach_reduce)


def parameter_groups(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name of the module, FSDP's record) of every group of parameters in `model`, in module order.
    A group of several modules, `fully_shard([a, b])`, has the name of the first."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            groups = parameter_groups_of(module._get_fsdp_state())
            new = [group for group in groups if not any(group is one for one in seen)]
            seen += new
            yield from ((name, group) for group in new)


def collective_of(record: Any, verb: str) -> Any:
    """What a group calls for its "all_gather" or "reduce_scatter"."""
    return getattr(record, f"_{verb}_comm")


def replace_collective(record: Any, verb: str, by: Any) -> Any:
    """Make a group call `by`; returns what it called before."""
    before = collective_of(record, verb)
    setattr(record, f"_{verb}_comm", by)
    return before


def replace_replicas(record: Any, by: Any) -> Any:
    """Make a group's all-reduces between replicas go through `by`; returns its mesh as it was."""
    before = record.mesh_info
    record.mesh_info = copy.copy(before)
    record.mesh_info.replicate_process_group = by
    return before


def name_in(parameter: Any) -> str:
    """A parameter's name within FSDP2's root module."""
    name: str = parameter._param_fqn
    return name


def shape_of(parameter: Any) -> torch.Size:
    """The shape of a whole parameter."""
    shape: torch.Size = parameter._orig_size
    return shape


def shard_of(values: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded parameter, or of its gradient."""
    shard: torch.Tensor = getattr(values, "_local_tensor", values).detach()
    return shard


@dataclass(frozen=True)
class Groups:
    """The process groups of equally sharded parameters.

    Attributes:
        scatter: for the reduce-scatter of gradients; None: not compressed.
        replicas: between the same shards of all replicas (HSDP); None: there is one replica, or
            this hop is not compressed.
        shard, shards: index of this rank's shard, and number of shards.
        replica, of_replicas: index of this rank's replica, and number of replicas.
    """

    scatter: dist.ProcessGroup | None
    replicas: dist.ProcessGroup | None
    shard: int
    shards: int
    replica: int
    of_replicas: int

    @property
    def all(self) -> list[dist.ProcessGroup]:
        return [group for group in (self.scatter, self.replicas) if group is not None]

    @property
    def rank(self) -> int:
        """This rank's index among the ranks that take part in an average."""
        return self.replica * self.shards + self.shard

    @property
    def size(self) -> int:
        """Number of ranks that take part in an average."""
        return self.of_replicas * self.shards

    def only(self, ours: Callable[[dist.ProcessGroup], bool]) -> Groups:
        """The same, with None for process groups for which `ours` is False."""
        kept = [g if g is not None and ours(g) else None for g in (self.scatter, self.replicas)]
        return replace(self, scatter=kept[0], replicas=kept[1])


def process_groups(record: Any) -> Groups:
    """The process groups over which a sharded group of parameters is reduced."""
    mesh = record.mesh_info
    scatter = record._reduce_scatter_process_group
    replicas = getattr(mesh, "replicate_process_group", None)
    between = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
    return Groups(scatter, replicas, scatter.rank(), scatter.size(), *between)


@dataclass(frozen=True)
class Piece:
    """A parameter in the input of a reduce-scatter or all-gather.

    Attributes:
        parameter: FSDP's record of it.
        at, end: its place within the part of each rank, in values, with padding.
        lengths: number of its values per rank, without padding.
    """

    parameter: Any
    at: int
    end: int
    lengths: tuple[int, ...]


def scattered(numel: int, ranks: int) -> list[Piece]:
    """The parameters in the input of the reduce-scatter that FSDP calls now, in order.

    Args:
        numel: of that input.

    Raises:
        ConfigError: this version of torch is not supported.
    """
    pieces, at = _pieces(_local(_frame(), _ARGUMENT), ranks)
    if at * ranks != numel:
        raise ConfigError(
            f"FSDP2 scatters {numel} values, not the {at * ranks} of {len(pieces)} gradients in "
            f"shards for {ranks} ranks: torch {torch.__version__} has a layout that gradwire does "
            "not support"
        )
    return pieces


def gathered(record: Any, numel: int, ranks: int) -> list[Piece]:
    """The parameters of a group in the input of its all-gather, in order.

    Args:
        numel: of that input, which is one rank's part.

    Raises:
        ConfigError: this version of torch is not supported.
    """
    pieces, at = _pieces(record.fsdp_params, ranks)
    if at != numel:
        raise ConfigError(
            f"FSDP2 gathers {numel} values from a rank, not the {at} of {len(pieces)} parameters "
            f"in shards for {ranks} ranks: torch {torch.__version__} has a layout that gradwire "
            "does not support"
        )
    return pieces


def _pieces(parameters: Iterable[Any], ranks: int) -> tuple[list[Piece], int]:
    """(pieces in order, values of each rank with padding)."""
    pieces, at = [], 0
    for parameter in parameters:
        lengths, padded = _cut(parameter, ranks)
        pieces.append(Piece(parameter, at, at + padded, lengths))
        at += padded
    return pieces, at


def gathers_shards(record: Any) -> bool:
    """Whether a group's next all-gather is of the optimizer's shards: with reshard_after_forward a
    number, backward gathers what forward had gathered, cut anew for a part of the ranks."""
    return not record.is_sharded_post_forward


def gathers_again(record: Any) -> bool:
    """Whether backward gathers the optimizer's shards again after forward."""
    return bool(record._reshard_after_forward and not record._use_post_forward_mesh)


def gather_group(record: Any) -> dist.ProcessGroup:
    """The process group over which the optimizer's shards are gathered."""
    group: dist.ProcessGroup = record.mesh_info.shard_process_group
    return group


class _Context(FSDPStateContext):  # type: ignore[type-arg]
    """What the groups of one root module share, which also tells forwards apart. FSDP2 calls nobody
    as one ends; it notes which module began it, until then."""

    forward: object | None = None

    @property
    def iter_forward_root(self) -> Any:
        return self.__dict__["iter_forward_root"]

    @iter_forward_root.setter
    def iter_forward_root(self, began: Any) -> None:
        self.__dict__["iter_forward_root"] = began
        self.forward = None if began is None else object()


def forward_of(record: Any) -> object | None:
    """The outermost forward that runs among the FSDP2 modules that share a group's root, another
    object for each: of a module, or of a method registered with register_fsdp_forward_method. None:
    none runs. One that an exception ended runs until FSDP2's reset_iter_state."""
    context = _context(record)
    if not isinstance(context, _Context):
        context.__class__ = _Context  # for good: several handles may share it
        context.iter_forward_root = context.iter_forward_root
    running: object | None = context.forward
    return running


def broken_off(record: Any) -> bool:
    """Whether an exception has ended a forward or a backward of a group's root module, and FSDP2's
    reset_iter_state has not been called since: then it leaves out gradients without a word."""
    context = _context(record)
    return context.post_backward_final_callback_queued or context.iter_forward_root is not None


def _context(record: Any) -> Any:
    return record.modules[0]._get_fsdp_state()._state_ctx


def _frame() -> FrameType | None:
    """The frame of FSDP's foreach_reduce, if it is a caller; else None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not foreach_reduce.__code__:
        frame = frame.f_back
    return frame


def _local(frame: FrameType | None, name: str) -> Any:
    if frame is None or name not in frame.f_locals:
        raise ConfigError(
            f"torch {torch.__version__}: FSDP2's foreach_reduce has no {name}, from which gradwire "
            f"reads which gradients it scatters: use torch {SUPPORTED}"
        )
    return frame.f_locals[name]


def reduced_over(
    group: dist.ProcessGroup, values: torch.Tensor
) -> tuple[torch.nn.Module, Any] | None:
    """(root module, FSDP's record) of the group of parameters whose gradients `values` the caller
    reduces over `group`; None: the caller is not FSDP2, or is a hook called by it."""
    frame = _frame()
    if frame is None or not any(
        _local(frame, over) is group and _local(frame, what) is values for over, what in _REDUCTIONS
    ):
        return None
    while frame is not None and not isinstance(frame.f_locals.get("self"), FSDPParamGroup):
        frame = frame.f_back  # skip decorators
    if frame is None:
        return None
    record = frame.f_locals["self"]
    (root,) = (state for state in _context(record).all_states if state._is_root)
    return root._modules[0], record


def gradient_dtype(parameter: Any) -> torch.dtype:
    """The dtype in which a parameter's gradient is reduced."""
    policy = parameter.mp_policy  # before torch 2.15 also of the whole group
    found: torch.dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    return found


def shard_lengths(parameter: Any, ranks: int) -> tuple[int, ...]:
    """How many values of a parameter each rank gets."""
    return _cut(parameter, ranks)[0]


def _cut(parameter: Any, ranks: int) -> tuple[tuple[int, ...], int]:
    """(number of values per rank, number per rank with padding)."""
    size, dim = shape_of(parameter), parameter.fsdp_placement.dim
    if dim != 0:  # always even
        each = math.prod(size) // ranks
        return (each,) * ranks, each
    rows, row = size[0], math.prod(size[1:])
    most = -(-rows // ranks)
    lengths = (min(max(rows - rank * most, 0), most) * row for rank in range(ranks))
    return tuple(lengths), most * row


def factor_of(op: Any) -> tuple[str, float]:
    """("avg" or "sum", factor for the result) of a reduction.

    Raises:
        ConfigError: the reduction is not supported.
    """
    if op == dist.ReduceOp.AVG:
        return "avg", 1.0
    if op == dist.ReduceOp.SUM:
        return "sum", 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, (int, float)):
            return "sum", float(factor)
    raise ConfigError(
        f"FSDP2 requests the reduction {op}: gradwire supports SUM, AVG and PREMUL_SUM"
    )
