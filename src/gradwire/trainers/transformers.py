"""`gw.transformers`: compress the gradients of Hugging Face's Trainer.

trainer = Trainer(model, args, train_dataset=data)
gw.transformers.compress(trainer, "qsgd:bits=4")
trainer.train()
"""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from gradwire.errors import ConfigError
from gradwire.handles.handle import Handle
from gradwire.trainers.state import FILE, Compression, Makes, read, write

try:
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint
except ModuleNotFoundError as error:
    raise ImportError(
        f'gw.transformers needs Transformers ({error}): pip install "gradwire[transformers]"'
    ) from error


class CompressionCallback(TrainerCallback):
    """What `compress` adds to a trainer."""

    def __init__(self, trainer: Trainer, compression: Compression) -> None:
        self._trainer = trainer
        self._compression = compression
        self.resumes: str | bool | None = None  # of the present call of trainer.train

    @property
    def handle(self) -> Handle | None:
        """Of the present training, or the last one; None before it."""
        return self._compression.handle

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compression.begin()
        folder = get_last_checkpoint(args.output_dir) if self.resumes is True else self.resumes
        if folder:
            self._compression.load_state_dict(read(os.path.join(folder, FILE)))
        self._compression.attach(self._trainer.model_wrapped, self._trainer.optimizer)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.save_only_model:
            return
        found = self._compression.state_dict()  # on every rank
        if found and args.should_save:
            folder = os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
            if os.path.isdir(folder):  # a trial of a hyperparameter search has another
                write(found, os.path.join(folder, FILE))
        self._trainer.accelerator.wait_for_everyone()  # else a rank may resume from half of it

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._compression.detach()


def compress(trainer: Trainer, codec: Makes = "qsgd", **options: Any) -> CompressionCallback:
    """Compress what every later `trainer.train()` synchronises (DDP, or FSDP2).

    The state of all ranks is in `checkpoint-N/gradwire.pt`, which
    `trainer.train(resume_from_checkpoint=...)` loads at any number of ranks. What the trainer logs
    of training has `handle.metrics()` of rank 0, as "gradwire/...".

    Args:
        codec, options: as in `gw.attach`; or partial(gw.outer, every=100).

    Returns:
        The callback, whose `handle` is that of the present training.

    Raises:
        ConfigError: `trainer` is none, or compresses already. Within `trainer.train`: as
            `gw.attach`.
    """
    if not isinstance(trainer, Trainer):
        raise ConfigError(
            f"gw.transformers.compress: trainer={trainer!r:.60}: give the Trainer, before its model"
        )
    if any(isinstance(one, CompressionCallback) for one in trainer.callback_handler.callbacks):
        raise ConfigError(
            "gw.transformers.compress: this trainer compresses already: call "
            "trainer.remove_callback with what the first call returned, then this one again"
        )
    callback = CompressionCallback(trainer, Compression(codec, options))
    trainer.add_callback(callback)
    train, signature, log = trainer.train, inspect.signature(trainer.train), trainer.log

    @functools.wraps(train)
    def resuming(*args: Any, **kwargs: Any) -> Any:  # callbacks are not told where it resumes
        given = signature.bind(*args, **kwargs).arguments
        callback.resumes = given.get("resume_from_checkpoint")
        return train(*args, **kwargs)

    @functools.wraps(log)
    def logging(logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        handle, trains = callback.handle, "loss" in logs  # else an evaluation, or the summary
        here = trains and trainer.is_world_process_zero()
        if here and handle is not None and handle._reductions.installed:
            logs.update(handle.metrics(prefix="gradwire/"))
        return log(logs, *args, **kwargs)  # on_log is too late: loggers are called before it

    trainer.train, trainer.log = resuming, logging
    return callback
