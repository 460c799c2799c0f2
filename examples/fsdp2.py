"""Train a small GPT under FSDP2, with weights gathered at 8 bits and gradients reduced at 4.

    torchrun --nproc-per-node 2 examples/fsdp2.py --checkpoint fsdp2.pt
    torchrun --nproc-per-node 3 examples/fsdp2.py --checkpoint fsdp2.pt

gradwire needs only the two marked lines. With `--checkpoint` rank 0 saves one file at the end; the
next run resumes from it, on any number of ranks.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gradwire as gw  # 1

TEXT = torch.tensor(list(Path(__file__).read_bytes()))  # this file is what the model learns
CONTEXT, WIDTH, LAYERS, HEADS = 32, 64, 2, 4


class GPT(nn.Module):
    """Bytes [n, context] (int64) to logits [n, context, 256]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(LAYERS)
        )
        self.output = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, given: Tensor) -> Tensor:
        x = self.embedding(given) + self.position.weight
        later = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        logits: Tensor = self.output(x)
        return logits


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoint", type=Path)
    path = parser.parse_args().checkpoint
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = GPT()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    handle = gw.attach(model, "qsgd", bits=4, weights="randomshift:bits=8")  # 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    if path is not None and path.exists():
        state = torch.load(path, weights_only=True)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
            options=whole,
        )
        handle.load_state_dict(state["gradwire"])
    if rank == 0:
        print(handle)

    draw = torch.Generator().manual_seed(rank)  # every rank has its own data
    for step in range(101):
        starts = torch.randint(0, len(TEXT) - CONTEXT, (8, 1), generator=draw)
        window = TEXT[starts + torch.arange(CONTEXT + 1)]
        logits = model(window[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.4f}")

    if path is not None:
        weights, moments = get_state_dict(model, optimizer, options=whole)  # on every rank
        gradwire = handle.full_state_dict(rank0_only=True)  # on every rank, too
        if rank == 0:
            torch.save({"model": weights, "optimizer": moments, "gradwire": gradwire}, path)
    if rank == 0:
        stats = handle.stats()
        of_weights = stats["weights_ratio"]
        print(f"weights: {stats['weights_wire_bytes']:,} bytes, {of_weights:.1f} times less")
        print(f"gradients: {stats['wire_bytes']:,} bytes, {stats['ratio']:.1f} times less")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
