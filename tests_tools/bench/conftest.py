"""Ranks on `net none` are forked (`forked.py`); tests marked `lab` need one that works."""

from __future__ import annotations

from collections.abc import Iterator

import forked
import pytest

from gradwire_tools.bench import workers
from gradwire_tools.lab import available


@pytest.fixture(scope="module", autouse=True)  # other folders have the real lab
def _forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workers, "lab", forked.STAND_IN)
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab") is not None:
        reason = available()
        if reason is not None:
            pytest.skip(reason)
