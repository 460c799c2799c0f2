"""`gw.attach(model, "auto")`: ranks plan, try, settle and adapt together; what is refused."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.integrations import automatic
from gradwire.integrations.auto import WantedSetting
from gradwire.planner.links import Links
from gradwire.sim import Curves
from ranks import as_processes

pytestmark = pytest.mark.multiprocess

QUICK = gw.Auto(seconds=0.3, trial=2, watch=3, replan=gw.Replan(every=4, average=2))
FULL = WantedSetting("none", "ring", rank=0, seconds=1.0)
HALF = WantedSetting("bf16", "sra", 2, rank=1, seconds=1.0)
CODED = WantedSetting("qsgd:bits=4", "sra", exclude=("2.weight",), rank=2, seconds=1.0)


def made() -> tuple[DDP, gw.Handle]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 16))
    model = DDP(net)
    return model, gw.attach(model, "auto", auto=QUICK)


def step(model: DDP, number: int) -> None:
    generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
    model.zero_grad()
    model(torch.randn(8, 32, generator=generator)).square().mean().backward()
    for p in model.parameters():
        assert p.grad is not None
        p.data -= 0.05 * p.grad


def train(model: DDP, handle: gw.Handle, until: Any) -> int:
    """Passes until a condition holds on all ranks; weights stay the same on all."""
    end = time.monotonic() + 60
    for number in itertools.count():
        assert time.monotonic() < end, handle.automatic and handle.automatic.history
        step(model, number)
        flat = torch.cat([p.detach().view(-1) for p in model.parameters()])
        every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(every, flat)
        assert all(torch.equal(one, flat) for one in every)
        holds = torch.tensor(int(bool(until())))
        dist.all_reduce(holds, op=dist.ReduceOp.MIN)
        if holds:
            return number
    raise AssertionError


def planned(monkey: pytest.MonkeyPatch, *plans: list[WantedSetting]) -> None:
    """Give these plans, one after the other, from costs that are not measured."""
    given = iter(plans)
    monkey.setattr(automatic, "costs", lambda _: Curves("none", 1, {}))
    monkey.setattr(automatic, "plan", lambda *_: (next(given), "a plan of the test's"))


def lines(handle: gw.Handle) -> list[str]:
    assert handle.automatic is not None
    return [row["line"] for row in handle.automatic.history]


def it_measures_and_decides(rank: int) -> list[str]:
    model, handle = made()
    assert handle.plan.parameters[0].how == "Cast(dtype='bf16')"
    train(model, handle, lambda: any("in use from now on" in line for line in lines(handle)))
    assert "links:" in lines(handle)[0]
    found = lines(handle)
    handle.detach()
    dist.barrier()
    return found


def it_loads_what_another_plan_saved(rank: int) -> None:
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [CODED], [HALF])
        model, handle = made()
        train(model, handle, lambda: handle.adaptation is not None)
        state = handle.state_dict()
        assert "QSGD" in state["parameters"]["0.weight"]["codec"]
        handle.detach()
        dist.barrier()
        again, other = made()
        step(again, 0)
        assert other.state_dict()["steps"] != state["steps"]
        other.load_state_dict(state)
        assert other.state_dict()["steps"] == state["steps"]
        assert other.plan.parameters[0].how == "Cast(dtype='bf16')"
        train(again, other, lambda: any("in use from now on" in line for line in lines(other)))
        wrong = {**state, "parameters": {**state["parameters"], "0.weight": {"numel": 3}}}
        with pytest.raises(gw.ConfigError, match=r"0\.weight has numel 3"):
            other.load_state_dict(wrong)
        other.detach()
        dist.barrier()


def test_a_state_loads_whatever_plan_was_in_force() -> None:
    as_processes(2, it_loads_what_another_plan_saved)


def it_tries_and_settles(rank: int) -> tuple[list[str], str, Any]:
    """The codec is made to win: bf16 passes of one rank are slowed down."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [HALF, CODED])
        model, handle = made()
        auto = handle.automatic
        assert auto is not None
        if rank == 1:
            model.module.register_forward_pre_hook(
                lambda *_: time.sleep(0.03 * (handle.plan.parameters[2].how != "dense"))
            )
        train(model, handle, lambda: handle.adaptation is not None)
        assert auto.setting == CODED
        how = {p.name: p.how for p in handle.plan.parameters}
        assert how["2.weight"] == "dense"
        assert "qsgd" in how["0.weight"].lower()
        assert handle.adaptation is not None
        adaptation = handle.adaptation
        train(model, handle, lambda: adaptation.history)
        with pytest.raises(gw.ConfigError, match='"auto" changes'):
            handle.update(bits=3)
        handle.detach()
        dist.barrier()
        return lines(handle), how["0.weight"], [row["line"] for row in adaptation.history[:1]]


