"""examples/torchtitan_trainer.py: a small Llama, and checkpoints.

torchtitan is for GPUs. Here it is told that the CPU is one, and has neither a monitor of its memory
nor a barrier that names a device.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trained import as_under_torchrun, compressed

from ranks import one_by_one

EXAMPLE = Path(__file__).parents[2] / "examples" / "torchtitan_trainer.py"
MEMORY = SimpleNamespace(
    device_name="CPU",
    reset_peak_stats=lambda: None,
    get_peak_stats=lambda: SimpleNamespace(
        max_active_gib=0.0, max_active_pct=0.0, max_reserved_gib=0.0, max_reserved_pct=0.0,
        num_alloc_retries=0, num_ooms=0,
    ),
)  # fmt: skip


def on_the_cpu() -> None:
    torch._utils._get_available_device_type = lambda: "cpu"
    from torchtitan.components import metrics
    from torchtitan.distributed import utils

    metrics.build_device_memory_monitor = lambda: MEMORY
    utils.set_pg_timeouts = lambda **_: None


class Batches:
    """Random tokens: of each step and rank the same."""

    def __init__(self, rank: int) -> None:
        self.rank, self.step = rank, 0

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.step += 1
            draw = torch.Generator().manual_seed(1000 * self.step + self.rank)
            tokens = torch.randint(0, 256, (2, 33), generator=draw)
            yield {"input": tokens[:, :-1]}, tokens[:, 1:]

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def config_of_02(folder: Path) -> Any:
    from torchtitan.config import JobConfig
    from torchtitan.models import llama3
    from torchtitan.protocols.train_spec import _extra_train_specs as known
    from torchtitan.protocols.train_spec import register_train_spec

    if "small" not in known:
        args = llama3.TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=256)
        spec = replace(
            llama3.get_train_spec(),
            model_args={"small": args},
            build_tokenizer_fn=None,
            build_dataloader_fn=lambda dp_rank, **_: Batches(dp_rank),
        )
        register_train_spec("small", spec)
    config = JobConfig()
    config.job.dump_folder = str(folder)
    config.model.name, config.model.flavor = "small", "small"
    config.activation_checkpoint.mode = "none"
    return config


def config_of_03(folder: Path) -> Any:
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import config_registry, model_registry

    config = config_registry.llama3_debugmodel()
    config.model_spec = model_registry("debugmodel")
    for layer in config.model_spec.model.layers:  # flex attention has no backward on the CPU
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=2048)
    config.dump_folder = str(folder)
    config.tokenizer = SimpleNamespace(build=lambda **_: None)
    config.dataloader = SimpleNamespace(build=lambda dp_rank, **_: Batches(dp_rank))
    config.activation_checkpoint = None
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a newer torch
    return config


def trained(trainer: type[Any], folder: Path, resumes_from: int = -1) -> Any:
    new = importlib.util.find_spec("torchtitan.trainer") is not None
    config = config_of_03(folder) if new else config_of_02(folder)
    config.training.steps, config.training.seq_len, config.training.local_batch_size = 4, 32, 2
    config.training.mixed_precision_param = "float32"
    config.checkpoint.enable, config.checkpoint.interval = True, 2
    config.checkpoint.last_save_model_only = False
    config.checkpoint.load_step = resumes_from
    config.debug.seed = 0
    made = trainer(config)
    made.train()
    made.close()
    return made


def trains_and_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, to the same bits as a run that went on."""
    as_under_torchrun(rank)
    os.environ["LOCAL_RANK"] = "0"  # the CPU has one device
    on_the_cpu()
    trainer = runpy.run_path(str(EXAMPLE))["CompressedTrainer"]
    whole = trained(trainer, folder)
    compressed(whole.handle)
    dist.barrier()
    resumed = trained(trainer, folder, resumes_from=2)
    assert resumed.handle.stats()["steps"] == 2
    for was, now in zip(*(t.model_parts[0].parameters() for t in (whole, resumed)), strict=True):
        assert torch.equal(was.to_local(), now.to_local())
    states = [t.handle.state_dict()["aggregators"] for t in (whole, resumed)]
    for name, kept in states[0].items():
        assert torch.equal(kept["residual"], states[1][name]["residual"])


@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="no torchtitan")
def test_checkpoints_of_torchtitan_have_all_ranks(tmp_path: Path) -> None:
    one_by_one(2, [trains_and_resumes], tmp_path)
