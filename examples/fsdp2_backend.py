"""Train a small model under FSDP2 on the backend "gradwire"; the rest is a plain FSDP2 script.

    torchrun --nproc-per-node 2 examples/fsdp2_backend.py
    torchrun --nproc-per-node 2 examples/fsdp2_backend.py gloo

Gradients of matrices are reduce-scattered at 4 bits per value, those of biases uncompressed.
Weights are gathered uncompressed.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def train(seed: int, steps: int = 101) -> float:
    """The last loss, averaged over the ranks."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    target = torch.randn(64, 64)
    inputs = torch.Generator().manual_seed(1000 * seed + dist.get_rank())  # each rank has its own
    last = torch.zeros(())
    for step in range(steps):
        x = torch.randn(32, 64, generator=inputs)
        loss = (model(x) - x @ target / 8).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            last = loss.detach().clone()
            dist.all_reduce(last)  # a metric: exact on every backend
            if dist.get_rank() == 0:
                print(f"step {step:3}  loss {last.item() / dist.get_world_size():.4f}")
    return last.item() / dist.get_world_size()


def main() -> None:
    dist.init_process_group(sys.argv[1] if len(sys.argv) > 1 else "gradwire")
    train(seed=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
