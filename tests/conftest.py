"""Options of the whole test suite."""

from __future__ import annotations

from pathlib import Path

import pytest

LAB = Path(__file__).parent / "lab"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write tests/golden/ anew, do not compare.",
    )


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start processes or make namespaces run one at a time, on one xdist worker.

    They need the cores for themselves, and some look for what others of them left behind.
    """
    for item in items:
        alone = item.get_closest_marker("lab") or item.get_closest_marker("multiprocess")
        if alone or LAB in item.path.parents:
            item.add_marker(pytest.mark.xdist_group("processes"))


@pytest.hookimpl(trylast=True)  # behind xdist
def pytest_collection_finish(session: pytest.Session) -> None:
    """Stop where groups have no effect: xdist 3.8 tells them by names that pytest 9.2 hides."""
    if session.config.getoption("loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError(
                    f"this pytest-xdist does not keep groups of tests together ({item.nodeid}); "
                    "install the versions of constraints.txt"
                )