def compression_that_does_not_pay(rank: int) -> tuple[list[str], Any]:
    """Codec passes of one rank are slowed down: then 16 bits stay, and no policy starts."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [CODED, FULL, HALF])
        model, handle = made()
        if rank == 1:
            model.module.register_forward_pre_hook(
                lambda *_: time.sleep(0.03 * (handle.plan.parameters[0].how != "dense"))
            )
        auto = handle.automatic
        assert auto is not None
        train(model, handle, lambda: auto.setting == FULL)
        train(model, handle, lambda: handle.plan.parameters[0].how == "dense")
        assert handle.adaptation is None
        handle.detach()
        dist.barrier()
        return lines(handle), handle.plan.options.algorithm


def links_that_change(rank: int) -> list[str]:
    """A second plan is made when the watch says that links have changed, and the policy ends."""
    with pytest.MonkeyPatch.context() as monkey:
        planned(monkey, [CODED], [HALF])
        model, handle = made()
        auto = handle.automatic
        assert auto is not None

        class Watch:
            newest = Links.of(2, [(0, 1, 1e-3, 1e-8, 1e-8)])

            def close(self) -> None:
                pass

        auto._watch.close()
        auto._watch = Watch()  # type: ignore[assignment]
        train(model, handle, lambda: handle.adaptation is not None)
        train(model, handle, lambda: auto._base is not None)
        Watch.newest = Links.of(2, [(0, 1, 5e-3, 1e-8, 1e-8)])
        train(model, handle, lambda: auto.setting == HALF)
        assert handle.adaptation is None
        train(model, handle, lambda: handle.plan.parameters[0].how.startswith("Cast"))
        handle.detach()
        dist.barrier()
        return lines(handle)


def nothing_can_be_planned(rank: int) -> list[str]:
    with pytest.MonkeyPatch.context() as monkey:

        def fails(*_: Any) -> Any:
            raise RuntimeError("no compiler")

        monkey.setattr(automatic, "costs", fails)
        model, handle = made()
        train(model, handle, lambda: any("in use" in line for line in lines(handle)))
        handle.detach()
        dist.barrier()
        return lines(handle)


def test_it_measures_and_decides() -> None:
    one, other = as_processes(2, it_measures_and_decides)
    assert one == other


@pytest.mark.parametrize("ranks", [2, 3])
def test_it_tries_and_settles_on_what_is_faster(ranks: int) -> None:
    found = as_processes(ranks, it_tries_and_settles)
    assert all(one == found[0] for one in found)
    assert found[0][0][0] == "a plan of the test's"
    assert "tried: " in found[0][0][1]
    assert "does not pay" not in found[0][0][1]


def test_it_says_that_compression_does_not_pay() -> None:
    one, other = as_processes(2, compression_that_does_not_pay)
    assert one == other
    assert "compression does not pay here" in one[0][1]
    assert one[1] == "ring"


def test_changed_links_make_a_new_plan() -> None:
    one, other = as_processes(2, links_that_change)
    assert one == other
    assert any("changed from 1 ms" in line and "to 5 ms" in line for line in one)


def test_without_a_plan_the_reference_stays() -> None:
    one, other = as_processes(2, nothing_can_be_planned)
    assert one == other
    assert "nothing can be planned: no costs of kernels: no compiler" in one[0]
    assert "bf16" in one[1]


def refusals(rank: int) -> list[str]:
    model = DDP(nn.Linear(4, 4))
    found = []
    for given in (
        {"bits": 4}, {"policy": "lgreco"}, {"replan": gw.Replan()}, {"algorithm": "ring"},
        {"error_feedback": True},
    ):  # fmt: skip
        with pytest.raises(gw.ConfigError) as caught:
            gw.attach(model, "auto", **given)
        found.append(str(caught.value))
    with pytest.raises(gw.ConfigError, match='is for the codec "auto"'):
        gw.attach(model, "qsgd", auto=gw.Auto())
    with pytest.raises(gw.ConfigError, match="share=2"):
        gw.Auto(share=2)
    with pytest.raises(gw.ConfigError, match="trial=0"):
        gw.Auto(trial=0)
    with pytest.raises(gw.ConfigError, match="zip"):
        gw.Auto(codecs=["zip"])
    dist.barrier()
    return found


def test_what_does_not_go_with_it_is_named() -> None:
    (found,) = as_processes(1, refusals)
    names = ["bits=4", "policy='lgreco'", "replan=Replan(", "algorithm='ring'", "error_feedback"]
    for name, message in zip(names, found, strict=True):
        assert name in message
        assert '"auto" decides this' in message
