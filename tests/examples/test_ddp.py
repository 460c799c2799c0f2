"""examples/ddp.py runs under torchrun and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


def run(*options: str) -> tuple[list[float], str]:
    """Its losses, and all it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)], done.stdout


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_ddp_example(tmp_path: Path) -> None:
    checkpoint = "--checkpoint", str(tmp_path / "ddp.pt")
    losses, printed = run(*checkpoint)
    assert losses[-1] < 0.8 * losses[0]
    ratio = re.search(r"([\d.]+) times less", printed)
    assert ratio is not None
    assert float(ratio.group(1)) > 5
    resumed, _ = run(*checkpoint)
    assert resumed[0] < 1.2 * losses[-1]
