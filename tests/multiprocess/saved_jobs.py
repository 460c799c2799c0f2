"""Jobs whose handles have all that a state may have: how they train, save and load."""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenario import digest, layers, model_of, owed, own_mesh, sharded
from test_automatic import clocked, how
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw

WAYS = ("own", "full", "dcp")
# Passes: after the first a decision is in force, after the second another. No window has them.
SAVED, END = 7, 13
WITHOUT = 3, 5  # where nothing is decided
CHECKED = gw.Replan(every=10, first=4, average=2, share=1.0)  # decides early, where a plan is stale
OFTEN = gw.Replan(every=6, first=4, average=2, share=1.0, stale=None)
TRIED = 40, 44  # where trials come before


def remembering(group: Any) -> tuple[Any, gw.Handle]:
    """A policy whose second decision depends on what it saw at the first, which changes nothing."""
    how = {"error_feedback": True, "policy": replace(OFTEN, policy="accordion")}
    return (model := model_of("ddp", group)), gw.attach(model, "qsgd:bits=4", **how)


def learning(group: Any) -> tuple[Any, gw.Handle]:
    """Beside a policy, learned levels of weights, and references."""
    weights = {"*.weight": "learnedlevels:bits=4:block=128"}
    how: dict[str, Any] = {"error_feedback": True, "policy": CHECKED, "weights": weights}
    how["options"] = gw.Options(keep="reference")
    return (model := model_of("fsdp2", group)), gw.attach(model, "topk:density=0.05", **how)


def choosing_both(group: Any) -> tuple[Any, gw.Handle]:
    """A policy of gradients and of weights, which both have several sizes."""
    model = model_of("fsdp2", group)
    with torch.no_grad():
        for number, size in ((0, 30.0), (4, 0.03)):
            model[number].weight.mul_(size)
    how = {"error_feedback": True, "policy": OFTEN}
    return model, gw.attach(model, "topk:density=0.05", weights="randomshift:bits=5", **how)


def automatic(group: Any) -> tuple[Any, gw.Handle]:
    """A plan that trials choose, which no state has: here one with residuals."""
    model = model_of("ddp", group)
    auto = gw.Auto((), ("powersgd:rank=2",), policy=None, trial=1, watch=0)
    handle: Any = gw.attach(model, auto)
    clocked(handle, lambda: 1.0 if "powersgd" in how(handle)["0.weight"] else 30.0)
    return model, handle


def weighing(group: Any) -> tuple[Any, gw.Handle]:
    """A policy that begins with a trial of DDP's buckets."""
    model = DDP(layers(), process_group=group, bucket_cap_mb=0.05)
    return model, gw.attach(model, "qsgd:bits=4", policy=gw.Replan(weigh="time"))


def aggregating(group: Any) -> tuple[Any, gw.Handle]:
    """Residuals of a codec's, of a low-rank aggregator's beside its factor, and of a leader's."""
    model = model_of("ddp", group)
    kept = {"2.weight": "powersgd:rank=2", "4.weight": "artopk:density=0.1"}
    how: dict[str, Any] = {"density": 0.1, "codecs": kept, "error_feedback": True}
    return model, gw.attach(model, "topk", **how)


def many_parameters(group: Any, keep: str | None) -> tuple[Any, gw.Handle]:
    """Tied, frozen and uneven ones; learned levels of gradients and weights, and random numbers."""
    model = sharded(mesh=own_mesh() if group is None else DeviceMesh.from_group(group, "cpu"))
    weights = dict.fromkeys(("embedding", "second.weight", "spare.weight"), "randomshift:bits=4")
    weights |= dict.fromkeys(("first.weight", "frozen.weight"), "learnedlevels:bits=4:block=128")
    codec = "learnedlevels:bits=3:block=128:rounding=stochastic"
    kept = gw.Options(keep=keep)
    how: dict[str, Any] = {"error_feedback": True, "weights": weights, "options": kept}
    return model, gw.attach(model, codec, codecs={"second.weight": "qsgd:bits=4"}, **how)


