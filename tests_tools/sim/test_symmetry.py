"""One node that represents all: when it may, and that it takes the same time."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gradwire.algorithms import Hierarchical
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire_tools.sim import predict
from gradwire_tools.sim.symmetry import Symmetry
from gradwire_tools.sim.task_times import algorithm_on
from machines import USUAL, scenario
from products import EXHAUSTIVE

UNIFORM = str(128 * 960)  # blocks that 2, 3, 4, 5, 8 and 16 ranks share evenly
# options of algorithms whose ranks are symmetric, and list their tasks in one order, rotated
ALIKE: list[dict[str, Any]] = [
    {"algorithm": "sra"},
    {"algorithm": "sra", "coordinated": True},
    {"algorithm": "ring"},
    {"algorithm": "all_gather"},
    {"algorithm": "parameter_server"},
    {"algorithm": "parameter_server", "coordinated": True},
    {"algorithm": "hierarchical"},
    {"algorithm": "hierarchical", "inside": "full"},
]
GRID: dict[str, Any] = {
    "algorithm": "hierarchical",
    "between": "grid",
}  # symmetric if it has no gaps


# (ranks, ranks per node)
WHERE = [(2, 1), (3, 1), (5, 1), (8, 1), (8, 2), (16, 4)]


def unlike(one: dict[str, Any], exact: dict[str, Any], **tolerance: float) -> list[str]:
    """Keys of a row in which one node does not take what all do."""
    assert (exact.pop("exact"), one.pop("exact")) == (True, False)
    return [
        f"{key}: {found}, not {exact[key]}"
        for key, found in one.items()
        if key in tolerance or not tolerance
        if found != (exact[key] if isinstance(exact[key], str) or exact[key] is None
                     else pytest.approx(exact[key], rel=tolerance.get(key)))
    ]  # fmt: skip


def both(ranks: int, model: str, **given: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row by one node, and one by all."""
    return (
        predict(scenario(ranks, model, exact=False, **given), USUAL),
        predict(scenario(ranks, model, exact=True, **given), USUAL),
    )


def test_every_rank_does_what_rank_0_does_rotated() -> None:
    faults = []
    for options, ranks in [*product(ALIKE, [2, 3, 5, 8]), (GRID, 4), (GRID, 8), (GRID, 12)]:
        algorithm = algorithm_on(Options(**options), ranks, 1)
        chunks = algorithm.chunks(ranks)
        sizes = [[64] * chunks, [32] * chunks]
        columns = algorithm.columns(ranks) if isinstance(algorithm, Hierarchical) else 0
        rotation = Symmetry(ranks, 1, chunks, columns)
        if options.get("inside") == "full":
            sizes = [[*segment, *segment] for segment in sizes]
        first = algorithm.build(0, ranks, sizes)
        for rank in range(ranks):
            found = rotation.rotated_tasks(algorithm.build(rank, ranks, sizes), 0)
            if found != rotation.rotated_tasks(first, rank):
                faults.append(f"{options}: rank {rank} of {ranks}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("cores", [float("inf"), 2.0])
def test_one_node_takes_the_time_of_all(cores: float) -> None:
    faults = []
    for options, (ranks, per_node) in product((*ALIKE, GRID), WHERE):
        if options is not GRID or ranks > 5:
            rows = both(ranks, UNIFORM, per_node=per_node, cores=cores, **options)
            faults += [f"{options}, {ranks} by {per_node}: {key}" for key in unlike(*rows)]
    for partitions in (8, 16, 24):
        options = {"algorithm": "parameter_server", "partitions": partitions}
        faults += [f"{options}: {key}" for key in unlike(*both(8, UNIFORM, **options))]
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("ranks", [6, pytest.param(16, marks=EXHAUSTIVE)])
def test_ragged_chunks_are_near(ranks: int) -> None:
    """Chunks of a real model differ by blocks; their mean size represents all."""
    faults = []
    for options in (o for o in ALIKE if "coordinated" not in o):
        near = {"seconds": 0.05, "wire_bytes": 0.01, "compute_seconds": 0.05}
        rows = both(ranks, "resnet50", **options)
        faults += [f"{options}: {key}" for key in unlike(*rows, **near)]
    assert not faults, "\n".join(faults)


DIFFERENT: list[dict[str, Any]] = [
    {"algorithm": "tree"},
    {"algorithm": "parameter_server", "partitions": 3},
    {"algorithm": "sra", "per_node": 3},
    {"algorithm": "hierarchical", "per_node": 3},
    {"algorithm": "hierarchical", "between": "grid", "nodes": (0, 1, 2, 3, 4, 5, 6, 6)},
    {"algorithm": "hierarchical", "nodes": (0, 0, 0, 1, 1, 1, 2, 2)},
]


def test_ranks_that_differ_are_all_simulated() -> None:
    for given in DIFFERENT:
        with pytest.raises(ConfigError, match="not symmetric"):
            predict(scenario(8, "1e6", exact=False, **given), USUAL)
        assert predict(scenario(8, "1e6", **given), USUAL)["exact"], given


@EXHAUSTIVE
def test_few_messages_are_simulated_exactly_many_are_not() -> None:
    assert predict(scenario(64, "resnet50"), USUAL)["exact"]
    row = predict(scenario(512, "resnet50"), USUAL)
    assert not row["exact"]
    assert row["seconds"] > row["limit_seconds"]
