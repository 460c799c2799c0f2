"""`gw.attach(model, "auto")`: ranks plan, try, settle and adapt together; what is refused."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import on_all, unlike
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.planner import kernel_costs
from gradwire.planner.links import Links
from gradwire_tools.sim import Curves
from ranks import caught, refuses, together
from rooms.integrations import WantedSetting, automatic

pytestmark = pytest.mark.multiprocess

QUICK = gw.Auto(seconds=0.3, trial=2, watch=3, replan=gw.Replan(every=4, average=2))
FULL = WantedSetting("none", "ring", rank=0, seconds=1.0)
HALF = WantedSetting("bf16", "sra", 2, rank=1, seconds=1.0)
CODED = WantedSetting("qsgd:bits=4", "sra", exclude=("2.weight",), rank=2, seconds=1.0)


def model_of() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16)))


def made(auto: gw.Auto = QUICK) -> tuple[DDP, Any]:
    model = model_of()
    return model, gw.attach(model, "auto", auto=auto)


def step(model: DDP, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 32, generator=generator)).square().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.data -= 0.05 * p.grad


def train(model: DDP, handle: Any, until: Any) -> int:
    """Passes until a condition holds on all ranks; weights stay the same on all. After each pass,
    wait for the decision that it began."""
    end = time.monotonic() + 120
    for number in itertools.count():
        assert time.monotonic() < end, handle.automatic.history
        step(model, number)
        handle.automatic.serial.wait()
        assert not unlike(dict(model.named_parameters()))
        if all(on_all(bool(until()))):
            return number
    raise AssertionError


class Watch:
    """In place of a watch of the links: what a test sets."""

    newest: Links | None = None

    def __init__(self, comm: Any, links: Links, share: float) -> None:
        pass

    def close(self) -> None:
        pass


def links(alpha: float) -> Links:
    ranks = range(dist.get_world_size())
    return Links.of(len(ranks), [(a, b, alpha, 1e-8, 1e-8) for a in ranks for b in ranks if a < b])


@contextmanager
def job(*plans: list[WantedSetting], auto: gw.Auto = QUICK) -> Iterator[tuple[Any, DDP, Any]]:
    """What changes the module, a model, and its handle, to which these plans are given."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, *plans)
        yield monkey, *made(auto)


def planned(monkey: pytest.MonkeyPatch, *plans: list[WantedSetting]) -> None:
    """Give these plans, one after the other, from links and costs that are not measured."""
    given = iter(plans)
    monkey.setattr(Watch, "newest", links(1e-3))
    monkey.setattr(automatic, "LinkWatch", Watch)
    monkey.setattr(automatic, "measure_links", lambda *_: links(1e-3))
    monkey.setattr(automatic, "costs", lambda _: Curves("none", 1, {}))
    monkey.setattr(automatic, "plan", lambda *_: (next(given), "a plan of the test's"))


class Clock:
    """A pass takes one second by it, or 30 on rank 1 where a condition holds."""

    def __init__(self, model: DDP, monkey: pytest.MonkeyPatch, is_slow: Any) -> None:
        self._now, self._is_slow = 0.0, is_slow
        monkey.setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: self._now))
        model.module.register_forward_pre_hook(self._passes)

    def _passes(self, *_: Any) -> None:
        self._now += 30.0 if dist.get_rank() == 1 and self._is_slow() else 1.0


def lines(handle: Any) -> list[str]:
    return [row["line"] for row in handle.automatic.history]


def says(handle: Any, part: str) -> Callable[[], bool]:
    return lambda: any(part in line for line in lines(handle))


def adapts(handle: Any) -> Callable[[], bool]:
    return lambda: handle.adaptation is not None


def ended(handle: Any) -> list[str]:
    """Detaches; what was decided, which is the same on all ranks."""
    found = lines(handle)
    assert all(one == found for one in on_all(found))
    handle.detach()
    dist.barrier()
    return found


