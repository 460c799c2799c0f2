"""The process that tests of target triton share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import triton_checks


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., Any]]:
    """`interpreted(function, *arguments)`: its result in a process where Triton interprets
    kernels."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, triton_checks.begin) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result()