MADE: dict[str, Any] = {
    made.__name__: made for made in (remembering, learning, choosing_both, automatic, weighing)
}
POLICIES = ("remembering", "learning", "choosing_both")
EVALUATED = "weights kept as reference, and evaluated"  # the last version was gathered already
KEPT = {f"weights kept as {keep}": keep for keep in (None, "none", "reference")}
KEPT[EVALUATED] = "reference"
MADE |= {"aggregating": aggregating}
MADE |= {name: partial(many_parameters, keep=keep) for name, keep in KEPT.items()}
KINDS = [kind for kind in MADE if kind != "weighing"]  # do not depend on what was measured
# Whose states differ: a state has nothing of payloads, whether they are kept or not.
MOVED = [k for k in KINDS if KEPT.get(k, "reference") == "reference" and k != EVALUATED]


class Job:
    """A model and its handle, of all ranks unless a group is given."""

    def __init__(self, kind: str, group: Any = None) -> None:
        self.model, self.handle = MADE[kind](group)
        self.kind, self.group = kind, group
        # Of many parameters micro-batches are each reduced, and see one version of the weights.
        self.many = kind in KEPT
        make = torch.optim.AdamW if self.many else torch.optim.SGD
        self.optimizer = make(self.model.parameters(), lr=1e-3 if self.many else 1e-6)

    def loss(self, number: int) -> torch.Tensor:
        made = torch.Generator().manual_seed(100 * number + dist.get_rank())
        if self.many:
            found = self.model(torch.randn(8, 30, generator=made), spare=True)
        else:
            found = self.model(torch.randn(16, 64, generator=made))
        return found.square().mean()  # type: ignore[no-any-return]

    def train(self, first: int, last: int) -> list[Any]:
        """Of each pass: losses, this rank's gradients, and the methods in force."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            losses = [self.loss(2 * step + micro) for micro in range(1 + self.many)]
            for loss in losses:
                loss.backward()
            if step == 2 and (self.many or self.kind == "learning") and self.handle.world_size > 1:
                self.handle.learn_levels(1000, 50)
            of = [p.grad for p in self.model.parameters() if p.grad is not None]
            gradients = [digest(getattr(g, "_local_tensor", g)) for g in of]
            found.append(([loss.item() for loss in losses], gradients, self.methods()))
            self.optimizer.step()
            self.settle()
        return found

    def settle(self) -> None:
        """Wait until all ranks have decided, and prepared what they will use."""
        self.handle._reductions.runner.wait()
        self.handle._reductions.switch.change(lambda plan: plan)
        dist.barrier(self.group)

    def methods(self) -> list[str]:
        return [str(p) for p in self.handle.plan.parameters]

    def changes(self) -> None:
        """Gradients of the first and the last layer change places: plans go stale."""
        layers = list(getattr(self.model, "module", self.model))
        layers[0].scale, layers[4].scale = layers[4].scale, layers[0].scale

    def decisions(self) -> list[Any]:
        """Those after the state was saved, but for their seconds."""
        adaptation = self.handle._reductions.adaptation
        rows = [] if adaptation is None else adaptation.history
        left = {"line", "seconds"}
        return [
            {k: v for k, v in row.items() if k not in left} for row in rows if row["pass"] > SAVED
        ]

    def state(self) -> str:
        """This rank's, with digests of tensors."""
        state = {**self.handle.state_dict(), "plan": 0}
        if "weights" in state:  # what is current without a reference is gathered anew all the same
            kept = state["weights"]
            current = [name for name in kept["current"] if name in kept["references"]]
            state["weights"] = {**kept, "current": current}
        return json.dumps(state, default=digest)

    def everything(self) -> list[str]:
        """All that loading a state may change."""
        adaptation = self.handle._reductions.adaptation
        deciders = {} if adaptation is None else adaptation._deciders
        of_policy = repr([(d.policy, d._last) for d in deciders.values()])
        return [self.state(), of_policy, *self.methods()]

    # ---- states

    def weights(self) -> Any:
        """Copies of the model's and of the optimizer's state."""
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return weights, copy.deepcopy(self.optimizer.state_dict())

    def has(self, weights: Any) -> None:
        self.model.load_state_dict(weights[0])
        self.optimizer.load_state_dict(copy.deepcopy(weights[1]))

    def save(self, folder: Path) -> None:
        """In every way."""
        rank = self.handle.rank
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        torch.save(self.handle.state_dict(), folder / f"own{rank}.pt")
        whole = self.handle.full_state_dict(rank0_only=True)
        assert bool(whole) == (rank == 0)
        if rank == 0:
            torch.save(whole, folder / "full.pt")
        state = {"gradwire": self.handle.checkpoint()}
        if self.many:
            state["model"], state["optimizer"] = get_state_dict(self.model, self.optimizer)
        dcp.save(state, checkpoint_id=folder / "dcp")
        dist.barrier()

    def loads(self, way: str, folder: Path, full: Any) -> None:
        """It has then what `full` says, of which residuals may be dropped with a warning."""
        drops = self.handle.world_size == 1 and (self.many or self.kind in POLICIES[1:])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always" if way == "rank 0" or drops else "error")
            self._load(way, folder)
        said = [str(one.message) for one in warned]
        if way == "rank 0" and self.handle.world_size == 3 and self.kind != "automatic":
            assert any("residuals start at zero" in one for one in said), (self.kind, said)
        if drops and way != "rank 0":
            assert any("are dropped" in one for one in said), (self.kind, way, said)
            assert not self.handle.state_dict()["aggregators"]
        assert_loaded(self, full, drops or way == "rank 0")

    def _load(self, way: str, folder: Path) -> None:
        every = len(list(folder.glob("own*.pt")))
        if way == "dcp":
            if self.many:
                weights, moments = get_state_dict(self.model, self.optimizer)
                saved = {"model": weights, "optimizer": moments}
                dcp.load(saved, checkpoint_id=folder / "dcp")
                set_state_dict(
                    self.model, self.optimizer, model_state_dict=weights, optim_state_dict=moments
                )
            self.handle.load(folder / "dcp")
            return
        same = every == self.handle.world_size
        files = {
            "own": [f"own{self.handle.rank}"] if same else [f"own{n}" for n in range(every)][::-1],
            "full": ["full"],
            "rank 0": ["own0"],
        }[way]
        found = [torch.load(folder / f"{name}.pt", weights_only=True, mmap=True) for name in files]
        self.handle.load_state_dict(found[0] if len(found) == 1 else found)


