"""Between machines and within one: over gloo, and in shared memory."""

from __future__ import annotations

import pytest

from products import EXHAUSTIVE
from stress.worlds import of_transport


@pytest.fixture(params=[pytest.param(False, marks=EXHAUSTIVE), True], ids=["gloo", "shm"])
def shm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether messages travel in memory, in this test's processes."""
    for name, value in of_transport(request.param).items():
        monkeypatch.setenv(name, value)
    return bool(request.param)
