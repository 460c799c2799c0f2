"""Jobs whose handles have all that a state may have, saved in every way, and loaded by as many
ranks, fewer and more.

Ranks wait for each other's decisions after every pass, so that runs with a policy are equal.
"""

from __future__ import annotations

import copy
import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adaptive_model import layers, model_of
from sharded_model import digest, on_all, owed
from test_automatic import QUICK, planned
from together import together
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught
from rooms.integrations import WantedSetting

pytestmark = pytest.mark.multiprocess

WAYS = ("own", "full", "dcp")
# Passes: after the first a decision is in force, after the second another. No window has them.
SAVED, END = 7, 13
CHECKED = gw.Replan(every=10, first=4, average=2, share=1.0)  # decides early, where a plan is stale
OFTEN = gw.Replan(every=6, first=4, average=2, share=1.0, stale=None)
SKETCHED = WantedSetting("powersgd:rank=2", "sra", rank=3, seconds=1.0)


def remembering(group: Any) -> tuple[Any, gw.Handle]:
    """A policy whose second decision depends on what it saw at the first, which changes nothing."""
    how = {"error_feedback": True, "policy": "accordion", "replan": OFTEN}
    return (model := model_of("ddp", group)), gw.attach(model, "qsgd:bits=4", **how)


def learning(group: Any) -> tuple[Any, gw.Handle]:
    """Beside a policy, learned levels of weights, and references."""
    weights = {"weights": {"*.weight": "learnedlevels:bits=4:block=128"}, "keep": "reference"}
    how = {"error_feedback": True, "policy": "lgreco", "replan": CHECKED, **weights}
    return (model := model_of("fsdp2", group)), gw.attach(model, "topk:density=0.05", **how)


def choosing_both(group: Any) -> tuple[Any, gw.Handle]:
    """A policy of gradients and of weights, which both have several sizes."""
    model = model_of("fsdp2", group)
    with torch.no_grad():
        for number, size in ((0, 30.0), (4, 0.03)):
            model[number].weight.mul_(size)
    how = {"error_feedback": True, "policy": "lgreco", "replan": OFTEN}
    return model, gw.attach(model, "topk:density=0.05", weights="randomshift:bits=5", **how)


def automatic(group: Any) -> tuple[Any, gw.Handle]:
    """A plan that measurements choose, which no state has: here one with residuals."""
    model = model_of("ddp", group)
    return model, gw.attach(model, "auto", auto=QUICK)


def weighing(group: Any) -> tuple[Any, gw.Handle]:
    """A policy that begins with a trial of DDP's buckets."""
    model = DDP(layers(), process_group=group, bucket_cap_mb=0.05)
    how = {"policy": "lgreco", "replan": gw.Replan(weigh="time")}
    return model, gw.attach(model, "qsgd:bits=4", **how)


MADE = {made.__name__: made for made in (remembering, learning, choosing_both, automatic, weighing)}
KINDS = list(MADE)[:-1]  # that do not depend on what was measured


