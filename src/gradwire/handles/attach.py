"""`gw.attach(model)`: compress the gradients of a DDP or FSDP2 module."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.collectives import Options
from gradwire.collectives.calling import options_of
from gradwire.errors import ConfigError, check_keywords
from gradwire.groups import communicator
from gradwire.handles.alone import attach_alone
from gradwire.handles.arguments import Decides, Methods, WeightsGiven, check_renamed, read_plan
from gradwire.handles.ddp import COALESCE_BYTES, Planned, plan_ddp
from gradwire.handles.handle import Handle
from gradwire.handles.hook import hook_state
from gradwire.handles.uncompiled import refuse
from gradwire.handles.wrapped import in_hand
from gradwire.planner.files import PlanFile
from gradwire.planner.weights import Weights

if TYPE_CHECKING:  # loaded on use: most handles have no policy
    from gradwire.controllers import Policy
    from gradwire.controllers.replan import Replan
    from gradwire.decide.auto import Auto
    from gradwire.handles.sharded_attach import PlannedShards

log = logging.getLogger("gradwire")


def attach(
    model: torch.nn.Module | FSDPModule | Callable[..., Any],
    codec: Method | Auto = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, Method] | None = None,
    error_feedback: bool = False,
    options: Options | None = None,
    weights: Weights = None,
    plan: PlanFile | str | os.PathLike[str] | None = None,
    policy: Policy | Replan | str | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    cross_barrier: bool = False,
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
            options as further keywords or in the name ("powersgd:rank=8"; see `gradwire codec
            list`), a Codec, an Aggregator, or None for no compression. "auto" or gw.Auto(), for
            DDP, measures and decides (docs/how-to/automatic.md). On the CPU, where a rank can
            compile no kernels, bf16 is sent instead, with a warning (docs/reference/kernels.md).
        include: name patterns ("*.bias") to compress although they have fewer dimensions. Names
            are those of the bare model, without the segments `_orig_mod` and
            `_checkpoint_wrapped_module` of torch.compile and activation checkpointing.
        exclude: name patterns of parameters to send uncompressed.
        codecs: name pattern -> codec or aggregator, as `codec`; the first match takes precedence
            over all other arguments.
        error_feedback: keep the compression error in one fp32 residual per compressed parameter,
            and add it to the next step's gradient. "powersgd", "artopk", "topkc", "lwtopk",
            "globaltopk", "sparseloco" and "dgc" always do. A biased codec (`Codec.biased`: topk,
            onebit) without it warns once per process, and so does error feedback around a method
            whose error may exceed what it encodes (`Codec.contracts`: terngrad, qsgd:bits=2).
        options: how collectives run: algorithm (docs/reference/algorithms.md), seed, and more; see
            gw.Options. FSDP2 modules have the algorithms "sra" and "hierarchical": in two levels,
            for several ranks per machine, so that what is gathered and scattered crosses between
            machines once.
        weights: of an FSDP2 module: the codec in which its weights are gathered ("randomshift",
            8 bits in blocks of 1024; see docs/how-to/fsdp2.md); None leaves that to FSDP2. Vectors
            and parameters of fewer than 4096 values are gathered uncompressed. Or name pattern ->
            codec, of which the first match counts; what matches none is gathered uncompressed, and
            so is what holds values that are not finite. Forward, backward and the module's
            `unshard()` give decoded weights; the optimizer's shards are exact.
        plan: a file that `handle.plan.save` wrote, of the same model: it says how each parameter
            is sent, in place of codec, include, exclude, codecs, error_feedback and weights. One of
            `gradwire plan --save`, for DDP, has algorithm, segments and coalesce_bytes, too, for
            options that leave them out, and what is expected of a pass.
        policy: changes methods per parameter while training runs, at no more than the error that
            `codec` would make everywhere: by name, with options ("lgreco"), or an object of one's
            own (docs/how-to/adaptive.md); gw.Replan(policy, every=500) also says when it decides.
            `codec` is "qsgd", "topk" or "powersgd".
        cross_barrier: of a DDP module: a step does not wait for its last averages; they arrive
            while the next forward computes, and what they belong to steps then, with equal bits
            (docs/how-to/cross-barrier.md).
        optimizer: that steps the module's parameters, for cross_barrier.

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
    model = in_hand(model)
    with _refusing(model, weights is not None or plan is not None):
        check_renamed("attach", codec_options)
        check_keywords(attach, codec_options, OPTIONS)
        given = options_of(options)
        sent, seed, held = given.of_collectives, given.seed or 0, given.coalesce_bytes
        methods = Methods(codec, codec_options, include, exclude, codecs, error_feedback)
        gathered = WeightsGiven(weights, given.keep)
        pinned = None
        if plan is not None:
            pinned = read_plan(plan, gathered)
            methods = methods.pinned(pinned)
            gathered = replace(gathered, by=pinned.weights_by_name())
            if pinned.planned and isinstance(model, FSDPModule):
                raise ConfigError("attach: plan: gradwire plan has planned for DDP, not for FSDP2")
            sent = pinned.options(sent)
            if held is None:
                held = pinned.planned.get("coalesce_bytes")
        decides, methods = Decides.of(policy, methods, model)
        planned: PlannedShards | Planned
        if isinstance(model, FSDPModule):
            if held is not None:
                raise ConfigError(
                    "attach: coalesce_bytes is for DDP's buckets; FSDP2 scatters group by group: "
                    "leave it out"
                )
            from gradwire.handles.sharded_attach import plan_sharded  # a DDP script has none

            rules, used = methods.rules(sharded=True), gathered.rules()
            if cross_barrier:
                raise ConfigError(
                    "attach: cross_barrier is for DDP: FSDP2 steps shards, and gathers the next "
                    "layer's weights while this one computes: leave it out"
                )
            planned = plan_sharded(model, rules, weights=used, options=sent, pinned=pinned)
        elif isinstance(model, DistributedDataParallel):
            gathered.refuse()
            planned = plan_ddp(model, methods.rules(), sent, held, pinned)
            crossing = _crossing(planned.named, optimizer, cross_barrier)
            if hook_state(model).reducer is not None:
                raise ConfigError(
                    "this module already has a handle attached: call its detach() before attaching "
                    "again"
                )
        else:
            gathered.rules()  # for FSDP2, which is not used in a single process
            held = COALESCE_BYTES if held is None else held
            of = methods.rules(), (sent, held), seed, pinned, decides
            _crossing([*model.named_parameters()], optimizer, cross_barrier)
            return _told(attach_alone(model, *of), pinned)
    if isinstance(planned, Planned):
        return _told(planned.handle(seed, decides, optimizer=crossing), pinned)
    return _told(planned.handle(seed, decides), pinned)


def _crossing(
    named: Sequence[tuple[str, torch.Tensor]], optimizer: object, cross_barrier: object
) -> torch.optim.Optimizer | None:
    """The optimizer whose steps cross the barrier, if any."""
    if not isinstance(cross_barrier, bool):
        raise ConfigError(f"attach: cross_barrier={cross_barrier!r:.60}: give True or False")
    if not cross_barrier:
        if optimizer is not None:
            raise ConfigError(
                "attach: optimizer is for cross_barrier=True: give that, or leave optimizer out"
            )
        return None
    from gradwire.handles.cross_barrier import check_crossing  # loaded on use

    return check_crossing(named, optimizer)


@contextmanager
def _refusing(model: torch.nn.Module, gathers: bool) -> Iterator[None]:
    """What is raised within it on one rank alone is told to its peers, who wait for this rank.

    Args:
        gathers: whether weights are gathered through codecs.
    """
    try:
        yield
    except Exception as error:
        with suppress(Exception):  # of a module over no group that could have a handle
            if isinstance(model, DistributedDataParallel):
                refuse([communicator(model.process_group)], error)
            elif isinstance(model, FSDPModule):
                from gradwire.handles.sharded_attach import comms_of

                refuse(comms_of(model, gathers), error)
        raise


def _told(made: Handle, pinned: PlanFile | None) -> Handle:
    """`made`, and a line in the log if it has nothing to do, or what its plan lets expect."""
    if made.world_size == 1:
        log.info("attach: a single process sends nothing, so nothing is compressed")
    made._pinned = pinned
    if pinned is not None and pinned.planned and made.world_size > 1 and made.rank == 0:
        log.info("attach: %s", pinned.expectation(made.plan, made.world_size))
    return made
