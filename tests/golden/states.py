"""Golden states: a checkpoint in each form, as an older version wrote it, and what it loads to.

states/FORM has what was saved on two ranks: gradwire's state, and the model's weights. A line of
states.txt is a form at a number of ranks: a digest of each rank's state as it was loaded, and of
its weights two steps later. On two ranks they are those of the run that was saved and went on.

    own      DDP; a file of each rank's state_dict; residuals and a policy's choices
    full     FSDP2; full_state_dict; learned levels of gradients and weights, and residuals
    dcp      FSDP2; a DCP checkpoint; references of weights, residuals, a policy's memory
    trainer  DDP; a trainer's file; state that is alike on all ranks, and that of several methods

`python -m golden.states` in tests/ writes all of it anew. A change of what is saved keeps the old
files, and must load them: write new ones only beside them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from golden.training_runs import Products
from ranks import as_processes
from rooms.trainers import Compression, read, write

FOLDER = Path(__file__).parent / "states"
LINES = FOLDER / "states.txt"
RANKS = (1, 2, 3)
SAVED, END = 12, 14
SHAPES = {"wide": (26, 20), "bias": (26,), "deep": (20, 16), "long": (2, 300)}
LEARNED = "learnedlevels:bits=3:block=128:rounding=stochastic"
ONCE = gw.Replan(every=1000, first=4, average=2, share=1.0, stale=None)  # decides before SAVED


def layers() -> nn.Module:
    made = Products(half=False, shapes=SHAPES)
    with torch.no_grad():
        made.deep *= 64.0  # larger gradients, for which a policy chooses another method
    return made


def sharded() -> nn.Module:
    return fully_shard(layers(), mesh=dist.DeviceMesh.from_group(dist.group.WORLD, "cpu"))


def attached(model: nn.Module, codec: str, keep: str | None = None, **how: Any) -> gw.Handle:
    options = gw.Options(seed=5, keep=keep)
    return gw.attach(model, codec, include=("*",), error_feedback=True, options=options, **how)


MADE: dict[str, Callable[[], tuple[nn.Module, gw.Handle]]] = {
    "own": lambda: (
        model := DDP(layers()),
        attached(model, "topk:density=0.05", policy=ONCE),
    ),
    "full": lambda: (model := sharded(), attached(model, LEARNED, weights={"[wdl]*": LEARNED})),
    "dcp": lambda: (
        model := sharded(),
        attached(
            model, "qsgd:bits=4", policy=replace(ONCE, policy="accordion"),
            weights={"[wdl]*": "randomshift:bits=4"}, keep="reference",
        ),
    ),
    "trainer": lambda: (
        model := DDP(layers()),
        attached(
            model, "topk:density=0.05",
            codecs={"wide": "powersgd:rank=2", "deep": "artopk:density=0.1", "long": "dgc"},
        ),
    ),
}  # fmt: skip


class Job:
    """A form's model and handle, as `save` leaves them or `load` finds them."""

    def __init__(self, form: str) -> None:
        self.form = form
        self.folder = FOLDER / form
        self.model, self.handle = MADE[form]()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=2**-6)

    def train(self, first: int, last: int, decides: bool = False) -> None:
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.model(step).backward()
            if self.form == "full" and step == 4:
                self.handle.learn_levels(100, 20)
            self.optimizer.step()
            if decides and step == 7:
                self.handle._reductions.runner.wait()  # what was decided is prepared

    def weights(self) -> dict[str, torch.Tensor]:
        named = getattr(self.model, "module", self.model).named_parameters()
        return {n: getattr(p, "full_tensor", lambda p=p: p)().detach().clone() for n, p in named}

    def save(self) -> None:
        own = self.handle.state_dict()
        full = self.handle.full_state_dict(rank0_only=True)
        kept = Compression(handle=self.handle).state_dict()
        weights = self.weights()
        if dist.get_rank() == 0:
            self.folder.mkdir(parents=True)
            torch.save(weights, self.folder / "weights.pt")
            if self.form == "full":
                torch.save(full, self.folder / "full.pt")
            if self.form == "trainer":
                write(kept, str(self.folder / "gradwire.pt"))
        dist.barrier()
        if self.form == "own":
            torch.save(own, self.folder / f"own{dist.get_rank()}.pt")
        if self.form == "dcp":
            state = {"gradwire": self.handle.checkpoint()}
            dcp.save(state, checkpoint_id=self.folder / "checkpoint")

    def load(self) -> None:
        weights = torch.load(self.folder / "weights.pt", weights_only=True)
        inside = getattr(self.model, "module", self.model)
        set_model_state_dict(inside, weights, options=StateDictOptions(full_state_dict=True))
        if self.form == "dcp":
            self.handle.load(self.folder / "checkpoint")
        elif self.form == "trainer":
            found = read(str(self.folder / "gradwire.pt"))
            Compression(handle=self.handle).load_state_dict(found)
        elif self.form == "full":
            found = torch.load(self.folder / "full.pt", weights_only=True)
            self.handle.load_state_dict(found)
        else:
            files = [self.folder / f"own{rank}.pt" for rank in (0, 1)]
            if dist.get_world_size() == 2:
                files = [files[dist.get_rank()]]
            found = [torch.load(file, weights_only=True) for file in files]
            self.handle.load_state_dict(found[0] if len(found) == 1 else found)

    def state(self) -> str:
        """A digest of this rank's state, without the plan's number."""
        state = {**self.handle.state_dict(), "plan": 0}
        return digest(state)

    def end(self) -> str:
        """A digest of the weights, but for those whose gradients are sums of products."""
        self.train(SAVED, END)
        kept = {n: p for n, p in self.weights().items() if (self.form, n) != ("trainer", "wide")}
        return digest(kept)


def digest(of: Any) -> str:
    text = json.dumps(of, default=_of_tensor, sort_keys=True)
    return hashlib.sha1(text.encode()).hexdigest()[:16]


def _of_tensor(tensor: torch.Tensor) -> list[str]:
    values = tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return [str(tensor.dtype), str(tuple(tensor.shape)), hashlib.sha1(values).hexdigest()]


def saved(rank: int) -> dict[str, tuple[str, str]]:
    """Save every form; of the run that goes on."""
    found = {}
    for form in MADE:
        job = Job(form)
        job.train(0, SAVED, decides=True)
        assert (form != "own") or job.handle.plan.version, job.handle.history()
        job.save()
        found[form] = job.state(), job.end()
    return found


def loaded(rank: int) -> dict[str, tuple[str, str]]:
    """Of every form, once it is loaded."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropped residuals
        for form in MADE:
            job = Job(form)
            job.load()
            found[form] = job.state(), job.end()
    return found


def lines(ranks: int, body: Callable[[int], Mapping[str, Any]] = loaded) -> list[str]:
    every = as_processes(ranks, body, deadline=200.0)
    found = []
    for form in MADE:
        states, ends = zip(*(of[form] for of in every), strict=True)
        found.append(f"{form} on {ranks}: states {' '.join(states)}, then {' '.join(ends)}")
    return found


def stored(ranks: int) -> list[str]:
    return [line for line in LINES.read_text().splitlines() if f" on {ranks}: " in line]


def record() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    two = lines(2, saved)
    assert lines(2) == two, "a state does not load to what was saved"
    found = [line for ranks in RANKS for line in (two if ranks == 2 else lines(ranks))]
    LINES.write_text("\n".join(found) + "\n")


if __name__ == "__main__":
    record()
