"""Ranks on `net none` are forked (`forked.py`); tests marked `lab` need one that works."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import pytest

from gradwire_tools.bench import workers
from gradwire_tools.bench.adapt import record
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


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recording of two ranks, two steps at each of two points; and the command's rows."""
    folder = tmp_path_factory.mktemp("recorded") / "gpt"
    small = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    return folder, list(record.run(folder, "gpt", (0, 3), 2, 2, task_options=small))
