"""Train a small model under DDP, with gradients compressed to 4 bits.

    torchrun --nproc-per-node 2 examples/ddp.py
    torchrun --nproc-per-node 2 examples/ddp.py --checkpoint ddp.pt

gradwire needs only the two marked lines. With `--checkpoint` rank 0 saves one file at the end, with
every rank's residuals; the next run resumes from it, on any number of ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw  # 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    path = parser.parse_args().checkpoint
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model)
    handle = gw.attach(ddp, codec="qsgd", bits=4, error_feedback=True)  # 2
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    if path is not None and path.exists():
        state = torch.load(path, weights_only=True)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gradwire"])
    if rank == 0:
        print(handle)

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

    if path is not None:
        gradwire = handle.full_state_dict(rank0_only=True)  # collective: every rank calls it
        if rank == 0:
            model_state, optimizer_state = ddp.module.state_dict(), optimizer.state_dict()
            torch.save(
                {"model": model_state, "optimizer": optimizer_state, "gradwire": gradwire}, path
            )
    if rank == 0:
        stats = handle.stats()
        print(f"sent {stats['wire_bytes']:,} bytes, {stats['ratio']:.1f} times less than fp32")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
