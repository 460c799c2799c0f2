"""Ranks on `net none` are forked (`forked.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forked
from gradwire_tools.bench import workers
from gradwire_tools.bench.adapt import record


@pytest.fixture(scope="module", autouse=True)  # other folders have the real lab
def _forked_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(workers, "lab", forked.STAND_IN)
        yield


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A recording of two ranks, two steps at each of two points; and the command's rows."""
    folder = tmp_path_factory.mktemp("recorded") / "gpt"
    small = {"layers": 1, "width": 32, "heads": 2, "context": 16}
    return folder, list(record.run(folder, "gpt", (0, 3), 2, 2, task_options=small))