class Job:
    """A model and its handle, of all ranks unless a group is given."""

    def __init__(self, kind: str, group: Any = None) -> None:
        self.model, self.handle = MADE[kind](group)
        self.kind, self.group = kind, group
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)

    def train(self, first: int, last: int) -> list[Any]:
        """Of each pass: this rank's gradients, and the methods in force."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            made = torch.Generator().manual_seed(100 * step + dist.get_rank())
            self.model(torch.randn(16, 64, generator=made)).square().mean().backward()
            if step == 2 and self.kind == "learning" and self.handle.world_size > 1:
                self.handle.learn_levels(1000, 50)
            of = [getattr(p.grad, "_local_tensor", p.grad) for p in self.model.parameters()]
            found.append(([digest(g) for g in of], self.methods()))
            self.optimizer.step()
            self.settle()
        return found

    def settle(self) -> None:
        """Wait until all ranks have decided, and prepared what they will use."""
        automatic, adaptation = self.handle.automatic, self.handle.adaptation
        for serial in (automatic and automatic.serial, adaptation and adaptation._serial):
            if serial is not None:
                serial.wait()
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
        adaptation = self.handle.adaptation
        rows = [] if adaptation is None else adaptation.history
        left = {"line", "seconds"}
        return [
            {k: v for k, v in row.items() if k not in left} for row in rows if row["pass"] > SAVED
        ]

    def state(self) -> str:
        """This rank's, with digests of tensors."""
        return json.dumps({**self.handle.state_dict(), "plan": 0}, default=digest)

    def everything(self) -> list[str]:
        """All that loading a state may change."""
        adaptation = self.handle.adaptation
        deciders = {} if adaptation is None else adaptation._deciders
        of_policy = repr([(d.policy, d._last) for d in deciders.values()])
        return [self.state(), of_policy, *self.methods()]

    # ---- states

    def save(self, folder: Path) -> None:
        """In every way."""
        rank = self.handle.rank
        if rank == 0:
            folder.mkdir()
        dist.barrier()
        torch.save(self.handle.state_dict(), folder / f"own{rank}.pt")
        whole = self.handle.full_state_dict(rank0_only=True)
        if rank == 0:
            torch.save(whole, folder / "full.pt")
        dcp.save({"gradwire": self.handle.checkpoint()}, checkpoint_id=folder / "dcp")
        dist.barrier()

    def loads(self, way: str, folder: Path, full: Any) -> None:
        """It has then what `full` says, of which residuals may be dropped with a warning."""
        drops = self.handle.world_size == 1 and self.kind in ("learning", "choosing_both")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if way == "rank 0" or drops else "error")
            self._load(way, folder)
        assert_loaded(self, full, drops or way == "rank 0")

    def _load(self, way: str, folder: Path) -> None:
        every = len(list(folder.glob("own*.pt")))
        if way == "dcp":
            self.handle.load_checkpoint(folder / "dcp")
            return
        same = every == self.handle.world_size
        files = {
            "own": [f"own{self.handle.rank}"] if same else [f"own{n}" for n in range(every)][::-1],
            "full": ["full"],
            "rank 0": ["own0"],
        }[way]
        found = [torch.load(folder / f"{name}.pt", weights_only=True) for name in files]
        self.handle.load_state_dict(found[0] if len(found) == 1 else found)


def assert_loaded(job: Job, full: Any, drops: bool) -> None:
    """What `full` has is there, as much as so many ranks have a use for it; `drops`: but for
    residuals."""
    first, now = full["ranks"][0], job.handle.full_state_dict()
    assert all(state["steps"] == first["steps"] for state in now["ranks"])
    assert all(state.get("levels") == first.get("levels") for state in now["ranks"])
    if job.handle.adaptation is not None and "policy" in first and job.kind != "automatic":
        assert all(state["parameters"] == first["parameters"] for state in now["ranks"])
        assert now["ranks"][0]["policy"] == first["policy"]
    if not drops:
        assert owed(now).keys() == owed(full).keys()
        for name, residual in owed(full).items():
            torch.testing.assert_close(owed(now)[name], residual)


# ---- checks


