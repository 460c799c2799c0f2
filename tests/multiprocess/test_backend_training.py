"""Unmodified scripts on the backend train to the loss that gloo gives, and send far less."""

from __future__ import annotations

import runpy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from products import EXHAUSTIVE
from ranks import as_processes

pytestmark = pytest.mark.multiprocess

EXAMPLES = Path(__file__).parents[2] / "examples"
SEEDS = range(3)


def losses(rank: int, script: str) -> tuple[list[float], dict[str, Any] | None]:
    """The script's last loss per seed, and the backend's statistics."""
    warnings.simplefilter("ignore")
    train: Callable[[int], float] = runpy.run_path(str(EXAMPLES / script))["train"]
    made = [train(seed) for seed in SEEDS]
    stats = getattr(dist.group.WORLD, "stats", None)
    return made, stats() if stats is not None else None


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("script", "world_size"),
    [
        pytest.param("ddp_backend.py", 2, marks=EXHAUSTIVE),
        pytest.param("ddp_backend.py", 4, marks=EXHAUSTIVE),
        pytest.param("fsdp2_backend.py", 2, marks=EXHAUSTIVE),
    ],
)
def test_the_loss_is_that_of_gloo(script: str, world_size: int) -> None:
    assert "import gradwire" not in (EXAMPLES / script).read_text()
    made = {
        backend: as_processes(world_size, losses, script, timeout=60, backend=backend)
        for backend in ("gloo", "gradwire")
    }
    reference, _ = made["gloo"][0]
    ours, stats = made["gradwire"][0]
    assert all(ranks == ours for ranks, _ in made["gradwire"])
    # Noise: the effect of another seed. Four bits must change less than half as much, in each
    # run; and the loss must have come down, or nothing was trained.
    noise = max(reference) - min(reference)
    for seed in SEEDS:
        assert reference[seed] < 0.5
        assert abs(ours[seed] - reference[seed]) < noise / 2, (ours, reference)
        assert ours[seed] != reference[seed]
    assert stats is not None
    assert stats["calls"] >= 101 * len(SEEDS)
    assert stats["ratio"] > 6.5  # biases are uncompressed
