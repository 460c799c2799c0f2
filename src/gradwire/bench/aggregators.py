"""`gradwire bench aggregators`: what averaging a model's gradients costs in CPU time and memory.

The gradients have the shapes and the values of a task's first step. Two ranks on loopback average
them through DDP in one bucket, so that all parameters share each round; backward itself only copies
given gradients. Methods take turns, each rank has one thread, and CPU time is that of the whole
process, summed over its threads, so it does not grow with other load or with waiting. The time of a
hook that does nothing is subtracted. Medians over turns of the mean over ranks.

The limit is a copy of the gradients in memory, measured in the same turns: a method of of_limit 1
takes as long as reading the gradients and writing the averages.

By default the rows are those of the sweep of ranks of UTIL 3.3, PowerSGD beside torch's hook, with
the share of the time that orthogonalisation takes; then all other aggregators at their defaults.

A row: method, task, numel, parameters (how many), seconds (CPU per backward), ms_per_million (of
values), wall_seconds (of a backward, on this machine, which the ranks share), limit_seconds,
of_limit (limit_seconds / seconds), orthogonal_share (of seconds, in orthogonalisation; null where a
method has none), rounds (collectives per backward), wire_bytes (per rank and backward), state_bytes
(kept from step to step), state_bytes_per_value, peak_extra_bytes (state, and messages in flight;
null for torch's hooks, which do not count it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.aggregators import registry
from gradwire.bench import methods as method_table
from gradwire.bench import tasks, workers
from gradwire.bench.provenance import stamped
from gradwire.errors import ConfigError
from gradwire.lab import Network

_TIMEOUT_S = 580.0
_RANKS, _QUICK_RANKS = (1, 4, 16, 32, 64), (4, 32)  # of matrices: UTIL's, and 32


@dataclass(frozen=True)
class Config:
    """The workers' arguments."""

    methods: tuple[str, ...]
    task: str
    turns: int


@stamped
def run(
    methods: Sequence[str] | None = None,
    task: str = "gpt",
    ranks: int = 2,
    quick: bool = False,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row per method.

    Args:
        methods: names as in `bench train`.
        task: whose gradients: "gpt" or "image".
        ranks: number of ranks.
        quick: fewer ranks of matrices and turns.
        advance: is called with every turn.

    Raises:
        ConfigError: an unknown task, method or option, or a number out of range.
        WorkerError: a rank failed.
    """
    trained = tasks.get(task)
    names = tuple(methods or default_methods(_QUICK_RANKS if quick else _RANKS))
    if ranks < 2:
        raise ConfigError(f"--ranks {ranks}: one rank sends nothing; use 2 ranks or more")
    for name in names:
        method_table.parse(name).check(ranks, tasks.shapes(trained))
    config = Config(names, task, 3 if quick else 25)
    worker = "gradwire.bench.aggregators_worker"
    network = Network.parse("none")
    for row in workers.rows(worker, config, ranks, network, _TIMEOUT_S, advance):
        yield {**row, "ranks": ranks}


def default_methods(ranks: Sequence[int]) -> list[str]:
    """PowerSGD, with both ways to orthogonalise, and torch's hook at each rank; all others."""
    sweep = []
    for rank in ranks:
        ours = f"powersgd:rank={rank}"
        sweep += [f"torch-powersgd:rank={rank}", ours, f"{ours}:orthogonal=qr"]
    return [*sweep, *(name for name in registry.REGISTRY if name != "powersgd")]
