"""`make demo`: what gradwire is for, in three minutes on one machine.

A byte-level GPT trains on four emulated machines behind a slow network, three times over: with
torch's fp32 all-reduce, with torch's fp16 hook, and with gradwire at 4 bits; same model, same
seeds, same batches, taking turns. At the end: one table, and a page with the curves.

How slow the network has to be depends on this machine. Four ranks share its cores, so a step
computes longer here than it would on four machines, and a fast network would hide behind that. So
the time of a step without communication is measured first, and the network is the fastest of
`RATES` on which communication clearly outweighs it. Which one, and why, is printed.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire import lab
from gradwire.bench import report, train, train_view
from gradwire.bench.methods import ring_bytes
from gradwire.bench.train_config import TrainConfig

RATES = ("1gbit", "500mbit", "300mbit", "200mbit", "100mbit", "50mbit", "20mbit")
LATENCY = "1ms"

# The fp16 hook's bytes must take this many times as long as computing: then even a quarter of them
# outweighs computing, and what is compared is communication.
_OUTWEIGHS = 5.0

_CONFIG = TrainConfig(
    task="gpt",
    task_options={"validation_sequences": 64},
    nodes=4,
    net="none",
    methods=train.COMPARED,
    steps=300,
    evaluate_every=10,
    budget_seconds=150.0,
    timeout_seconds=600.0,
)


@dataclass(frozen=True)
class Choice:
    """A network, and why it was chosen, in a sentence."""

    net: str
    reason: str


def demo(
    page: Path,
    write: Callable[[dict[str, Any]], None],
    console: Console,
    net: str | None = None,
) -> None:
    """Runs the demo, prints its table to `console`, and writes the report to `page`.

    Args:
        write: is called with each row.
        net: the network, if it is not to be chosen here.

    Raises:
        ConfigError: the report's packages are missing, or `net` is not a network.
        WorkerError: a rank failed.
    """
    if net is not None:
        lab.Network.parse(net)
    report.check_packages()  # before three minutes have gone into rows
    choice = Choice(net, f"Network {net}, as asked.") if net else choose(_CONFIG, console)
    console.print(choice.reason, highlight=False, soft_wrap=True)
    config = replace(_CONFIG, net=choice.net)
    found = []
    for row in train_view.watch(config, console):
        found.append(row)
        write(row)
    console.print(train_view.table([row for row in found if row["row"] == "summary"]))
    title = "gradwire: the same training, with less to send"
    page.write_text(report.render(found, title, [choice.reason]), encoding="utf-8")
    console.print(f"The curves are in {page}", highlight=False, soft_wrap=True)


def choose(config: TrainConfig, console: Console) -> Choice:
    """The fastest of `RATES` that computing does not hide; `none` where no lab can be made."""
    unavailable = lab.available()
    if unavailable is not None:
        return Choice(
            "none",
            "No network is emulated, so this shows losses and bytes, and no gain in time: "
            + unavailable,
        )
    console.print("Measuring a step without communication ...", style="dim")
    ideal, parameters = _ideal_step(config)
    return fastest(ideal, parameters, config.nodes)


def fastest(ideal: float, parameters: int, nodes: int) -> Choice:
    """The choice itself: pure, so that it can be tested.

    Args:
        ideal: seconds of a step without communication.
    """
    sent = ring_bytes(parameters, 2, nodes)
    chosen = RATES[-1]
    for rate in RATES:
        if _wire_seconds(sent, rate) >= _OUTWEIGHS * ideal:
            chosen = rate
            break
    wire = _wire_seconds(sent, chosen)
    ranks = f"{nodes} ranks on {os.cpu_count()} cores"
    reason = (
        f"Network {chosen}, {LATENCY}: a step computes for {ideal * 1e3:.0f} ms here ({ranks}), "
        f"and the fp16 hook's {sent / 1e6:.1f} MB a rank and step then take {wire * 1e3:.0f} ms "
        "on the wire."
    )
    if chosen != RATES[0]:
        fast = _wire_seconds(sent, RATES[0])
        reason += f" At {RATES[0]} they would take {fast * 1e3:.0f} ms, which computing would hide."
    return Choice(f"{chosen},{LATENCY}", reason)


def _wire_seconds(sent: int, rate: str) -> float:
    return sent * 8 / lab.Network.parse(f"{rate},{LATENCY}").rate_bits_per_s


def _ideal_step(config: TrainConfig) -> tuple[float, int]:
    """Seconds of a step without communication, and how many parameters the model has."""
    alone = replace(
        config, net="none", methods=("torch-fp32",), steps=0, budget_seconds=None, ideal_steps=6
    )
    last: dict[str, Any] = {}
    for row in train.run(alone, announce=_quiet):
        last = row
    return float(last["ideal_step_seconds"]), int(last["parameters"])


def _quiet(text: str) -> None:
    """What this short run emulates is of no interest: nothing."""
