"""`gw.keras`, on the backend that KERAS_BACKEND names: each check imports Keras itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trained import (
    BATCHES,
    CODEC,
    as_under_torchrun,
    compressed,
    data,
    exact,
    read,
)

import gradwire as gw
from ranks import raises, refuses
from training import same_everywhere

SHAPES = {"a/kernel": (64, 64), "a/bias": (64,), "b/kernel": (64, 64), "b.c/bias": (64,)}
PATHS = ["net/a/kernel", "a/bias", "net/part/b/kernel", "b.c/bias"]


def variables(dtype: str = "float32") -> list[Any]:
    import keras

    made = [keras.Variable(np.zeros(shape), dtype=dtype) for shape in SHAPES.values()]
    for variable, path in zip(made, PATHS, strict=True):
        variable._path = path
    return made


def gradients(rank: int, step: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=made) for shape in SHAPES.values()]


def given(gradient: torch.Tensor, dtype: str = "float32") -> Any:
    import keras

    return keras.ops.convert_to_tensor(gradient.numpy(), dtype=dtype)


def sgd(**options: Any) -> Any:
    import keras

    return gw.keras.DistributedOptimizer(
        keras.optimizers.SGD(1.0, **options), CODEC, error_feedback=True
    )


def numbers(of: list[Any]) -> torch.Tensor:
    import keras

    found = [keras.ops.convert_to_numpy(keras.ops.cast(one, "float32")) for one in of]
    return torch.cat([torch.from_numpy(np.array(one)).flatten() for one in found])


class Weights(torch.nn.Module):
    """The same as a torch model, whose gradients are what it is given."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
            value = torch.nn.Parameter(torch.zeros(shape, dtype=dtype))
            self._parameters[name] = value

    def forward(self, gradients: list[torch.Tensor]) -> torch.Tensor:
        products = zip(self.parameters(), gradients, strict=True)
        return torch.stack([(p * g).sum() for p, g in products]).sum()


def averages_are_torchs(rank: int, folder: Path) -> None:
    """To the bit, in each dtype: what the optimizer gets, and so the weights, and residuals."""
    for name in ("float32", "bfloat16", "float16"):
        dtype = getattr(torch, name)
        model = DistributedDataParallel(Weights(dtype))
        handle = gw.attach(model, CODEC, error_feedback=True)
        optimizer, ours = sgd(), variables(name)
        for step in range(3):
            made = [gradient.to(dtype) for gradient in gradients(rank, step)]
            model(made).backward()
            optimizer.apply([given(one.float(), name) for one in made], ours)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad
                    parameter.grad = None
            assert torch.equal(
                numbers(ours), torch.cat([p.float().flatten() for p in model.parameters()])
            )
        mine, theirs = gw.keras.handle(optimizer).full_state_dict(), handle.full_state_dict()
        exact(mine, theirs)
        if name == "float32":
            compressed(gw.keras.handle(optimizer))
        handle.detach()


