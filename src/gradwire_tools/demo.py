"""`make demo`: training with and without gradwire, in three minutes on one machine.

A byte-level GPT trains on four emulated machines on a slow network, three times: with torch's fp32
all-reduce, with torch's fp16 hook, and with gradwire at 4 bits. The three runs have the same model,
seeds and batches, and are interleaved. The result is a table and a report page.

The network is chosen so that communication outweighs computing: the time of a step without
communication is measured first, and the network is the fastest of `RATES` on which the fp16 hook's
bytes take five times as long. On a faster network the gain is smaller. The choice is printed and
is on the page.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire_tools import lab, report
from gradwire_tools.bench.train import run, view
from gradwire_tools.bench.train.applied import ring_bytes
from gradwire_tools.bench.train.config import COMPARED, TrainConfig

RATES = ("1gbit", "500mbit", "300mbit", "200mbit", "100mbit", "50mbit", "20mbit")
LATENCY = "1ms"

# Wire time of the fp16 hook / compute time, at least. Then communication dominates even with a
# quarter of the bytes, and the demo compares communication.
_WIRE_TO_COMPUTE = 5.0

_CONFIG = TrainConfig(
    task="gpt",
    task_options={"validation_sequences": 64},
    nodes=4,
    net="none",
    methods=COMPARED,
    steps=300,
    evaluate_every=5,
    budget_seconds=150.0,
    target_at=0.6,  # the last loss of so short a run depends on chance
    timeout_seconds=600.0,
)


def demo(
    page: Path,
    write: Callable[[dict[str, Any]], None],
    console: Console,
    net: str | None = None,
) -> None:
    """Run the demo, print its table to `console`, and write the report to `page`.

    Args:
        write: called with each row.
        net: the network; None chooses one.

    Raises:
        ConfigError: the report's packages are missing, or `net` is not a network.
        WorkerError: a rank failed.
    """
    if net is not None:
        net = str(lab.Schedule.parse(net))
    report.check_packages()  # before the three minutes of training
    net, reason = (net, f"Network {net}, as asked.") if net else choose(_CONFIG, console)
    console.print(reason, highlight=False, soft_wrap=True)
    config = replace(_CONFIG, net=net)
    found = []
    for row in view.watch(config, console):
        row["run"]["note"] = reason
        found.append(row)
        write(row)
    console.print(view.table([row for row in found if row["row"] == "summary"]))
    page.write_text(report.render(found, "gradwire demo: time to accuracy"), encoding="utf-8")
    console.print(f"The report is in {page}", highlight=False, soft_wrap=True)


def choose(config: TrainConfig, console: Console) -> tuple[str, str]:
    """The fastest network of `RATES` that computing does not hide, `none` where no lab works; and
    the reason, in a sentence."""
    unavailable = lab.available()
    if unavailable is not None:
        told = "No network is emulated, so this run shows losses and bytes, but no gain in time: "
        return "none", told + unavailable
    console.print("Measuring a step without communication ...", style="dim")
    alone = replace(
        config, net="none", methods=("torch-fp32",), steps=0, budget_seconds=None, ideal_steps=6
    )
    *_, last = run.run(alone, None, lambda text: None)
    return fastest(float(last["ideal_step_seconds"]), int(last["parameters"]), config.nodes)


def fastest(ideal: float, parameters: int, nodes: int) -> tuple[str, str]:
    """The choice of `choose`, as a pure function.

    Args:
        ideal: seconds of a step without communication.
    """
    sent = ring_bytes(parameters, 2, nodes)
    wires = {rate: sent * 8 / lab.Network.parse(rate).rate_bits_per_s for rate in RATES}
    slow = (rate for rate, wire in wires.items() if wire >= _WIRE_TO_COMPUTE * ideal)
    chosen = next(slow, RATES[-1])
    ranks = f"{nodes} ranks on {os.cpu_count()} cores"
    reason = (
        f"Network {chosen}, {LATENCY}: a step computes for {ideal * 1e3:.0f} ms here ({ranks}), "
        f"and the fp16 hook's {sent / 1e6:.1f} MB per rank and step take "
        f"{wires[chosen] * 1e3:.0f} ms on the wire. It is the fastest of {', '.join(RATES)} on "
        f"which that is {_WIRE_TO_COMPUTE:g} times as long as computing, or the slowest of them; "
        "on a faster network the gain is smaller."
    )
    return f"{chosen},{LATENCY}", reason
