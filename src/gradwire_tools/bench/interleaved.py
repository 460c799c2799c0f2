"""Interleaved timing (A B A B): other load on the machine affects all functions equally."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

SECONDS_EACH = {"c": 1.0, "eager": 3.0}  # budget per function
TURNS = {"c": (7, 41), "eager": (3, 5)}  # at least, at most
QUICK_TURNS = {"c": (3, 9), "eager": (1, 1)}
EVENTS, QUICK_EVENTS = 31, 9  # turns on a GPU
LEAD = 20_000_000  # cycles, some 10 ms, in which the host queues a turn's launches


def medians(
    functions: Sequence[Callable[[], object]], threads: int, target: str, quick: bool
) -> list[float]:
    """Median seconds per function: on `threads` threads, or for target "triton" on the stream."""
    if target == "triton":
        return _on_stream(functions, QUICK_EVENTS if quick else EVENTS)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _on_threads(functions, target, quick)
    finally:
        torch.set_num_threads(before)


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The bounds of the middle half of the values, between the least and the greatest."""
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def _on_threads(functions: Sequence[Callable[[], object]], target: str, quick: bool) -> list[float]:
    fewest, most = QUICK_TURNS[target] if quick else TURNS[target]
    budget = len(functions) * SECONDS_EACH[target] / (20 if quick else 1)
    for function in functions:  # warm up: page faults, compilation
        function()
    times: list[list[float]] = [[] for _ in functions]
    begin = time.perf_counter()
    for turn in range(most):
        if turn >= fewest and time.perf_counter() - begin > budget:
            break
        for function, seconds in zip(functions, times, strict=True):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds) for seconds in times]


def _on_stream(functions: Sequence[Callable[[], object]], turns: int) -> list[float]:
    """Seconds on the stream, which waits for no launch: a busy host would be measured else."""
    for _ in range(3):  # warm up: compilation, GPU clocks
        for function in functions:
            function()
    torch.cuda.synchronize()
    marks: list[list[Any]] = [[] for _ in functions]
    for _ in range(turns):
        torch.cuda._sleep(LEAD)
        for function, pairs in zip(functions, marks, strict=True):
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            function()
            pair[1].record()
            pairs.append(pair)
    torch.cuda.synchronize()
    return [statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs) for pairs in marks]


def slowest(act: Callable[[], object]) -> float:
    """Seconds of the slowest rank of the default group; all begin together."""
    dist.barrier()
    begun = time.perf_counter()
    act()
    spent = torch.tensor(time.perf_counter() - begun, dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)