def each_kind_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved: with the state of then, and on to the bits and decisions
    of a run that went on. (Of rank 0's state alone, each rank has what is not its own.)"""
    with pytest.MonkeyPatch.context() as monkey:
        for number, kind in enumerate(KINDS):
            planned(monkey, [SKETCHED])
            first = Job(kind)
            first.train(0, SAVED)
            first.save(folder / kind)
            state, full = first.state(), first.handle.full_state_dict()
            assert len(owed(full)) == 3
            assert all(residual.any() for residual in owed(full).values())
            weights = {name: value.clone() for name, value in first.model.state_dict().items()}
            first.changes()
            expected, decided = first.train(SAVED, END), first.decisions()
            assert kind == "automatic" or expected[0][1] != expected[-1][1], decided
            planned(monkey, [SKETCHED])
            again = Job(kind)
            again.model.load_state_dict(weights)
            again.loads("rank 0", folder / kind, full)
            for way in (*WAYS[number:], *WAYS[:number]):
                again.loads(way, folder / kind, full)
                assert kind == "automatic" or again.state() == state, (kind, way)
            again.changes()
            found = again.train(SAVED, END)
            if kind == "automatic":  # which begins anew
                assert all(how == found[-1][1] for how in on_all(found[-1][1]))
            else:
                assert found == expected, kind
                assert again.decisions() == decided, kind
                what_is_refused_changes_nothing(again, full)
                again.loads("full", folder / kind, full)
            if kind == "remembering":
                how_values_were_rounded_does_not_matter(first)


def each_kind_moves(rank: int, folder: Path, then: Path | None = None) -> None:
    """To another number of ranks, where training goes on, and is saved again."""
    with pytest.MonkeyPatch.context() as monkey:
        for kind in KINDS:
            planned(monkey, [SKETCHED])
            job = Job(kind)
            full = torch.load(folder / kind / "full.pt", weights_only=True)
            for way in ("rank 0", *WAYS):
                job.loads(way, folder / kind, full)
            job.train(SAVED, SAVED + 2)
            if then is not None:
                job.save(then / kind)
            assert all(how == job.methods() for how in on_all(job.methods()))


def each_kind_moves_from_a_single_rank(rank: int) -> None:
    mine, _ = dist.new_subgroups(1)
    with pytest.MonkeyPatch.context() as monkey:
        for kind in KINDS:
            planned(monkey, [SKETCHED])
            alone, job = Job(kind, mine), Job(kind)
            alone.train(0, 2)
            full = on_all(alone.handle.full_state_dict())[0]
            job.handle.load_state_dict(full)
            assert_loaded(job, full, drops=False)
            job.train(2, 4)


def how_values_were_rounded_does_not_matter(job: Job) -> None:
    """A state of an older default loads, into methods that round as today's."""
    expected, full = (job.state(), job.methods()), job.handle.full_state_dict()
    for state in full["ranks"]:
        for facts in state["parameters"].values():
            facts["codec"] = facts["codec"].replace("dithered", "stochastic")
        methods = state["policy"]["methods"]["gradients"]
        assert methods
        for name in methods:
            methods[name] += ":rounding=stochastic"
    job.handle.load_state_dict(full)
    assert (job.state(), job.methods()) == expected


def a_trial_of_buckets_runs_again_from_a_state_before_it(rank: int) -> None:
    job = Job("weighing")
    start = job.handle.state_dict()
    for _ in range(2):
        weights, step = None, 0
        while weights is None:
            assert step < 60, job.handle.history()
            job.train(step, step + 1)
            weights, step = job.handle.state_dict()["policy"]["byte_weights"], step + 1
            assert all(of == weights for of in on_all(weights))
        assert len(weights) == 3
        job.handle.load_state_dict(start)


# What is wrong in the states of all ranks: what the error says, where it is, and what is put there
# (`...`: nothing), which may be a function of what was there.
DAMAGE: list[tuple[str, str, Any]] = [
    ("(version 1)", "version", True),
    ("lacks 'steps'", "steps", ...),
    ("has False for 'rank'", "rank", False),
    ("has True for 'world_size'", "world_size", True),
    ("has True for 'seed'", "seed", True),
    ("seed=-1", "seed", -1),
    ("below 2^64", "seed", 1 << 70),
    ("is at step -5", "steps/0.weight", -5),
    ("is at step True", "steps/0.weight", True),
    ("not a whole number from 0 to below 2^48", "steps/0.weight", 1 << 80),
    ("has 'two' for 'shards'", "shards", "two"),
    ("its parameters differ in 0.weight", "parameters/0.weight", ...),
    ("2.weight has numel 3", "parameters/2.weight/numel", 3),
    ("4.weight has codec TopK(density=1)", "parameters/4.weight/codec", "TopK(density=1)"),
    ("the state of 4.weight is not a mapping", "aggregators/4.weight", 3),
    ("the state has 'other' for 4.weight", "aggregators/4.weight/other", torch.zeros(1)),
    ("is int, not a tensor", "aggregators/4.weight/residual", 3),
    ("has shape", "aggregators/4.weight/residual", lambda residual: residual[1:]),
    ("has dtype", "aggregators/4.weight/residual", lambda residual: residual.half()),
    ("has device meta", "aggregators/4.weight/residual", lambda residual: residual.to("meta")),
    ("not contiguous", "aggregators/4.weight/residual", lambda one: one.repeat(2)[::2]),
    ("for 'policy'", "policy", 3),
    ("for 'policy' (passes='7')", "policy/passes", "7"),
    ("for 'policy' (passes=-1)", "policy/passes", -1),
    ("for 'policy' ('methods')", "policy/methods", ...),
    ("unknown codec or aggregator 'qsdg'", "policy/methods/gradients/4.weight", "qsdg"),
    ("4.weight has TernGrad", "policy/methods/gradients/4.weight", "terngrad"),
    ("for 'policy' ('nobody')", "policy/methods/gradients/nobody", "none"),
    ("for 'policy'", "policy/byte_weights", 3),
    ("for 'policy'", "policy/gradients", [3]),
    ("for 'policy'", "policy/gradients/planned_error", "none"),
]  # fmt: skip
OF_KIND: dict[str, list[tuple[str, str, Any]]] = {
    "remembering": [("for 'policy'", "policy/gradients/memory", {"norms": {"0.weight": "none"}})],
    "learning": [
        ("for 'levels'", "levels", {"weights": 3}),
        ("for 'levels'", "levels/weights/0.weight", ["none"]),
        ("for 'weights'", "weights/references", 3),
        ("for 'weights'", "weights/current", [[1]]),
        ("for 'weights'", "weights/changed", 3),
        ("no shard of this module", "weights/references/nobody", torch.zeros(1)),
        ("no shard of this module", "weights/references/0.weight", lambda part: part[:, 1:]),
        ("no shard of this module", "weights/references/0.weight", lambda part: part.to("meta")),
        ("no shard of this module", "dims", {"0.weight": "none"}),
    ],
    "choosing_both": [
        ("for 'dims'", "dims", 3),
        ("0.weight has Float8", "policy/methods/weights/0.weight", "fp8"),
    ],
}
# Where the state of one rank is another.
UNLIKE = [
    ("differ in seed", "seed", 7),
    ("differ in steps", "steps/0.weight", 99),
    ("differ in passes of policy", "policy/passes", 99),
    ("differ in methods of policy", "policy/methods/gradients", {"0.weight": "none"}),
    ("give the states of all", "rank", 0),
]


def damaged(state: dict[str, Any], path: str, value: Any) -> None:
    """Put it where it is not wanted."""
    *way, last = path.split("/")
    for key in way:
        state = state[key]
    if value is ...:
        del state[last]
    else:
        state[last] = value(state[last]) if callable(value) else value


def what_is_refused_changes_nothing(job: Job, saved: Any) -> None:
    """Of states that are other than the handle's in all that they have.

    Args:
        saved: of all ranks.
    """
    before = job.everything()

    def refused(states: Any, told: str, kind: type = gw.ConfigError) -> None:
        error = caught(lambda: job.handle.load_state_dict(states))
        assert isinstance(error, kind), (job.kind, told, error)
        assert told in str(error), (job.kind, told, error)
        assert job.everything() == before, (job.kind, told)

    refused([], "the list of states is empty")
    refused([3], "not the state_dict of a gradwire handle")
    every, one = slice(None), slice(1, 2)
    for rows, ranks in ((DAMAGE, every), (OF_KIND[job.kind], every), (UNLIKE, one)):
        for told, path, value in rows:
            states = copy.deepcopy(saved["ranks"])
            for state in states[ranks]:
                damaged(state, path, value)
            refused(states, told)
    of_nine = {**saved["ranks"][0], "world_size": 9}
    if "shards" in of_nine:
        of_nine["shards"] = 9
    with warnings.catch_warnings():  # a user may want an error
        warnings.simplefilter("error")
        refused(of_nine, "residuals start at zero", UserWarning)


def test_all_that_a_handle_has_is_saved_and_loaded(tmp_path: Path) -> None:
    of_two, of_three = tmp_path / "two", tmp_path / "three"
    of_two.mkdir()
    of_three.mkdir()
    together(
        2,
        partial(each_kind_resumes, folder=of_two),
        each_kind_moves_from_a_single_rank,
        a_trial_of_buckets_runs_again_from_a_state_before_it,
    )
    together(3, partial(each_kind_moves, folder=of_two, then=of_three))
    together(2, partial(each_kind_moves, folder=of_three))
    together(1, partial(each_kind_moves, folder=of_three))