def it_measures_and_decides(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkey:
        monkey.setattr(kernel_costs, "VALUES", (1 << 10, 1 << 12))
        monkey.setattr(kernel_costs, "_ARRAY", 1 << 16)
        model, handle = made()
        assert handle.plan.parameters[0].how == "Cast(dtype='bf16')"
        train(model, handle, says(handle, "in use from now on"))
        assert "links:" in ended(handle)[0]


def a_state_loads_whatever_plan_was_in_force(rank: int) -> None:
    with job([CODED], [HALF]) as (_, model, handle):
        train(model, handle, adapts(handle))
        state = handle.state_dict()
        assert "QSGD" in state["parameters"]["0.weight"]["codec"]
        ended(handle)
        again, other = made()
        step(again, 0)
        assert other.state_dict()["steps"] != state["steps"]
        other.load_state_dict(state)
        assert other.state_dict()["steps"] == state["steps"]
        assert other.plan.parameters[0].how == "Cast(dtype='bf16')"
        train(again, other, says(other, "in use from now on"))
        wrong = {**state, "parameters": {**state["parameters"], "0.weight": {"numel": 3}}}
        refuses("0.weight has numel 3", lambda: other.load_state_dict(wrong))
        ended(other)


def it_tries_and_settles_on_what_is_faster(rank: int) -> None:
    """The codec wins: bf16 passes of one rank are slower."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [HALF, CODED])
        monkey.setattr(automatic.Pace, "usual", lambda _: (0.5, 0.25))
        model, handle = made()
        auto = handle.automatic
        Clock(model, monkey, lambda: handle.plan.parameters[2].how != "dense")
        train(model, handle, adapts(handle))
        assert auto.setting == CODED
        how = {p.name: p.how for p in handle.plan.parameters}
        assert how["2.weight"] == "dense"
        assert "qsgd" in how["0.weight"].lower()
        train(model, handle, lambda: handle.adaptation.history)
        rows = on_all([row["line"] for row in handle.adaptation.history[:1]])
        assert all(one == rows[0] for one in rows)
        assert all(one == how for one in on_all(how))
        refuses('"auto" changes', lambda: handle.update(bits=3))
        found = ended(handle)
        assert found[0] == "a plan of the test's"
        assert "tried: bf16 by sra, 2 segments: 3e+04 ms, " in found[1]
        assert "does not pay" not in found[1]
        half, coded = next(row["tried"] for row in auto.history if "tried" in row)
        assert coded == {**half, "setting": str(CODED), "seconds": 1.0, "used": True}
        assert (half["seconds"], half["used"]) == (30.0, False)
        assert coded["setting"] == "qsgd:bits=4 by sra, 1 small uncompressed"
        assert half["expected_seconds"] == 0.25 + 1.0  # the rest of a pass, and as planned
        told = handle.history()
        assert [row["line"] for row in told if row["by"] == "auto"] == found
        assert [row["line"] for row in told if row["by"] == "lgreco"]
        assert [row["step"] for row in told] == sorted(row["step"] for row in told)
        assert str(handle).endswith(f"lgreco, step {told[-1]['step']}: {told[-1]['line']}")


def it_says_that_compression_does_not_pay(rank: int) -> None:
    """Codec passes of one rank are slower: then 16 bits stay, and no policy starts."""
    with job([CODED, FULL, HALF]) as (monkey, model, handle):
        auto = handle.automatic
        Clock(model, monkey, lambda: handle.plan.parameters[0].how != "dense")
        train(model, handle, lambda: auto.setting == FULL)
        train(model, handle, lambda: handle.plan.parameters[0].how == "dense")
        assert handle.adaptation is None
        assert handle.plan.options.algorithm == "ring"
        said = "compression does not pay here; in use from now on: none by ring"
        assert ended(handle)[1].startswith(said)


def a_codec_without_choices_says_so(rank: int) -> None:
    """Then no policy chooses bits, and what was decided is in use all the same."""
    with job([replace(CODED, method="onebit")]) as (_, model, handle):
        train(model, handle, says(handle, "no policy"))
        assert "OneBit" in handle.plan.parameters[0].how
        assert handle.adaptation is None
        assert ended(handle)[-1].startswith("no policy chooses bits: ")


def a_method_that_nothing_predicts_is_tried(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkey:
        sketched = WantedSetting("powersgd:rank=2", rank=3)
        planned(monkey, [HALF, sketched])
        model, handle = made()
        auto = handle.automatic
        Clock(model, monkey, lambda: "powersgd" not in handle.plan.parameters[0].how)
        train(model, handle, adapts(handle))
        assert auto.setting == sketched
        tried = next(row["tried"] for row in auto.history if "tried" in row)
        assert [one["used"] for one in tried] == [False, True]
        assert tried[1]["expected_seconds"] is None
        ended(handle)


def changed_links_make_a_new_plan(rank: int) -> None:
    """A second plan is made when the watch says that links have changed, and the policy ends."""
    with job([CODED], [HALF]) as (_, model, handle):
        auto = handle.automatic
        train(model, handle, adapts(handle))
        train(model, handle, lambda: auto._base is not None)
        Watch.newest = links(5e-3)
        train(model, handle, lambda: auto.setting == HALF)
        assert handle.adaptation is None
        train(model, handle, lambda: handle.plan.parameters[0].how.startswith("Cast"))
        said = ended(handle)
        assert any("changed from 1 ms" in line and "to 5 ms" in line for line in said)


def slower_passes_make_a_new_plan(rank: int) -> None:
    """A plan is made anew once two looks saw slower passes; one look is not enough."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [FULL], [HALF])
        slow: list[int] = []
        # Each look sees the passes since the last one, and no other.
        model, handle = made(replace(QUICK, watch=automatic._REMEMBERED))
        auto = handle.automatic
        Clock(model, monkey, lambda: slow)
        train(model, handle, lambda: auto._usual is not None)
        slow.append(1)
        train(model, handle, lambda: auto._changes == 1)
        slow.clear()
        train(model, handle, lambda: auto._changes == 0)
        assert auto.setting == FULL
        slow.append(1)
        train(model, handle, lambda: auto.setting == HALF)
        assert any("passes take 3e+04 ms, no longer 1000" in line for line in ended(handle))


def detaching_ends_the_background(rank: int) -> None:
    """Also what waits for ranks that will not come, and what has not begun."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey)
        model, handle = made()
        step(model, 0)
        auto, switch = handle.automatic, handle._reductions.switch
        assert auto is not None
        if rank == 1:
            auto._submit(lambda: auto._told("for rank 0"))
            auto._submit(lambda: auto._told("for rank 0"))
            update = switch.ask(lambda plan: replace(plan, version=plan.version + 1))
        handle.detach()
        assert not auto.serial._busy
        assert not switch._busy
        assert not auto.history
        if rank == 1:
            assert "the handle was detached" in str(caught(lambda: update.wait(0)))
        dist.barrier()


def links_are_probed(rank: int) -> None:
    found = gw.probe(seconds=0.2, codecs=["qsgd:bits=4"])
    assert found.links.ranks == 2
    assert found.links.worst_alpha > 0
    assert len(set(found.machines)) == 1
    assert any("QSGD" in name for name in found.kernels)
    assert str(found).startswith("2 ranks on 1 machine; latency ")
    assert all(one == found for one in on_all(found))
    for seconds in (0.0, 1e4, float("inf"), float("nan")):
        refuses(f"seconds={seconds}", lambda s=seconds: gw.probe(seconds=s))
    unlike = "qsgd" if rank else "zip"  # at once on all ranks
    said = refuses("refused: unknown codec 'zip'", lambda: gw.probe(codecs=[unlike]))
    assert "codecs ('qsgd',)" in said


def without_links_or_costs_the_reference_stays(rank: int) -> None:
    alpha = gw.ConfigError("Links: alpha has a number that is negative or not finite")
    for name, error, why in (
        ("measure_links", alpha, f"the links cannot be measured: {alpha}"),
        ("costs", RuntimeError("no compiler"), "no costs of kernels: no compiler"),
    ):

        def fails(*_: Any, error: Exception = error) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as monkey:
            planned(monkey)
            monkey.setattr(automatic, name, fails)
            model, handle = made()
            train(model, handle, says(handle, "in use"))
            said = f"nothing can be planned: {why}"
            assert ended(handle) == [said, f"in use from now on: bf16 by sra ({said})"]


def it_plans_what_would_be_compressed(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [CODED])
        seen: list[Any] = []
        monkey.setattr(automatic, "plan", lambda *of: seen.append(of[2]) or ([CODED], "a plan"))
        model = model_of()
        given = {"include": ["2.bias"], "exclude": ["0.weight"], "codecs": {"2.weight": "qsgd"}}
        handle = gw.attach(model, "auto", auto=QUICK, **given)
        train(model, handle, lambda: lines(handle))
        ended(handle)
        # A vector is sent uncompressed, so what is excluded is one.
        assert seen in ([], [[("0.weight", (2048,)), ("0.bias", (64,)), ("2.bias", (1, 16))]])
        for none in ({"exclude": ["*"]}, {"codecs": {"*.weight": "qsgd"}}):
            other = model_of()
            handle = gw.attach(other, "auto", auto=QUICK, **none)
            for number in range(5):
                step(other, number)
            assert handle.automatic is None
            (decided,) = handle.history()
            assert decided["line"].startswith("there is nothing to compress: include, exclude and")
            handle.detach()
            dist.barrier()
        assert bool(seen) == (rank == 0)


def what_does_not_go_with_it_is_named(rank: int) -> None:
    model = DDP(nn.Linear(4, 4))
    for name, given in (
        ("bits=4", {"bits": 4}),
        ("policy='lgreco'", {"policy": "lgreco"}),
        ("replan=Replan(", {"replan": gw.Replan()}),
        ("algorithm='ring'", {"algorithm": "ring"}),
        ("algorithm='ring'", {"options": gw.Options("ring")}),
        ("segments=4", {"options": gw.Options(segments=4)}),
        ("error_feedback", {"error_feedback": True}),
    ):
        said = refuses(name, lambda given=given: gw.attach(model, "auto", **given))
        assert '"auto" decides this' in said
    for said, call in (
        ('is for the codec "auto"', lambda: gw.attach(model, "qsgd", auto=gw.Auto())),
        ("share=2", lambda: gw.Auto(share=2)),
        ("seconds=inf must be above 0 and at most 600", lambda: gw.Auto(seconds=float("inf"))),
        ("trial=-1", lambda: gw.Auto(trial=-1)),
        ("zip", lambda: gw.Auto(codecs=["zip"])),
        ("codecs='qsgd': give several names", lambda: gw.Auto(codecs="qsgd")),
        ("codecs=None: give several names", lambda: gw.Auto(codecs=None)),  # type: ignore[arg-type]
        ("codecs=(5,): give several names", lambda: gw.Auto(codecs=(5,))),  # type: ignore[arg-type]
        ("methods='powersgd': give several", lambda: gw.Auto(methods="powersgd")),
        ("zip", lambda: gw.Auto(methods=["zip"])),
        ("trial=0", lambda: gw.Auto(methods=["powersgd"], trial=0)),
        ("lgrecco", lambda: gw.Auto(policy="lgrecco")),
        ("policy=5: give a policy", lambda: gw.Auto(policy=5)),  # type: ignore[arg-type]
        ("replan has mixed=True", lambda: gw.Auto(replan=gw.Replan(mixed=True))),
        ("replan=None: give gw.Replan", lambda: gw.Auto(replan=None)),  # type: ignore[arg-type]
        ("auto=5: give gw.Auto", lambda: gw.attach(model, "auto", auto=5)),  # type: ignore[arg-type]
    ):
        refuses(said, call)


def test_the_pace_of_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now, spent = iter([0.0, 9.0, 10.0, 11.0, 13.0, 14.0, 15.0]), iter(range(7))
    monkeypatch.setattr(automatic, "time", SimpleNamespace(perf_counter=lambda: next(now)))
    pace = automatic.Pace(lambda: (0.25 * (n := next(spent)), 0.5 * n))
    assert [pace.passed(version) for version in (0, 0, 1, 1)] == [None, 9.0, 1.0, 1.0]
    assert pace.usual() == (0.25, 0.25)
    assert pace.of_version() is None  # two passes are too few
    assert [pace.passed(1) for _ in range(3)] == [2.0, 1.0, 1.0]
    assert pace.of_version() == (1, 1.0)


def test_settings_of_one_codec_do_not_stand_in_each_others_way() -> None:
    """Only what is more exact must be beaten by a margin."""
    assert automatic.best_of([2, 1, 2], [96.0, 100.0, 93.0]) == 2
    assert automatic.best_of([2, 1, 2], [93.0, 100.0, 96.0]) == 0
    assert automatic.best_of([2, 1, 2], [97.0, 100.0, 96.0]) == 1
    assert automatic.best_of([1, 0, 2], [96.0, 100.0, 92.0]) == 1


def test_ranks_plan_try_settle_and_adapt_together() -> None:
    together(
        2,
        it_measures_and_decides,
        a_state_loads_whatever_plan_was_in_force,
        it_tries_and_settles_on_what_is_faster,
        it_says_that_compression_does_not_pay,
        a_codec_without_choices_says_so,
        a_method_that_nothing_predicts_is_tried,
        changed_links_make_a_new_plan,
        slower_passes_make_a_new_plan,
        detaching_ends_the_background,
        links_are_probed,
        without_links_or_costs_the_reference_stays,
        it_plans_what_would_be_compressed,
        what_does_not_go_with_it_is_named,
    )


@pytest.mark.exhaustive
def test_three_ranks_settle_on_what_is_faster() -> None:
    together(3, it_tries_and_settles_on_what_is_faster)
