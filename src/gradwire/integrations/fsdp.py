"""What FSDP2 knows of its own reduce-scatters: the one file that looks into torch's private parts.

An FSDP module has groups of parameters, each of which is reduced and scattered by itself, through a
replaceable object. What that object is given does not say which parameters it holds: those without
a gradient have been left out. The list of those that are in it is an argument of the function that
calls the object (torch 2.9 to 2.15), and is read there; sizes say nothing.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from gradwire.errors import ConfigError

_ARGUMENT = "fsdp_params"
_REDUCTIONS = (
    ("reduce_scatter_group", "reduce_scatter_input"),
    ("all_reduce_group", "reduce_output"),
)
# What is behind its decorators: frames have its code.
foreach_reduce = inspect.unwrap(_fsdp_collectives.foreach_reduce)


def parameter_groups(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name of the module, FSDP's record) of every group of parameters in `model`, in its order;
    one of several modules, `fully_shard([a, b])`, comes with the first."""
    seen: list[Any] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Several of a module since torch 2.12; one, or none, before.
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            new = [group for group in groups if not any(group is one for one in seen)]
            seen += new
            yield from ((name, group) for group in new)


@dataclass(frozen=True)
class Groups:
    """The process groups of what is sharded alike.

    Attributes:
        scatter: over which gradients are reduced and scattered; None: it is left alone.
        replicas: between the same shards of all replicas (HSDP); None: there is one replica, or it
            is left alone.
        shard, shards: this rank's shard, of so many.
        replica, of_replicas: this rank's replica, of so many.
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
        """Among those that have a part in an average."""
        return self.replica * self.shards + self.shard

    @property
    def size(self) -> int:
        """Ranks that have a part in an average."""
        return self.of_replicas * self.shards

    def only(self, ours: Callable[[dist.ProcessGroup], bool]) -> Groups:
        """The same, but for what travels over other process groups."""
        kept = [g if g is not None and ours(g) else None for g in (self.scatter, self.replicas)]
        return replace(self, scatter=kept[0], replicas=kept[1])


def process_groups(record: Any) -> Groups:
    """Those over which a group of parameters is reduced, which is sharded."""
    mesh = record.mesh_info
    scatter = record._reduce_scatter_process_group
    replicas = getattr(mesh, "replicate_process_group", None)
    between = (0, 1) if replicas is None else (replicas.rank(), replicas.size())
    return Groups(scatter, replicas, scatter.rank(), scatter.size(), *between)


@dataclass(frozen=True)
class Piece:
    """A parameter in what is scattered.

    Attributes:
        parameter: FSDP's record of it.
        at: where it begins within the stretch of each rank, in values.
        lengths: how many values of it each rank gets; padding is not counted.
    """

    parameter: Any
    at: int
    lengths: tuple[int, ...]


def scattered(numel: int, ranks: int) -> list[Piece]:
    """What is in the tensor that FSDP has just handed over, in its order.

    Args:
        numel: of that tensor.

    Raises:
        ConfigError: this torch does not say.
    """
    pieces, at = [], 0
    for parameter in _local(_frame(), _ARGUMENT):
        lengths, padded = _cut(parameter, ranks)
        pieces.append(Piece(parameter, at, lengths))
        at += padded
    if at * ranks != numel:
        raise ConfigError(
            f"FSDP2 scatters {numel} values, which are not the {at * ranks} of "
            f"{len(pieces)} gradients in shards for {ranks} ranks: torch {torch.__version__} lays "
            "them out in a way that gradwire does not know"
        )
    return pieces


def _frame() -> FrameType | None:
    """Where FSDP reduces gradients, if that is who calls."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not foreach_reduce.__code__:
        frame = frame.f_back
    return frame


def _local(frame: FrameType | None, name: str) -> Any:
    if frame is None or name not in frame.f_locals:
        raise ConfigError(
            f"torch {torch.__version__} does not say which gradients FSDP2 scatters where gradwire "
            f"looks (foreach_reduce's {name}): use torch 2.9 to 2.15"
        )
    return frame.f_locals[name]


def reduced_over(
    group: dist.ProcessGroup, values: torch.Tensor
) -> tuple[torch.nn.Module, Any] | None:
    """(root module, FSDP's record) of the group of parameters whose gradients the caller reduces
    over `group`, being `values`; None: the caller is not FSDP2, or a hook that it has called."""
    frame = _frame()
    if frame is None or not any(
        _local(frame, over) is group and _local(frame, what) is values for over, what in _REDUCTIONS
    ):
        return None
    while frame is not None and not isinstance(frame.f_locals.get("self"), FSDPParamGroup):
        frame = frame.f_back  # decorators stand between
    if frame is None:
        return None
    record = frame.f_locals["self"]
    first: Any = record.modules[0]
    states = first._get_fsdp_state()._state_ctx.all_states
    (root,) = (state for state in states if state._is_root)
    return root._modules[0], record


def gradient_dtype(record: Any, parameter: Any) -> torch.dtype:
    """In which a parameter's gradient is reduced."""
    policy = record.mp_policy
    found: torch.dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
    return found


def shard_lengths(parameter: Any, ranks: int) -> tuple[int, ...]:
    """How many values of a parameter each rank gets."""
    return _cut(parameter, ranks)[0]


def _cut(parameter: Any, ranks: int) -> tuple[tuple[int, ...], int]:
    """(how many values each rank gets, how many with padding)."""
    size, dim = parameter._orig_size, parameter.fsdp_placement.dim
    if dim != 0:  # always even
        each = math.prod(size) // ranks
        return (each,) * ranks, each
    rows, row = size[0], math.prod(size[1:])
    most = -(-rows // ranks)
    lengths = (min(max(rows - rank * most, 0), most) * row for rank in range(ranks))
    return tuple(lengths), most * row


def factor_of(op: Any) -> tuple[str, float]:
    """("avg" or "sum", what the result is multiplied by) of a reduction.

    Raises:
        ConfigError: another reduction.
    """
    if op == dist.ReduceOp.AVG:
        return "avg", 1.0
    if op == dist.ReduceOp.SUM:
        return "sum", 1.0
    if op == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if isinstance(factor, (int, float)):
            return "sum", float(factor)
    raise ConfigError(f"FSDP2 asks for the reduction {op}: gradwire does SUM, AVG and PREMUL_SUM")
