"""The scripts that `make gpu-check` runs as ranks, tried on the CPU: they themselves work."""

from __future__ import annotations

import gpu_checks
import pytest
import torch

from products import EXHAUSTIVE


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_the_script_finds_nothing_wrong_on_the_cpu() -> None:
    said = gpu_checks.ranks_share(2, device="cpu")
    assert said == ""


def test_the_script_of_one_rank_finds_nothing_wrong_on_the_cpu() -> None:
    assert gpu_checks.nccl_alone(device="cpu") == ""


def test_what_nccl_wants_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert gpu_checks.missing_for_nccl(1) is None
    assert gpu_checks.missing_for_nccl(2) == "NCCL wants a GPU for each of 2 ranks: here 1"
