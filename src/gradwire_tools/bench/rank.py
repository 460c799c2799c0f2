"""One rank of a benchmark, as `workers.measured` starts it.

    python -m gradwire_tools.bench.rank MODULE CONFIG EVENTS

The module has the configuration's class, `Config`, and `measure(config, progress)`, which joins the
other ranks in torch's default group and returns the rows. Those of rank 0 count.
"""

from __future__ import annotations

import importlib
import sys

import torch.distributed as dist

from gradwire_tools.bench import workers


def main(arguments: list[str]) -> None:
    """Measure, and on rank 0 report."""
    module = importlib.import_module(arguments[0])
    config, events = workers.configured(module.Config, arguments[1:])
    events.rows(module.measure(config, events.progress))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
