"""torch's own tests of process groups and DDP, over our backend: the same outcome as over gloo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

HERE = Path(__file__).parent

# Tests with different outcomes, and why.
APART = {"test_ddp_logging_data_cpu": "asks DDP's log, which is torch's, for the name gloo"}


def outcomes(backend: str, *names: str) -> dict[str, str]:
    paths = [str(path) for path in (HERE, HERE.parent, HERE.parents[1] / "src")]
    done = subprocess.run(
        [sys.executable, "-m", "torchs_suite", backend, *names],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert lines, done.stderr[-2000:]
    return {line["test"]: line["outcome"] for line in lines}


def unlike(*names: str) -> dict[str, str]:
    """The tests, of these or of all, with another outcome than over gloo."""
    ours = outcomes("gradwire", *names)
    assert not names or set(names) == set(ours)
    odd = [name for name, outcome in ours.items() if outcome not in ("passed", "skipped")]
    gloo = outcomes("gloo", *odd) if odd else {}
    return {name: ours[name] for name in odd if gloo[name] in ("passed", "skipped")}


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.timeout(3000)
def test_all() -> None:
    found = unlike()
    assert set(found) == set(APART), found
