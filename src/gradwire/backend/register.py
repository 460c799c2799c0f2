"""`gw.register(model)`: under the backend, set how a model is compressed; `gw.register(blob=True)`.

A script registers its model before or after wrapping it. A model that is not wrapped yet gets its
handle, through `gw.attach`, at the first forward of a module that wraps it.
"""

from __future__ import annotations

import glob
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire import codecs
from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.backend.group import Group
from gradwire.collectives import Options, check_defined
from gradwire.collectives.calling import options_of
from gradwire.errors import ConfigError, check_keywords
from gradwire.groups import communicator
from gradwire.handles.arguments import Methods, check_renamed
from gradwire.handles.attach import attach
from gradwire.handles.bias import warn_once
from gradwire.handles.fsdp import parameter_groups, process_groups
from gradwire.handles.handle import Handle
from gradwire.handles.sharded_plan import not_free
from gradwire.handles.wrapped import original, plain_name, plain_names, synchronising
from gradwire.lang import Codec
from gradwire.lang.codec import check_codec
from gradwire.planner import make_plan


class Registration:
    """What `register` returns.

    Attributes:
        handle: the handle of `gw.attach`; None before the model is wrapped and run.
        settled: whether the wrapped model was found.
    """

    def __init__(self, model: torch.nn.Module, arguments: Mapping[str, Any]) -> None:
        self.handle: Handle | None = None
        self.settled = False
        self._model = weakref.ref(model)
        self._arguments = arguments  # of `attach`, for names of this model

    def withdraw(self) -> None:
        """Stop waiting for the model to be wrapped, or detach from it."""
        _forget(self)
        if self.handle is not None:
            self.handle.detach()

    def settle(self, wrapped: torch.nn.Module) -> bool:
        """Attach if `wrapped` is, or wraps, the model and synchronises its gradients; whether this
        registration waits no longer."""
        model = self._model()
        if model is None:
            return True  # the model no longer exists
        outer, prefix = wrapped, ""
        if isinstance(wrapped, DistributedDataParallel):
            outer = wrapped.module
            found = "" if wrapped is model else _name_within(outer, model)
            if found is None:
                return False
            prefix = found
            _check_group(wrapped.process_group)
        elif original(wrapped) is model and isinstance(wrapped, FSDPModule):
            if self._arguments["options"].coalesce_bytes is not None:
                raise ConfigError("register: coalesce_bytes is for DDP modules")
            for where, record in parameter_groups(wrapped):
                reason = not_free(where or "(the root)", record)
                if reason is not None:
                    raise ConfigError(reason)
                for group in process_groups(record).all:
                    _check_group(group)
        else:
            return False
        self.handle = attach(wrapped, **_narrowed(self._arguments, outer, prefix))
        self.settled = True
        return True


