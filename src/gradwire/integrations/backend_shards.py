"""Where parameters stand in what FSDP2 scatters.

The gradients of one FSDP module are reduced together: each is cut into a shard for every rank
(rows of its first dimension, the last ones padded), and the tensor that is scattered holds, rank by
rank, that rank's shards of all parameters, side by side. Known from the parameters' shapes, that
becomes a layout, which a group finds again by the number of values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from gradwire.codecs import Identity
from gradwire.collectives import Options, check_defined
from gradwire.errors import ConfigError
from gradwire.integrations.backend import Group
from gradwire.integrations.backend_layouts import Layouts, Part
from gradwire.lang import Codec
from gradwire.planner import make_plan


def register_shards(
    model: FSDPModule,
    codec: str | Codec | None,
    codec_options: Mapping[str, object],
    include: Sequence[str],
    exclude: Sequence[str],
    codecs: Mapping[str, str | Codec | None],
) -> None:
    """Tell the process groups of `model` which parameters they scatter, and how each travels.

    Args:
        model: a module, and all in it, that `fully_shard` was called on.
        codec, codec_options, include, exclude, codecs: as in `make_plan`.

    Raises:
        ConfigError: a process group of another backend, a codec without reduce-scatter, or what
            `make_plan` and the comparison of ranks find.
    """
    assert isinstance(model, torch.nn.Module)
    trained = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    plan = make_plan(trained, codec, codec_options, 1, include, exclude, codecs)
    planned = {p.name: p.codec for p in plan.parameters}
    for chosen in planned.values():
        if chosen is not None:
            check_defined(Options().algorithm, chosen)
    name_of = {parameter: name for name, parameter in reversed(trained)}
    found: dict[Group, Layouts] = {}
    for scattering in _scattering(model):
        parts = tuple(
            Part(name, planned[name] or Identity(), shard)
            for parameter, shard in scattering.shards
            if (name := name_of.get(parameter)) is not None
        )
        if parts:
            found.setdefault(scattering.group, Layouts()).add(
                "reduce_scatter", parts, scattering.group.size()
            )
        if parts and scattering.replicas is not None:
            found.setdefault(scattering.replicas, Layouts()).add("all_reduce", parts)
    for group, layouts in found.items():
        group.blobs.learn(layouts, plan.describe())


class _Scattering:
    """The parameters whose gradients FSDP reduces together.

    Attributes:
        group: scatters them.
        replicas: reduces the shards afterwards, under HSDP; else None.
        shards: each parameter, and the values in a shard of it, padding included.
    """

    def __init__(self, fsdp: Any) -> None:
        self.group = _checked(fsdp._reduce_scatter_process_group)
        hybrid = hasattr(fsdp.mesh_info, "replicate_process_group")
        self.replicas = _checked(fsdp._all_reduce_process_group) if hybrid else None
        self.shards = [
            (p.sharded_param, p.padded_sharded_param_size.numel()) for p in fsdp.fsdp_params
        ]


def _scattering(model: torch.nn.Module) -> list[_Scattering]:
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # Several of a module since torch 2.12; one, or none, before.
            groups = getattr(state, "_fsdp_param_groups", None)
            if groups is None:
                groups = [state._fsdp_param_group] if state._fsdp_param_group else []
            found += [_Scattering(g) for g in groups if hasattr(g.mesh_info, "shard_mesh_size")]
    return found


def _checked(group: dist.ProcessGroup) -> Group:
    if not isinstance(group, Group):
        raise ConfigError(
            f"register serves process groups of the backend 'gradwire'; FSDP's is {group.name()}: "
            "use init_process_group('gradwire'), or name it in the mesh's backend_override"
        )
    return group
