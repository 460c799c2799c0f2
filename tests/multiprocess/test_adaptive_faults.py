"""Ranks never disagree on a plan that a policy chooses: many switches under delays, and ranks that
are slow, killed or resumed while they decide.

Delays are counted in passes: the background work of a rank is held at a named point until the rank
has begun some more passes, or until the test lets it go on.
"""

from __future__ import annotations

import contextlib
import copy
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from scenario import FOUR, digest, held, model_of, passes, until_decided

import gradwire as gw
from gradwire.controllers import Budget, Layer, Policy
from ranks import on
from rooms.decide import tables
from training import alike, everywhere

ONCE = gw.Replan(every=10_000, first=4, average=2, share=1.0, stale=None)


@dataclass(frozen=True)
class Restless(Policy):
    """The first or the last method per layer, another choice at each decision: each is a kernel."""

    seed: int = 0
    made: int = 0

    name = "restless"
    bounded = False

    def after(self, layers: Any) -> Restless:
        return Restless(self.seed, self.made + 1)

    def memory(self) -> dict[str, Any]:
        return {"made": self.made}

    def remembering(self, memory: Any) -> Restless:
        return Restless(self.seed, int(memory.get("made", 0)))

    def choose(self, layers: list[Layer], budget: Budget) -> list[int]:
        draw = random.Random(f"{self.seed} {self.made}")
        return [draw.choice((0, len(one.methods) - 1)) for one in layers]


# ---- delays


class Lag:
    """Holds the background of a rank until the rank has begun up to two more passes."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)
        self._changed = threading.Condition()
        self._passes, self._open = 0, False

    def passed(self) -> None:
        with self._changed:
            self._passes += 1
            self._changed.notify_all()

    def hold(self) -> None:
        with self._changed:
            until = self._passes + self._draw.randrange(3)
            came = self._changed.wait_for(lambda: self._open or self._passes >= until, 60)
            self._open |= not came  # the test has failed
            assert came, "training waits for its background"

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Nothing is held: the rank waits for its background."""
        with self._changed:
            self._open = True
            self._changed.notify_all()
        yield
        self._open = False


def weights(model: Any) -> list[str]:
    return [digest(getattr(p, "full_tensor", lambda p=p: p)()) for p in model.parameters()]


# ---- checks


@on(2, ("ddp", FOUR, 4), ("fsdp2", FOUR, 4))
@on(3, ("ddp", "topk:density=0.05", 50), ("ddp", "qsgd:bits=4", 100), exhaustive=True)
@on(4, ("fsdp2", "qsgd:bits=4", 100), exhaustive=True)
def test_ranks_never_disagree(rank: int, kind: str, codec: str, count: int) -> None:
    """Trains until the plan in force has changed so many times."""
    lag = Lag(rank)
    model = model_of(kind)
    often = gw.Replan(Restless(), every=1, average=1, share=1.0, stale=None)
    how: dict[str, Any] = {"policy": often}
    if "topk" in codec:
        how["error_feedback"] = True
    handle: Any = gw.attach(model, codec, **how)
    seen: list[tuple[int, list[str]]] = []
    step = switched = 0
    with held(lag.hold, lag.hold):
        while switched < count and step < 40 * count:
            passes(model, step, step + 1)
            lag.passed()
            step += 1
            seen.append((handle.plan.version, [str(p) for p in handle.plan.parameters]))
            switched += step > 1 and seen[-1][1] != seen[-2][1]
            if step % 20 == 0:
                with lag.released():
                    handle._reductions.runner.wait()
            if step == count // 2:  # resumed, each rank from its own state, while others decide
                with lag.released():
                    state = copy.deepcopy(handle.state_dict())
                    handle.detach()
                    handle = gw.attach(model, codec, **how)
                    handle.load_state_dict(state)
                assert handle._reductions.adaptation.passes == state["policy"]["passes"]
        assert switched == count
        assert alike((seen, weights(model)))
        with lag.released():
            handle._reductions.runner.wait()
        handle.detach()


