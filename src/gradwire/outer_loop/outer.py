"""`gw.outer(model, optimizer)`: replicas that train by themselves and meet every H steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.aggregators import Aggregator, registry
from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.codecs import Cast
from gradwire.collectives import Options
from gradwire.collectives.calling import options_of
from gradwire.collectives.functional import broadcast
from gradwire.engine import Communicator, GroupInfo
from gradwire.errors import ConfigError, check_keywords
from gradwire.groups import communicator
from gradwire.handles.arguments import Decides, Methods
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.handle import Handle
from gradwire.handles.uncompiled import available
from gradwire.outer_loop.fragment import Fragment
from gradwire.outer_loop.homes import Home, Replica, deal, fragments_of, replica_of
from gradwire.outer_loop.settings import OuterSettings, settings_of
from gradwire.outer_loop.steps import OuterSteps
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.plan import ParameterPlan
from gradwire.planner.rules import exactly, matches
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of

SMALL = 4096  # values of a weight; what is smaller travels in bf16


def outer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    preset: str | None = None,
    *,
    every: int | None = None,
    codec: Method = None,
    lr: float | None = None,
    momentum: float | None = None,
    residual: float | None = None,
    fragments: int | None = None,
    delay: int | None = None,
    mix: float | None = None,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, Method] | None = None,
    options: Options | None = None,
    offload: bool = True,
    **codec_options: object,
) -> Outer:
    """Train replicas of `model` that meet every `every` optimizer steps (DiLoCo, 2311.08105).

    Between two meetings a replica sends nothing. At a meeting, what it has moved by since the last
    one is averaged over replicas through a codec, and an outer step moves the outer weights, equal
    on all replicas, by that average; the replica goes on from there.

        outer = gw.outer(model, optimizer, every=100, codec="qsgd:bits=4")
        for batch in batches:
            loss(model, batch).backward()
            optimizer.step()  # every 100th meets
            optimizer.zero_grad()

    Call it on every rank, with the same arguments. It makes the weights that are trained, of all
    replicas, those of the group's rank 0. Optimizer state stays each replica's own.

    Args:
        model: a plain module, each rank of `group` a replica; or a replica of several ranks: a DDP
            module, or one that FSDP2 shards, over those ranks. Buffers stay each replica's own.
        optimizer: whose steps are counted; steps that a GradScaler skips are not.
        preset: "diloco", "streaming", "muloco" (its outer half: Muon is yours), "sparseloco" or
            "average"; None: the defaults of `OuterSettings`. The arguments that follow change it.
        every, codec, lr, momentum, residual, fragments, delay, mix: see `OuterSettings`
            (docs/how-to/outer.md); None: as the preset has it. codec="none" sends fp32.
        group: the ranks at the same place of every replica; of a plain module None is the default
            group. Of a replica of several ranks it is one dimension of a mesh.
        include, exclude, codecs: as for `gw.attach`. Vectors, and weights of fewer than 4096
            values, travel in bf16, unless `codecs` or `include` names them.
        options: as for `gw.attach`.
        offload: keep outer weights, momentum and residuals in host memory, 8 bytes per weight and 4
            more with a residual; otherwise beside the model.
        codec_options: of the codec.

    Returns:
        A handle: `print` it for rounds, bytes, seconds and drift; save it beside model and
        optimizer, on every replica. `lr` and `momentum` can be set between two meetings, alike on
        all replicas; `outer_weights()` are those to evaluate, equal on all of them.

    Raises:
        ConfigError: an argument of a wrong type or value (it is named), a biased codec without a
            residual, a wrapped module without `group`, or ranks that disagree.
    """
    check_keywords(outer, codec_options, OPTIONS)
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"outer takes a module, not {type(model).__name__}")
    real = isinstance(optimizer, torch.optim.Optimizer)
    stepped = {p for group in optimizer.param_groups for p in group["params"]} if real else set()
    if stepped.isdisjoint(model.parameters()):
        raise ConfigError(
            f"outer: optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer of this "
            "model's parameters: give that which steps them"
        )
    given = {
        "every": every, "codec": codec, "lr": lr, "momentum": momentum, "residual": residual,
        "fragments": fragments, "delay": delay, "mix": mix,
    }  # fmt: skip
    settings = settings_of(preset, given)
    between = _group(group)
    replica = replica_of(model, between)
    names = [home.name for home in replica.every]
    parts = fragments_of(names, settings.every, settings.fragments)
    settings = settings.divided(len(parts))
    chosen = options_of(options)
    methods = Methods(settings.codec, codec_options, include, exclude, codecs)
    rules = with_small(methods.rules(), replica.homes)
    comm = communicator(between) if between is not None else _alone()
    device = torch.device("cpu") if offload else replica.homes[0].parameter.device
    plan = plan_of(replica, rules, settings, comm.world_size, chosen, 0, device)

    def remade(plan: Plan, rules: Rules) -> Plan:
        of = comm.world_size, plan.options, plan.version, device
        return plan_of(replica, rules, settings, *of)

    seed = chosen.seed or 0
    plan = available(plan, lambda rules: remade(plan, rules), device, [comm], Decides())
    agreed = [f"{settings}", f"seed {seed}", *map(str, parts), *plan.describe()]
    comm.agree("the call of gw.outer", agreed)
    warn_of_bias(plan, comm.world_size, "gw.outer")
    owner = comm.owner(comm.handle_name(model, f"outer weights from {names[0]}"))
    members = members_of(plan, seed, comm.rank, comm.handles)
    _begin_alike(replica, between)
    made = [Fragment(every, members, device) for every in deal(replica.every, parts)]
    inside = None if replica.inside is None else communicator(replica.inside)
    of = settings, made, replica, inside, optimizer, remade
    steps = OuterSteps(plan, members, owner, *of)
    return Outer(steps, seed, comm.rank, StateGather([] if between is None else [between]))


class Outer(Handle):
    """What `gw.outer` returns: a handle of meetings instead of backward passes.

    `stats` counts in `steps` the times that all fragments have met, and has, besides:
    rounds (meetings per fragment), optimizer_steps, hidden_seconds (of meetings, while training
    went on), drift (norm of theta - theta_r at the newest meetings).
    """

    _reductions: OuterSteps

    @property
    def lr(self) -> float:
        """Of the outer step; set it between two meetings, alike on all replicas."""
        return self._reductions.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._reductions.lr = replace(self._reductions.settings, lr=value).lr

    @property
    def momentum(self) -> float:
        """Of the outer step, as `lr`."""
        return self._reductions.momentum

    @momentum.setter
    def momentum(self, value: float) -> None:
        self._reductions.momentum = replace(self._reductions.settings, momentum=value).momentum

    def outer_weights(self) -> dict[str, torch.Tensor]:
        """The outer weights by name, fp32: those to evaluate and to keep, equal on all replicas; of
        a replica of several ranks this rank's rows. Copies."""
        fragments = self._reductions.fragments
        return {name: values.clone() for one in fragments for name, values in one.theta.items()}

    def recover(self) -> None:
        raise ConfigError(
            "recover: a process group that has lost a replica does not come back: start all "
            "replicas from a checkpoint of `save`. Nothing of the broken meeting was applied"
        )


