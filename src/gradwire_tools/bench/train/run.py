"""`gradwire bench train`: time to accuracy of every method on one task and one network.

The measure is the time in which a method reaches the validation loss of the uncompressed baseline
(Beyond Throughput, 2.2), since bytes and throughput do not measure learning. The baseline for time
is 16 bit, not 32. Every row names its method:

- a row per evaluation (`row: evaluation`): the metric and the loss after given steps and seconds;
- a row per method at the end (`row: summary`), over all its seeds: time to target, step time, and
  the ideal step time, which is the time of a step without communication, measured in the same run.

`run` yields rows as they come. docs/reference/benchmarks.md lists every key.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.train import state
from gradwire_tools.bench.train.compose import composed_rows
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.rows import Advance, Announce, Row, rows


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@stamped
def run(
    config: TrainConfig,
    progress: Advance | None = None,
    announce: Announce = _to_stderr,
    folder: Path | None = None,
    resume: bool = False,
) -> Iterator[Row]:
    """Train, and yield rows as they come; closing the iterator ends all processes.

    Args:
        progress: called a few times per second while a method trains.
        announce: called with lines for people: what is emulated, what was substituted.
        folder: in which the run keeps what it needs to continue after it is killed; it is removed
            at the end.
        resume: continue the run in `folder`, if there is one; its rows come again, from the first.

    Raises:
        ConfigError: the configuration cannot run, or not on this machine; or `resume`, and the run
            in `folder` has another configuration, or is damaged; or `folder` is something else.
        WorkerError: a rank failed or timed out.
    """
    announce(config.check().describe())
    train = composed_rows if config.nets else rows
    if folder is None:
        yield from train(config, progress, announce)
        return
    with state.lease(folder):
        if state.prepare(folder, dataclasses.asdict(config), resume):
            announce(f"Continuing the run in {folder}, from where it last saved")
        elif resume:
            announce(f"There is no run to continue in {folder}: it starts from the beginning")
        saving = dataclasses.replace(config, state=str(folder / "train"))
        yield from train(saving, progress, announce)
        state.remove(folder)
