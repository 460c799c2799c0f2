"""Train under torchrun's elastic restart: a checkpoint holds what compression has not sent yet.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint elastic

When a rank dies, the others end with a TransportError that names it, torchrun starts all of them
anew, and training goes on from the last checkpoint to the same weights, bit for bit, as if nothing
had happened. `--die-at STEP` makes the last rank die once, to see it. Started with another number
of ranks, it goes on from the same checkpoint: residuals are shared out among the ranks there are.

The variable gives every attempt a store of its own. Without it gloo finds the addresses of the
ranks that are gone (torch 2.13; with or without gradwire).
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw

EVERY = 5  # steps from one checkpoint to the next


def batch(step: int, rank: int) -> torch.Tensor:
    """Of a step, so that a restart sees what it would have seen."""
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="a folder that all ranks see"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    handle = gw.attach(ddp, bits=2, error_feedback=True)

    # One file, which rank 0 writes, holds what every rank has not sent yet.
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    path, first = args.checkpoint / "newest.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        first = state["step"]
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gradwire"])
        print(f"rank {rank} goes on from step {first}", flush=True)
    dist.barrier()  # nobody saves before all have loaded

    for step in range(first, args.steps):
        if step == args.die_at and rank == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().mean().backward()
        optimizer.step()
        done = step + 1
        if done % EVERY == 0:
            gradwire = handle.full_state_dict(rank0_only=True)  # collective
            if rank == 0:
                state = {
                    "step": done,
                    "model": ddp.module.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "gradwire": gradwire,
                }
                torch.save(state, path.with_suffix(".part"))
                path.with_suffix(".part").rename(path)  # whole, or not there

    total = sum(float(p.double().sum()) for p in ddp.parameters())
    print(f"rank {rank} ends with {total.hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
