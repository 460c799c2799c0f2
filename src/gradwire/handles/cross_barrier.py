"""Cross-barrier training: a step does not wait for its last averages (CGX 4.3).

    backward   DDP gets its buckets back at once, and copies them into gradients, which nobody may
               see before the averages are there
    step()     steps the parameters whose averages are there; the others are late, and step with
               the options of now
    forward    what touches a late parameter, or its gradient, waits for its bucket: its averages
               become the gradients, and the optimizer steps its parameters alone

So a network that is busy behind the last layers of backward, the first of the model, may go on
while the next forward computes what has stepped. Within the model's own forward a touch waits for
one bucket; elsewhere, as in an evaluation or a checkpoint, for all of them.
"""

from __future__ import annotations

import copy
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook

from gradwire.errors import ConfigError
from gradwire.handles.awaited import arrive, can_be_awaited, release, withhold
from gradwire.handles.backward import ModuleHook
from gradwire.handles.bucket import Bucket
from gradwire.handles.optimizers import LateStep, Optimizer, check_optimizer
from gradwire.handles.urgency import Urgency

log = logging.getLogger("gradwire")


@dataclass(eq=False)
class Late:
    """A parameter whose average is awaited.

    Attributes:
        gradient: where the average belongs.
        average: it will be here, in DDP's bucket: the same memory with gradient_as_bucket_view.
        step: that the script has asked for meanwhile; None: none.
        hidden: whether the gradient is taken from the parameter while the optimizer steps others.
    """

    parameter: torch.Tensor
    gradient: torch.Tensor
    average: torch.Tensor
    step: LateStep | None = None
    hidden: bool = False


class CrossBarrier:
    """The late parameters of one DDP module.

    Args:
        names: of its parameters.
        wait: for buckets; raises what their averages ended with.
        window: how many scopes may be in flight.

    Attributes:
        crosses: whether the running backward leaves its averages late.
        urgency: in what order they are sent.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        names: Mapping[torch.Tensor, str],
        wait: Callable[..., None],
        window: int,
    ) -> None:
        self.crosses = False
        self.urgency = Urgency(window)
        self._model, self._names, self._wait = model, names, wait
        self._late: dict[Bucket, list[Late]] = {}
        self._lock = threading.RLock()
        self._asked = 0  # parameters of the newest step
        self._told = False
        self._steps = 0  # that run: one may call another, of its base class
        self._hooks: list[Any] = [
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
            optimizer.register_state_dict_pre_hook(lambda _: self.land()),
            optimizer.register_load_state_dict_pre_hook(lambda *_: self.land()),
            model.register_forward_pre_hook(_BeforeForward(self._before_forward)),
        ]
        # The script's own hooks find all gradients: ours are the last before, the first after.
        self._before: Any = optimizer._optimizer_step_pre_hooks  # ordered, which torch leaves out
        after: Any = optimizer._optimizer_step_post_hooks
        self._own = self._hooks[0].id
        after.move_to_end(self._hooks[1].id, last=False)
        # Before the engine ends, for which peers would wait.
        Finalize(self, _land_at_exit, (weakref.ref(self),), exitpriority=1)
        # Autograd adds to a gradient unseen, as in a backward of a penalty alone.
        self._hooks += [
            p.register_hook(_before_accumulation(weakref.ref(p))) for p in names if p.requires_grad
        ]
        for module in model.module.modules():
            # Before a scripted one, which takes no hook, all averages are awaited.
            if not isinstance(module, torch.jit.ScriptModule):
                hook = ModuleHook(self._before_module, records=False)
                self._hooks.append(module.register_forward_pre_hook(hook))

    # ---- backward

    def begin(self, first: bool) -> None:
        """A backward of the module begins, which may be the first."""
        self.land()
        self._steps = 0  # if one has raised
        if self._own in self._before:  # else detached since the forward
            self._before.move_to_end(self._own)
        model = self._model
        # Of a parameter that no rank uses DDP leaves an older gradient as it is.
        older = model.find_unused_parameters and any(p.grad is not None for p in self._names)
        self.crosses = not (first or older or model._join_config.enable)

    def ends(self) -> None:
        """It has computed its gradients."""
        self.crosses = False
        self.urgency.note()

    def take(self, buckets: Sequence[Bucket]) -> None:
        """DDP has put buckets into gradients, which are late now."""
        for bucket in buckets:
            late = [
                Late(p, p.grad, average)
                for p, average in zip(bucket.content.parameters, bucket.views(), strict=True)
                if p.grad is not None  # no rank has one
            ]
            self._late[bucket] = late
            for one in late:
                for tensor in (one.parameter, one.gradient):
                    withhold(tensor, partial(self._touched, bucket))

    # ---- forward

    def _before_forward(self, ddp: DistributedDataParallel, compiled: bool) -> None:
        if self._late and (compiled or not ddp.training or _has_compiled(ddp)):
            self.land()

    def _before_module(self, module: torch.nn.Module, *_: object) -> None:
        if not self._in_forward():
            self.land()
        for parameter in module._parameters.values():
            arrive(parameter)

    def _in_forward(self) -> bool:
        return DistributedDataParallel._active_ddp_module is self._model and torch.is_grad_enabled()

    def _touched(self, bucket: Bucket) -> None:
        if self._in_forward():
            self.land(bucket)
            return
        if not self._told and any(one.step is None for one in self._late.get(bucket, ())):
            self._told = True
            log.warning(
                "cross_barrier: gradients, or weights, are read between backward and "
                "optimizer.step(), as by clip_grad_norm_: such a step waits for all averages, as "
                "without cross_barrier"
            )
        self.land()

    def land(self, *buckets: Bucket) -> None:
        """Wait for these buckets, or for all: averages become gradients, and parameters step that
        the script has stepped.

        Raises:
            GradwireError: an average failed; nothing is late any more.
        """
        with self._lock:
            for bucket in buckets or tuple(self._late):
                if bucket not in self._late:
                    continue
                # Those that are there step with it, in one call of the optimizer.
                there = [one for one in self._late if one is bucket or one.ended.is_set()]
                try:
                    self._wait(*there)
                except Exception as error:
                    raise self._failed(error) from None
                self._landed([late for one in there for late in self._late.pop(one)])

    def _landed(self, late: Sequence[Late]) -> None:
        cleared: list[tuple[torch.Tensor, torch.Tensor | None]] = []
        steps: dict[LateStep, list[torch.Tensor]] = {}
        for one in late:
            parameter = one.parameter
            release(parameter)
            release(one.gradient)
            if one.hidden:
                parameter.grad, one.hidden = one.gradient, False
            if parameter.grad is one.gradient:
                if one.gradient.data_ptr() != one.average.data_ptr():
                    one.gradient.copy_(one.average)
            elif one.step is not None:  # by zero_grad()
                cleared.append((parameter, parameter.grad))
                parameter.grad = one.average
            if one.step is not None:
                steps.setdefault(one.step, []).append(parameter)
        for step, parameters in steps.items():
            step.run(parameters)
        for parameter, gradient in cleared:
            parameter.grad = gradient

    def _failed(self, error: Exception) -> Exception:
        """The error to raise: nothing is late any more, and late steps are not made."""
        late = [one for ones in self._late.values() for one in ones]
        self._late.clear()
        for one in late:
            release(one.parameter)
            release(one.gradient)
        missed = [self._names[one.parameter] for one in late if one.step is not None]
        raised = copy.copy(error).with_traceback(None)
        if missed:
            text = (
                f"{error}; cross_barrier: of {self._asked} parameters of the last step "
                f"{self._asked - len(missed)} have stepped, and these have not: "
                f"{', '.join(missed[:4])}{', ...' if missed[4:] else ''}: other ranks may have "
                "stepped others: load a checkpoint on all of them"
            )
            raised.args = (text,)
        return raised

    # ---- the script's steps

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer steps: those whose averages are not there take no part, but later."""
        if torch.compiler.is_compiling():
            raise ConfigError(
                "cross_barrier: optimizer.step() is being compiled, for all parameters at once: "
                "leave torch.compile of the step, or cross_barrier, out"
            )
        self._steps += 1
        if self._steps > 1:
            return
        stepped = any(one.step is not None for late in self._late.values() for one in late)
        closure = len(args) > 1 or kwargs.get("closure") is not None
        if stepped or closure or next(reversed(self._before)) != self._own:
            self.land()
            return
        with self._lock:
            for bucket in tuple(self._late):
                if _is_there(bucket):
                    self.land(bucket)
            if not self._late:
                return
            step = LateStep(optimizer)
            self._asked = sum(p.grad is not None and p in step for p in self._names)
            for late in self._late.values():
                for one in late:
                    if one.parameter.grad is one.gradient and one.parameter in step:
                        one.step, one.hidden = step, True
                        one.parameter.grad = None

    def _after_step(self, *_: object) -> None:
        self._steps -= 1
        if self._steps > 0:
            return
        for late in self._late.values():
            for one in late:
                if one.hidden:
                    one.parameter.grad, one.hidden = one.gradient, False

    # ---- its end

    def remove(self) -> None:
        """Between two passes: nothing is late any more, and the optimizer is as it was."""
        try:
            self.land()
        finally:
            for hook in self._hooks:
                hook.remove()


