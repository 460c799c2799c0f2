"""Tests marked `lab` are skipped, with the reason, if no lab works on this machine."""

from __future__ import annotations

import pytest

from gradwire_tools.lab import available


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab") is not None:
        reason = available()
        if reason is not None:
            pytest.skip(reason)
