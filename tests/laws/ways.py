"""The algorithms of all-reduce that laws are asserted for."""

from __future__ import annotations

import random
from typing import Any

from gradwire import Options


def hierarchical(nodes: tuple[int, ...], **how: Any) -> Options:
    return Options(algorithm="hierarchical", nodes=nodes, **how)


def anywhere(n: int) -> Options:
    draw = random.Random(n)
    nodes = tuple(draw.randrange(4) for _ in range(n))
    return hierarchical(nodes, inside=draw.choice(["codec", "full"]))


# The options of each algorithm, as a function of the number of ranks.
WAYS: dict[str, Any] = {
    "sra": lambda n: Options(),
    "ring": lambda n: Options(algorithm="ring"),
    "tree": lambda n: Options(algorithm="tree"),
    "servers": lambda n: Options(algorithm="parameter_server"),
    "3_servers": lambda n: Options(algorithm="parameter_server", partitions=3),
    "coordinated": lambda n: Options(coordinated=True),
    "coordinated_servers": lambda n: Options(
        algorithm="parameter_server", partitions=5, coordinated=True
    ),
    "all_gather": lambda n: Options(algorithm="all_gather"),
    "pairs": lambda n: hierarchical(tuple(r // 2 for r in range(n)), inside="full"),
    "in_turn": lambda n: hierarchical(tuple(r % 3 for r in range(n))),
    "one_machine": lambda n: hierarchical((7,) * n, inside="full"),
    "grid": lambda n: hierarchical(tuple(range(n)), between="grid"),
    "grid_of_pairs": lambda n: hierarchical(
        tuple(max(r, 1) for r in range(n)), between="grid", inside="full"
    ),
    "anywhere": anywhere,
}
