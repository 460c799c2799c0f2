"""`gw.register(model)`: under the backend, compress a model parameter by parameter, not as blobs.

A script hands its model over before or after it wraps it. Of a DDP module the handle of
`gw.attach` takes the buckets, before they reach the process group; of an FSDP2 module the group
learns which parameters stand where in what is scattered (backend_shards.py). A model that is not
wrapped yet is waited for: the first forward of a module that wraps it settles it.
"""

from __future__ import annotations

import glob
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.integrations.attach import attach
from gradwire.integrations.backend import Group
from gradwire.integrations.backend_shards import register_shards
from gradwire.integrations.handle import Handle
from gradwire.lang import Codec
from gradwire.planner import make_plan


@dataclass(frozen=True)
class _Wish:
    """How a model is to be compressed: the arguments of `gw.attach`."""

    codec: str | Codec | None
    include: Sequence[str]
    exclude: Sequence[str]
    codecs: Mapping[str, str | Codec | None]
    error_feedback: bool
    seed: int
    algorithm: str | None
    options: Options | None
    coalesce_bytes: int | None
    codec_options: Mapping[str, object] = field(default_factory=dict)

    def check(self, model: torch.nn.Module) -> None:
        """What can be known before the model is wrapped; raises ConfigError."""
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        make_plan(named, self.codec, self.codec_options, 1, self.include, self.exclude, self.codecs)


class Registration:
    """What `register` returns.

    Attributes:
        handle: of a DDP module: what `gw.attach` returns, with statistics and state. None of an
            FSDP2 module, and before the model is wrapped and run.
        settled: whether the wrapped model was found.
    """

    def __init__(self, model: torch.nn.Module, wish: _Wish) -> None:
        self.handle: Handle | None = None
        self.settled = False
        self._model = weakref.ref(model)
        self._wish = wish

    def withdraw(self) -> None:
        """No longer wait for the model to be wrapped; of a DDP module: detach."""
        _forget(self)
        if self.handle is not None:
            self.handle.detach()

    def settle(self, wrapped: torch.nn.Module) -> bool:
        """Act if `wrapped` is, or wraps, the model in a way that synchronises gradients."""
        model = self._model()
        if model is None:
            return True  # it is gone: there is nothing to wait for
        wish = self._wish
        if isinstance(wrapped, DistributedDataParallel):
            prefix = _name_within(wrapped.module, model) if wrapped is not model else ""
            if prefix is None:
                return False
            _check_group(wrapped.process_group)
            self.handle = attach(wrapped, **_narrowed(wish, wrapped.module, prefix))
        elif wrapped is model and isinstance(wrapped, FSDPModule):
            of_ddp = (wish.algorithm, wish.options, wish.coalesce_bytes)
            if wish.error_feedback or any(given is not None for given in of_ddp):
                raise ConfigError(
                    "register: error_feedback, algorithm, options and coalesce_bytes are for DDP "
                    "modules: what FSDP2 scatters goes through the default reduce-scatter, without "
                    "residuals"
                )
            plan = wish.codec, wish.codec_options, wish.include, wish.exclude, wish.codecs
            register_shards(wrapped, *plan)
        else:
            return False
        self.settled = True
        return True


def register(
    model: torch.nn.Module,
    codec: str | Codec | None = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, str | Codec | None] | None = None,
    error_feedback: bool = False,
    seed: int = 0,
    algorithm: str | None = None,
    options: Options | None = None,
    coalesce_bytes: int | None = None,
    **codec_options: object,
) -> Registration:
    """Compress `model` parameter by parameter under the backend "gradwire".

    Call it on every rank with the same arguments, before or after wrapping:

        dist.init_process_group("gradwire")
        gw.register(model, bits=4)
        model = DistributedDataParallel(model)

    Args:
        model: a module that DDP or FSDP2 wraps, now or later; a DDP module; or an FSDP2 module.
            Where it becomes a part of what DDP wraps, the other parameters go uncompressed.
        codec, include, exclude, codecs, error_feedback, seed, algorithm, options, coalesce_bytes,
            codec_options: as in `gw.attach` (None: its default), with the names of `model`'s own
            parameters. FSDP2 has no error feedback, no choice of algorithm and no coalescing.

    Raises:
        ConfigError: as `gw.attach`; or a process group of another backend. What shows only when
            the model is wrapped is raised by the first forward after that.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"register takes a torch.nn.Module, not {type(model).__name__}")
    wish = _Wish(
        codec,
        include,
        exclude,
        codecs or {},
        error_feedback,
        seed,
        algorithm,
        options,
        coalesce_bytes,
        codec_options,
    )
    registration = Registration(model, wish)
    if not registration.settle(model):
        wish.check(model)
        _wait(registration)
    return registration


def _check_group(group: object) -> None:
    if not isinstance(group, Group):
        name = getattr(group, "name", lambda: type(group).__name__)()
        raise ConfigError(
            f"register serves process groups of the backend 'gradwire'; this module's is {name}: "
            "use init_process_group('gradwire'), or gw.attach(ddp_model) on any backend"
        )


def _name_within(outer: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """What names of `model`'s parameters begin with in `outer`; None: it is not in there."""
    for name, module in outer.named_modules():
        if module is model:
            return f"{name}." if name else ""
    return None


def _narrowed(wish: _Wish, outer: torch.nn.Module, prefix: str) -> dict[str, Any]:
    """The arguments of `attach` on a module in which the model's names begin with `prefix`."""
    start = glob.escape(prefix)
    codecs: dict[str, str | Codec | None] = {start + p: c for p, c in wish.codecs.items()}
    outside = [n for n, p in outer.named_parameters() if p.requires_grad]
    codecs |= {glob.escape(n): None for n in outside if not n.startswith(prefix)}
    coalesce = {} if wish.coalesce_bytes is None else {"coalesce_bytes": wish.coalesce_bytes}
    return {
        "codec": wish.codec,
        "include": [start + pattern for pattern in wish.include],
        "exclude": [start + pattern for pattern in wish.exclude],
        "codecs": codecs,
        "error_feedback": wish.error_feedback,
        "seed": wish.seed,
        "algorithm": wish.algorithm,
        "options": wish.options,
        **coalesce,
        **wish.codec_options,
    }


# ---- waiting for models to be wrapped: a hook before every forward, while there is one to wait for

_lock = threading.Lock()
_waiting: list[Registration] = []
_hook: Any = None


def _wait(registration: Registration) -> None:
    global _hook  # noqa: PLW0603  # one hook a process, as torch has it
    with _lock:
        _waiting.append(registration)
        if _hook is None:
            _hook = register_module_forward_pre_hook(_before_forward)


def _forget(registration: Registration) -> None:
    global _hook  # noqa: PLW0603
    with _lock:
        _waiting[:] = [other for other in _waiting if other is not registration]
        if not _waiting and _hook is not None:
            _hook.remove()
            _hook = None


def _before_forward(module: torch.nn.Module, _: object) -> None:
    compiled = getattr(module, "_orig_mod", None)
    for registration in list(_waiting):
        if registration.settle(module if compiled is None else compiled):
            _forget(registration)
