"""The parameters and the plan of FSDP2 modules, before a handle is attached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregators import Compressed, Dense
from gradwire.collectives import Operation, Options, check_defined
from gradwire.collectives.legal import FLOATS, check_algorithm
from gradwire.errors import ConfigError
from gradwire.handles.fsdp import (
    Groups,
    collective_of,
    gradient_dtype,
    name_in,
    parameter_groups,
    process_groups,
    shape_of,
    shard_lengths,
)
from gradwire.handles.scatter import Replicas, Scatter
from gradwire.handles.wrapped import plain_name, plain_names
from gradwire.lang.kernels import needs_compiling
from gradwire.planner import Plan, Rules, WeightRules, make_plan
from gradwire.planner.rules import in_16_bits

SCATTER, GATHER = Operation("reduce_scatter", "avg"), Operation("all_gather")


@dataclass(frozen=True)
class Trained:
    """The parameters that have gradients.

    Attributes:
        named: names, and meta tensors of the unsharded shapes; a tied parameter has several.
        names: the first ones, by FSDP's record of the parameter.
        records: FSDP's records of groups of parameters.
        groups: the process groups, common to all.
    """

    named: list[tuple[str, torch.Tensor]]
    names: Mapping[Any, str]
    records: list[Any]
    groups: Groups

    def shards(self) -> list[list[tuple[str, tuple[int, ...], torch.dtype]]]:
        """Of each group of parameters, of those that have gradients now: name, how many values each
        rank gets, and the dtype in which they are reduced."""
        found = []
        for record in self.records:
            of_record = [
                (
                    self.names[p],
                    shard_lengths(p, self.groups.shards),
                    gradient_dtype(p),
                )
                for p in record.fsdp_params
                if p in self.names and p.sharded_param.requires_grad
            ]
            if of_record:
                found.append(of_record)
        return found

    def dims(self) -> dict[str, int]:
        """The dimension in which a parameter is sharded, by name, where it is not the first."""
        return {n: p.fsdp_placement.dim for p, n in self.names.items() if p.fsdp_placement.dim}


def make_sharded_plan(
    named: Sequence[tuple[str, torch.Tensor]],
    rules: Rules,
    ranks: int,
    version: int = 0,
    weights: WeightRules | None = None,
    options: Options | None = None,
) -> Plan:
    """The plan; raises ConfigError as `make_plan`, for aggregators other than codecs, and for
    options that FSDP2's collectives do not have."""
    options = options or Options()
    # `make_plan` checks codecs for an all-reduce.
    plan = replace(make_plan(named, rules, ranks, version=version), options=options)
    for operation in (SCATTER, *([] if weights is None else [GATHER])):
        check_algorithm(operation, options_for(operation, options), ranks, "FSDP2")
    for p in plan.parameters:
        alone = isinstance(p.inner, Compressed) and p.inner == Compressed(p.inner.codec)
        if not (alone or isinstance(p.inner, Dense)):
            raise ConfigError(
                f"parameter {p.name}: FSDP2's reduce-scatter takes a codec, not {p.inner}"
            )
        if p.codec is not None:
            check_defined(options.algorithm, p.codec, SCATTER.verb)
    return plan if weights is None else _with_weights(plan, weights, named)


def options_for(operation: Operation, options: Options) -> Options:
    """How one of a sharded module's collectives runs, if `options` say how gradients are
    scattered."""
    if operation.verb == SCATTER.verb:
        return options
    if operation.verb == GATHER.verb:
        return replace(options, inside="codec")  # payloads are forwarded, not summed
    return options.through("sra")  # between replicas, and of single numbers


def _with_weights(
    plan: Plan, weights: WeightRules, named: Sequence[tuple[str, torch.Tensor]]
) -> Plan:
    names: dict[torch.Tensor, tuple[str, ...]] = {}
    for name, parameter in named:
        names[parameter] = (*names.get(parameter, ()), name)
    weights.check(names.values())
    parameters = []
    for p, known in zip(plan.parameters, names.values(), strict=True):
        codec = weights.choose(known, len(p.shape), p.numel)
        if codec is not None and p.dtype not in FLOATS:
            raise ConfigError(
                f"weights: parameter {p.name} is of {p.dtype}, and codecs take float32, float16 "
                f'and bfloat16: exclude it by weights={{"{p.name}": None, "*": ...}}'
            )
        if plan.rules.uncompiled and codec is not None and needs_compiling(codec):
            codec = in_16_bits(p.dtype)
        parameters.append(replace(p, weight=codec))
    return replace(plan, parameters=tuple(parameters), weights=weights)


