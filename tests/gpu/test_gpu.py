"""Target triton on a GPU; skipped where there is none. `make gpu-check` runs the same and more."""

from __future__ import annotations

import gpu_checks
import pytest
import torch

from gradwire.codecs import Codec

REASON = gpu_checks.missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.xdist_group("gpu"),
]


@pytest.mark.parametrize(("codec", "dtype"), gpu_checks.CASES, ids=repr)
def test_same_bytes(codec: Codec, dtype: torch.dtype) -> None:
    assert gpu_checks.same_bytes(codec, dtype) == ""


@pytest.mark.parametrize("name", gpu_checks.OTHERS)
def test_others(name: str) -> None:
    reason = gpu_checks.LACKING.get(name, lambda: None)()
    if reason is not None:
        pytest.skip(reason)
    assert gpu_checks.OTHERS[name]() == ""
