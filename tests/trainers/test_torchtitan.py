"""torchtitan's trainer with a handle; what ranks do is in torchtitan_runs.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks import one_by_one


@pytest.mark.multiprocess
@pytest.mark.skipif(find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_checkpoints_of_torchtitan_have_all_ranks(tmp_path: Path) -> None:
    import torchtitan_runs as ranks

    one_by_one(2, [ranks.trains_and_resumes], tmp_path)
