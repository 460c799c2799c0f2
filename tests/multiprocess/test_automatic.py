"""`gw.attach(model, "auto")`: ranks try, settle and adapt together; what is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from scenario import unlike
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import caught, on, refuses
from rooms.decide import Tell
from training import alike, backward, everywhere, mlp

QUICK = gw.Auto(trial=2, watch=3, policy=gw.Replan(every=4, average=2, share=1.0))
PASSES = 300  # at most, until what a check waits for


def made(auto: gw.Auto = QUICK, **given: Any) -> tuple[DDP, Any]:
    model = DDP(mlp(32, 64, 16))
    return model, gw.attach(model, auto, **given)


def step(model: DDP, number: int) -> None:
    made = torch.Generator().manual_seed(100 * number + dist.get_rank())
    backward(model, torch.randn(8, 32, generator=made))
    for p in model.parameters():
        p.data -= 0.05 * p.grad


def train(model: DDP, handle: Any, until: Callable[[], object]) -> None:
    """Passes until a condition holds on all ranks; weights stay the same on all. After each pass,
    wait for the decision that it began."""
    for number in range(PASSES):
        step(model, number)
        handle._reductions.runner.wait()
        assert not unlike(dict(model.named_parameters()))
        if all(everywhere(bool(until()))):
            return
    raise AssertionError(handle.history())


def clocked(handle: Any, seconds: Callable[[], float]) -> None:
    """A pass takes so long by the clock of the handle."""
    now = itertools.accumulate(iter(seconds, None), initial=0.0)
    handle._reductions.runner._clock = lambda: next(now)


def lines(handle: Any) -> list[str]:
    return [row["line"] for row in handle._reductions.automatic.history]


def ended(handle: Any) -> list[str]:
    """Detaches; what was decided, which is the same on all ranks."""
    found = lines(handle)
    assert alike(found)
    handle.detach()
    dist.barrier()
    return found


def how(handle: Any) -> dict[str, str]:
    return {p.name: p.how.lower() for p in handle.plan.parameters}


@on(2)
@on(3, exhaustive=True)
def test_it_tries_settles_and_adapts(rank: int) -> None:
    """Passes without a codec are slower on one rank; later those with it are slower on the other.
    Then what is sent goes back to 16 bits, and the policy ends."""
    model, handle = made(codecs={"2.bias": "qsgd"})
    slow, auto = [("dense", "cast")], handle._reductions.automatic

    def seconds() -> float:
        return (
            30.0 if rank == len(slow) % 2 and how(handle)["0.weight"].startswith(slow[-1]) else 1.0
        )

    clocked(handle, seconds)
    assert how(handle)["0.weight"] == "cast(dtype='bf16')"
    trying = "auto: still trying none, bf16, qsgd:bits=4 in turn"
    assert trying in str(handle)
    on = handle._reductions
    train(model, handle, lambda: on.adaptation is not None and on.adaptation.history)
    assert auto.setting == "qsgd:bits=4"
    assert "qsgd" in how(handle)["2.bias"], "what has a codec of its own keeps it"
    assert alike(how(handle))
    refuses('"auto" changes', lambda: handle.update(bits=3))
    (tried,) = (row["tried"] for row in auto.history)
    assert [(one["seconds"], one["used"]) for one in tried] == [
        (30.0, False), (30.0, False), (1.0, True),
    ]  # fmt: skip
    told = handle.history()
    assert [row["line"] for row in told if row["by"] == "auto"] == lines(handle)
    assert [row["line"] for row in told if row["by"] == "lgreco"]
    assert [row["step"] for row in told] == sorted(row["step"] for row in told)
    assert trying not in str(handle)
    assert str(handle).endswith(f"lgreco, step {told[-1]['step']}: {told[-1]['line']}")
    slow.append(("qsgd", "qsgd"))
    train(model, handle, lambda: auto.setting in ("none", "bf16"))
    assert handle._reductions.adaptation is None
    assert any("compression does not pay here" in line for line in ended(handle))


def test_a_state_loads_whatever_plan_was_in_force(rank: int) -> None:
    model, handle = made()
    clocked(handle, lambda: 1.0 if "qsgd" in how(handle)["0.weight"] else 30.0)
    train(model, handle, lambda: handle._reductions.adaptation is not None)
    state = handle.state_dict()
    assert "QSGD" in state["parameters"]["0.weight"]["codec"]
    ended(handle)
    again, other = made()
    step(again, 0)
    assert other.state_dict()["steps"] != state["steps"]
    other.load_state_dict(state)
    assert other.state_dict()["steps"] == state["steps"]
    assert how(other)["0.weight"] == "cast(dtype='bf16')"
    train(again, other, lambda: lines(other))
    wrong = {**state, "parameters": {**state["parameters"], "0.weight": {"numel": 3}}}
    refuses("0.weight has numel 3", lambda: other.load_state_dict(wrong))
    ended(other)


def test_detaching_ends_the_background(rank: int) -> None:
    """Also what waits for ranks that will not come, and what has not begun."""
    model, handle = made()
    step(model, 0)
    runner = handle._reductions.runner
    if rank == 1:
        tells = threading.Event()
        tell = runner._tell
        runner._tell = lambda *of: (tells.set(), tell(*of))[1]

        def waits() -> Any:
            yield Tell("for rank 0", None)

        runner.start(waits())
        step_ahead = handle._reductions.switch.ask(
            lambda plan: replace(plan, version=plan.version + 1)
        )
        assert tells.wait(60)
    handle.detach()
    assert not runner._busy
    assert not handle.history()
    if rank == 1:
        assert step_ahead._prepared.done()
        assert "the handle was detached" in str(caught(lambda: step_ahead.wait(0)))
    dist.barrier()


def test_nothing_to_compress_is_said(rank: int) -> None:
    for given in ({"exclude": ["*"]}, {"codecs": {"*.weight": "qsgd"}}):
        model, handle = made(**given)
        for number in range(5):
            step(model, number)
        assert handle._reductions.automatic is None
        (decided,) = handle.history()
        assert decided["line"].startswith("there is nothing to compress: include, exclude and")
        handle.detach()
        dist.barrier()


def test_links_are_probed(rank: int) -> None:
    found = gw.probe(seconds=0.2, codecs=["qsgd:bits=4"])
    assert found.links.ranks == 2
    assert found.links.worst_alpha > 0
    assert len(set(found.machines)) == 1
    assert any("QSGD" in name for name in found.kernels)
    assert str(found).startswith("2 ranks on 1 machine; latency ")
    assert alike(found)
    for seconds in (0.0, 1e4, float("inf"), float("nan")):
        refuses(f"seconds={seconds}", lambda s=seconds: gw.probe(seconds=s))
    unlike = "qsgd" if rank else "zip"  # at once on all ranks
    said = refuses("refused: unknown codec 'zip'", lambda: gw.probe(codecs=[unlike]))
    assert "codecs ('qsgd',)" in said
