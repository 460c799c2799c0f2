"""One rank, one GPU, NCCL: it sends to itself in stream order, which is all that can be tried so.

    python nccl_alone.py DEVICE

Prints what is wrong, or nothing. DEVICE is cuda; cpu tries the script itself, over the tests' link.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import gradwire as gw
from fifo import FifoHub
from gradwire.engine import Communicator, Graph, Issue, Kind
from gradwire.groups import communicator
from gradwire.transport import Hub
from rooms.engine import lower

SEGMENTS, NBYTES, JOBS = 6, 1 << 20, 5


class Mirror:
    """A job that sends every segment to its own rank, adds one, sends it again, and keeps it."""

    def __init__(self, device: torch.device, number: int) -> None:
        self.graph = graph = Graph("abcd")
        for s in range(SEGMENTS):
            made, came, back, end = (graph.buffer(role, s, 0, 0) for role in "abcd")
            graph.encode(s, [made])
            graph.send(s, made, peer=0)
            graph.recv(s, came, peer=0)
            graph.merge(s, [came], [back], own=0)
            graph.send(s, back, peer=0)
            graph.recv(s, end, peer=0)
            graph.decode(s, [end])
        self.schedule = lower(graph, 0, lambda role, *_: int(role in "cd"))
        self.number = number
        self.result = torch.zeros(SEGMENTS, NBYTES, dtype=torch.uint8, device=device)
        self.messages = [torch.zeros_like(self.result[0]) for _ in graph.writer]
        self.kernel_calls = 0

    def start(self) -> None:
        return

    def memory(self, buffer: int) -> torch.Tensor:
        return self.messages[buffer]

    def compute(self, task: int) -> None:
        self.kernel_calls += 1
        kind, segment = self.graph.kind[task], self.graph.segment[task]
        came = [self.messages[b] for b in self.graph.reads[task]]
        made = [self.messages[b] for b in self.graph.writes[task]]
        if kind is Kind.ENCODE:
            made[0].fill_(10 * self.number + segment)
        elif kind is Kind.MERGE:
            torch.add(came[0], 1, out=made[0])
        else:
            self.result[segment].copy_(came[0])

    def verdicts(self) -> Sequence[object]:
        return ()

    def finish(self) -> None:
        return


def main(device: torch.device) -> None:
    if device.type == "cuda":
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        seconds = timedelta(seconds=60)
        dist.init_process_group("nccl", timeout=seconds, world_size=1, rank=0, store=store)
        dist.all_reduce(torch.ones(1, device=device))  # makes the communicator
        comm = communicator()
        if comm.stream(device) is None:
            print("a group over NCCL is not taken for one")
            return
    else:
        link = FifoHub(1).link(0)
        comm = Communicator(Hub(1).transport(0), links=lambda _: link)
    mirrored(comm, device)
    if device.type == "cuda":
        functions(device)
        dist.destroy_process_group()


def mirrored(comm: Communicator, device: torch.device) -> None:
    stream = comm.stream(device)
    assert stream is not None
    jobs = [Mirror(device, number) for number in range(JOBS)]
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")  # whoever makes the host wait
    for job in jobs:
        ticket = comm.calls.ticket()
        ticket.next_round(Issue(0, "a test"))
        outcome = ticket.begin_in_order(stream, lambda job=job: job).result(0)
        ticket.close()
        if outcome.kernel_calls != job.kernel_calls:
            print(f"{outcome.kernel_calls} calls of kernels are told of {job.kernel_calls}")
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
