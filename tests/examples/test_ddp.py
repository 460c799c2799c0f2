"""examples/ddp.py runs under torchrun and learns."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.py"


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_ddp_example() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(EXAMPLE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.8 * losses[0]
    ratio = re.search(r"([\d.]+) times less", done.stdout)
    assert ratio is not None
    assert float(ratio.group(1)) > 5
