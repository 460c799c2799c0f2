"""`gw.accelerate`: what `accelerator.save_state` keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from trained import (
    CODEC,
    DEVICE,
    HOW,
    OUTER,
    as_a_job_of_its_own,
    as_under_torchrun,
    batches,
    compressed,
    exact,
    met,
    net,
)

import gradwire as gw
from ranks import refuses
from training import flat, same_everywhere


def made() -> tuple[Any, Any, Any, gw.Handle]:
    accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu")
    bare = net()
    optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = accelerator.prepare(bare, optimizer)
    handle = gw.accelerate.attach(accelerator, model, CODEC, **HOW)
    return accelerator, model, optimizer, handle


def train(accelerator: Any, model: Any, optimizer: Any, handle: gw.Handle) -> None:
    for batch in batches():
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: Path) -> Any:
    return torch.load(folder / "state" / "custom_checkpoint_0.pkl", weights_only=True)


def trains_and_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, to the same bits as a run that went on."""
    as_under_torchrun(rank)
    first = accelerator, model, _, handle = made()
    train(*first)
    compressed(handle)
    accelerator.save_state(str(folder / "state"))
    dist.barrier()
    train(*first)
    assert same_everywhere(flat(model))
    again = accelerator, resumed, _, other = made()
    accelerator.load_state(str(folder / "state"))
    exact(other.full_state_dict(), saved(folder))
    train(*again)
    assert torch.equal(flat(resumed), flat(model))
    # One object in the checkpoint, whatever was attached before.
    other.detach()
    assert not other._reductions.installed
    last = gw.accelerate.attach(again[0], resumed, CODEC, **HOW)
    again[0].load_state(str(folder / "state"))
    exact(last.full_state_dict(), saved(folder))
    accelerator = again[0]
    accelerator.free_memory()  # as a function of find_executable_batch_size begins
    model = accelerator.prepare(net())
    last = gw.accelerate.attach(accelerator, model, CODEC, **HOW)
    accelerator.load_state(str(folder / "state"))
    exact(last.full_state_dict(), saved(folder))
    refuses("give the Accelerator first", lambda: gw.accelerate.attach(None, resumed))  # type: ignore[arg-type]
    # A handle by itself would be rank 0's.
    accelerator.register_for_checkpointing(handle)
    refuses("gw.accelerate.attach", lambda: accelerator.save_state(str(folder / "wrong")))


def replicas_train_and_resume(rank: int, folder: Path) -> None:
    """Each is a job of its own to Accelerate, and saves for itself."""
    as_a_job_of_its_own()

    def replica() -> Any:
        accelerator = accelerate.Accelerator(cpu=DEVICE == "cpu")
        bare = net()
        optimizer = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
        model, optimizer = accelerator.prepare(bare, optimizer)
        how = {"optimizer": optimizer}
        return accelerator, model, optimizer, gw.accelerate.attach(accelerator, model, OUTER, **how)

    first = replica()
    train(*first)
    first[0].save_state(str(folder / f"replica{rank}"))
    train(*first)
    train(*first)
    again = replica()
    again[0].load_state(str(folder / f"replica{rank}"))
    train(*again)
    train(*again)
    met(again[1], first[1], again[3])


def a_part_of_the_ranks_is_refused(rank: int, folder: Path) -> None:
    """As with tensor parallelism: rank 0's handle does not reach all ranks."""
    as_under_torchrun(rank)
    accelerator, two = accelerate.Accelerator(cpu=DEVICE == "cpu"), dist.new_group([0, 1])
    if rank < 2:
        model = DistributedDataParallel(net(), process_group=two)
        said = "save handle.checkpoint() on every rank"
        refuses(said, lambda: gw.accelerate.attach(accelerator, model))
        gw.attach(model)  # nothing is left attached
