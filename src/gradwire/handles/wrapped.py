"""What a user has in hand: the DDP or FSDP2 module inside torch.compile's and trainers' wrappers.

A wrapper is known by its shape, since no trainer is imported here: it is a module that holds the
wrapped one under one of a few names, and no parameter of its own.

| held under | by |
| --- | --- |
| `_orig_mod` | torch.compile |
| `_forward_module` | Lightning Fabric's `_FabricModule` |
| `module`, `model` | wrappers that a script or a trainer writes |

What torch puts around a module inside DDP or FSDP2, to compile it or to checkpoint its activations,
lengthens the names of its parameters. Names here are those of the model as its author wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError

_REPLICATE = "torch.distributed._composable.replicate"  # adds a base class of its own
_HELD = ("_forward_module", "module", "model")
_SEGMENTS = ("_orig_mod", "_checkpoint_wrapped_module")

T = TypeVar("T")


def is_alone() -> bool:
    """Whether this process is the whole job: no process group and no launcher's, or one rank."""
    if dist.is_initialized():
        return dist.get_world_size() == 1
    return os.environ.get("WORLD_SIZE", "1") == "1"


def plain_name(name: str) -> str:
    """The name of a parameter or module, without the segments that torch's wrappers add."""
    return ".".join(part for part in name.split(".") if part not in _SEGMENTS)


def plain_names(named: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Names and what they name, without these segments; where one name would stand for two things,
    both keep theirs."""
    known = list(named)
    found: dict[str, T] = {}
    twice = set()
    for name, value in known:
        short = plain_name(name)
        if found.setdefault(short, value) is not value:
            twice.add(short)
    return [
        (name if plain_name(name) in twice else plain_name(name), value) for name, value in known
    ]


def original(module: torch.nn.Module) -> torch.nn.Module:
    """The module that torch.compile was given, where `module` is what it returned."""
    inner: torch.nn.Module | None = vars(module).get("_modules", {}).get("_orig_mod")
    return module if inner is None else original(inner)


def synchronising(module: object) -> torch.nn.Module | None:
    """The DDP or FSDP2 module in `module`, which is one or wraps one; None: it has none.

    Raises:
        ConfigError: there are several; or the wrapper has parameters beside it, whose gradients
            that module does not synchronise.
    """
    if not isinstance(module, torch.nn.Module):
        return None
    if _synchronises(module):
        return module
    inner = original(module)
    if inner is not module:
        return synchronising(inner)
    found: dict[torch.nn.Module, str] = {}
    for name in _HELD:
        held = synchronising(vars(module)["_modules"].get(name))
        if held is not None:
            found.setdefault(held, name)
    for held, name in found.items():
        if len(_inside(module)) > 1:
            raise ConfigError(
                f"{type(module).__name__} holds several modules that synchronise gradients: "
                f"{_listed(module)}: pass each of them to a call of its own"
            )
        of_held = set(held.parameters())
        beside = [n for n, p in module.named_parameters() if p.requires_grad and p not in of_held]
        if beside:
            raise ConfigError(
                f"{type(module).__name__} has parameters beside the {_kind(held)} in .{name}, "
                f"which that does not synchronise, such as {beside[0]}: pass model.{name}, or wrap "
                "the whole"
            )
        return held
    return None


def in_hand(module: object) -> torch.nn.Module:
    """The DDP or FSDP2 module that `attach` means by `module`; in a single process, a module.

    Raises:
        ConfigError: there is none, or not one alone; it says what to pass instead.
    """
    found = synchronising(module)
    if found is not None:
        return found
    if isinstance(module, FullyShardedDataParallel):
        raise ConfigError(
            "attach takes a DistributedDataParallel module, or one from fully_shard (FSDP2), not "
            "FullyShardedDataParallel (FSDP1): shard the model with fully_shard"
        )
    what, remedy = type(module).__name__, ""
    if isinstance(module, torch.nn.Module):
        bases, inside = type(module).__mro__, _listed(module)
        if any(base.__module__ == _REPLICATE for base in bases):
            what = "one from replicate"
            remedy = ": wrap the bare model, attach(DistributedDataParallel(model))"
        elif inside:
            remedy = f", which has these inside: {inside}: pass such a module itself"
        elif is_alone():
            return module
        elif any(base.__name__ == "LightningModule" for base in bases):
            remedy = (
                ": pass what the trainer wraps, trainer.strategy.model in on_fit_start, or give "
                'the trainer callbacks=[gw.lightning.GradwireCallback("qsgd:bits=4")]'
            )
        else:
            remedy = (
                ": wrap it first, attach(DistributedDataParallel(model)), or shard it, "
                "attach(fully_shard(model)); if it is wrapped, pass what wraps it, not its .module"
            )
    elif _in_object(module):
        remedy = f": pass .{_in_object(module)} of it"
    elif hasattr(module, "__dict__"):
        remedy = (
            ": of a trainer pass the module that it has wrapped: trainer.strategy.model "
            "(Lightning, in on_fit_start), trainer.model_wrapped (Hugging Face), or what "
            "accelerator.prepare or fabric.setup gave"
        )
    raise ConfigError(
        f"attach takes a DistributedDataParallel module, or one from fully_shard, not {what}"
        f"{remedy}"
    )


def only_inside(module: torch.nn.Module) -> torch.nn.Module:
    """The one DDP or FSDP2 module in `module`, under whatever name, that has all of its parameters
    that are trained; else `module` itself, of which `attach` says what is wrong."""
    inside = list(_inside(module).values())
    if len(inside) != 1:
        return module
    of_inside = set(inside[0].parameters())
    beside = any(p.requires_grad and p not in of_inside for p in module.parameters())
    return module if beside else inside[0]


def _in_object(holder: object) -> str:
    """Where an object that is no module holds a DDP or FSDP2 module, as trainers do; "" if not."""
    for path in ("model", "module", "model_wrapped", "strategy.model"):
        at: object = holder
        for name in path.split("."):
            # Of the object itself: properties of trainers may do work, or raise anything.
            at = getattr(at, "__dict__", {}).get(name)
        if isinstance(at, torch.nn.Module) and _inside(at):
            return path
    return ""


def _inside(module: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The outermost DDP and FSDP2 modules in `module`, by name."""
    found: dict[str, torch.nn.Module] = {}
    for name, inner in module.named_modules():
        outside = not any(not outer or name.startswith(f"{outer}.") for outer in found)
        if outside and _synchronises(inner):
            found[name] = inner
    return found


def _listed(module: torch.nn.Module) -> str:
    """The modules of `_inside` as text: four at most."""
    kinds = [f"{name} ({_kind(inner)})" for name, inner in _inside(module).items()]
    return ", ".join([*kinds[:4], *["..."] * (len(kinds) > 4)])


def _synchronises(module: object) -> bool:
    return isinstance(module, (DistributedDataParallel, FSDPModule))


def _kind(module: torch.nn.Module) -> str:
    return "DDP module" if isinstance(module, DistributedDataParallel) else "FSDP2 module"
