"""`gw.keras`: compress what Keras 3 trains, on TensorFlow or PyTorch.

torch.distributed.init_process_group("gloo")
optimizer = gw.keras.DistributedOptimizer(keras.optimizers.Adam(), "qsgd:bits=4")
model.compile(optimizer, loss, jit_compile=False)
model.fit(data, callbacks=[gw.keras.BroadcastCallback()])

Gradients are averaged where the optimizer is given them: when Keras has computed all of them, so
that nothing overlaps with its backward.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from gradwire.aggregators.registry import Method
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.handles.handle import Handle
from gradwire.handles.wrapped import is_alone
from gradwire.trainers.given import averages, stand_in
from gradwire.trainers.keras_gradients import CROSSINGS
from gradwire.trainers.state import Compression, read, write

try:
    import keras
except ModuleNotFoundError as error:
    raise ImportError(
        f'gw.keras needs Keras 3 and its backend ({error}): pip install "gradwire[keras]"'
    ) from error


def DistributedOptimizer(
    optimizer: keras.optimizers.Optimizer, codec: Method = "qsgd", **options: Any
) -> keras.optimizers.Optimizer:
    """Make `optimizer` average its gradients over the default process group, compressed.

    It is the same object, of the same class, and what Keras saves of it is unchanged: a saved model
    loads without gradwire. Then call this again, on `model.optimizer`.

    Args:
        optimizer: a Keras optimizer; with loss scaling the LossScaleOptimizer.
        codec, options: as in `gw.attach`. Names of parameters are those of layer and variable,
            "dense/kernel"; of layers of the same name the later ones have numbers, "dense_1".

    Raises:
        ConfigError: no Keras optimizer, or one that averages already; or another backend of Keras
            than TensorFlow and PyTorch. In the first step, as `gw.attach`; or the step is compiled
            by XLA.
    """
    if keras.backend.backend() not in CROSSINGS:
        raise ConfigError(
            f"gw.keras: Keras runs on {keras.backend.backend()}: gw.keras takes TensorFlow and "
            "PyTorch: set KERAS_BACKEND to tensorflow or torch"
        )
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            f"gw.keras.DistributedOptimizer: optimizer={optimizer!r:.60}: give an optimizer of "
            "Keras 3, such as keras.optimizers.Adam()"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if _averaging(optimizer) or _averaging(inner):
        raise ConfigError("gw.keras.DistributedOptimizer: this optimizer averages already")
    optimizer.apply = _Averaging(optimizer, Compression(codec, options))
    return optimizer


def handle(optimizer: keras.optimizers.Optimizer) -> Handle:
    """The handle of an optimizer that averages.

    Raises:
        ConfigError: it does not, or its first step is still to come.
    """
    found = _of(optimizer).compression.handle
    if found is None:
        raise ConfigError("gw.keras: there is no handle before the optimizer's first step")
    return found


def save(optimizer: keras.optimizers.Optimizer, path: str | os.PathLike[str]) -> None:
    """Write the state of all ranks, residuals among it, into rank 0's file. Collective: every rank
    calls it, between two steps, beside `model.save`, which rank 0 alone calls.

    Raises:
        ConfigError: as `handle`.
    """
    handle(optimizer)
    state = _of(optimizer).compression.state_dict()
    if state:
        write(state, os.fspath(path))
    if not is_alone():
        dist.barrier()  # else a rank may read what is not there yet


def load(optimizer: keras.optimizers.Optimizer, path: str | os.PathLike[str]) -> None:
    """Load what `save` wrote, on every rank, before the first step or between two; any number of
    ranks may have saved it.

    Raises:
        ConfigError: there is no such file; or as `Handle.load_state_dict`, if need be in the first
            step.
    """
    if not os.path.exists(path):
        raise ConfigError(f"gw.keras.load: {path}: no such file")
    _of(optimizer).compression.load_state_dict(read(os.fspath(path)))


class BroadcastCallback(keras.callbacks.Callback):
    """For `model.fit`: at its start all ranks get rank 0's weights and variables of the model's
    optimizers. Where averaging fails within a tf.function, fit raises that error, not
    TensorFlow's.

    Raises:
        ConfigError: at the start of fit: ranks have unlike variables, or an optimizer of the model
            does not average.
    """

    def on_train_begin(self, logs: Any = None) -> None:
        model, every = self.model, _optimizers(self.model)
        averaging = [
            _averaging(getattr(one, "inner_optimizer", one)) or _averaging(one)
            for one in every.values()
        ]
        for name, found in zip(every, averaging, strict=True):
            if found is None:
                raise ConfigError(
                    f"gw.keras.BroadcastCallback: model.{name} does not average: call "
                    f"gw.keras.DistributedOptimizer(model.{name}, ...), also after loading or "
                    "copying a model, which makes a new optimizer"
                )
        only = next(iter(every.values()))
        if len(every) == 1 and not only.built:
            only.build(model.trainable_variables)
        if not is_alone():
            _broadcast([*model.weights, *(v for one in every.values() for v in one.variables)])
        if not isinstance(model.train_function, _Raising):
            watched = [one for one in averaging if one is not None]
            model.train_function = _Raising(model.train_function, watched)


def _optimizers(model: keras.Model) -> dict[str, Any]:
    """By attribute: `optimizer`, and what a model with a train_step of its own has besides."""
    every = {
        name: value
        for name, value in vars(model).items()
        if isinstance(value, keras.optimizers.Optimizer)
    }
    return every or {"optimizer": model.optimizer}


def _broadcast(variables: Sequence[Any]) -> None:
    like = [f"{v.path} {tuple(v.shape)} {v.dtype}" for v in variables]
    communicator().agree("the variables of gw.keras.BroadcastCallback", like)
    for variable in variables:
        value = [keras.ops.convert_to_numpy(variable)]
        dist.broadcast_object_list(value)
        variable.assign(value[0])


class _Averaging:
    """What takes the place of an optimizer's `apply`."""

    def __init__(self, optimizer: Any, compression: Compression) -> None:
        self.compression = compression
        self._failure: BaseException | None = None
        self._optimizer, self._apply = optimizer, optimizer.apply
        self._untraced = CROSSINGS[keras.backend.backend()].untraced(self._averaged)
        self._names: list[str] = []  # of the variables with gradients
        self._model: torch.nn.Module | None = None  # from the first step on

    def __call__(self, grads: Any, trainable_variables: Any = None) -> Any:
        variables = self._optimizer._trainable_variables
        if trainable_variables is not None:
            variables = trainable_variables = list(trainable_variables)
        grads = list(grads)
        there = [place for place, gradient in enumerate(grads) if gradient is not None]
        if there and len(grads) == len(variables):  # else Keras says what is wrong
            given, of = ([every[place] for place in there] for every in (grads, variables))
            with self._noting():
                found = self._untraced(given, of)
            for place, average in zip(there, found, strict=True):
                grads[place] = average
        return self._apply(grads, trainable_variables)

    def _averaged(self, gradients: list[Any], variables: list[Any]) -> Sequence[Any]:
        crossing, names = CROSSINGS[keras.backend.backend()], _names_of(variables)
        crossing.check()
        if self._model is None:
            _check_callers(self._optimizer)
            shapes = [tuple(variable.shape) for variable in variables]
            dtypes = [getattr(torch, keras.backend.standardize_dtype(g.dtype)) for g in gradients]
            like = dict(zip(names, zip(shapes, dtypes, strict=True), strict=True))
            with crossing.attaching():
                self._model = self._attached(stand_in(like, crossing.device(gradients)))
            self._names = names
        elif names != self._names:
            changed = sorted(set(names) ^ set(self._names)) or ["their order"]
            raise ConfigError(
                "gw.keras: other variables have gradients than in this optimizer's first step: "
                f"{changed[0]}: make a new optimizer after freezing variables, and give a variable "
                "a gradient in every step, or in none"
            )
        return gradients if is_alone() else crossing.averaged(gradients, self._average)

    def _average(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self._model is not None
        with self._noting():
            return averages(self._model, gradients)

    def failure(self) -> BaseException | None:
        """What averaging has raised since the last call."""
        found, self._failure = self._failure, None
        return found

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._failure = error
            raise

    def _attached(self, model: torch.nn.Module) -> torch.nn.Module:
        handle = self.compression.attach(model)
        inner = getattr(self._optimizer, "inner_optimizer", self._optimizer)
        own = next((name for name in ("momentum", "beta_1") if getattr(inner, name, 0)), None)
        for p in handle.plan.parameters:
            if own is not None and p.aggregator.replaces_momentum:
                self.compression.begin()
                raise ConfigError(
                    f"gw.keras: {type(inner).__name__} has {own}={getattr(inner, own):g}, and the "
                    f"average of {p.name}, by {p.inner}, includes momentum already: make the "
                    f"optimizer with {own}=0, or give momentum=0 ('dgc:momentum=0')"
                )
        return model


class _Raising:
    """A function within which averaging may fail: it raises that error itself."""

    def __init__(self, run: Callable[..., Any], averaging: Sequence[_Averaging]) -> None:
        self._run, self._averaging = run, averaging

    def __call__(self, *args: Any) -> Any:
        self._failure()
        try:
            return self._run(*args)
        except Exception as error:
            cause = self._failure()
            if cause is None or cause is error:
                raise
            raise cause from error

    def _failure(self) -> BaseException | None:
        found = [one.failure() for one in self._averaging]
        return next((failure for failure in found if failure is not None), None)


def _averaging(optimizer: Any) -> _Averaging | None:
    found = getattr(optimizer, "apply", None)
    return found if isinstance(found, _Averaging) else None


def _of(optimizer: Any) -> _Averaging:
    found = _averaging(optimizer)
    if found is None:
        raise ConfigError(
            f"gw.keras: {optimizer!r:.60} does not average: give what "
            "gw.keras.DistributedOptimizer returned"
        )
    return found


def _names_of(variables: Sequence[Any]) -> list[str]:
    """The ends of their paths, layer and variable: what is before it is lost when Keras saves and
    loads a model. Where several are alike, layers get numbers."""
    found: dict[str, None] = {}
    for variable in variables:
        path = getattr(variable, "path", variable.name)  # tf.Variable has no path
        first, *rest = path.split("/")[-2:]
        names = ("/".join([f"{first}_{n}" if n else first, *rest]) for n in count())
        found[next(name for name in names if name not in found)] = None
    return list(found)


def _check_callers(optimizer: Any) -> None:
    """Raise ConfigError where a LossScaleOptimizer, such as model.compile puts around an optimizer,
    calls `optimizer`: it skips a step on the ranks alone whose own gradients are not finite. Or
    where Keras has averaged the gradients, as it does in versions after 3.15 on torch."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.optimizers.LossScaleOptimizer) and caller is not optimizer:
            raise ConfigError(
                "gw.keras: a LossScaleOptimizer, which model.compile adds for mixed_float16, calls "
                "this optimizer: give it to gw.keras, and model.compile the result: "
                "gw.keras.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(optimizer))"
            )
        if isinstance(caller, keras.Model) and getattr(caller, "ddp_model", None) is not None:
            raise ConfigError(
                "gw.keras: this Keras wraps the model in DDP itself, and averages its gradients: "
                "leave DistributedOptimizer out, and call gw.attach(model.ddp_model, ...) in a "
                "callback's on_train_begin"
            )
        frame = frame.f_back
