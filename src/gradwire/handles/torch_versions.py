"""What differs between the versions of torch that gradwire runs with: 2.9 to 2.15.

This is the only file of gradwire that asks which torch it runs with. It asks for names, not for
version numbers: a nightly build and a build with patches have what their names say.

| since | what | before |
| --- | --- | --- |
| 2.12 | `FSDPState._fsdp_param_groups`, a list | `_fsdp_param_group`, one or None |
| 2.13 | `ProcessGroup.reduce_scatter_single` | `_reduce_scatter_base` |
| 2.13 | DDP's buckets hold a complex gradient as pairs of real values | as complex values |
| 2.13, 2.14 | more operations of a process group: `ADDED` | `OPERATIONS` |
| 2.14 | a backend's sequence numbers start at 0 | whoever makes it sets them |

What all of these versions have alike, and what is private in torch, is used where it is needed
(FSDP2's: fsdp.py); `make test-torch VERSION=...` shows whether a version still has it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

SUPPORTED = "2.9 to 2.15"

# Operations of a process group that are passed on to torch's own group: in all versions.
OPERATIONS = (
    "_allgather_base",
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
    "reduce_scatter_tensor_coalesced",
    "scatter",
    "send",
)
# In later versions alone: name -> the first version that has it.
ADDED = {
    "all_gather_single": (2, 13),
    "all_gather_single_coalesced": (2, 13),
    "all_to_all_single": (2, 13),
    "reduce_scatter_single_coalesced": (2, 13),
    "gather_into_tensor": (2, 14),
    "gather_single": (2, 14),
}


def passed_on() -> list[str]:
    """The operations, but for `allreduce` and the reduce-scatter, that this torch's groups have."""
    return [*OPERATIONS, *(name for name in ADDED if hasattr(dist.ProcessGroup, name))]


def reduce_scatter_name() -> str:
    """The process group's method that reduces and scatters one tensor."""
    new = "reduce_scatter_single"
    return new if hasattr(dist.ProcessGroup, new) else "_reduce_scatter_base"


def parameter_groups_of(state: Any) -> list[Any]:
    """FSDP2's records of a module's groups of parameters, by FSDP2's state of the module."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is not None:
        return list(groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []


def values_of(buffer: torch.Tensor) -> torch.Tensor:
    """The values of a DDP bucket's buffer; a complex gradient lies there as pairs."""
    return torch.view_as_real(buffer).view(-1) if buffer.is_complex() else buffer


def number_from_zero(backend: Any) -> None:
    """Start the sequence numbers of a backend that has just been made, where torch does not."""
    if hasattr(dist.ProcessGroup, "_set_sequence_number_for_group"):
        backend._set_sequence_number_for_group()
