"""One node that represents all: when it may, and that it takes the same time."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from machines import USUAL, scenario

from gradwire.algorithms import Hierarchical
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.sim import predict
from gradwire.sim.symmetry import Symmetry
from gradwire.sim.task_times import algorithm_on
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


@pytest.mark.parametrize(
    ("options", "ranks"),
    [*product(ALIKE, [2, 3, 5, 8]), (GRID, 4), (GRID, 8), (GRID, 12)],
    ids=str,
)
def test_every_rank_does_what_rank_0_does_rotated(options: dict[str, Any], ranks: int) -> None:
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
        assert found == rotation.rotated_tasks(first, rank)


@pytest.mark.parametrize("cores", [float("inf"), 2.0])
@pytest.mark.parametrize(
    ("options", "ranks", "per_node"),
    [
        (options, *where)
        for options in (*ALIKE, GRID)
        for where in [(2, 1), (3, 1), (5, 1), (8, 1), (8, 2), (16, 4)]
        if options is not GRID or where[0] > 5
    ],
    ids=str,
)
def test_one_node_takes_the_time_of_all(
    options: dict[str, Any], ranks: int, per_node: int, cores: float
) -> None:
    rows = [
        predict(
            scenario(ranks, UNIFORM, per_node=per_node, cores=cores, exact=exact, **options), USUAL
        )
        for exact in (True, False)
    ]
    assert [row.pop("exact") for row in rows] == [True, False]
    for key, found in rows[1].items():
        expected = rows[0][key]
        assert found == (expected if isinstance(expected, str) else pytest.approx(expected))


@pytest.mark.parametrize("partitions", [8, 16, 24])
def test_servers_of_several_partitions_are_symmetric(partitions: int) -> None:
    options = {"algorithm": "parameter_server", "partitions": partitions}
    exact, one = (
        predict(scenario(8, str(128 * 960), exact=exact, **options), USUAL)["seconds"]
        for exact in (True, False)
    )
    assert one == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("ranks", [6, 16])
@pytest.mark.parametrize("options", [o for o in ALIKE if "coordinated" not in o], ids=str)
def test_ragged_chunks_are_near(options: dict[str, Any], ranks: int) -> None:
    """Chunks of a real model differ by blocks; their mean size represents all."""
    exact, one = (
        predict(scenario(ranks, "resnet50", exact=exact, **options), USUAL)
        for exact in (True, False)
    )
    assert one["seconds"] == pytest.approx(exact["seconds"], rel=0.05)
    assert one["wire_bytes"] == pytest.approx(exact["wire_bytes"], rel=0.01)
    assert one["compute_seconds"] == pytest.approx(exact["compute_seconds"], rel=0.05)


@pytest.mark.parametrize(
    "given",
    [
        {"algorithm": "tree"},
        {"algorithm": "parameter_server", "partitions": 3},
        {"algorithm": "sra", "per_node": 3},
        {"algorithm": "hierarchical", "per_node": 3},
        {"algorithm": "hierarchical", "between": "grid", "nodes": (0, 1, 2, 3, 4, 5, 6, 6)},
        {"algorithm": "hierarchical", "nodes": (0, 0, 0, 1, 1, 1, 2, 2)},
    ],
    ids=str,
)
def test_ranks_that_differ_are_all_simulated(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="not symmetric"):
        predict(scenario(8, "1e6", exact=False, **given), USUAL)
    assert predict(scenario(8, "1e6", **given), USUAL)["exact"]


@EXHAUSTIVE
def test_few_messages_are_simulated_exactly_many_are_not() -> None:
    assert predict(scenario(64, "resnet50"), USUAL)["exact"]
    row = predict(scenario(512, "resnet50"), USUAL)
    assert not row["exact"]
    assert row["seconds"] > row["limit_seconds"]
