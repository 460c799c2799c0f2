"""One rank of `gradwire probe`; started by it on every node, or by torchrun."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

from gradwire import groups
from gradwire.bench import workers
from gradwire.bench.probe import ProbeConfig
from gradwire.planner.links import measure_links, measure_sends

_SEND_BYTES = tuple(1 << power for power in range(10, 25, 2))  # 1 KB to 16 MB
_SEND_S = 1.0  # of the largest message, at most


def measure(config: ProbeConfig) -> list[dict[str, Any]]:
    """Rows of pairs and sends, in the default group; alike on all ranks."""
    comm = groups.communicator()
    links = measure_links(comm, config.seconds)
    rows: list[dict[str, Any]] = []
    for i in range(links.ranks):
        for j in range(links.ranks):
            if i != j:
                alpha, beta = links.alpha[i][j], links.beta[i][j]
                costs = {"alpha": alpha, "beta": beta, "bandwidth": 8 / beta}
                rows.append({"part": "pair", "from": i, "to": j, **costs})
    beta = links.beta[0][1]
    sizes = [size for size in _SEND_BYTES if size * beta < _SEND_S or size == _SEND_BYTES[0]]
    for nbytes, seconds in measure_sends(comm, sizes).items():
        rows.append({"part": "send", "bytes": nbytes, "seconds": seconds})
    assert dist.group.WORLD is not None
    groups.release(dist.group.WORLD)  # before rank 0, which has the store, may end
    return rows


def main(arguments: list[str]) -> None:
    """Measure, and on rank 0 report."""
    config, events = workers.configured(ProbeConfig, arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    events.progress("links", 0, 1)
    events.rows(measure(config))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
