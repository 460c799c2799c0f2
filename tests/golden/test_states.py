"""Checkpoints of older versions load, and training goes on bit for bit (see states.py)."""

from __future__ import annotations

import pytest

from golden import states


@pytest.mark.multiprocess
@pytest.mark.parametrize("ranks", states.RANKS)
def test_an_older_checkpoint_loads(ranks: int) -> None:
    assert states.lines(ranks) == states.stored(ranks)
