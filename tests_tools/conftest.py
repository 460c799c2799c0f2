"""Of the tests of gradwire_tools: what ranks that are forked have imported (tests/ends.py); tests
marked `lab` are skipped, with the reason, if no lab works on this machine."""

import os

import pytest

from gradwire_tools.lab import available

_ranks = "gradwire_tools.bench.train.worker"
_given = os.environ.get("GRADWIRE_TEST_IMPORTS", "")
os.environ["GRADWIRE_TEST_IMPORTS"] = ",".join(filter(None, [_given, _ranks]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("lab") is not None and (reason := available()):
        pytest.skip(reason)
