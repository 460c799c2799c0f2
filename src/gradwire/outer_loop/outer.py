"""`gw.outer(model, optimizer)`: replicas that train by themselves and meet every H steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gradwire.aggregators import registry
from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.codecs import Cast
from gradwire.collectives import Options
from gradwire.collectives.calling import options_of
from gradwire.engine import Communicator, GroupInfo
from gradwire.errors import ConfigError, check_keywords
from gradwire.groups import communicator
from gradwire.handles.arguments import Decides, Methods
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.handle import Handle
from gradwire.handles.uncompiled import available
from gradwire.outer_loop.fragment import Fragment
from gradwire.outer_loop.homes import (
    Replica,
    check_crossing,
    deal,
    fragments_of,
    replica_of,
    shard,
)
from gradwire.outer_loop.regroup import regroup
from gradwire.outer_loop.settings import OuterSettings, settings_of
from gradwire.outer_loop.steps import OuterSteps
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.plan import ParameterPlan
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of

SMALL = 4096  # values of a weight; what is smaller travels in bf16
# Dtypes of weights; of others, fp32 loses something. A sign step would be of what bf16 rounds off.
_KEPT, _OF_SIGN = (torch.float32, torch.bfloat16, torch.float16), torch.float32
_meeting: WeakSet[OuterSteps] = WeakSet()  # of this process


def outer(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    preset: str | None = None,
    *,
    every: int | None = None,
    codec: Method = None,
    lr: float | None = None,
    momentum: float | None = None,
    rule: str | None = None,
    residual: float | None = None,
    fragments: int | None = None,
    delay: int | None = None,
    mix: float | None = None,
    rounds: int | None = None,
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
        preset: "diloco", "streaming", "muloco" (its outer half: Muon is yours), "sparseloco",
            "demo" (for torch.optim.SGD) or "average"; None: the defaults of `OuterSettings`. The
            arguments that follow change it.
        every, codec, lr, momentum, rule, residual, fragments, delay, mix: see `OuterSettings`
            (docs/how-to/outer.md); None: as the preset has it. codec="none" sends fp32.
        rounds: how often the same weights will meet in all, if that is known: where they are few,
            lr and momentum of the preset are changed to suit.
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
    shard(model.modules())
    real = isinstance(optimizer, torch.optim.Optimizer)
    stepped = {p for group in optimizer.param_groups for p in group["params"]} if real else set()
    if stepped.isdisjoint(model.parameters()):
        raise ConfigError(
            f"outer: optimizer: {type(optimizer).__name__} is no torch.optim.Optimizer of this "
            "model's parameters: give that which steps them"
        )
    given = {
        "every": every, "codec": codec, "lr": lr, "momentum": momentum, "rule": rule,
        "residual": residual, "fragments": fragments, "delay": delay, "mix": mix,
    }  # fmt: skip
    settings = settings_of(preset, given, rounds)
    if codec is None and isinstance(settings.codec, str):  # arguments change a preset
        kept = [o for o in settings.codec.split(":") if o.partition("=")[0] not in codec_options]
        settings = replace(settings, codec=":".join(kept))
    if not isinstance(offload, bool):
        raise ConfigError(f"outer: offload={offload!r:.60}: use True or False")
    between = _group(group)
    replica = replica_of(model, between)
    for home in replica.every:
        if home.parameter.is_meta:
            raise ConfigError(f"outer: {home.name} has no values yet: call it after to_empty()")
        if home.parameter.dtype not in ((_OF_SIGN,) if settings.rule == "sign" else _KEPT):
            raise ConfigError(
                f"outer: {home.name} is {home.parameter.dtype}, and outer weights are fp32: use "
                f"weights in fp32{'' if settings.rule == 'sign' else ', bf16 or fp16'}"
            )
    own = {id(home.parameter) for home in replica.every}
    if any(not own.isdisjoint(other.weights) for other in _meeting if other.installed):
        raise ConfigError("outer: weights of this model meet already: detach() that handle before")
    parts = fragments_of([h.name for h in replica.every], settings.every, settings.fragments)
    settings = replace(settings, fragments=len(parts))
    methods = Methods(settings.codec, codec_options, include, exclude, codecs)
    device = torch.device("cpu") if offload else replica.homes[0].parameter.device
    chosen = options_of(options)
    seed = chosen.seed or 0
    make = partial(_steps, model, optimizer, replica, parts, settings, device)
    return Outer(make(methods.rules(), chosen, seed, _communicator(between)), seed, between, make)


def _steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    replica: Replica,
    parts: Sequence[Sequence[str]],
    settings: OuterSettings,
    device: torch.device,
    rules: Rules,
    options: Options,
    seed: int,
    comm: Communicator,
    before: OuterSteps | None = None,
    version: int = 0,
) -> OuterSteps:
    """How replicas meet, first or after others: collective.

    Args:
        comm: of the replicas.
        before: whose outer weights they go on from; None: those of the first rank.
        version: of the plan.
    """

    def planned(rules: Rules, options: Options = options, version: int = version) -> Plan:
        return plan_of(replica, rules, settings, comm.world_size, options, version)

    def remade(plan: Plan, rules: Rules) -> Plan:
        return planned(rules, plan.options, plan.version)

    plan = available(planned(rules), planned, device, [comm], Decides())
    agreed = [
        f"{replace(settings, codec=None)}",
        f"seed {seed}",
        *map(str, parts),
        *plan.describe(),
    ]
    comm.agree("the call of gw.outer", agreed)
    warn_of_bias(plan, comm.world_size, "gw.outer")
    first = replica.every[0].name
    owner = comm.owner(comm.handle_name(model, f"outer weights from {first}"))
    members = members_of(plan, seed, comm.rank, comm.handles)
    if before is None:
        every = deal(replica.every, parts)
        made = [Fragment(one, members, device, settings.rule) for one in every]
    else:
        made = [fragment.among(members) for fragment in before.fragments]
    inside = None if replica.inside is None else communicator(replica.inside)
    steps = OuterSteps(plan, members, owner, settings, made, replica, inside, optimizer, remade)
    if before is None:
        steps.take(comm, 0, ["theta"])
        steps.follow()
    _meeting.add(steps)
    return steps


class Outer(Handle):
    """What `gw.outer` returns: a handle of meetings instead of backward passes.

    `stats` counts in `steps` the times that all fragments have met, and has, besides:
    rounds (meetings per fragment), optimizer_steps, hidden_seconds (of meetings, while training
    went on), drift (norm of theta - theta_r at the newest meetings).
    """

    _reductions: OuterSteps

    def __init__(
        self,
        steps: OuterSteps,
        seed: int,
        between: dist.ProcessGroup | None,
        make: Callable[..., OuterSteps],
    ) -> None:
        super().__init__(steps, seed, steps.owner.comm.rank, _gather(between))
        self._make = make  # the meetings of another group

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
        return {name: kept.theta.clone() for one in fragments for name, kept in one.weights.items()}

    def settle(self) -> None:
        """Wait until the averages of a meeting that is under way are there; they are applied when
        its delay is over."""
        self._reductions.settle()

    def recover(self, group: dist.ProcessGroup | DeviceMesh | None = None) -> None:
        """Go on with the replicas of another group: those that are left after a loss, and others
        that join. Collective over `group`, between two optimizer steps.

            try:
                optimizer.step()
            except gw.TransportError:
                group = ...  # of those that are left, by a rendezvous of yours
                outer.recover(group)

        A meeting that broke off ends alike on all that were in it: all apply it if one has, or if
        all of them have its averages; else none does, and they hold it at once, with the same
        differences and residuals. A replica that is behind begins at the others' outer weights and
        momentum, with their counts, lr and momentum and without residuals: one that joins calls
        `gw.outer` with the same arguments in a group of its own, or before it is in any. Those are
        followed that were in the largest group, and of equals those that have met most often.
        What another one had left out in its residual is lost with it. An update that was not in
        force is dropped, and statistics begin anew.

        Args:
            group: as of `gw.outer`.

        Raises:
            ConfigError: the handle was detached, the group is not of replicas, or these differ in
                arguments: nothing changes.
            TransportError: a rank of the group did not make the call, or failed.
        """
        if not self._reductions.installed:
            raise ConfigError("recover: this handle was detached: call gw.outer again")
        between = _group(group)
        check_crossing(self._reductions.replica.inside, between)
        comm = _communicator(between)
        on, self._seed = regroup(self._reductions, comm, self._seed, self._make)
        self._reductions, self._members, self._gather = on, on.members, _gather(between)
        self.rank, self.world_size = comm.rank, comm.world_size
        if on.missed is not None:  # if another replica is lost now, that can be recovered from
            on.meet(on.missed)


def _gather(between: dist.ProcessGroup | None) -> StateGather:
    return StateGather([] if between is None else [between])


def _communicator(between: dist.ProcessGroup | None) -> Communicator:
    """Of replicas; that of one without a process group makes no transport."""
    if between is not None:
        return communicator(between)
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


def plan_of(
    replica: Replica,
    rules: Rules,
    settings: OuterSettings,
    ranks: int,
    options: Options,
    version: int,
) -> Plan:
    """The plan of differences, which are fp32; with residuals as settings say, and what is small in
    bf16 unless all is sent as it is.

    Raises:
        ConfigError: a biased codec has no residual, or as `make_plan`.
    """
    dense = rules.default == registry.get(None)
    plain, smallest = (None, 0) if dense else ("bf16", SMALL)
    rules = replace(rules, plain=registry.get(plain), smallest=smallest)
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