def _alone() -> Communicator:
    """Of one replica, without a process group; it makes no transport."""
    none: Any = None
    return Communicator(lambda: none, info=GroupInfo(0, 1, 0.0, dist.HashStore()))


def _group(given: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group of replicas; None: there is one replica."""
    if isinstance(given, DeviceMesh):
        if given.ndim != 1:
            raise ConfigError(
                f"outer: group is a mesh of {given.ndim} dimensions: give one of them, "
                'group=mesh["replicas"]'
            )
        return given.get_group()
    if given is None and dist.is_initialized():
        return dist.group.WORLD
    return given


def with_small(rules: Rules, homes: Sequence[Home]) -> Rules:
    """Rules in which small weights travel in bf16, unless the user's name them."""
    small = [
        home.name
        for home in homes
        if (home.parameter.dim() < 2 or home.parameter.numel() < SMALL)
        and home.parameter.dtype.itemsize > 2
        and not any(matches((home.name,), pattern) for pattern in (*rules.include, *rules.exclude))
    ]
    if rules.default == registry.get(None):
        return rules
    in_bf16 = registry.get("bf16")
    extra: list[tuple[str, Aggregator]] = [(exactly(name), in_bf16) for name in small]
    return replace(rules, overrides=(*rules.overrides, *extra))


def plan_of(
    replica: Replica,
    rules: Rules,
    settings: OuterSettings,
    ranks: int,
    options: Options,
    version: int,
    device: torch.device,
) -> Plan:
    """The plan of differences, which are fp32; with residuals as settings say.

    Raises:
        ConfigError: a biased codec has no residual, or as `make_plan`.
    """
    like = [
        (home.name, torch.empty(home.rows().shape, dtype=torch.float32, device="meta"))
        for home in replica.homes
    ]
    plan = make_plan(
        like, replace(rules, feedback=bool(settings.residual)), ranks, options, 0, version
    )
    biased = [p for p in plan.parameters if p.numel >= SMALL and _is_biased(p)]
    if biased and settings.residual is None:
        return make_plan(like, replace(rules, feedback=True), ranks, options, 0, version)
    if biased and not settings.residual and ranks > 1:
        raise ConfigError(
            f"outer: residual=0: {biased[0].inner} is biased, and what it leaves out of every "
            "difference would be lost: leave residual out, or use an unbiased codec"
        )
    return plan


def _is_biased(p: ParameterPlan) -> bool:
    """Whether what a method leaves out needs a residual; what 16 bits round off does not."""
    lossy = p.codec is not None and p.codec.biased and not isinstance(p.codec, Cast)
    return lossy or p.inner.needs_feedback


def _begin_alike(replica: Replica, between: dist.ProcessGroup | None) -> None:
    """Make the weights of all replicas those of the first."""
    if between is None or between.size() == 1:
        return
    for home in replica.homes:
        rows = home.rows()
        values = rows.contiguous()
        broadcast(values, 0, group=between)
        rows.copy_(values)
    replica.spread(replica.every)
