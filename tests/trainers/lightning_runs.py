"""`gw.lightning`: Lightning's Trainer with DDP and FSDP2, and Fabric's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from trained import (
    BATCHES,
    CODEC,
    as_under_torchrun,
    compressed,
    data,
    exact,
    flat,
    net,
    read,
    replicas_alike,
    same_sum,
)

import gradwire as gw
from ranks import caught


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Sharded(Module):
    def configure_model(self) -> None:
        if not isinstance(self.net, torch.distributed.fsdp.FSDPModule):
            torch.distributed.fsdp.fully_shard(self.net, mesh=self.device_mesh["data_parallel"])


class AtStart(L.Callback):
    """Looks at the handle when training begins: the checkpoint has been loaded."""

    def __init__(self, of: Any) -> None:
        self.of = of
        self.full: Any = None
        self.refused: BaseException | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.full = self.of.handle.full_state_dict()
        self.refused = caught(lambda: gw.attach(pl_module))


class Logger(L.pytorch.loggers.logger.DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.logged.append((step, metrics))


def fit(folder: Path, module: Any, epochs: int, resumes: Any = None, strategy: Any = "ddp") -> Any:
    callback = gw.lightning.GradwireCallback(CODEC, error_feedback=True)
    start, logger = AtStart(callback), Logger()
    trainer = L.Trainer(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, max_epochs=epochs,
        callbacks=[callback, start], logger=logger, log_every_n_steps=2, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data(), batch_size=4)  # Lightning adds the sampler
    trainer.fit(module, loader, ckpt_path=resumes)
    return trainer, callback, start, logger


def of_callback(path: Path) -> Any:
    return read(path)["callbacks"]["GradwireCallback"]


def trains_and_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, to the same bits as a run that went on."""
    as_under_torchrun(rank)
    whole = Module()
    fit(folder, whole, 2)
    module = Module()
    trainer, callback, start, logger = fit(folder, module, 1)
    compressed(callback.handle)
    replicas_alike(flat(module))
    assert "trainer.strategy.model in on_fit_start" in str(start.refused)
    steps = [step for step, found in logger.logged if "gradwire/ratio" in found]
    assert steps == ([2] if rank == 0 else [])
    trainer.save_checkpoint(folder / "of_two.ckpt")  # after fit, when the handle is detached
    saved = of_callback(folder / "of_two.ckpt")
    again = Module()
    _, resumed, start, _ = fit(folder, again, 2, folder / "of_two.ckpt")
    exact(start.full, saved)
    assert torch.equal(flat(again), flat(whole))
    # What validate and test load is not for a later fit.
    resumed.setup(trainer, again, "test")
    resumed.load_state_dict(saved)
    assert resumed.handle.state_dict()["steps"] != saved["ranks"][rank]["steps"]


def resumes_on_three(rank: int, folder: Path) -> None:
    as_under_torchrun(rank)
    _, callback, start, _ = fit(folder, Module(), 2, folder / "of_two.ckpt")
    same_sum(start.full, of_callback(folder / "of_two.ckpt"))
    compressed(callback.handle)


def shards_and_resumes(rank: int, folder: Path) -> None:
    """FSDP2, whose checkpoint is loaded after the handle is attached."""
    as_under_torchrun(rank)

    def strategy() -> Any:
        return L.pytorch.strategies.ModelParallelStrategy(
            data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        )

    module = Sharded()
    trainer, callback, _, _ = fit(folder, module, 1, strategy=strategy())
    compressed(callback.handle)
    trainer.save_checkpoint(folder / "shards.ckpt")
    _, _, start, _ = fit(folder, Sharded(), 2, folder / "shards.ckpt", strategy())
    exact(start.full, of_callback(folder / "shards.ckpt" / "meta.pt"))


def fabric_saves_all_ranks(rank: int, folder: Path) -> None:
    as_under_torchrun(rank)
    fabric = L.Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy="ddp")
    fabric.launch()

    def made() -> tuple[Any, Any, gw.Handle]:
        bare = net()
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        return model, optimizer, gw.attach(model, CODEC, error_feedback=True)

    model, optimizer, handle = made()
    for batch in data().view(BATCHES, dist.get_world_size(), 4, 64):
        fabric.backward(model(batch[rank]).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    compressed(handle)
    replicas_alike(flat(model))
    error = caught(lambda: fabric.save(folder / "wrong.ckpt", {"gradwire": handle}))
    assert isinstance(error, gw.ConfigError), error
    assert "gw.lightning.state(handle)" in str(error)
    fabric.save(folder / "fabric.ckpt", {"model": model, "gradwire": gw.lightning.state(handle)})
    model, optimizer, again = made()
    fabric.load(folder / "fabric.ckpt", {"model": model, "gradwire": gw.lightning.state(again)})
    exact(again.full_state_dict(), read(folder / "fabric.ckpt")["gradwire"])
