"""Jobs whose handles have all that a state may have, saved in every way, and loaded by as many
ranks, fewer and more.

Ranks wait for each other's decisions after every pass, so that runs with a policy are equal.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from saved_jobs import (
    END,
    EVALUATED,
    KEPT,
    KINDS,
    MOVED,
    POLICIES,
    SAVED,
    TRIED,
    WAYS,
    WITHOUT,
    Job,
    assert_loaded,
    references,
    residuals,
)
from scenario import gathered, owed, unlike

import gradwire as gw
from ranks import as_processes, raises
from training import alike, everywhere

pytestmark = pytest.mark.multiprocess


def each_kind_resumes(rank: int, folder: Path) -> None:
    """At the number of ranks that saved: with the state of then, and on to the bits and decisions
    of a run that went on. (Of rank 0's state alone, each rank has what is not its own.)"""
    for number, kind in enumerate(KINDS):
        first = Job(kind)
        at, end = WITHOUT if kind in KEPT or kind == "aggregating" else (SAVED, END)
        at, end = TRIED if kind == "automatic" else (at, end)
        first.train(0, at)
        if kind == EVALUATED:
            with torch.no_grad():
                first.loss(0)
        first.save(folder / kind)
        state, full = first.state(), first.handle.full_state_dict()
        assert len(owed(full)) == 3 + first.many
        assert all(residual.any() for residual in owed(full).values())
        assert len(full["ranks"]) == full["world_size"] == dist.get_world_size()
        assert bool(references(full)) == (kind == "learning" or KEPT.get(kind) == "reference")
        if kind == "aggregating":
            assert not torch.equal(*residuals(full))  # rank 0's says nothing of rank 1's
        weights = first.weights()
        if kind in POLICIES:
            first.changes()
        expected, decided = first.train(at, end), first.decisions()
        assert kind not in POLICIES or expected[0][-1] != expected[-1][-1], decided
        again = Job(kind)
        again.has(weights)
        again.loads("rank 0", folder / kind, full)
        ways = (*WAYS[number % 3 :], *WAYS[: number % 3])
        for way in ways if kind in MOVED else ("own",):
            again.loads(way, folder / kind, full)
            assert kind == "automatic" or again.state() == state, (kind, way)
        if kind in POLICIES:
            again.changes()
        found = again.train(at, end)
        if kind == "automatic":  # which begins anew
            assert alike(found[-1][-1])
            continue
        assert found == expected, kind
        assert again.decisions() == decided, kind
        if kind in POLICIES:
            what_is_refused_changes_nothing(again, full)
            again.loads("full", folder / kind, full)
        else:  # back in time, once a version that is about to be replaced was gathered
            with torch.no_grad():
                first.loss(0)
            first.has(weights)
            first.loads("full", folder / kind, full)
            assert first.train(at, end) == expected, kind
        if kind == "remembering":
            how_values_were_rounded_does_not_matter(first)
        if first.many:
            without = first.handle.state_dict()
            without.pop("levels")
            first.handle.load_state_dict(without)
            assert "levels" not in first.handle.state_dict()


def each_kind_moves(
    rank: int, folder: Path, kinds: Sequence[str] = MOVED, then: Path | None = None
) -> None:
    """To another number of ranks, where training goes on, and is saved again."""
    for kind in kinds:
        job = Job(kind)
        full = torch.load(folder / kind / "full.pt", weights_only=True)
        job.loads("rank 0", folder / kind, full)
        if job.many:
            job.train(0, 1)
        states = set()
        for way in WAYS:
            job.loads(way, folder / kind, full)
            if way != "dcp":  # which sums in another order
                states.add(job.state())
        assert kind == "automatic" or len(states) == 1, kind
        for losses, *_ in job.train(SAVED, SAVED + 2):
            assert all(loss < float("inf") for loss in losses)
        if then is not None:
            job.save(then / kind)
        assert alike(job.methods())
        assert not unlike(gathered(job.model) if job.many else {})


def test_each_kind_moves_from_a_single_rank(rank: int) -> None:
    mine, _ = dist.new_subgroups(1)
    for kind in MOVED:
        alone, job = Job(kind, mine), Job(kind)
        alone.train(0, 2)
        full = everywhere(alone.handle.full_state_dict())[0]
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


def test_a_trial_of_buckets_runs_again_from_a_state_before_it(rank: int) -> None:
    job = Job("weighing")
    start = job.handle.state_dict()
    for _ in range(2):
        weights, step = None, 0
        while weights is None:
            assert step < 60, job.handle.history()
            job.train(step, step + 1)
            weights, step = job.handle.state_dict()["policy"]["byte_weights"], step + 1
            assert alike(weights)
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
    ("4.weight has feedback", "parameters/4.weight/feedback", False),
    ("another.weight", "steps/another.weight", 1),
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
    ("4.weight has terngrad", "policy/methods/gradients/4.weight", "terngrad"),
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
        ("0.weight has fp8", "policy/methods/weights/0.weight", "fp8"),
    ],
}
# Where the state of one rank is another.
UNLIKE = [
    ("differ in seed", "seed", 7),
    ("differ in steps", "steps/0.weight", 99),
    ("differ in passes of policy", "policy/passes", 99),
    ("differ in methods of policy", "policy/methods/gradients", {"0.weight": "none"}),
    ("give the states of all", "rank", 0),
    ("rank 99 of 2", "rank", 99),
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
        raises(kind, lambda: job.handle.load_state_dict(states), told)
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
    long: dict[str, Any] = {"timeout": 600.0, "deadline": 240.0}
    as_processes(2, each_kind_resumes, of_two, **long)
    as_processes(3, each_kind_moves, of_two, MOVED, of_three, **long)
    as_processes(2, each_kind_moves, of_three, MOVED[::2], **long)
    as_processes(1, each_kind_moves, of_three, MOVED[1::2], **long)
