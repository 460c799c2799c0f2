"""examples/elastic.py: a killed rank, torchrun's restart, and the same weights as without it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLE = Path(__file__).parents[2] / "examples" / "elastic.py"


def train(checkpoint: Path, *options: str, ranks: int = 2) -> str:
    """The run's output."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--max-restarts", "1"]
    command += [str(EXAMPLE), "--checkpoint", str(checkpoint), *(options or ["--steps", "10"])]
    environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=150, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_a_restart_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")
    broken = train(tmp_path / "broken", "--steps", "10", "--die-at", "7")
    assert sorted(re.findall(r"rank (\d) resumes from step 5", broken)) == ["0", "1"]
    # lines of two ranks may run into each other, so match up to the end of the number
    ends = re.findall(r"ends with (-?0x[0-9a-f.]+p[+-]\d+)", whole + broken)
    assert len(ends) == 4
    assert len(set(ends)) == 1


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "5")
    more = train(tmp_path, "--steps", "7", ranks=3)
    assert sorted(re.findall(r"rank (\d) resumes from step 5", more)) == ["0", "1", "2"]
    ends = re.findall(r"ends with (-?0x[0-9a-f.]+p[+-]\d+)", more)
    assert len(ends) == 3
    assert len(set(ends)) == 1
