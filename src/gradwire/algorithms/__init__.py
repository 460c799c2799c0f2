"""Algorithms: pure functions from (rank, world_size, sizes) to a graph, each with its cost formula.

`REGISTRY` is the table of them; a new algorithm is one file and one line here.
"""

from __future__ import annotations

from types import ModuleType

from gradwire.algorithms import scatter_reduce_allgather
from gradwire.errors import ConfigError

REGISTRY: dict[str, ModuleType] = {"sra": scatter_reduce_allgather}


def get(name: str) -> ModuleType:
    """The algorithm called `name`.

    Raises:
        ConfigError: unknown name; the message lists the known ones.
    """
    if name not in REGISTRY:
        raise ConfigError(f"unknown algorithm {name!r}; known: {', '.join(sorted(REGISTRY))}")
    return REGISTRY[name]