@on(2, "ddp")
@on(2, "fsdp2", exhaustive=True)
def test_a_slow_rank_delays_the_plan_and_not_training(rank: int, kind: str) -> None:
    """Training goes on in the old plan while one rank makes its tables; then all adopt the new
    one, at the same pass. Windows that end meanwhile are skipped."""
    goes_on = threading.Event()

    def waits() -> None:
        assert rank != 1 or goes_on.wait(60), "training waits for the tables"

    model = model_of(kind)
    often = gw.Replan(every=1, average=1, share=1.0, stale=None)
    handle: Any = gw.attach(model, FOUR, policy=often)
    versions = []
    with held(before=waits):
        passes(model, 0, 12)
        assert everywhere(handle.plan.version) == [0, 0]
        goes_on.set()
        handle._reductions.runner.wait()
        for step in range(12, 16):
            passes(model, step, step + 1)
            versions.append(handle.plan.version)
        handle._reductions.runner.wait()
    assert alike(versions)
    assert versions[-1] >= 1
    begun = [row["pass"] for row in handle._reductions.adaptation.history]
    assert begun[:1] == [1]
    assert set(begun).isdisjoint(range(2, 11)), begun
    least = min(map(len, everywhere(begun)))
    assert least > 1
    assert all(one[:least] == begun[:least] for one in everywhere(begun))
    handle.load_state_dict(handle.state_dict())


@on(2, "decides", "prepares")
def test_a_state_saved_while_ranks_decide_is_the_same_plan_on_all(rank: int, moment: str) -> None:
    """A state is saved on all ranks while some know of the new plan, and others do not."""
    reached, goes_on = threading.Event(), threading.Event()

    def waits() -> None:
        reached.set()
        assert goes_on.wait(60)

    model = model_of("ddp")
    handle: Any = gw.attach(model, FOUR, policy=ONCE)
    there = {"decides": "before", "prepares": "after"}[moment]
    with held(**({there: waits} if rank == 1 else {})):
        passes(model, 0, 5)
        if rank == 1:
            assert reached.wait(60)
        elif moment == "prepares":
            handle._reductions.runner.wait()
        everywhere("there")
        state = copy.deepcopy(handle.state_dict())
        goes_on.set()
        assert alike(state["parameters"])
        handle.detach()
        again: Any = gw.attach(model, FOUR, policy=ONCE)
        again.load_state_dict(state)
    assert alike([str(p) for p in again.plan.parameters])
    passes(model, 5, 8)
    assert alike(weights(model))


def test_a_detached_policy_stops_after_the_running_table(rank: int) -> None:
    reached, made, table = threading.Event(), [], tables.table
    model = model_of("ddp")
    handle: Any = gw.attach(model, FOUR, policy=ONCE)

    def slow(name: str, *rest: Any) -> Layer:
        reached.set()
        assert closed.wait(60)
        made.append(name)
        return table(name, *rest)

    runner = handle._reductions.runner
    close, closed = runner.close, threading.Event()
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(tables, "table", slow)
        monkey.setattr(runner, "close", lambda: (close(), closed.set()))
        passes(model, 0, 5)
        assert reached.wait(60)
        handle.detach()
        assert len(made) == 1, "detach waits for the table, and no other begins"
    assert handle.history() == []


def test_a_ruling_that_comes_too_late_for_a_rank_changes_no_plan(rank: int) -> None:
    """Rank 1 gives up on it; rank 0, which has it, does not ask for the plan alone."""
    model = model_of("ddp")
    handle: Any = gw.attach(model, FOUR, policy=ONCE)
    runner = handle._reductions.runner
    tell = runner._tell

    def late(key: str, *rest: Any) -> Any:
        found = tell(key, *rest)
        if rank == 1 and key.endswith("/ruling"):
            raise gw.TransportError("rank 1: rank 0 did not reach the ruling")
        return found

    runner._tell = late
    until_decided(model, handle, 1, 0)
    (row,) = handle._reductions.adaptation.history
    assert "the plan stays: rank 1: rank 0 did not reach the ruling" in row["line"]
    assert row["changed"] == 0
    passes(model, 300, 303)
    assert handle.plan.version == 0
