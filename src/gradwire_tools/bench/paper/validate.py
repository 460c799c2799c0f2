"""`gradwire sim --validate`: the simulator against the lab, point by point.

In the lab each point has its own run, so that TCP's state (such as its congestion window) comes
from the same collective, as in training. A run that takes clearly longer than simulated is
repeated, since other load on a shared machine only adds time; the least median counts. The lab's
nodes and its switch share this machine's cores, which the simulation takes into account.

A row: ranks, net, method, algorithm, numel, measured_seconds (bench collectives: of the slowest
rank, median over rounds), simulated_seconds, error (simulated / measured - 1), of_limit (of the
measured), runs (number of measurements), spread (largest median / least - 1, the variation of the
lab).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from gradwire import codecs as codec_table
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.network import collectives
from gradwire_tools.bench.progress import cells, unwatched
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.lab import Network, available
from gradwire_tools.sim import Curves, Net, Scenario, predict

KINDS = (
    row_kind(
        "sim --validate",
        "measured_seconds simulated_seconds",
        "net:text method:text algorithm:text ranks:positive numel:count measured_seconds:amount "
        "simulated_seconds:amount error:number spread:amount",
        "of_limit:amount? runs:positive",
    ),
)

RANKS = (2, 4, 8)
NETS = ("100mbit,5ms", "300mbit,1ms", "1gbit,1ms")
ALGORITHMS = ("sra", "ring", "tree", "parameter_server", "all_gather")
CODECS = ("qsgd", "identity")
NUMEL = 2_500_000
RUNS = 3  # per point, at most
_SLOW = 1.1  # a run that takes longer than this, relative to the simulation, is repeated
# The subset that `--quick` runs.
QUICK: dict[str, Any] = {
    "ranks": (2,), "nets": NETS[1:2], "codecs": CODECS[:1], "algorithms": ALGORITHMS[:2],
}  # fmt: skip

# Total rate of all nodes, at most. Beyond it the lab's switch is the bottleneck
# (docs/laboratory/lab.md).
_LAB_BITS_PER_S = 5e9
# The switch's core seconds per byte and end: 9 % of a core at 1 Gbit/s (docs/laboratory/lab.md).
SWITCH_S = 0.36e-9
# Core seconds per message and end, of ranks that share two cores: threads that wake, and packets
# that pass the switch. Measured with averages of 64 KB to 16 MB by all algorithms.
MESSAGE_S = 0.1e-3


@stamped
def run(
    ranks: Sequence[int] = RANKS,
    nets: Sequence[str] = NETS,
    codecs: Sequence[str] = CODECS,
    algorithms: Sequence[str] = ALGORITHMS,
    numel: int = NUMEL,
    runs: int = RUNS,
    fresh: bool = False,
) -> Iterator[Row]:
    """Yield a row for each number of ranks, network, codec and algorithm.

    With `fresh`, kernels are measured again before each number of ranks on each network, since the
    speed of a shared machine changes during the twenty minutes of a full run.

    Raises:
        ConfigError: no lab on this machine.
    """
    reason = available()
    if reason is not None:
        raise ConfigError(f"this machine cannot emulate a network to compare with ({reason})")
    chosen = {text: codec_table.get(text) for text in codecs}

    labs = [
        (Network.parse(net), count)
        for net, count in itertools.product(nets, ranks)
        if count * Network.parse(net).rate_bits_per_s <= _LAB_BITS_PER_S
    ]

    @cache
    def known(lab: tuple[Network, int]) -> Curves:
        found = measuring.measured(chosen.values(), threads=1, fresh=fresh)
        stack, message = found.link.stack + SWITCH_S, found.link.message + MESSAGE_S
        return replace(found, link=replace(found.link, stack=stack, message=message))

    def rows(lab: tuple[Network, int], text: str, algorithm: str) -> Iterator[Row]:
        network, count = lab
        net, method = str(network), f"gradwire:{text}"
        scenario = Scenario(
            ranks=count,
            net=Net(net, network.rate_bits_per_s, network.latency_s),
            codec=chosen[text],
            model=str(numel),
            options=Options(algorithm=algorithm),
            cores=float(len(os.sched_getaffinity(0))),
            barrier=True,
        )
        model = predict(scenario, known(lab))
        found: list[Row] = []
        least = float("inf")
        while len(found) < runs and least > _SLOW * model["seconds"]:
            found.append(_measured(count, net, f"{method}:algorithm={algorithm}", numel))
            least = min(least, found[-1]["seconds"])
        assert all(row["wire_bytes"] == model["wire_bytes"] for row in found), (found, model)
        yield {
            "ranks": count,
            "net": net,
            "method": method,
            "algorithm": algorithm,
            "numel": numel,
            "measured_seconds": least,
            "simulated_seconds": model["seconds"],
            "error": model["seconds"] / least - 1,
            "of_limit": max(row["of_limit"] for row in found),
            "runs": len(found),
            "spread": max(row["seconds"] for row in found) / least - 1,
        }

    name = "{1} by {2}, {0[1]} ranks on {0[0]}"
    yield from cells(name, rows, labs, chosen, algorithms)


def _measured(ranks: int, net: str, method: str, numel: int) -> Row:
    (row,) = unwatched(collectives.run(ranks, net, [method], numel=numel, quick=True))
    return row
