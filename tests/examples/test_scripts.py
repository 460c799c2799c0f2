"""The examples run under torchrun, learn, and resume.

On plain gloo those of the backend sometimes abort at the very end, in a destructor of gloo's (torch
2.13), so that is left to test_backend_groups.py, which compares the losses.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = [EXHAUSTIVE, pytest.mark.multiprocess]


def run(script: str, *options: str, ranks: int = 2, **environment: str) -> str:
    """What it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *options],
        env={**os.environ, **environment},
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"loss ([\d.]+)", printed)]


def ratios(printed: str) -> list[float]:
    return [float(x) for x in re.findall(r"([\d.]+) times less", printed)]


def test_ddp(tmp_path: Path) -> None:
    checkpoint = "--checkpoint", str(tmp_path / "ddp.pt")
    printed = run("ddp.py", *checkpoint)
    first, *_, last = losses(printed)
    assert last < 0.8 * first
    assert ratios(printed)[0] > 5
    assert losses(run("ddp.py", *checkpoint))[0] < 1.2 * last


def test_fsdp2(tmp_path: Path) -> None:
    """It resumes at another world size."""
    checkpoint = "--checkpoint", str(tmp_path / "fsdp2.pt")
    printed = run("fsdp2.py", *checkpoint)
    first, *_, last = losses(printed)
    assert last < 0.6 * first
    of_weights, of_gradients = ratios(printed)
    assert of_weights > 3
    assert of_gradients > 5
    assert losses(run("fsdp2.py", *checkpoint, ranks=3))[0] < 1.2 * last


@pytest.mark.parametrize("script", ["ddp_backend.py", "fsdp2_backend.py"])
def test_backend(script: str) -> None:
    found = losses(run(script))
    assert len(found) == 6
    assert found[-1] < 0.5 * found[0]


def test_skeletons() -> None:
    printed = run("skeleton_aggregator.py")
    first, *_, last = losses(printed)
    assert last < 0.8 * first
    assert ratios(printed)[0] > 3
    printed = run("skeleton_policy.py")
    assert "pass 20: steepest: " in printed
    assert "times fewer than uniform" in printed


def elastic(checkpoint: Path, *options: str, ranks: int = 2, script: str = "elastic.py") -> str:
    given = "--checkpoint", str(checkpoint), *options
    restarts = {"PET_MAX_RESTARTS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return run(script, *given, ranks=ranks, **restarts)


def weights(printed: str) -> list[str]:
    """Lines of two ranks may run into each other, so match up to the end of the number."""
    return re.findall(r"ends with (-?0x[0-9a-f.]+p[+-]\d+)", printed)


def resumed(printed: str) -> list[str]:
    return sorted(re.findall(r"rank (\d) resumes from step 5", printed))


def test_a_restart_after_a_killed_rank_ends_with_the_same_weights(tmp_path: Path) -> None:
    whole = elastic(tmp_path / "whole", "--steps", "10")
    broken = elastic(tmp_path / "broken", "--steps", "10", "--die-at", "7")
    assert resumed(broken) == ["0", "1"]
    assert len(weights(whole + broken)) == 4
    assert len(set(weights(whole + broken))) == 1


def test_another_number_of_ranks_goes_on(tmp_path: Path) -> None:
    elastic(tmp_path, "--steps", "5")
    more = elastic(tmp_path, "--steps", "7", ranks=3)
    assert resumed(more) == ["0", "1", "2"]
    assert len(weights(more)) == 3
    assert len(set(weights(more))) == 1


def outer(checkpoint: Path, steps: int, *options: str, ranks: int = 2) -> str:
    given = "--steps", str(steps), "--codec", "qsgd:bits=4", *options
    return elastic(checkpoint, *given, ranks=ranks, script="outer.py")


def test_replicas_restart_after_one_is_killed(tmp_path: Path) -> None:
    """Each from its own file, to the same bits."""
    whole = outer(tmp_path / "whole", 30)
    first, *_, last = losses(whole)
    assert last < 0.5 * first
    assert "3 rounds in 30 steps" in whole
    broken = outer(tmp_path / "broken", 30, "--die-at", "27")
    assert len(re.findall(r"replica \d resumes from step 20", broken)) == 2
    assert len(weights(whole + broken)) == 4
    assert len(set(weights(whole + broken))) == 1


def test_other_numbers_of_replicas_go_on(tmp_path: Path) -> None:
    """One whose file is older, and one that has none, follow the others."""
    outer(tmp_path, 10)
    shutil.copy(tmp_path / "replica1.pt", tmp_path / "older")
    outer(tmp_path, 20)
    shutil.move(tmp_path / "older", tmp_path / "replica1.pt")
    for ranks, of in (3, "1 resumes from step 10"), (1, "0 resumes from step 30"):
        printed = outer(tmp_path, 30 if ranks == 3 else 40, ranks=ranks)
        assert f"replica {of}" in printed
        assert len(weights(printed)) == ranks
        assert len(set(weights(printed))) == 1