def assert_loaded(job: Job, full: Any, drops: bool) -> None:
    """What `full` has is there, as much as so many ranks have a use for it; `drops`: but for
    residuals."""
    first, now = full["ranks"][0], job.handle.full_state_dict()
    assert [state["rank"] for state in now["ranks"]] == list(range(now["world_size"]))
    assert all(state["steps"] == first["steps"] for state in now["ranks"])
    assert all(state.get("levels") == first.get("levels") for state in now["ranks"])
    adapts = job.handle._reductions.adaptation is not None
    if adapts and "policy" in first and job.kind != "automatic":
        assert all(state["parameters"] == first["parameters"] for state in now["ranks"])
        assert now["ranks"][0]["policy"] == first["policy"]
    if drops:
        return
    before, after = owed(full), owed(now)
    assert after.keys() == before.keys()
    for name, residual in before.items():
        torch.testing.assert_close(after[name], residual)
    for name, basis in bases(first).items() if job.kind == "aggregating" else ():
        assert all(torch.equal(bases(state)[name], basis) for state in now["ranks"])
    kept, found = references(full), references(now)
    assert all(torch.equal(found[name], reference) for name, reference in kept.items())
    old, new = residuals(full), residuals(now)
    if job.kind == "aggregating" and (len(old), len(new)) == (3, 2):
        # As load_state_dict's docstring says: of three ranks 0 and 2, and rank 1, at 2/3.
        torch.testing.assert_close(new[0], (old[0] + old[2]) * 2 / 3)
        torch.testing.assert_close(new[1], old[1] * 2 / 3)


def residuals(full: Any) -> list[torch.Tensor]:
    """Of a codec, by rank."""
    states = [state["aggregators"].get("0.weight", {}) for state in full["ranks"]]
    return [state["residual"] for state in states if "residual" in state]


def bases(state: Any) -> dict[str, torch.Tensor]:
    """PowerSGD's factors, which all ranks have alike."""
    return {name: of["basis"] for name, of in state["aggregators"].items() if "basis" in of}


def references(full: Any) -> dict[str, torch.Tensor]:
    """Of weights that are sent as differences, of all ranks."""
    parts = [state.get("weights", {}).get("references", {}) for state in full["ranks"]]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