def check_crossing(named: Sequence[tuple[str, torch.Tensor]], optimizer: object) -> Optimizer:
    """The optimizer, if parameters may be late.

    Raises:
        ConfigError: they may not.
    """
    for name, p in named:
        if not can_be_awaited(p) or p.is_complex():
            what = "complex" if p.is_complex() else f"a {type(p).__name__}"
            raise ConfigError(
                f"attach: cross_barrier=True: parameter {name} is {what}, and only "
                "torch.nn.Parameters of real values can be waited for: leave cross_barrier out"
            )
    found = check_optimizer(optimizer)
    own = {p for group in found.param_groups for p in group["params"]}
    if own.isdisjoint(p for _, p in named):
        raise ConfigError(
            "attach: cross_barrier=True: the optimizer has none of this module's parameters: give "
            "the one that steps them"
        )
    return found


def _land_at_exit(of: weakref.ref[CrossBarrier]) -> None:
    """Take part in what peers still compute, unless this process ends by an exception."""
    crossing = of()
    if crossing is not None and not hasattr(sys, "last_value"):
        with suppress(Exception):  # each waits for the same, and raises it
            crossing.land()


class _BeforeForward(ModuleHook):
    """Runs where the module's forward is compiled, too: outside of what is compiled."""

    def __init__(self, then: Callable[..., None]) -> None:
        super().__init__(torch.compiler.disable(then, reason="gradwire waits for late averages"))

    def __call__(self, module: torch.nn.Module, *_: Any) -> None:
        self._then(module, torch.compiler.is_compiling())


def _is_there(bucket: Bucket) -> bool:
    return bucket.ended.is_set()


def _before_accumulation(of: weakref.ref[torch.Tensor]) -> Callable[[torch.Tensor], None]:
    def hook(_: torch.Tensor) -> None:
        arrive(of())

    return unserializable_hook(hook)  # type: ignore[no-any-return]


def _has_compiled(model: torch.nn.Module) -> bool:
    """Whether there is code that does not ask a parameter's class."""
    return any(
        isinstance(m, torch.jit.ScriptModule) or m._compiled_call_impl is not None
        or "_orig_mod" in m._modules
        for m in model.modules()
    )  # fmt: skip
