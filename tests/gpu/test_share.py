"""The ranks that share a GPU in `make gpu-check`, tried on the CPU: the script itself works."""

from __future__ import annotations

import gpu_checks
import pytest


@pytest.mark.multiprocess
def test_the_script_finds_nothing_wrong_on_the_cpu() -> None:
    said = gpu_checks.ranks_share(2, device="cpu")
    assert said == ""
