"""One of several ranks that share a GPU, over gloo, or that have one each, over NCCL: collectives
of CUDA tensors.

    python share.py RANK WORLD_SIZE PORT DEVICE BACKEND

PORT is that of a TCPStore which the caller hosts. Prints what is wrong, or nothing. What it reduces
on the device must be, bit by bit, what the same collective makes on the CPU. DEVICE is cuda; cpu,
with gloo, tries the script itself.
"""

from __future__ import annotations

import logging
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from gradwire.groups import communicator

SIZES = (1, 1000, 300_007)
STEPS = 20
ROUNDS = 50  # of so many steps, until something is decided


# What automatic mode decides depends on the machine: a choice against compression is no fault.
logging.getLogger("gradwire").setLevel(logging.ERROR)


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
    train_decided(device, "in use from now on", gw.Auto(trial=2))
    replan = gw.Replan("lgreco", 5, average=2)
    train_decided(device, "", "qsgd:bits=4", policy=replan)
    for keep in ("payload", "none", "reference"):
        train_sharded(device, keep)
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
    learn(model, device)
    same_everywhere([p.detach() for p in model.parameters()])
    if handle.stats()["ratio"] < 3:
        print(f"sent {handle.stats()}")


def train_decided(device: torch.device, said: str, codec: str, **options: Any) -> None:
    """A module learns while a policy or automatic mode decides, of gradients on the device; it ends
    once a line of the history has `said`."""
    layer = torch.nn.Linear(64, 64).to(device)
    model = DistributedDataParallel(layer)
    handle = gw.attach(model, codec, **options)
    decided = torch.zeros(1, device=device if dist.get_backend() == "nccl" else "cpu")
    for _ in range(ROUNDS):
        torch.manual_seed(0)
        layer.reset_parameters()
        learn(model, device)
        decided.fill_(any(said in row["line"] for row in handle.history()))
        dist.all_reduce(decided, dist.ReduceOp.MIN)
        if decided:
            break
    else:
        print(f"{codec}: nothing was decided in {ROUNDS * STEPS} steps: {handle.history()}")
    failed = [row["line"] for row in handle.history() if "nothing can be planned" in row["line"]]
    if failed:
        print(f"{codec}: {failed}")
    same_everywhere([p.detach() for p in model.parameters()])
    handle.detach()


def train_sharded(device: torch.device, keep: str) -> None:
    """A module under FSDP2 learns from weights that travel quantised, alike on all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)).to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for module in (*model, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=module is not model)
    handle = gw.attach(
        model, "qsgd:bits=8", weights="randomshift:bits=8", options=gw.Options(keep=keep)
    )
    learn(model, device)
    same_everywhere([model(torch.eye(64, device=device)).detach()])
    stats = handle.stats()
    ratios = stats["ratio"], stats["weights_raw_bytes"] / stats["weights_wire_bytes"]
    if dist.get_world_size() > 1 and min(ratios) < 2:
        print(f"keep={keep!r} sent {stats}")
    handle.detach()


def learn(model: torch.nn.Module, device: torch.device) -> None:
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


def same_everywhere(tensors: list[torch.Tensor]) -> None:
    values = torch.cat([tensor.reshape(-1) for tensor in tensors])
    values = values if dist.get_backend() == "nccl" else values.cpu()
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    if not all(torch.equal(values, other) for other in gathered):
        print("replicas differ")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), torch.device(sys.argv[4]), sys.argv[5])
