"""Reduce-scatter and all-gather of shards on the simulator: the graphs and bytes of collectives."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from machines import FREE, GBIT, QSGD

from gradwire import Options
from gradwire.collectives import Operation
from gradwire.partition import Spec
from gradwire_tools.sim.fabric import Link
from gradwire_tools.sim.run import Machines, Result, run
from gradwire_tools.sim.task_times import algorithm_on, bucket_contents, timed_graph

VALUES = 1 << 22
OPERATIONS = [Operation("all_gather"), Operation("reduce_scatter", "avg")]


def simulated(operation: Operation, n: int, per_node: int, **how: str) -> tuple[Result, list[int]]:
    """A run of QSGD at 1 Gbit/s and 1 ms, and each rank's bytes by the formula."""
    options = Options(segments=4, **how)  # type: ignore[arg-type]
    algorithm = algorithm_on(options, n, per_node, operation)
    bucket = (Spec("w", VALUES // n * n, torch.float32, QSGD),)
    contents = bucket_contents(bucket, algorithm, options, n, operation=operation)
    jobs = [[timed_graph(contents, algorithm, rank, n, FREE)] for rank in range(n)]
    link = Link(rate=GBIT.rate_bits_per_s / 8, latency=GBIT.latency_s)
    result = run(Machines(n, per_node, link, FREE.engine), jobs, [0.0])
    return result, [algorithm.wire_bytes(rank, n, contents.sizes) for rank in range(n)]


def test_compressed_bytes_cross_once() -> None:
    """A node sends less by the number of ranks per node, and takes so much less time."""
    for operation, (n, per_node) in product(OPERATIONS, [(4, 2), (8, 4), (5, 2), (16, 4)]):
        flat, _ = simulated(operation, n, per_node)
        levels, formula = simulated(operation, n, per_node, algorithm="hierarchical")
        assert list(levels.sent_bytes) == formula
        nodes = [range(first, min(first + per_node, n)) for first in range(0, n, per_node)]
        crossings = sum(len(node) * (n - len(node)) for node in nodes), n * (len(nodes) - 1)
        expected = sum(flat.moved_bytes) * crossings[1] / crossings[0]
        assert sum(levels.moved_bytes) == pytest.approx(expected, rel=0.01)
        if n % per_node == 0:
            assert max(levels.moved_bytes) * per_node == pytest.approx(
                max(flat.moved_bytes), rel=0.01
            )
            rounds = 2 * GBIT.latency_s
            wire = max(levels.moved_bytes) * 8 / GBIT.rate_bits_per_s
            assert wire < max(levels.ended) < wire + 2 * rounds
            assert max(levels.ended) < max(flat.ended)
