"""What `handle.metrics()` costs in a step of the gpt task.

    torchrun --nproc_per_node 2 scripts/metrics_overhead.py [METHOD]

Steps without metrics and steps that are all sampled take turns. Prints their medians, the time of a
call, and what a step costs more on average if metrics are read in every step and one pass in a
hundred is sampled, as is the default.
"""

from __future__ import annotations

import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.handles.metrics import EVERY
from gradwire_tools.bench import tasks

TURNS, NEVER = 60, 1 << 40


def main(method: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    task = tasks.get("gpt", sequences=4)
    model = DistributedDataParallel(task.model(0))
    optimizer = task.optimizer(model.module)
    handle = gw.attach(model, method, error_feedback=True)
    seconds: dict[str, list[float]] = {"plain": [], "sampled": [], "call": []}
    for turn in range(TURNS + 5):
        for kind, every in (("plain", NEVER), ("sampled", 1)):
            handle.metrics(every=every)
            if kind == "plain":
                handle._metrics.sampler._next = NEVER  # a changed `every` samples at once
            batch = task.batch(0, dist.get_rank(), turn)
            dist.barrier()
            begun = time.perf_counter()
            task.loss(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended = time.perf_counter()
            handle.metrics(every=every)
            if turn >= 5:
                seconds[kind].append(ended - begun)
                seconds["call"].append(time.perf_counter() - ended)
    plain, sampled, call = (statistics.median(times) for times in seconds.values())
    more = call + max(sampled - plain, 0) / EVERY
    if dist.get_rank() == 0:
        print(f"{method}: a step {1e3 * plain:.1f} ms, sampled {1e3 * sampled:.1f} ms, ", end="")
        print(f"a call {1e6 * call:.0f} us: {100 * more / plain:.2f} % of a step")
    handle.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "qsgd:bits=4")
