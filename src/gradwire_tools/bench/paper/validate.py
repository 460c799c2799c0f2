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
from typing import Any

from gradwire import codecs as codec_table
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire_tools.bench import workers
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.network import collectives
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.lab import Network, available
from gradwire_tools.sim import Net, Scenario, predict
from gradwire_tools.sim.curves import Software

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
# (docs/internals/lab.md).
_LAB_BITS_PER_S = 5e9
# The switch's core seconds per byte and end: 9 % of a core at 1 Gbit/s (docs/internals/lab.md).
SWITCH_S = 0.36e-9
# Core seconds per message and end, of ranks that share two cores: threads that wake, and packets
# that pass the switch. Measured with averages of 64 KB to 16 MB by all algorithms.
MESSAGE_S = 0.1e-3


def on_shared_cores(link: Software) -> Software:
    """The costs of messages in the lab, whose nodes and switch share this machine's cores."""
    return replace(link, stack=link.stack + SWITCH_S, message=link.message + MESSAGE_S)


@stamped
def run(
    ranks: Sequence[int] = RANKS,
    nets: Sequence[str] = NETS,
    codecs: Sequence[str] = CODECS,
    algorithms: Sequence[str] = ALGORITHMS,
    numel: int = NUMEL,
    runs: int = RUNS,
    fresh: bool = False,
    advance: workers.Advance | None = None,
) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of ranks, network, codec and algorithm.

    With `fresh`, kernels are measured again before each number of ranks on each network, since the
    speed of a shared machine changes during the twenty minutes of a full run.

    `advance` is called with every point.

    Raises:
        ConfigError: no lab on this machine.
    """
    reason = available()
    if reason is not None:
        raise ConfigError(f"this machine cannot emulate a network to compare with ({reason})")
    cores = float(len(os.sched_getaffinity(0)))
    chosen = {text: codec_table.get(text) for text in codecs}
    labs = [
        (Network.parse(net), count)
        for net, count in itertools.product(nets, ranks)
        if count * Network.parse(net).rate_bits_per_s <= _LAB_BITS_PER_S
    ]
    points, done = len(labs) * len(chosen) * len(algorithms), itertools.count()
    for network, count in labs:
        net = str(network)
        known = measuring.measured(chosen.values(), threads=1, fresh=fresh, advance=advance)
        known = replace(known, link=on_shared_cores(known.link))
        for (text, codec), algorithm in itertools.product(chosen.items(), algorithms):
            if advance is not None:
                advance(f"{text} by {algorithm}, {count} ranks on {net}", next(done), points)
            scenario = Scenario(
                ranks=count,
                net=Net(net, network.rate_bits_per_s, network.latency_s),
                codec=codec,
                model=str(numel),
                options=Options(algorithm=algorithm),
                cores=cores,
                barrier=True,
            )
            model = predict(scenario, known)
            method = f"gradwire:{text}:algorithm={algorithm}"
            lab = [_measured(count, net, method, numel)]
            while len(lab) < runs and _least(lab) > _SLOW * model["seconds"]:
                lab.append(_measured(count, net, method, numel))
            assert all(row["wire_bytes"] == model["wire_bytes"] for row in lab), (lab, model)
            least = _least(lab)
            yield {
                "ranks": count,
                "net": net,
                "method": f"gradwire:{text}",
                "algorithm": algorithm,
                "numel": numel,
                "measured_seconds": least,
                "simulated_seconds": model["seconds"],
                "error": model["seconds"] / least - 1,
                "of_limit": max(row["of_limit"] for row in lab),
                "runs": len(lab),
                "spread": max(row["seconds"] for row in lab) / least - 1,
            }


def _least(lab: Sequence[dict[str, Any]]) -> float:
    return min(float(row["seconds"]) for row in lab)


def _measured(ranks: int, net: str, method: str, numel: int) -> dict[str, Any]:
    (row,) = collectives.run(ranks, net, [method], numel=numel, quick=True)
    return row
