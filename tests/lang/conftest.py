"""The process that tests of target triton share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import triton_checks


@pytest.fixture(scope="session")
def interpreting() -> Iterator[ProcessPoolExecutor]:
    """A process where Triton interprets kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, triton_checks.begin) as pool:
        yield pool
