"""examples/ddp_backend.py and examples/fsdp2_backend.py run under torchrun.

On plain gloo they sometimes abort at the very end, in a destructor of gloo's (torch 2.13), so that
is left to test_backend_training.py, which compares the losses.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLES = Path(__file__).parents[2] / "examples"


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.parametrize("script", ["ddp_backend.py", "fsdp2_backend.py"])
def test_backend_example(script: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    command += [str(EXAMPLES / script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    losses = [float(x) for x in re.findall(r"loss ([\d.]+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < 0.5 * losses[0]
