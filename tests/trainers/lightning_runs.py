"""`gw.lightning`: Lightning's Trainer with DDP and FSDP2, and Fabric's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from trained import (
    CODEC,
    DEVICE,
    HOW,
    OUTER,
    as_a_job_of_its_own,
    as_under_torchrun,
    batches,
    cluster,
    compressed,
    data,
    exact,
    met,
    net,
    read,
    same_sum,
)

import gradwire as gw
from ranks import caught, refuses
from training import flat, same_everywhere


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


def fit(
    folder: Path, module: Any, epochs: int, resumes: Any = None, strategy: Any = "ddp",
    accumulate: int = 1,
) -> Any:  # fmt: skip
    callback = gw.lightning.GradwireCallback(CODEC, **HOW)
    start, logger = AtStart(callback), Logger()
    trainer = L.Trainer(
        **cluster(), strategy=strategy, max_epochs=epochs,
        callbacks=[callback, start], logger=logger, log_every_n_steps=2, default_root_dir=folder,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        accumulate_grad_batches=accumulate,
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
    assert same_everywhere(flat(module))
    assert "trainer.strategy.model in on_fit_start" in str(start.refused)
    steps = [step for step, found in logger.logged if "gradwire/ratio" in found]
    assert steps == ([1] if rank == 0 else [])
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


def replicas_train_and_resume(rank: int, folder: Path) -> None:
    """Each is a job of its own to Lightning, and saves for itself."""
    as_a_job_of_its_own()
    loader = torch.utils.data.DataLoader(data()[rank::2], batch_size=4)

    def fitted(epochs: int, resumes: Any = None) -> Any:
        module, callback = Module(), gw.lightning.GradwireCallback(OUTER)
        trainer = L.Trainer(
            accelerator=DEVICE, devices=1, max_epochs=epochs, callbacks=[callback], logger=False,
            enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        )  # fmt: skip
        trainer.fit(module, loader, ckpt_path=resumes)
        return trainer, module, callback.handle

    trainer, *_ = fitted(1)
    trainer.save_checkpoint(folder / f"replica{rank}.ckpt")
    _, again, outer = fitted(3, folder / f"replica{rank}.ckpt")
    met(again, fitted(3)[1], outer)


def fabric_saves_all_ranks(rank: int, folder: Path) -> None:
    as_under_torchrun(rank)
    fabric = L.Fabric(**cluster(), strategy="ddp")
    fabric.launch()

    def made() -> tuple[Any, Any, gw.Handle]:
        bare = net()
        model, optimizer = fabric.setup(bare, torch.optim.SGD(bare.parameters(), lr=0.1))
        return model, optimizer, gw.attach(model, CODEC, **HOW)

    model, optimizer, handle = made()
    for batch in batches():
        fabric.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    compressed(handle)
    assert same_everywhere(flat(model))
    wrong = folder / "wrong.ckpt", {"gradwire": handle}
    refuses("gw.lightning.state(handle)", lambda: fabric.save(*wrong))
    fabric.save(folder / "fabric.ckpt", {"model": model, "gradwire": gw.lightning.state(handle)})
    model, optimizer, again = made()
    state = {"model": model, "gradwire": gw.lightning.state(again)}
    gw.lightning.load(fabric, folder / "fabric.ckpt", state)
    exact(again.full_state_dict(), read(folder / "fabric.ckpt")["gradwire"])


def fabric_loads_shards(rank: int, folder: Path) -> None:
    """FSDP2's checkpoints put what was saved in the place of what is to load it."""
    as_under_torchrun(rank)

    def sharded(model: Any, mesh: Any) -> Any:
        return torch.distributed.fsdp.fully_shard(model, mesh=mesh["data_parallel"])

    fabric = L.Fabric(
        **cluster(),
        strategy=L.fabric.strategies.ModelParallelStrategy(
            sharded, data_parallel_size=2, tensor_parallel_size=1, process_group_backend="gloo"
        ),
    )  # fmt: skip
    fabric.launch()

    def made() -> dict[str, Any]:
        model = fabric.setup(net())
        handle = gw.attach(model, CODEC, **HOW)
        return {"model": model, "gradwire": gw.lightning.state(handle)}

    state = made()
    fabric.backward(state["model"](data()[rank::2].to(DEVICE)).square().mean())
    compressed(state["gradwire"].handle)
    fabric.save(folder / "fabric-shards", state)
    state = made()
    gradwire = state["gradwire"]
    gw.lightning.load(fabric, folder / "fabric-shards", state)
    assert state["gradwire"] is gradwire
    exact(gradwire.handle.full_state_dict(), read(folder / "fabric-shards" / "meta.pt")["gradwire"])


def batches_accumulate_and_a_checkpoint_may_lack_gradwire(rank: int, folder: Path) -> None:
    """A step's numbers are logged once; residuals that are missing are told."""
    as_under_torchrun(rank)
    plain = L.Trainer(
        **cluster(), strategy="ddp", max_steps=1, logger=False,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(data(), batch_size=4)
    plain.fit(Module(), loader)
    plain.save_checkpoint(folder / "plain.ckpt")
    with pytest.warns(UserWarning, match="nothing of gradwire is there: residuals start at zero"):
        fit(folder, Module(), 2, folder / "plain.ckpt")
    _, _, _, logger = fit(folder, Module(), 2, accumulate=2)  # three batches, two steps an epoch
    steps = [step for step, found in logger.logged if "gradwire/ratio" in found]
    assert steps == ([1, 3] if rank == 0 else [])
