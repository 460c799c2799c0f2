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
