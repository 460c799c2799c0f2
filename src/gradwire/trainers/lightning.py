"""`gw.lightning`: a callback for Lightning's Trainer, and the state for Fabric's checkpoints.

Trainer(strategy="ddp", callbacks=[gw.lightning.GradwireCallback("qsgd:bits=4")])
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradwire.handles.handle import Handle
from gradwire.trainers.state import Compression, Makes, warn_of_none

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as missing:
    try:  # the same code under its other name
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise ImportError(
            f'gw.lightning needs Lightning ({missing}): pip install "gradwire[lightning]"'
        ) from missing


class GradwireCallback(Callback):
    """Compresses the gradients of `trainer.fit` (DDP; FSDP2 by ModelParallelStrategy).

    It attaches when the strategy has wrapped the model, detaches at the end of fit, logs
    `handle.metrics()` every `log_every_n_steps` steps as "gradwire/...", and keeps the state of all
    ranks, residuals among it, in the trainer's checkpoints, for any number of ranks.

    Args:
        codec, options: as in `gw.attach`; or partial(gw.outer, every=100).

    Raises:
        ConfigError: as `gw.attach`, at the start of fit.
    """

    def __init__(self, codec: Makes = "qsgd", **options: Any) -> None:
        self._compression = Compression(codec, options)
        self._fits = self._resumed = False
        self._logged = 0  # the step

    @property
    def handle(self) -> Handle | None:
        """Of the present fit, or the last one; None before it."""
        return self._compression.handle

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._fits, self._resumed, self._logged = stage == "fit", False, 0
        if self._fits:
            self._compression.begin()

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._compression.attach(trainer.strategy.model, *trainer.optimizers[:1])

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        handle = self.handle
        if trainer.ckpt_path and handle is not None and handle.world_size > 1 and not self._resumed:
            warn_of_none(trainer.ckpt_path)

    def on_train_batch_end(self, trainer: Any, *others: Any) -> None:
        every, handle, step = trainer.log_every_n_steps, self.handle, trainer.global_step
        if handle is None or not (trainer.loggers and trainer.is_global_zero and every):
            return
        if step % every == 0 and step != self._logged:  # batches may be accumulated
            self._logged = step
            found = handle.metrics(prefix="gradwire/")
            for logger in trainer.loggers:
                logger.log_metrics(found, step=step - 1)  # as Lightning counts what it logs

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._compression.detach()

    def state_dict(self) -> dict[str, Any]:
        return self._compression.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        if self._fits:  # validate and test load callbacks, too
            self._resumed = True
            self._compression.load_state_dict(state_dict)


def state(handle: Handle) -> Compression:
    """The state of all ranks, for Fabric's checkpoints; every rank saves and loads, as always:

    fabric.save(path, {"model": fabric_module, "gradwire": gw.lightning.state(handle)})
    gw.lightning.load(fabric, path, {"model": ..., "gradwire": gw.lightning.state(handle)})
    """
    return Compression(handle=handle)


def load(fabric: Any, path: Any, state: dict[str, Any], **options: Any) -> dict[str, Any]:
    """`fabric.load`, which leaves out what `state` returned where checkpoints are sharded (FSDP2 by
    ModelParallelStrategy).

    Args:
        path, state, options: as of `fabric.load`; what it returns is returned.

    Raises:
        ConfigError: as `Handle.load_state_dict`.
    """
    given = {key: one for key, one in state.items() if isinstance(one, Compression)}
    rest: dict[str, Any] = fabric.load(path, state, **options)
    for key, one in given.items():
        if state[key] is not one:  # Fabric has put there what was saved
            found, state[key] = state[key], one
            one.load_state_dict(found)
    return rest
