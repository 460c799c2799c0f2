"""One of several ranks that share a GPU, over gloo, or that have one each, over NCCL: collectives
of CUDA tensors.

    python share.py RANK WORLD_SIZE PORT DEVICE BACKEND

PORT is that of a TCPStore which the caller hosts. Prints what is wrong, or nothing. What it reduces
on the device must be, bit by bit, what the same collective makes on the CPU. DEVICE is cuda; cpu,
with gloo, tries the script itself.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.groups import communicator

SIZES = (1, 1000, 300_007)
STEPS = 20


def main(rank: int, world_size: int, port: int, device: torch.device, backend: str) -> None:
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    seconds = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, timeout=seconds)
    dist.init_process_group(backend, timeout=seconds, world_size=world_size, rank=rank, store=store)
    for codec in ("identity", "qsgd", "topk"):
        for algorithm in ("sra", "ring", "tree"):
            for numel in SIZES:
                same_as_on_the_cpu(codec, gw.Options(algorithm=algorithm), numel, device)
    train(device)
    stream = communicator().stream(device)
    if (stream is not None) != (backend == "nccl"):
        print(f"over {backend}, tensors on {device} go by way of {stream}")
    dist.barrier()
    dist.destroy_process_group()


def same_as_on_the_cpu(codec: str, options: gw.Options, numel: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for step in range(2):
        here = torch.randn(numel, generator=generator)
        there = here.to(device)
        for tensor in (here, there):
            residual = torch.full_like(tensor, 0.25)
            gw.all_reduce(tensor, codec, op="avg", residual=residual, step=step, options=options)
        if not torch.equal(here, there.cpu()):
            print(f"{codec}, {options}, {numel} values: other bits than on the CPU")


def train(device: torch.device) -> None:
    """A module under DDP learns, and its replicas agree."""
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(64, 64).to(device))
    handle = gw.attach(model, bits=4, error_feedback=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
    target = torch.randn(64, 64, device=device) / 8
    losses = []
    for step in range(STEPS):
        torch.manual_seed(1000 * step + dist.get_rank())
        x = torch.randn(128, 64).to(device)
        loss = (model(x) - x @ target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if losses[-1] > 0.5 * losses[0]:
        print(f"the loss went from {losses[0]} to {losses[-1]}")
    weights = torch.cat([p.detach().view(-1) for p in model.parameters()])
    weights = weights if dist.get_backend() == "nccl" else weights.cpu()
    gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, weights)
    if not all(torch.equal(weights, other) for other in gathered):
        print("replicas differ")
    if handle.stats()["ratio"] < 3:
        print(f"sent {handle.stats()}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), torch.device(sys.argv[4]), sys.argv[5])
