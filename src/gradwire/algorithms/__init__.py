"""Algorithms: pure functions from (rank, world_size, sizes) to a graph, each with its cost formula.

`REGISTRY` is the table of all-reduce algorithms; a new one is one file and one line here. `OF` has
the algorithms of every collective.
"""

from __future__ import annotations

from collections.abc import Mapping

from gradwire.algorithms import (
    all_gather,
    parameter_server,
    ring,
    scatter_reduce_allgather,
    sra_all_gather,
    sra_reduce_scatter,
    tree,
)
from gradwire.algorithms.broadcast import ScatterAllGather, Tree
from gradwire.algorithms.coordinated import Coordinated
from gradwire.algorithms.hierarchical import Hierarchical
from gradwire.algorithms.hierarchical_all_gather import HierarchicalAllGather
from gradwire.algorithms.hierarchical_reduce_scatter import HierarchicalReduceScatter
from gradwire.algorithms.protocol import Algorithm, Sizes
from gradwire.errors import ConfigError, use_one_of

__all__ = [
    "OF",
    "REGISTRY",
    "Algorithm",
    "Coordinated",
    "Hierarchical",
    "HierarchicalAllGather",
    "HierarchicalReduceScatter",
    "Sizes",
    "get",
]

REGISTRY: dict[str, Algorithm] = {
    "sra": scatter_reduce_allgather,
    "ring": ring,
    "tree": tree,
    "parameter_server": parameter_server,
    "all_gather": all_gather,
    "hierarchical": Hierarchical(),  # its machines are filled in when a collective is prepared
}

# verb -> name -> algorithm; a broadcast's root is filled in as well
OF: dict[str, Mapping[str, Algorithm]] = {
    "all_reduce": REGISTRY,
    "reduce_scatter": {"sra": sra_reduce_scatter, "hierarchical": HierarchicalReduceScatter()},
    "all_gather": {"sra": sra_all_gather, "hierarchical": HierarchicalAllGather()},
    "broadcast": {"sra": ScatterAllGather(), "tree": Tree()},
}


def get(name: str) -> Algorithm:
    """The all-reduce algorithm called `name`.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    if name not in REGISTRY:
        raise ConfigError(f"unknown algorithm {name!r}: {use_one_of(name, sorted(REGISTRY))}")
    return REGISTRY[name]
