"""Target triton through whole collectives: with and without memory of its own, and in order, as
over NCCL (law 6)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_collectives.py")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_collectives_of_target_triton_are_those_of_target_c() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    told = "NoneType NoneType NoneType CodecError NoneType"  # the bad group's second call
    said = ["plain same", "staged same", "in order same", told, told]
    assert done.stdout.splitlines() == said, done.stderr[-3000:]
