"""Target triton in whole collectives: with and without separate kernel memory, and in order, as
over NCCL (law 6)."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from products import EXHAUSTIVE

SCRIPT = Path(__file__).with_name("triton_collectives.py")


@EXHAUSTIVE
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_collectives_of_target_triton_are_those_of_target_c() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    *same, one, other = done.stdout.splitlines()
    assert same == ["plain same", "staged same", "in order same"], done.stderr[-3000:]
    # The bad group's second call; a rank may hear of it from its peer first.
    raised = {line.replace("NoneType ", "", 3).split()[0] for line in (one, other)}
    assert "CodecError" in raised, (one, other, done.stderr[-3000:])
    assert raised <= {"CodecError", "TransportError"}
    for line in (one, other):
        assert [kind == "NoneType" for kind in line.split()] == [True, True, True, False, True]
