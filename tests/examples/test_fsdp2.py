"""examples/fsdp2.py runs under torchrun, learns, and resumes at another world size."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2.py"


def run(ranks: int, *options: str) -> tuple[list[float], str]:
    """Its losses, and all it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)], done.stdout


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_fsdp2_example(tmp_path: Path) -> None:
    checkpoint = "--checkpoint", str(tmp_path / "fsdp2.pt")
    losses, printed = run(2, *checkpoint)
    assert losses[-1] < 0.6 * losses[0]
    of_weights, of_gradients = map(float, re.findall(r"([\d.]+) times less", printed))
    assert of_weights > 3
    assert of_gradients > 5
    resumed, _ = run(3, *checkpoint)
    assert resumed[0] < 1.2 * losses[-1]