def not_free(where: str, record: Any) -> str | None:
    """Why a handle cannot be attached to a group of parameters, or None.

    Args:
        where: its module, for the message.
    """
    if not hasattr(record.mesh_info, "shard_mesh_size"):
        return f"module {where} is replicated, not sharded: wrap it with DDP, and attach to that"
    return _custom(f"module {where}", record, "reduce_scatter")


def _custom(whose: str, record: Any, verb: str) -> str | None:
    """That a group has a script's own object for a collective, or None."""
    by = type(collective_of(record, verb))
    if by.__module__.startswith("torch."):
        return None
    return (
        f"{whose} has a custom {verb.replace('_', '-')}, {by.__name__} (set_custom_{verb}), which "
        "gradwire would replace: use one of the two"
    )


def check_nodes(options: Options, shards: int) -> None:
    """Raise ConfigError unless `options.nodes`, if given, has a machine for every rank that holds
    a shard."""
    nodes = options.nodes
    if nodes is not None and len(nodes) != shards:
        raise ConfigError(
            f"nodes={nodes}: give the machine of each of the {shards} ranks that hold shards"
        )


def check_gathers(trained: Trained) -> None:
    """Raise ConfigError if a group's weights are gathered by a script's own object."""
    for record in trained.records:
        name = trained.names.get(record.fsdp_params[0], "(no name)")
        reason = _custom(f"the group of parameter {name}", record, "all_gather")
        if reason is not None:
            raise ConfigError(reason)


def is_attached(record: Any) -> bool:
    """Whether a handle has replaced the collectives of a group of parameters."""
    between = getattr(record.mesh_info, "replicate_process_group", None)
    scatter = collective_of(record, "reduce_scatter")
    return isinstance(scatter, Scatter) or isinstance(between, Replicas)


def trained_of(
    model: torch.nn.Module, like: Groups | None, ours: Callable[[dist.ProcessGroup], bool]
) -> Trained:
    """The parameters of `model` that have gradients; arguments as of `plan_sharded`."""
    names_of: dict[Any, list[str]] = {}
    for name, parameter in plain_names(model.named_parameters(remove_duplicate=False)):
        names_of.setdefault(parameter, []).append(name)
    found: dict[Groups, str] = {}
    named: list[tuple[str, torch.Tensor]] = []
    names: dict[Any, str] = {}
    records: list[Any] = []
    trained, attached = False, None
    for module, record in parameter_groups(model):
        where = plain_name(module) or "(the root)"
        if is_attached(record):
            attached = attached or where
            continue
        reason = not_free(where, record)
        if reason is not None and like is None:
            raise ConfigError(reason)
        if reason is not None or like not in (None, process_groups(record)):
            continue
        groups = process_groups(record)
        groups = groups.only(ours)
        found.setdefault(groups, where)
        records.append(record)
        for parameter in record.fsdp_params:
            # Including frozen parameters, which may be trained later.
            if parameter.sharded_param.is_floating_point():
                trained |= parameter.sharded_param.requires_grad
                # During backward, modules hold unsharded parameters; then FSDP knows the names.
                known = names_of.get(parameter.sharded_param) or [plain_name(name_in(parameter))]
                names[parameter] = known[0]
                dtype = parameter.sharded_param.dtype
                shape = torch.empty(shape_of(parameter), dtype=dtype, device="meta")
                named += [(name, shape) for name in known]
    if len(found) > 1:
        first, second = list(found.values())[:2]
        raise ConfigError(
            f"modules {first} and {second} are sharded over different process groups, and a handle "
            "has one: attach to the inner modules of one group first, each by itself, then to the "
            "whole, whose handle leaves out what has one"
        )
    if not found and attached is not None:
        raise ConfigError(
            f"module {attached} already has a handle attached: call its detach() before attaching "
            "again"
        )
    if not found:
        raise ConfigError("fully_shard has sharded no module in this one: nothing to attach to")
    if not trained:
        raise ConfigError(
            "the module has no parameter that requires a gradient: nothing to attach to"
        )
    return Trained(named, names, records, *found)
