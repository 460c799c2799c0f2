"""One rank, one GPU, NCCL: it sends to itself in stream order, which is all that can be tried so.

    python nccl_alone.py DEVICE

Prints what is wrong, or nothing. DEVICE is cuda; cpu tries the script itself, over the tests' link.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gradwire as gw
from fifo import FifoHub
from gradwire.engine import Buffer, Graph, Kind, Task
from gradwire.engine.in_order import InOrder
from gradwire.engine.schedule import lower
from gradwire.groups import communicator

SEGMENTS, NBYTES, JOBS = 6, 1 << 20, 5


class Mirror:
    """A job that sends every segment to its own rank, adds one, sends it again, and keeps it."""

    def __init__(self, device: torch.device, number: int) -> None:
        tasks: list[Task] = []
        for s in range(SEGMENTS):
            made, came, back, end = (Buffer(role, s, 0, 0) for role in ("a", "b", "c", "d"))
            tasks += [
                Task(Kind.ENCODE, s, writes=(made,)),
                Task(Kind.SEND, s, reads=(made,), peer=0),
                Task(Kind.RECV, s, writes=(came,), peer=0),
                Task(Kind.MERGE, s, reads=(came,), writes=(back,), own=0),
                Task(Kind.SEND, s, reads=(back,), peer=0),
                Task(Kind.RECV, s, writes=(end,), peer=0),
                Task(Kind.DECODE, s, reads=(end,)),
            ]
        self.schedule = lower(Graph(tasks), 0, lambda buffer, *_: int(buffer.role in "cd"))
        self.number = number
        self.result = torch.zeros(SEGMENTS, NBYTES, dtype=torch.uint8, device=device)
        self.messages = {b: torch.zeros_like(self.result[0]) for t in tasks for b in t.writes}

    def start(self) -> None:
        return

    def memory(self, buffer: Buffer) -> torch.Tensor:
        return self.messages[buffer]

    def compute(self, task: Task) -> None:
        if task.kind is Kind.ENCODE:
            self.messages[task.writes[0]].fill_(10 * self.number + task.segment)
        elif task.kind is Kind.MERGE:
            torch.add(self.messages[task.reads[0]], 1, out=self.messages[task.writes[0]])
        else:
            self.result[task.segment].copy_(self.messages[task.reads[0]])

    def verdicts(self) -> Sequence[object]:
        return ()

    def finish(self) -> None:
        return


def main(device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        dist.init_process_group("nccl", address, timedelta(seconds=60), 1, 0)
        dist.all_reduce(torch.ones(1, device=device))  # makes the communicator
        in_order = communicator().in_order(device)
        if in_order is None:
            print("a group over NCCL is not taken for one")
            return
    else:
        in_order = InOrder(FifoHub(1).link(0))
    mirrored(in_order, device)
    if device.type == "cuda":
        functions(device)
        dist.destroy_process_group()


def mirrored(in_order: InOrder, device: torch.device) -> None:
    jobs = [Mirror(device, number) for number in range(JOBS)]
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # whoever makes the host wait
    for job in jobs:
        in_order.submit(job).result(0)
    results = torch.stack([job.result for job in jobs])
    if device.type == "cuda":
        torch.cuda.set_sync_debug_mode("default")
    expected = [[10 * j.number + s + 1 for s in range(SEGMENTS)] for j in jobs]
    for edge in (0, NBYTES // 2, NBYTES - 1):
        if results[:, :, edge].tolist() != expected:
            print(f"byte {edge}: {results[:, :, edge].tolist()}, not {expected}")


def functions(device: torch.device) -> None:
    """With one rank nothing is sent, and nothing changes."""
    tensor = torch.randn(100_000, device=device)
    before = tensor.clone()
    gw.all_reduce(tensor, "qsgd", op="avg")
    future = gw.all_reduce(tensor, "topk", op="avg", async_op=True)
    assert future is not None
    if not torch.equal(future.wait(), before):
        print("an all-reduce of one rank changed its tensor")


if __name__ == "__main__":
    main(torch.device(sys.argv[1]))
