"""One rank of a benchmark, as `workers.measured` starts it.

python -m gradwire_tools.bench.rank MEASURE EVENTS
"""

from __future__ import annotations

import sys
from functools import partial

import torch.distributed as dist

from gradwire_tools.bench import workers


def main(arguments: list[str]) -> None:
    """Measure in a default group, and on rank 0 report."""
    measure, events = workers.configured(partial, arguments)
    dist.init_process_group("gloo")
    events.write("rows", rows=measure(events.progress))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
