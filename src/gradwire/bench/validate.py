"""`gradwire sim --validate`: the simulator against the lab, point by point.

The lab's nodes share this machine's cores, so the simulation is told how many there are. A row:
ranks, net, method, algorithm, numel, measured_seconds (bench collectives: median over rounds of
the slowest rank), simulated_seconds, error (simulated / measured - 1), of_limit (of the measured).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from gradwire.bench import collectives, simulate
from gradwire.bench.simulate import Wanted
from gradwire.errors import ConfigError
from gradwire.lab import available

RANKS = (2, 4, 8)
NETS = ("100mbit,5ms", "300mbit,1ms", "1gbit,1ms")
ALGORITHMS = ("sra", "ring", "tree", "parameter_server", "all_gather")
CODECS = ("qsgd", "identity")
NUMEL = 2_500_000
# What `--quick` takes of it.
QUICK: dict[str, Any] = {"ranks": (2, 4), "nets": NETS[1:2], "algorithms": ALGORITHMS[:2]}


def run(
    ranks: Sequence[int] = RANKS,
    nets: Sequence[str] = NETS,
    codecs: Sequence[str] = CODECS,
    algorithms: Sequence[str] = ALGORITHMS,
    numel: int = NUMEL,
    fresh: bool = False,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks, network, codec and algorithm.

    Raises:
        ConfigError: no lab on this machine.
    """
    reason = available()
    if reason is not None:
        raise ConfigError(f"no emulated network here to compare with ({reason})")
    cores = float(len(os.sched_getaffinity(0)))
    for count in ranks:
        for net in nets:
            wanted = Wanted(
                codecs=codecs, algorithms=algorithms, ranks=count, net=net, model=str(numel),
                cores=cores, fresh=fresh,
            )  # fmt: skip
            fresh = False  # once is enough
            simulated = list(simulate.run(wanted))
            methods = [f"{row['method']}:algorithm={row['algorithm']}" for row in simulated]
            measured = list(collectives.run(count, net, methods, numel=numel, quick=True))
            for lab, model in zip(measured, simulated, strict=True):
                assert lab["wire_bytes"] == model["wire_bytes"], (lab, model)
                yield {
                    "ranks": count,
                    "net": net,
                    "method": model["method"],
                    "algorithm": model["algorithm"],
                    "numel": numel,
                    "measured_seconds": lab["seconds"],
                    "simulated_seconds": model["seconds"],
                    "error": model["seconds"] / lab["seconds"] - 1,
                    "of_limit": lab["of_limit"],
                }
