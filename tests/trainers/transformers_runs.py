"""`gw.transformers`: Hugging Face's Trainer, and its checkpoints."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
import transformers
from trained import (
    BATCHES,
    CODEC,
    DEVICE,
    HOW,
    OUTER,
    as_a_job_of_its_own,
    as_under_torchrun,
    compressed,
    data,
    exact,
    met,
    net,
    read,
)

import gradwire as gw
from ranks import refuses
from training import flat, same_everywhere


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.net(x).square().mean()}


class AtStart(transformers.TrainerCallback):
    """Looks at the handle before the first step: the checkpoint has been loaded."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.full: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.full = self.of.handle.full_state_dict()


class Logger(transformers.TrainerCallback):
    """One of the trainer's, which are called before any that is added later."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logged.append(dict(logs))


def made(
    folder: Path, epochs: int = 2, rows: Any = None, method: Any = CODEC, **options: Any
) -> tuple[Any, Any, AtStart]:
    """A trainer, its callback, and what looks at it."""
    args = transformers.TrainingArguments(
        output_dir=str(folder), num_train_epochs=epochs, per_device_train_batch_size=4,
        use_cpu=DEVICE == "cpu", lr_scheduler_type="constant", report_to=[], disable_tqdm=True,
        save_strategy="epoch", logging_steps=2, **{"ddp_backend": "gloo", **options},
    )  # fmt: skip
    rows = [{"x": x} for x in (data() if rows is None else rows)]
    trainer = transformers.Trainer(Model(), args, train_dataset=rows, callbacks=[Logger()])
    callback = gw.transformers.compress(trainer, method, **(HOW if method == CODEC else {}))
    start = AtStart(callback)
    trainer.add_callback(start)
    return trainer, callback, start


def trains_and_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, to the same bits as a run that went on."""
    as_under_torchrun(rank)
    whole, callback, _ = made(folder)
    whole.train()
    compressed(callback.handle)
    assert same_everywhere(flat(whole.model))
    _logs_have_metrics(whole, rank)
    half = folder / f"checkpoint-{BATCHES}"
    saved = read(half / "gradwire.pt")
    again, _, start = made(folder)
    again.train(resume_from_checkpoint=str(half))
    exact(start.full, saved)
    assert torch.equal(flat(again.model), flat(whole.model))
    # The newest, at the end of epoch 2, and one more epoch; then anew.
    newest, callback, start = made(folder, epochs=3, save_only_model=True)
    newest.train(resume_from_checkpoint=True)
    exact(start.full, read(folder / f"checkpoint-{2 * BATCHES}" / "gradwire.pt"))
    assert callback.handle.stats()["steps"] == BATCHES
    assert not (folder / f"checkpoint-{3 * BATCHES}" / "gradwire.pt").exists()
    newest.train()
    assert not start.full["ranks"][0]["aggregators"]


def replicas_train_and_resume(rank: int, folder: Path) -> None:
    """Each is a job of its own to the trainer, and saves for itself."""
    as_a_job_of_its_own()
    of = folder / f"replica{rank}", 3, data()[rank::2], OUTER
    whole, _, _ = made(*of, ddp_backend=None)
    whole.train()
    half = folder / f"replica{rank}" / f"checkpoint-{BATCHES}"
    again, callback, _ = made(*of, ddp_backend=None)
    again.train(resume_from_checkpoint=str(half))
    met(again.model, whole.model, callback.handle)


def _logs_have_metrics(trainer: Any, rank: int) -> None:
    """Of rank 0 in what is logged of training, for every logger and in the trainer's history."""
    logger = next(one for one in trainer.callback_handler.callbacks if isinstance(one, Logger))
    for logged in (logger.logged, trainer.state.log_history):
        steps = [row for row in logged if "loss" in row]
        assert len(steps) == len(logged) - 1 == BATCHES  # and the summary of the training
        for row in logged:
            found = {key for key in row if key.startswith("gradwire/")}
            assert ("gradwire/ratio" in found) == bool(found) == (rank == 0 and "loss" in row)
    if rank == 0:
        assert logger.logged[0]["gradwire/ratio"] > 4
        assert "gradwire/nmse" in logger.logged[1]


def a_checkpoint_without_gradwire_warns(rank: int, folder: Path) -> None:
    plain = folder / "plain" / f"checkpoint-{BATCHES}"
    if rank == 0:
        shutil.copytree(folder / f"checkpoint-{BATCHES}", plain)
        (plain / "gradwire.pt").unlink()
    dist.barrier()
    trainer, _, start = made(folder / "plain", ignore_data_skip=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=str(plain))
    assert any("residuals start at zero" in str(one.message) for one in caught)
    refuses("this trainer compresses already", lambda: gw.transformers.compress(trainer))
    refuses("give the Trainer", lambda: gw.transformers.compress(trainer.model))
    assert not start.full["ranks"][0]["aggregators"]


def the_backend_is_of_a_group_that_is_made_first(rank: int, folder: Path) -> None:
    """Accelerate and the Trainer refuse its name, and take the group. The last check: it leaves
    another group behind."""
    as_under_torchrun(rank)
    size, store = dist.get_world_size(), f"file://{folder}/group"
    dist.destroy_process_group()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    dist.init_process_group("gradwire", init_method=store, rank=rank, world_size=size)
    accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu")
    model = accelerator.prepare(net())
    accelerator.backward(model(data()[rank::size].to(DEVICE)).square().mean())
    args = transformers.TrainingArguments(
        str(folder / "backend"), max_steps=1, use_cpu=DEVICE == "cpu", report_to=[],
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = transformers.Trainer(Model(), args, train_dataset=[{"x": x} for x in data()])
    trainer.train()
    group: Any = dist.group.WORLD
    assert [handle.stats()["steps"] for handle in group.models.handles.values()] == [1, 1]
    assert all(handle.stats()["ratio"] > 4 for handle in group.models.handles.values())
