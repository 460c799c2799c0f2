"""`gw.attach(model)`: compress the gradients of a DDP or FSDP2 module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators.registry import Method
from gradwire.collectives import Options
from gradwire.collectives.calling import check_seed, options_of
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.integrations.bias import warn_of_bias
from gradwire.integrations.handle import Handle
from gradwire.integrations.hook import check_module, hook_state
from gradwire.integrations.sharded import Sharded
from gradwire.integrations.sharded_attach import plan_sharded
from gradwire.integrations.synchronised import synchronised
from gradwire.integrations.wrapped import in_hand
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.rules import check_coalesce_bytes

COALESCE_BYTES = 1 << 18


@overload
def attach(model: DistributedDataParallel, codec: Method = ..., **options: Any) -> Handle: ...
@overload
def attach(model: FSDPModule, codec: Method = ..., **options: Any) -> Sharded: ...
@overload
def attach(  # what torch.compile returns is typed as a Callable
    model: torch.nn.Module | Callable[..., Any], codec: Method = ..., **options: Any
) -> Handle | Sharded: ...
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
    **codec_options: object,
) -> Handle | Sharded:
    """Compress the gradients that `model` synchronises, and nothing else.

    Call it on every rank, with the same arguments, after wrapping the module:

        model = DistributedDataParallel(model)
        gw.attach(model, bits=4)

    Args:
        model: a DDP module, an FSDP2 module (docs/how-to/fsdp2.md), or the wrapper of one that
            torch.compile, Lightning Fabric or another trainer returns, if it has no parameters of
            its own. Parameters are on the CPU or on one GPU. Those in fp32, fp16 or bf16 may be
            compressed; others (float64, complex) are averaged uncompressed. Over NCCL, gradients
            move from GPU to GPU; over gloo alone, through host memory.
        codec: for parameters of two dimensions and more: a codec or aggregator by name, with its
            options as further keywords or in the name ("powersgd:rank=4"; see `gradwire codec
            list`), a Codec, an Aggregator, or None for no compression.
        include: name patterns ("*.bias") to compress although they have fewer dimensions. Names
            are those of the bare model, without the segments `_orig_mod` and
            `_checkpoint_wrapped_module` of torch.compile and activation checkpointing.
        exclude: name patterns of parameters to send uncompressed.
        codecs: name pattern -> codec or aggregator, as `codec`; the first match takes precedence
            over all other arguments.
        error_feedback: keep the compression error in one fp32 residual per compressed parameter,
            and add it to the next step's gradient. "powersgd", "artopk", "topkc", "lwtopk",
            "globaltopk" and "dgc" always do. A biased codec (`Codec.biased`: topk, onebit, ...)
            without it warns once per process.
        seed: of random numbers; not negative, below 2^64.
        algorithm: the name of the all-reduce algorithm (docs/reference/algorithms.md); None uses
            `options`.
        options: algorithm, segments, checksum, kernels.
        coalesce_bytes: DDP's buckets are combined until they hold at least as many bytes, or the
            pass ends; 0 sends each bucket by itself. It is 0 for modules with
            skip_all_reduce_unused_params.

    Returns:
        A handle with statistics and state, whose `update` changes these arguments during training.

    Raises:
        ConfigError: no such module (the message says what to pass), attached already, an argument
            of a wrong type or value (it is named), nothing to synchronise, sparse gradients,
            unknown codec, algorithm, option or pattern, a codec that is not defined in the
            algorithm, one for a parameter of a dtype that codecs do not take, or ranks that
            disagree (the first parameter that differs is named).
    """
    rules = Rules().changed(
        codec_options, codec=codec, include=include, exclude=exclude, codecs=codecs,
        error_feedback=error_feedback,
    )  # fmt: skip
    chosen = options_of(options, algorithm)
    check_seed(seed)
    check_coalesce_bytes(coalesce_bytes)
    model = in_hand(model)
    if isinstance(model, FSDPModule):
        if options is not None or algorithm is not None:
            raise ConfigError(
                "attach: algorithm and options are for DDP modules; FSDP2 modules have one "
                "reduce-scatter: leave these arguments out"
            )
        shards = plan_sharded(model, rules)
        warn_of_bias(shards.plan, shards.trained.groups.size)
        return shards.handle(seed)
    assert isinstance(model, DistributedDataParallel)
    planned = plan_ddp(model, rules, chosen, coalesce_bytes)
    if hook_state(model).reducer is not None:
        raise ConfigError(
            "this module already has a handle attached: call its detach() before attaching again"
        )
    warn_of_bias(planned.plan, model.process_group.size())
    return planned.handle(seed)


@dataclass(frozen=True)
class Planned:
    """A DDP module that has passed the checks on this rank, and its plan."""

    model: DistributedDataParallel
    named: list[tuple[str, torch.Tensor]]
    plan: Plan

    def handle(self, seed: int) -> Handle:
        """Attach; raises ConfigError if ranks disagree."""
        comm, state = communicator(self.model.process_group), hook_state(self.model)
        agreed = [f"seed {seed}", f"after {state.attached} handles of this module"]
        comm.agree("what is attached", [*agreed, *self.plan.describe()])
        owner = comm.owner(f"the module of {self.named[0][0]}")
        return Handle(self.model, state, self.named, self.plan, owner, seed)


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
