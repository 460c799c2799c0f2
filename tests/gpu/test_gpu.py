"""Target triton on a GPU; skipped where there is none. `make gpu-check` runs the same and more."""

from __future__ import annotations

import gpu_checks
import pytest
import torch

from codec_calls import DTYPES

REASON = gpu_checks.missing()
pytestmark = [
    pytest.mark.skipif(REASON is not None, reason=str(REASON)),
    pytest.mark.xdist_group("gpu"),
]


@pytest.mark.timeout(1800)  # it compiles a kernel per codec and form
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bytes(dtype: torch.dtype) -> None:
    codecs = [codec for codec, of in gpu_checks.CASES if of == dtype]
    found = {repr(codec): gpu_checks.same_bytes(codec, dtype) for codec in codecs}
    assert not any(found.values()), {codec: said for codec, said in found.items() if said}


@pytest.mark.timeout(1800)
def test_others() -> None:
    lacking = {name: reason for name, of in gpu_checks.LACKING.items() if (reason := of())}
    found = {name: of() for name, of in gpu_checks.OTHERS.items() if name not in lacking}
    assert not any(found.values()), {name: said for name, said in found.items() if said}
    if lacking:
        pytest.skip(f"all but {lacking}")
