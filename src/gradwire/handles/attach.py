"""`gw.attach(model)`: compress the gradients of a DDP or FSDP2 module."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.collectives import Options
from gradwire.collectives.calling import check_seed, options_of
from gradwire.controllers import Policy
from gradwire.controllers.replan import Replan
from gradwire.controllers.targets import policy_of, targets_of
from gradwire.decide.auto import Auto
from gradwire.errors import ConfigError, check_keywords
from gradwire.groups import communicator
from gradwire.handles.alone import attach_alone
from gradwire.handles.bias import warn_of_bias
from gradwire.handles.buckets import Buckets
from gradwire.handles.handle import Handle
from gradwire.handles.hook import hook_state
from gradwire.handles.refused import check_module
from gradwire.handles.sharded_attach import plan_sharded
from gradwire.handles.synchronised import synchronised
from gradwire.handles.uncompiled import available
from gradwire.handles.wrapped import in_hand, original
from gradwire.planner import Plan, Rules, WeightRules, make_plan
from gradwire.planner.files import PlanFile
from gradwire.planner.rules import check_coalesce_bytes
from gradwire.planner.weights import Weights, all_in_blocks
from gradwire.state.formats import StateGather
from gradwire.state.state import members_of

log = logging.getLogger("gradwire")

COALESCE_BYTES = 1 << 18


def attach(
    model: torch.nn.Module | FSDPModule | Callable[..., Any],
    codec: Method = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, Method] | None = None,
    error_feedback: bool = False,
    seed: int = 0,
    algorithm: str | None = None,
    options: Options | None = None,
    coalesce_bytes: int = COALESCE_BYTES,
    weights: Weights = None,
    keep: str | None = None,
    plan: PlanFile | str | os.PathLike[str] | None = None,
    policy: Policy | str | None = None,
    replan: Replan | None = None,
    auto: Auto | None = None,
    **codec_options: object,
) -> Handle:
    """Compress the gradients that `model` synchronises; with `weights`, what FSDP2 gathers, too.

    Call it on every rank, with the same arguments, after wrapping the module:

        model = DistributedDataParallel(model)
        gw.attach(model, bits=4)

    A single process sends nothing: there any module will do, with a process group or without, and
    the handle's methods work.

    Args:
        model: a DDP module, an FSDP2 module (docs/how-to/fsdp2.md), or the wrapper of one that
            torch.compile, Lightning Fabric or another trainer returns, if it has no parameters of
            its own. Parameters are on the CPU or on one GPU. Those in fp32, fp16 or bf16 may be
            compressed; others (float64, complex) are averaged uncompressed. Over NCCL, gradients
            move from GPU to GPU; over gloo alone, through host memory.
        codec: for parameters of two dimensions and more: a codec or aggregator by name, with its
            options as further keywords or in the name ("powersgd:rank=4"; see `gradwire codec
            list`), a Codec, an Aggregator, or None for no compression. "auto", for DDP, measures
            and decides (docs/how-to/automatic.md). On the CPU, where a rank can compile no kernels,
            bf16 is sent instead, with a warning (docs/reference/kernels.md).
        include: name patterns ("*.bias") to compress although they have fewer dimensions. Names
            are those of the bare model, without the segments `_orig_mod` and
            `_checkpoint_wrapped_module` of torch.compile and activation checkpointing.
        exclude: name patterns of parameters to send uncompressed.
        codecs: name pattern -> codec or aggregator, as `codec`; the first match takes precedence
            over all other arguments.
        error_feedback: keep the compression error in one fp32 residual per compressed parameter,
            and add it to the next step's gradient. "powersgd", "artopk", "topkc", "lwtopk",
            "globaltopk" and "dgc" always do. A biased codec (`Codec.biased`: topk, onebit, ...)
            without it warns once per process, and so does error feedback around a method whose
            error may be larger than what it encodes (`Codec.contracts`: terngrad, qsgd:bits=2).
        seed: of random numbers; not negative, below 2^64.
        algorithm: the name of the all-reduce algorithm (docs/reference/algorithms.md); None uses
            `options`. FSDP2 modules have "sra" and "hierarchical": in two levels, for several ranks
            per machine, so that what is gathered and scattered crosses between machines once.
        options: algorithm, segments, checksum, kernels.
        coalesce_bytes: DDP's buckets are combined until they hold at least as many bytes, or the
            pass ends; 0 sends each bucket by itself. It is 0 for modules with
            skip_all_reduce_unused_params.
        weights: of an FSDP2 module: the codec in which its weights are gathered ("randomshift",
            8 bits in blocks of 1024; see docs/how-to/fsdp2.md); None leaves that to FSDP2. Vectors
            and parameters of fewer than 4096 values are gathered uncompressed. Or name pattern ->
            codec, of which the first match counts; what matches none is gathered uncompressed, and
            so is what holds values that are not finite. Forward, backward and the module's
            `unshard()` give decoded weights; the optimizer's shards are exact.
        keep: what a rank keeps of weights that it gathered for forward. "payload", the default: the
            payloads of all ranks, so that backward gathers nothing, in the memory of the compressed
            model; payloads of groups that are not trained are kept on, until somebody changes them.
            "none", the default if that would take more than a quarter of the memory that is free on
            any rank: backward gathers the same payloads again. "redraw": nothing, and backward
            encodes the weights anew (THESIS Alg. C.1), with other random numbers. "reference": the
            decoded weights, the whole model on every rank in the dtype in which it is gathered:
            then each new version of the weights is sent as the difference to them, for which 4 bits
            suffice ("randomshift:bits=4"), backward gathers nothing, and errors do not add up.

        plan: a file that `handle.plan.save` wrote, of the same model: it says how each parameter
            is sent, in place of codec, include, exclude, codecs, error_feedback and weights. One of
            `gradwire plan --save`, for DDP, has algorithm, segments and coalesce_bytes, too, for
            calls that leave them out, and what is expected of a pass.

        policy: changes methods per parameter while training runs, at no more than the error that
            `codec` would make everywhere: gw.LGreco() or another policy, or its name with options
            (docs/how-to/adaptive.md). `codec` is "qsgd", "topk" or "powersgd".
        replan: when the policy decides; gw.Replan().
        auto: how "auto" decides; gw.Auto().

    With an FSDP2 module, "qsgd" has blocks of 1024 values unless `block` is given (THESIS 5.6.1).

    Returns:
        A handle with statistics and state, whose `update` changes these arguments during training.

    Raises:
        ConfigError: no such module (the message says what to pass), attached already, an argument
            of a wrong type or value (it is named), nothing to synchronise, sparse gradients,
            unknown codec, algorithm, option or pattern, a codec that is not defined in the
            algorithm, one for a parameter of a dtype that codecs do not take, or ranks that
            disagree (the first parameter that differs is named).
    """
    check_keywords(attach, codec_options, OPTIONS)
    chosen = options_of(options, algorithm)
    check_seed(seed)
    check_coalesce_bytes(coalesce_bytes)
    model = in_hand(model)
    if auto is not None and not isinstance(auto, Auto):
        raise ConfigError(f"attach: auto={auto!r:.60}: give gw.Auto(...), or leave it out")
    if plan == "measured":
        raise ConfigError(
            'attach: plan="measured": plan before training, by `torchrun --nproc-per-node N -m '
            "gradwire plan --shapes FILE --save PLAN` on the network as it is, or `gradwire plan "
            "--shapes FILE --net RATE,LATENCY --save PLAN` on a given one, and give plan=PLAN "
            "(handle.plan.save writes FILE)"
        )
    automatic = codec == "auto"
    if automatic:
        asked = {"policy": policy, "replan": replan, **codec_options}
        _check_automatic(model, asked, error_feedback)
        codec, auto = "bf16", auto or Auto()
    elif auto is not None:
        raise ConfigError('attach: auto is for the codec "auto": give that, or leave auto out')
    if replan is not None and policy is None:
        raise ConfigError("attach: replan is for a policy: give policy, too, such as gw.LGreco()")
    if not (replan is None or isinstance(replan, Replan)):
        raise ConfigError(
            f"attach: replan={replan!r:.60}: give a gw.Replan, such as gw.Replan(every=500)"
        )
    adaptive = None if policy is None else (policy_of(policy), replan or Replan())
    if adaptive is not None and adaptive[0].budget is not None:
        if codec_options or codec not in ("qsgd", adaptive[0].budget):
            raise ConfigError(
                f"attach: codec={codec!r:.60}: the policy's budget is {adaptive[0].budget!r}, and "
                "is the codec: leave codec and its options out, or the budget"
            )
        codec = adaptive[0].budget
    pinned = None
    if plan is not None:
        others = (codec, include, exclude, codecs, error_feedback, weights)
        if codec_options or others != ("qsgd", (), (), None, False, None):
            raise ConfigError(
                "attach: a plan says how each parameter is sent: leave codec and its options, "
                "include, exclude, codecs, error_feedback and weights out"
            )
        pinned = plan if isinstance(plan, PlanFile) else PlanFile.read(plan)
        codec, codecs, weights = None, pinned.by_name(), pinned.weights_by_name()
        if pinned.planned and isinstance(model, FSDPModule):
            raise ConfigError("attach: plan: gradwire plan has planned for DDP, not for FSDP2")
        if algorithm is None:
            chosen = pinned.options(chosen)
        if coalesce_bytes == COALESCE_BYTES:
            coalesce_bytes = pinned.planned.get("coalesce_bytes", coalesce_bytes)
    given: dict[str, Any] = {
        "codec": codec, "include": include, "exclude": exclude, "codecs": codecs,
        "error_feedback": error_feedback,
    }  # fmt: skip
    if isinstance(model, FSDPModule):
        given = all_in_blocks(given, codec_options)
    rules = Rules().changed(codec_options, **given)
    if isinstance(model, FSDPModule):
        if coalesce_bytes != COALESCE_BYTES:
            raise ConfigError(
                "attach: coalesce_bytes is for DDP's buckets; FSDP2 scatters group by group: leave "
                "it out"
            )
        gathered = WeightRules.of(weights, keep)
        compressed = weights is not None
        if keep is not None and not compressed:
            raise ConfigError(
                f"attach: keep={keep!r} is for weights in a codec: give weights, too, such as "
                '"randomshift:bits=8"'
            )
        used = gathered if compressed else None
        shards = plan_sharded(model, rules, weights=used, options=chosen)
        if pinned is not None:
            pinned.check(shards.plan.parameters)
        return _told(shards.handle(seed, adaptive), pinned)
    if not isinstance(model, DistributedDataParallel):
        WeightRules.of(weights, keep)  # for FSDP2, which is not used in a single process
        return _told(attach_alone(model, rules, (chosen, coalesce_bytes), seed, pinned), pinned)
    if weights is not None or keep is not None:
        raise ConfigError(
            "attach: weights and keep are for FSDP2 modules, which gather weights; DDP sends "
            "gradients alone: leave these arguments out"
        )
    planned = plan_ddp(model, rules, chosen, coalesce_bytes)
    if pinned is not None:
        pinned.check(planned.plan.parameters)
    if hook_state(model).reducer is not None:
        raise ConfigError(
            "this module already has a handle attached: call its detach() before attaching again"
        )
    return _told(planned.handle(seed, adaptive, auto), pinned)


def _told(made: Handle, pinned: PlanFile | None) -> Handle:
    """`made`, and a line in the log if it has nothing to do, or what its plan lets expect."""
    if made.world_size == 1:
        log.info("attach: a single process sends nothing, so nothing is compressed")
    made.pinned = pinned
    if pinned is not None and pinned.planned and made.world_size > 1 and made.rank == 0:
        log.info("attach: %s", pinned.expectation())
    return made


def _check_automatic(model: object, given: Mapping[str, object], error_feedback: bool) -> None:
    """Raise ConfigError for what does not go with "auto"."""
    if isinstance(model, FSDPModule):
        raise ConfigError(
            'attach: "auto" is for DDP modules; give an FSDP2 module a codec '
            "(`gradwire sim --sharded` predicts what it saves)"
        )
    for name, value in {**given, "error_feedback": error_feedback or None}.items():
        if value is not None:
            raise ConfigError(
                f'attach: {name}={value!r:.60}: "auto" decides this; gw.Auto says between what'
            )


@dataclass(frozen=True)
class Planned:
    """A DDP module that has passed the checks on this rank, and its plan."""

    model: DistributedDataParallel
    named: list[tuple[str, torch.Tensor]]
    plan: Plan

    def handle(
        self,
        seed: int,
        adaptive: tuple[Policy, Replan] | None = None,
        auto: Auto | None = None,
        call: str = "gw.attach",
    ) -> Handle:
        """Attach, with a policy, automatic or neither, as the user's `call`; raises ConfigError if
        ranks disagree, or the policy has no choice."""
        if adaptive is not None:
            targets_of(self.plan, adaptive[1].mixed)
        comm, state = communicator(self.model.process_group), hook_state(self.model)
        agreed = [f"seed {seed}", f"after {state.attached} handles of this module"]
        agreed += [] if adaptive is None else list(map(repr, adaptive))
        agreed += [] if auto is None else [repr(auto)]
        plan, device = self.plan, self.named[0][1].device
        plan = available(plan, self._planned, device, [comm], adaptive, auto)
        comm.agree("the call of gw.attach", [*agreed, *plan.describe()])
        warn_of_bias(plan, comm.world_size, call)
        name = comm.handle_name(original(self.model.module), self.named[0][0])
        owner = comm.owner(f"the {name}")
        unused = self.model.find_unused_parameters
        members = members_of(plan, seed, comm.rank, state.attached, unused)
        state.attached += 1
        reductions = Buckets(self.model, state, self.named, plan, members, owner)
        made = Handle(reductions, seed, comm.rank, StateGather([self.model.process_group]))
        if plan.rules.uncompiled:  # there is nothing to choose from
            return made
        if adaptive is not None:
            reductions.adapt(*adaptive)
        if auto is not None and comm.world_size > 1:  # a single rank sends nothing
            reductions.automate(auto)
        return made

    def _planned(self, rules: Rules) -> Plan:
        of = self.model.process_group.size(), self.plan.options, self.plan.coalesce_bytes
        return make_plan(self.named, rules, *of)


def plan_ddp(
    model: DistributedDataParallel,
    rules: Rules,
    options: Options | None = None,
    coalesce_bytes: int = COALESCE_BYTES,
) -> Planned:
    """Check a module and plan it on this rank, before ranks agree.

    Raises:
        ConfigError: no handle can be attached to this module.
    """
    check_module(model)
    named = synchronised(model)
    device = named[0][1].device
    away = next(((n, p.device) for n, p in named if p.device != device), None)
    if away is not None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"parameter {named[0][0]} is on {device}" + (", {} on {}".format(*away) if away else "")
            + ": all parameters must be on the CPU, or on one GPU"
        )  # fmt: skip
    whole = getattr(model, "skip_all_reduce_unused_params", False)
    size = model.process_group.size()
    plan = make_plan(named, rules, size, options, 0 if whole else coalesce_bytes)
    if whole and any(p.aggregator.scope == "model" for p in plan.parameters):
        raise ConfigError(
            "an aggregator over the whole model needs all of its gradients: wrap the module "
            "without skip_all_reduce_unused_params"
        )
    hook_state(model)  # last, since a hook cannot be unregistered
    return Planned(model, named, plan)
