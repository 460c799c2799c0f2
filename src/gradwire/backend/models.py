"""Attaches handles automatically to the models that use a group of the backend.

A module registration hook reports new DDP modules. At its first training forward a DDP module gets
a handle, unless the script has registered a communication hook or attached a handle. A
reduce-scatter of FSDP2 is recognised by its calling function; then the root module gets a handle.
No decision depends on a tensor's contents. All other operations are passed on to torch and counted
here.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.backend.settings import Settings
from gradwire.errors import ConfigError
from gradwire.handles.backward import ModuleHook
from gradwire.handles.ddp import Planned, plan_ddp
from gradwire.handles.fsdp import process_groups, reduced_over
from gradwire.handles.handle import Handle
from gradwire.handles.hook import hook_state
from gradwire.handles.sharded_attach import plan_sharded
from gradwire.handles.sharded_plan import is_attached, not_free
from gradwire.lang import gpu
from gradwire.planner import Rules

log = logging.getLogger("gradwire")


class Models:
    """The models that use one process group.

    Args:
        group: the process group.
        settings: of compression.

    Attributes:
        settings: of models without a registration, and of blobs; ranks agree on them.
        handles: of the modules found, as long as they exist.
        left: number of calls passed on to torch, by name of the operation.
    """

    def __init__(self, group: dist.ProcessGroup, settings: Settings) -> None:
        self.settings = settings
        self.handles: WeakKeyDictionary[torch.nn.Module, Handle] = WeakKeyDictionary()
        self.left: Counter[str] = Counter()
        self._group = group
        self._gone = dict.fromkeys(("calls", "wire_bytes", "raw_bytes", "seconds"), 0.0)
        self._seen: WeakSet[torch.nn.Module] = WeakSet()
        self._seen_records: WeakSet[Any] = WeakSet()
        self._log_lines: list[str] = []  # for the next log message
        _watch()

    @property
    def active(self) -> bool:
        """Whether models are compressed."""
        settings = self.settings
        return settings.codec is not None and not settings.blob and self._group.size() > 1

    def trains(self, ddp: DistributedDataParallel) -> bool:
        """Called before a training forward of a DDP module; whether it has been seen before."""
        if ddp in self._seen:
            self.log_pending()
            return True
        self._seen.add(ddp)
        if self.settings.blob:
            _refuse_builtin_hook(ddp)
        elif self.active:
            self._attach_ddp(ddp)
        return False

    def _attach_ddp(self, ddp: DistributedDataParallel) -> None:
        what = f"DDP module {type(ddp.module).__name__}"
        if not self._has_kernels(what, ddp):
            return
        try:
            planned = plan_ddp(ddp, self._rules())
        except ConfigError as error:
            self._log_lines.append(f"{what} uncompressed ({error})")
            return
        state = hook_state(ddp)
        held, named, plan = weakref.ref(ddp), planned.named, planned.plan
        del planned  # it has a reference to the module

        def attach() -> None:
            module = held()
            assert module is not None
            handle = Planned(module, named, plan).handle(self.settings.seed, call="gw.register")
            self._note(module, what, handle)

        # Attach at the first bucket, which all ranks reach; a single rank may run a forward.
        state.first = attach

    def reduces(self, values: torch.Tensor) -> Any:
        """If the caller is FSDP2 reducing the gradients `values`: FSDP2's record of their group of
        parameters, if its module has a handle after this call; else None."""
        found = reduced_over(self._group, values) if self.active else None
        if found is None:
            return None
        root, record = found
        if record not in self._seen_records:
            self._seen_records.add(record)
            what = f"FSDP2 module {type(root).__name__}"
            if not is_attached(record) and self._has_kernels(what, root):
                self._attach_sharded(what, root, record)
        return record if is_attached(record) else None

    def _attach_sharded(self, what: str, root: torch.nn.Module, record: Any) -> None:
        def report(*_: object) -> None:
            hook.remove()
            self.log_pending()

        hook = root.register_forward_pre_hook(ModuleHook(report, records=False))
        try:
            reason = not_free(what, record)
            if reason is not None:
                raise ConfigError(reason)
            planned = plan_sharded(root, self._rules(), process_groups(record), _is_active)
        except ConfigError as error:
            self._log_lines.append(f"{what} uncompressed ({error})")
            return
        self._note(root, what, planned.handle(self.settings.seed, call="gw.register"))

    def _has_kernels(self, what: str, module: torch.nn.Module) -> bool:
        device = next(module.parameters()).device.type
        reason = lacking(device)
        if reason is not None:
            log.warning("gradwire: %s is uncompressed on %s: %s", what, device, reason)
        return reason is None

    def _rules(self) -> Rules:
        return Rules().changed({}, codec=self.settings.codec)

    def _note(self, module: torch.nn.Module, what: str, handle: Handle) -> None:
        self.handles[module] = handle
        weakref.finalize(module, self._let_go, handle).atexit = False
        parameters = handle.plan.parameters
        through = sum(p.how != "dense" for p in parameters)
        codec = "bf16" if handle.plan.rules.uncompiled else self.settings.codec
        self._log_lines.append(f"{what}: {through} of {len(parameters)} parameters through {codec}")

    def log_pending(self) -> None:
        """Log once what is compressed and what is not; called after a step."""
        lines, self._log_lines = self._log_lines, []
        if lines and self._group.rank() == 0:
            left = ", ".join(f"{name} {count}" for name, count in sorted(self.left.items()))
            log.info(
                "gradwire: group %s: %s; other operations, passed on to torch: %s",
                self._group.group_name,
                "; ".join(lines),
                left or "nothing",
            )

    def totals(self) -> dict[str, float]:
        """calls, wire_bytes, raw_bytes, seconds of all handles, past and present."""
        found = dict(self._gone)
        for module in [held() for held in self.handles.keyrefs()]:  # another thread may add one
            handle = None if module is None else self.handles.get(module)
            if handle is not None:
                _add(found, handle)
        return found

    def _let_go(self, handle: Handle) -> None:
        """Called when a module is garbage-collected."""
        _add(self._gone, handle)


def _add(totals: dict[str, float], handle: Handle) -> None:
    stats = handle.stats()
    for key in totals:
        totals[key] += stats[key]


def _is_active(group: dist.ProcessGroup) -> bool:
    models = getattr(group, "models", None)
    return isinstance(models, Models) and models.active


def lacking(device_type: str) -> str | None:
    """Why tensors on such devices cannot be compressed, or None."""
    if device_type == "cpu":
        return None
    if device_type != "cuda":
        return "gradwire has kernels for the CPU and for CUDA"
    reason = gpu.missing()
    return "TRITON_INTERPRET=1 is set" if reason is None and gpu.interpreting() else reason


def _refuse_builtin_hook(ddp: DistributedDataParallel) -> None:
    """torch's built-in C++ hooks need a Work object that only torch's own groups return."""
    name = str(ddp._get_ddp_logging_data().get("comm_hook", ""))
    if "FP16_COMPRESS" in name or "ALLREDUCE" in name:
        raise ConfigError(
            f"this DDP module has torch's built-in communication hook {name}, which cannot run "
            "in blob mode: turn it off (GRADWIRE_BLOB=0), or register a hook written in Python, "
            "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"
        )


# ---- hooks on the construction and the first training forward of DDP modules


@functools.cache  # torch's hook is global
def _watch() -> None:
    register_module_module_registration_hook(_registered)


def _registered(parent: torch.nn.Module, name: str, _: torch.nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        parent.register_forward_pre_hook(_before_forward)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _before_forward(ddp: torch.nn.Module, _: object) -> None:
    assert isinstance(ddp, DistributedDataParallel)
    models: Any = getattr(ddp.process_group, "models", None)
    trains = torch.is_grad_enabled() and ddp.require_backward_grad_sync
    if not isinstance(models, Models) or (trains and models.trains(ddp)):
        for key, known in list(ddp._forward_pre_hooks.items()):
            if known is _before_forward:  # a copied module has it, and no handle that removes it
                del ddp._forward_pre_hooks[key]
