"""Gradients of Keras, on TensorFlow or PyTorch, as torch's tensors and back."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError

Average = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Crossing:
    """Between one of Keras' backends and torch; of torch itself, where nothing is copied."""

    def check(self) -> None:
        """Raise ConfigError where gradients cannot be averaged in the step that runs, or that is
        traced."""

    def untraced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, which the backend's compiler does not rewrite."""
        disabled: Callable[..., Any] = torch.compiler.disable(function)
        return disabled

    def attaching(self) -> contextlib.AbstractContextManager[None]:
        """Around what makes a DDP module."""
        return contextlib.nullcontext()

    def device(self, gradients: Sequence[Any]) -> torch.device:
        """Where `average` gets them."""
        return gradients[0].device  # type: ignore[no-any-return]

    def averaged(self, gradients: Sequence[Any], average: Average) -> Sequence[Any]:
        """What `average` makes of them; that may overwrite its results when it is next called."""
        # Tensors of their own, that nobody else holds. Keras copies what it keeps of averages.
        return average([gradient.detach() for gradient in gradients])


class OfTensorFlow(Crossing):
    """Through numpy's arrays, on the CPU: TensorFlow copies gradients of a GPU to it and back.

    Gradients are not copied, and averages once: TensorFlow takes an array as it is, as a tensor
    that nobody may change.
    """

    def check(self) -> None:
        import tensorflow as tf
        from tensorflow.python.ops import control_flow_util

        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise ConfigError(
                "gw.keras: XLA compiles this step, and cannot call gradwire: give model.compile, "
                'or your tf.function, jit_compile=False (the default, "auto", compiles on a GPU)'
            )
        if tf.distribute.get_strategy().num_replicas_in_sync > 1:
            raise ConfigError(
                f"gw.keras: {type(tf.distribute.get_strategy()).__name__} has several replicas in "
                "this process: start a process per replica, without tf.distribute"
            )

    def untraced(self, function: Callable[..., Any]) -> Callable[..., Any]:
        import tensorflow as tf

        plain: Callable[..., Any] = tf.autograph.experimental.do_not_convert(function)
        return plain

    @contextlib.contextmanager
    def attaching(self) -> Iterator[None]:
        """DDP loads triton where that is installed, and a second LLVM after TensorFlow's ends the
        process."""
        if "triton" in sys.modules:
            yield
            return
        sys.modules["triton"] = None  # type: ignore[assignment]  # as if it were not installed
        try:
            yield
        finally:
            del sys.modules["triton"]

    def device(self, gradients: Sequence[Any]) -> torch.device:
        return torch.device("cpu")

    def averaged(self, gradients: Sequence[Any], average: Average) -> Sequence[Any]:
        import tensorflow as tf

        def run(*arrays: np.ndarray) -> list[np.ndarray]:
            with _with_subnormals():
                found = average([_to_torch(array) for array in arrays])
            return [
                _to_numpy(one.clone(), array.dtype)
                for one, array in zip(found, arrays, strict=True)
            ]

        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        found: Any = tf.numpy_function(run, dense, [gradient.dtype for gradient in dense])
        if not isinstance(found, (list, tuple)):
            found = [found]
        for one, gradient in zip(found, dense, strict=True):
            one.set_shape(gradient.shape)  # which a graph forgets
        every: Sequence[Any] = found
        return every


@contextlib.contextmanager
def _with_subnormals() -> Iterator[None]:
    """TensorFlow's threads take subnormal numbers for zero, and threads made there do, too; other
    ranks may decode the same payload in another thread, and would then have other averages."""
    flushes = sys.float_info.min / 2 == 0.0
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(flushes)


# torch does not know numpy's bfloat16, which is a package's.
def _to_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _to_numpy(tensor: torch.Tensor, dtype: np.dtype) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(dtype)
    return tensor.numpy()


CROSSINGS: dict[str, Crossing] = {"tensorflow": OfTensorFlow(), "torch": Crossing()}