@overload
def register(model: torch.nn.Module, codec: Method = ..., **options: Any) -> Registration: ...
@overload
def register(*, codec: Method = ..., blob: bool, **options: Any) -> None: ...
def register(
    model: torch.nn.Module | None = None,
    codec: Method = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, Method] | None = None,
    error_feedback: bool = False,
    options: Options | None = None,
    blob: bool = False,
    group: dist.ProcessGroup | None = None,
    **codec_options: object,
) -> Registration | None:
    """Set how `model` is compressed under the backend "gradwire".

    Call it on every rank with the same arguments, before or after wrapping:

        dist.init_process_group("gradwire")
        gw.register(model, bits=4)
        model = DistributedDataParallel(model)

    Args:
        model: a module that DDP or FSDP2 wraps, now or later; a DDP module; or an FSDP2 module;
            compiled or not. If DDP wraps a module that contains it, the other parameters are sent
            uncompressed.
        codec, include, exclude, codecs, error_feedback, options, codec_options: as in `gw.attach`,
            with the names of `model`'s own parameters.
        blob: instead of a model: switch `group` to blob mode. From now on the large float tensors
            that a backward pass reduces over it are compressed as a whole, without knowledge of
            parameters, by `codec` with its options and the seed of `options`. Modules that have
            handles keep them. Call it on every rank.
        group: the process group for `blob`; None: the default group.

    Raises:
        ConfigError: as `gw.attach`; or a process group of another backend. Errors that can be
            detected only after wrapping are raised by the first forward.
    """
    check_renamed("register", codec_options)
    check_keywords(register, codec_options, OPTIONS)
    if blob:
        if model is not None:
            raise ConfigError("register: blob=True compresses without a model; give no model")
        _blob(group, codec, codec_options, options_of(options).seed or 0)
        return None
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"register takes a torch.nn.Module, not {type(model).__name__}")
    methods = Methods(codec, codec_options, include, exclude, codecs or {}, error_feedback)
    arguments = {**vars(methods), "options": options_of(options), **codec_options}
    # Compiled or not, it is the same model: a script may wrap either.
    wrapped = synchronising(model) or original(model)
    registration = Registration(original(wrapped), arguments)
    if not registration.settle(wrapped):
        # What is known before the model is wrapped.
        trained = [(n, p) for n, p in plain_names(wrapped.named_parameters()) if p.requires_grad]
        make_plan(trained, methods.rules(), 1)
        _wait(registration)
    return registration


def _blob(
    group: dist.ProcessGroup | None, codec: Method, options: Mapping[str, object], seed: int
) -> None:
    """Switch a group to blob mode."""
    actual = group if group is not None else dist.group.WORLD
    _check_group(actual)
    assert isinstance(actual, Group)
    made = codecs.get(codec, **options) if isinstance(codec, str) else codec
    check_codec(made)
    assert isinstance(made, Codec)
    check_defined(Options().algorithm, made)
    if made.biased and actual.size() > 1:
        warn_once(
            f"blobs go through {made}, which is biased, and keep no residuals: what it leaves out "
            "is lost, and training may not converge; give a model, and error_feedback=True"
        )
    settings = replace(actual.settings, codec=made, seed=seed, blob=True)
    communicator(actual).agree("blobs", [settings.describe()])
    actual.models.settings = settings


def _check_group(group: object) -> None:
    if not isinstance(group, Group):
        name = getattr(group, "name", lambda: type(group).__name__)()
        raise ConfigError(
            f"register needs a process group of the backend 'gradwire'; this one is {name}: "
            "use init_process_group('gradwire'), or gw.attach(ddp_model) on any backend"
        )


def _name_within(outer: torch.nn.Module, model: torch.nn.Module) -> str | None:
    """The prefix of the names of `model`'s parameters in `outer`; None: `outer` has no `model`."""
    for name, module in outer.named_modules():
        if module is model:
            short = plain_name(name)
            return f"{short}." if short else ""
    return None


def _narrowed(arguments: Mapping[str, Any], outer: torch.nn.Module, prefix: str) -> dict[str, Any]:
    """The arguments of `attach` on a module in which the model's names begin with `prefix`."""
    start = glob.escape(prefix)
    patterns = {of: [start + p for p in arguments[of]] for of in ("include", "exclude")}
    codecs = {start + pattern: codec for pattern, codec in arguments["codecs"].items()}
    outside = [n for n, p in plain_names(outer.named_parameters()) if p.requires_grad]
    codecs |= {glob.escape(n): None for n in outside if not n.startswith(prefix)}
    return {**arguments, **patterns, "codecs": codecs}


# ---- waiting for models to be wrapped: a global forward pre-hook, as long as a model is missing

_lock = threading.Lock()
_waiting: list[Registration] = []
_hook: Any = None


def _wait(registration: Registration) -> None:
    global _hook  # noqa: PLW0603  # torch's hook is global, too
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
    inner = original(module)
    for registration in list(_waiting):
        # What fully_shard made of a compiled module is both.
        if registration.settle(inner) or (inner is not module and registration.settle(module)):
            _forget(registration)
