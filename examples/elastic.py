"""Train under torchrun's elastic restart: checkpoints include the residuals.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint elastic

When a rank dies, the others end with a TransportError that names it. torchrun restarts all ranks,
and training resumes from the last checkpoint and ends with bit-identical weights. `--die-at STEP`
kills the last rank once, as a demonstration. Started with another number of ranks, it resumes from
the same checkpoint: residuals are distributed over the new ranks.

The environment variable gives every attempt its own store. Without it gloo finds the addresses of
the dead ranks (torch 2.13; with or without gradwire).
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
    """The batch of a step, the same after a restart."""
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
    handle = gw.attach(ddp, bits=4, error_feedback=True)

    # One file, which rank 0 writes, holds the residuals of every rank.
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    path, first = args.checkpoint / "newest.pt", 0
    if path.exists():
        state = torch.load(path, weights_only=True)
        first = state["step"]
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gradwire"])
        print(f"rank {rank} resumes from step {first}", flush=True)
    dist.barrier()  # no rank saves before all have loaded

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
                path.with_suffix(".part").rename(path)  # atomic: never a partial file

    total = sum(float(p.double().sum()) for p in ddp.parameters())
    print(f"rank {rank} ends with {total.hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
