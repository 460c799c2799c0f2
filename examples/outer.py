"""Train replicas on two machines that meet every so many steps, and restart from checkpoints.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 1 --max-restarts 3 --master-addr 10.0.0.1 \\
        --master-port 29500 examples/outer.py --checkpoint outer

on the first machine, here with the address 10.0.0.1; on the second the same with `--node-rank 1`.
On one machine, to try it: `torchrun --nproc-per-node 2 examples/outer.py`.

A replica saves after each meeting, on its own machine: the folder need not be shared. When one
dies, torchrun restarts all, and each resumes from its file. A replica whose file is older than that
of others, or that has none, begins at their outer weights: so another number of replicas may go on.
`--die-at STEP` kills the last replica once, as a demonstration.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

import gradwire as gw

LETTERS, LENGTH = 32, 16


class Model(torch.nn.Module):
    """A small GPT. Numbered layers are what `fragments` deals out."""

    def __init__(self, width=64, layers=2):
        super().__init__()
        self.embed = torch.nn.Embedding(LETTERS, width)
        self.place = torch.nn.Parameter(torch.zeros(LENGTH, width))
        how = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(width, 4, 4 * width, **how) for _ in range(layers)
        )
        self.head = torch.nn.Linear(width, LETTERS)
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)

    def forward(self, x):
        x = self.embed(x) + self.place
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.head(x)


def batch(step, rank):
    """Texts in which a letter tells the next; of each replica its own, the same after a restart."""
    made = torch.Generator().manual_seed(1000 * step + rank)
    texts = [torch.randint(LETTERS, (16,), generator=made)]
    for _ in range(LENGTH):
        texts.append((5 * texts[-1] + 7) % LETTERS)
    return torch.stack(texts, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--preset", default="average", help="or diloco, streaming, sparseloco")
    parser.add_argument("--every", type=int, default=10, help="steps from one meeting to the next")
    parser.add_argument("--codec", help="such as qsgd:bits=4; by default that of the preset")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--checkpoint", type=Path, help="a folder of this machine")
    parser.add_argument("--die-at", type=int)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(0)
    model = Model()  # no wrapper
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    outer = gw.outer(model, optimizer, args.preset, every=args.every, codec=args.codec)

    path = args.checkpoint and args.checkpoint / f"replica{rank}.pt"
    if path and path.exists():
        state = torch.load(path, weights_only=True)
        for name, of in ("model", model), ("optimizer", optimizer), ("outer", outer):
            of.load_state_dict(state[name])
        print(f"replica {rank} resumes from step {outer.stats()['optimizer_steps']}", flush=True)
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        outer.recover()  # one that is behind follows the others

    first = outer.stats()["optimizer_steps"]
    for step in range(first, args.steps):
        if step == args.die_at and rank == last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        texts = batch(step, rank)
        logits = model(texts[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step in (first, args.steps - 1):
            print(f"step {step}  loss {loss.item():.4f}", flush=True)
        if path and (step + 1) % args.every == 0:
            kept = {"model": model, "optimizer": optimizer, "outer": outer}
            part = path.with_suffix(".part")
            torch.save({name: of.state_dict() for name, of in kept.items()}, part)
            part.rename(path)  # atomic: never a partial file

    if rank == 0:
        print(outer)  # rounds, bytes, seconds hidden and waited for, drift
    total = sum(float(values.double().sum()) for values in outer.outer_weights().values())
    print(f"replica {rank} ends with {total.hex()}", flush=True)
    outer.detach()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
