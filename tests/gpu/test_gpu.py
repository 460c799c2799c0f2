"""Target triton on a GPU; skipped where there is none. `make gpu-check` runs the same and more. The
scripts that it runs as ranks are tried on the CPU: they themselves work."""

from __future__ import annotations

import gpu_checks
import pytest
import torch

from codec_calls import DTYPES
from products import EXHAUSTIVE

REASON = gpu_checks.missing()
pytestmark = pytest.mark.xdist_group("gpu")
on_a_gpu = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@on_a_gpu
@pytest.mark.timeout(1800)  # it compiles a kernel per codec and form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes(dtype: torch.dtype) -> None:
    codecs = [codec for codec, of in gpu_checks.CASES if of == dtype]
    found = {repr(codec): gpu_checks.same_bytes(codec, dtype) for codec in codecs}
    assert not any(found.values()), {codec: said for codec, said in found.items() if said}


@on_a_gpu
@pytest.mark.timeout(1800)
def test_others() -> None:
    lacking = {name: reason for name, of in gpu_checks.LACKING.items() if (reason := of())}
    found = {name: of() for name, of in gpu_checks.OTHERS.items() if name not in lacking}
    assert not any(found.values()), {name: said for name, said in found.items() if said}
    if lacking:
        pytest.skip(f"all but {lacking}")


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
