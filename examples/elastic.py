"""Train under torchrun's elastic restart: a checkpoint holds what compression has not sent yet.

    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 \\
        torchrun --nproc-per-node 2 --max-restarts 3 examples/elastic.py --checkpoint elastic

When a rank dies, the others end with a TransportError that names it, torchrun starts all of them
anew, and training goes on from the last checkpoint to the same weights, bit for bit, as if nothing
had happened. `--die-at STEP` makes the last rank die once, to see it.

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
        "--checkpoint", type=Path, required=True, help="a folder for one file a rank"
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

    # Ranks may have come to different checkpoints when one died: each rank keeps two, and all go
    # on from the newest that all have.
    args.checkpoint.mkdir(parents=True, exist_ok=True)
    mine = {int(p.stem.split("-")[1]): p for p in args.checkpoint.glob(f"rank{rank}-*.pt")}
    newest = torch.tensor(max(mine, default=0))
    dist.all_reduce(newest, op=dist.ReduceOp.MIN)
    first = int(newest)
    if first:
        state = torch.load(mine[first], weights_only=True)
        ddp.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        handle.load_state_dict(state["gradwire"])
        print(f"rank {rank} goes on from step {first}", flush=True)

    for step in range(first, args.steps):
        if step == args.die_at and rank == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        ddp(batch(step, rank)).square().mean().backward()
        optimizer.step()
        done = step + 1
        if done % EVERY == 0:
            state = {
                "model": ddp.module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "gradwire": handle.state_dict(),
            }
            path = args.checkpoint / f"rank{rank}-{done}.pt"
            torch.save(state, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)  # whole, or not there
            (args.checkpoint / f"rank{rank}-{done - 2 * EVERY}.pt").unlink(missing_ok=True)

    total = sum(float(p.double().sum()) for p in ddp.parameters())
    print(f"rank {rank} ends with {total.hex()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
