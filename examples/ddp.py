"""Train a small model under DDP, with gradients compressed to 4 bits.

    torchrun --nproc-per-node 2 examples/ddp.py

gradwire needs only the two marked lines.
"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw  # 1


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model)
    handle = gw.attach(ddp, codec="qsgd", bits=4)  # 2
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)

    target = torch.randn(64, 64)
    inputs = torch.Generator().manual_seed(rank)  # every rank has its own data
    for step in range(101):
        x = torch.randn(32, 64, generator=inputs)
        loss = (ddp(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")

    if rank == 0:
        stats = handle.stats()
        print(f"sent {stats['wire_bytes']:,} bytes, {stats['ratio']:.1f} times less than fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