def model(seed: int = 0, **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(seed)
    made = keras.Sequential(
        [
            keras.layers.Dense(64, activation="tanh", name="a"),
            keras.layers.Dense(64, name="b"),
        ],
        name="net",
    )
    made.build((None, 64))
    made.compile(sgd(), "mse", jit_compile=False, **options)
    made.optimizer.learning_rate = 0.1
    return made


def fit(of: Any, epochs: int = 1) -> None:
    mine = data().view(BATCHES, dist.get_world_size(), 4, 64)[:, dist.get_rank()].reshape(-1, 64)
    x = mine.numpy()
    of.fit(
        x, np.tanh(x), batch_size=4, epochs=epochs, shuffle=False, verbose=0,
        callbacks=[gw.keras.BroadcastCallback()],
    )  # fmt: skip


def trains_and_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, to the same bits as a run that went on."""
    as_under_torchrun(rank)
    import keras

    first = model(seed=rank)  # rank 0's weights count
    fit(first)
    compressed(gw.keras.handle(first.optimizer))
    assert same_everywhere(numbers(first.weights))
    gw.keras.save(first.optimizer, folder / "gradwire.pt")
    if rank == 0:
        first.save(folder / "model.keras")
    dist.barrier()
    saved = read(folder / "gradwire.pt")
    fit(first)
    # It is Keras' own optimizer.
    again = keras.models.load_model(folder / "model.keras")
    assert isinstance(again.optimizer, keras.optimizers.SGD)
    assert "apply" not in vars(again.optimizer)
    gw.keras.DistributedOptimizer(again.optimizer, CODEC, error_feedback=True)
    gw.keras.load(again.optimizer, folder / "gradwire.pt")
    fit(again)
    assert torch.equal(numbers(again.weights), numbers(first.weights))
    gw.keras.load(again.optimizer, folder / "gradwire.pt")
    exact(gw.keras.handle(again.optimizer).full_state_dict(), saved)


def odd_steps(rank: int, folder: Path) -> None:
    import keras

    # A variable without a gradient is left alone, in every step.
    first, second = sgd(), sgd()  # two at once
    ours, others = variables(), variables()
    made = [given(one) for one in gradients(rank, 0)]
    first.apply([None, *made[1:]], ours)
    second.apply(made, others)
    assert not numbers(ours[:1]).any()
    assert numbers(ours[1:]).all()
    assert same_everywhere(numbers(ours))
    refuses("first step: a/kernel: make a new optimizer", lambda: first.apply(made, ours))
    # Where one rank's gradients are not finite, none steps.
    inner = keras.optimizers.SGD(1.0)
    scaling = gw.keras.DistributedOptimizer(
        keras.optimizers.LossScaleOptimizer(inner, initial_scale=4.0), CODEC
    )
    ours = variables()
    broken = [made[0] * float("inf") if rank == 0 else made[0], *made[1:]]
    scaling.apply(broken, ours)
    assert not numbers(ours).any()
    assert float(scaling.dynamic_scale) == 2.0
    scaling.apply(made, ours)
    assert numbers(ours).any()
    assert same_everywhere(numbers(ours))


def what_is_refused(rank: int, folder: Path) -> None:
    import keras

    optimizer = sgd()
    refuses("averages already", lambda: gw.keras.DistributedOptimizer(optimizer))
    refuses("optimizer of Keras 3", lambda: gw.keras.DistributedOptimizer("adam"))
    refuses("before the optimizer's first step", lambda: gw.keras.handle(optimizer))
    refuses("does not average", lambda: gw.keras.handle(keras.optimizers.SGD()))
    made, ours = [given(one) for one in gradients(rank, 0)], variables()
    scaling = keras.optimizers.LossScaleOptimizer(sgd())
    refuses("LossScaleOptimizer", lambda: scaling.apply(made, ours))
    unlike = model()
    unlike.optimizer = keras.optimizers.SGD()  # as that of a copied model
    refuses("model.optimizer does not average", lambda: fit(unlike))
    other = folder / f"other{rank}"
    other.write_bytes(b"PK no checkpoint")
    refuses(f"other{rank}: not a file that", lambda: gw.keras.load(optimizer, other))
    momentum = gw.keras.DistributedOptimizer(keras.optimizers.SGD(momentum=0.9), "dgc")
    refuses("momentum already", lambda: momentum.apply(made, ours))
    wrapped, alike = model(), sgd()
    wrapped.ddp_model = wrapped.optimizer  # as later versions of Keras do on torch
    refuses("model.ddp_model", lambda: _step(wrapped, lambda: alike.apply(made, ours)))
    backend = keras.backend.backend
    try:
        keras.backend.backend = lambda: "jax"
        refuses("runs on jax", lambda: gw.keras.DistributedOptimizer(optimizer))
    finally:
        keras.backend.backend = backend


def tensorflow_alone(rank: int, folder: Path) -> None:
    import keras
    import tensorflow as tf

    # XLA is refused while the step is traced.
    compiled = model()
    compiled.jit_compile = True
    refuses("jit_compile=False", lambda: fit(compiled))
    # Sparse gradients are made dense.
    table = keras.Variable(np.zeros((8, 4)), name="table")
    rows = tf.IndexedSlices(tf.ones((2, 4)), tf.constant([rank, 7]), tf.constant([8, 4]))
    gw.keras.DistributedOptimizer(keras.optimizers.SGD(1.0), None).apply([rows], [table])
    expected = torch.zeros(8, 4)
    expected[:2], expected[7] = -0.5, -1.0
    assert torch.equal(numbers([table]), expected.flatten())
    # What fails within a graph is raised itself. There, subnormal numbers are no zeros.
    failing = model()
    averaging = failing.optimizer.apply
    average, halves = averaging._average, []

    def noting(gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        halves.append(sys.float_info.min / 2)
        return average(gradients)

    averaging._average = noting
    fit(failing)
    assert halves
    assert all(halves)
    gw.keras.handle(failing.optimizer).observe(_fails)
    raises(ZeroDivisionError, lambda: fit(failing))


def _fails(observation: Any) -> None:
    raise ZeroDivisionError


def alone(rank: int, folder: Path) -> None:
    """A single process: nothing is sent."""
    optimizer, ours = sgd(), variables()
    made = gradients(rank, 0)
    optimizer.apply([given(one) for one in made], ours)
    assert torch.equal(numbers(ours), torch.cat([-one.flatten() for one in made]))
    assert gw.keras.handle(optimizer).stats()["wire_bytes"] == 0


def _step(self: Any, run: Any) -> None:
    """As a method of `self`."""
    run()
