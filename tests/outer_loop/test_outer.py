"""Outer synchronisation: the loop of the papers, equal on all replicas, saved and resumed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from replicas import demo_reference, net, reference, sgd, train, weights_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gradwire as gw
from ranks import on, raises, refuses
from rooms.outer_loop import WORD, OuterSettings, fragments_of, settings_of
from training import same_everywhere

pytestmark = pytest.mark.multiprocess

NAMES = [name for name, _ in net().named_parameters()]


def close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, values in expected.items():
        torch.testing.assert_close(found[name].double(), values, rtol=2e-4, atol=2e-5)


LOOPS = [
    {"every": 1, "lr": 1.0, "momentum": 0.0},  # data-parallel SGD
    {"every": 6, "lr": 0.7, "momentum": 0.9},
    {"every": 6, "lr": 0.8, "momentum": 0.3, "fragments": 3, "delay": 1, "mix": 0.5},
    {"every": 10, "lr": 0.4, "momentum": 0.9, "fragments": 2, "delay": 3, "mix": 0.25},
]


@on((1, 2, 3), *range(len(LOOPS)))
def test_replicas_take_the_steps_of_the_loop_in_float64(rank: int, which: int) -> None:
    how, ranks, steps = LOOPS[which], dist.get_world_size(), 24
    model = net(seed=rank)  # all begin with those of rank 0
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, codec="none", **how)
    train(model, optimizer, rank, range(steps))
    parts = fragments_of(NAMES, how["every"], how.get("fragments", 1))
    rest = {k: v for k, v in how.items() if k != "fragments"}
    replicas, theta = reference(ranks, steps, parts, **rest)
    close(weights_of(model), replicas[rank])
    close(outer.outer_weights(), theta)
    apart, late = how["every"] // len(parts), how.get("delay", 0)
    met = sum(t % apart == 0 and t + late <= steps for t in range(1, steps + 1))
    assert outer.stats()["rounds"] == met / len(parts)


@on(3, "qsgd:bits=4", "topk:density=0.05", "powersgd:rank=2", "bf16", "onebit")
def test_a_meeting_loses_nothing_and_is_equal_everywhere(rank: int, codec: str) -> None:
    model = net()
    optimizer = sgd(model)
    settings: dict[str, Any] = {"residual": 1.0} if codec != "qsgd:bits=4" else {}
    outer = gw.outer(model, optimizer, every=3, codec=codec, lr=1.0, momentum=0.0, **settings)
    members, asked = outer._members, []
    member = outer._reductions.owner.comm.member
    meets = member._met
    member._met = lambda key, *of: asked.append(key) or meets(key, *of)
    for number in range(4):
        asked.clear()
        before = outer.outer_weights()
        kept = {n: m.state.get("residual", torch.zeros(1)).clone() for n, m in members.items()}
        train(model, optimizer, rank, range(3 * number, 3 * number + 2))
        loss_step = range(3 * number + 2, 3 * number + 3)
        moved = _moved(model, optimizer, rank, loss_step, before)
        after = outer.outer_weights()
        for name in before:
            stepped = (before[name] - after[name]).reshape(-1).double()  # lr 1: the average
            given = moved[name].reshape(-1).double() + kept[name].double()
            left = members[name].state.get("residual", torch.zeros(1)).double()
            if settings:  # sum of what was given = ranks x average + sum of what is left
                total = (given - left).contiguous()
                dist.all_reduce(total)
                torch.testing.assert_close(total / 3, stepped, rtol=1e-3, atol=1e-4)
            assert same_everywhere(after[name])
            assert torch.equal(model.get_parameter(name).detach(), after[name])
        # An answer of the control channel takes ten ways of the network.
        assert bool(asked) == (number == 0)
    assert f"{outer._reductions.fingerprint():08x}" in str(outer)


@on(3, "radial", "radial:codec=topk:density=0.2")
def test_a_radial_average_goes_as_far_as_what_is_sent(rank: int, codec: str) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(
        model, optimizer, every=2, codec=codec, lr=1.0, momentum=0.0, codecs={"embed.*": "none"}
    )
    before = outer.outer_weights()
    moved = _moved(model, optimizer, rank, range(2), before)
    for name, after in outer.outer_weights().items():
        assert same_everywhere(after)
        left = outer._members[name].state.get("residual", torch.zeros(1))
        total = (moved[name].reshape(-1) - left).double().norm()[None]
        dist.all_reduce(total)
        far, mean = (before[name] - after).double().norm(), total / 3
        if name in ("layers.0.weight", "head.weight"):
            ratio = float(far / mean)
            assert (abs(ratio - 1) < 2e-3) == (name == "layers.0.weight"), (name, ratio)


def _moved(
    model: torch.nn.Module, optimizer: Any, rank: int, steps: range, theta: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """theta - theta_r after these steps, before the meeting at their end."""
    found: dict[str, torch.Tensor] = {}
    hooks = optimizer._optimizer_step_post_hooks
    seen = optimizer.register_step_post_hook(
        lambda *_: found.update({n: theta[n] - w for n, w in weights_of(model).items()})
    )
    hooks.move_to_end(seen.id, last=False)
    train(model, optimizer, rank, steps)
    seen.remove()
    return found


def nearly_all_close(outer: Any, expected: dict[str, torch.Tensor], lr: float) -> None:
    """Values near zero have another sign in fp32, and then their weights are 2 lr off."""
    found = outer.outer_weights()
    assert all(same_everywhere(values) for values in found.values())
    off = torch.cat([(found[n].double() - t).abs().view(-1) for n, t in expected.items()])
    assert float((off > lr / 2).double().mean()) < 0.002
    assert float(off.median()) < 1e-7
    assert "outer step sign" in str(outer)


@on((1, 2))
def test_a_step_by_its_sign_is_that_of_the_loop_in_float64(rank: int) -> None:
    model, lr = net(), 0.01
    optimizer = sgd(model)
    how: dict[str, Any] = {"every": 3, "lr": lr, "momentum": 0.5, "rule": "sign"}
    outer = gw.outer(model, optimizer, codec="none", **how)
    train(model, optimizer, rank, range(12))
    nearly_all_close(outer, reference(dist.get_world_size(), 12, [NAMES], **how)[1], lr)


@on(3)
def test_demo_takes_the_steps_of_its_paper_in_float64(rank: int) -> None:
    """An inner learning rate of 1 gives the gradient, to rounding of the weights."""
    model, lr = net(width=64), 2e-3
    optimizer = sgd(model, lr=1.0)
    outer = gw.outer(model, optimizer, "demo", lr=lr)
    train(model, optimizer, rank, range(6))
    nearly_all_close(outer, demo_reference(3, 6, lr, beta=0.999, keep=32), lr)


@on(2, "diloco", "streaming", "muloco", "sparseloco", "demo", "average")
def test_a_saved_run_goes_on_bit_for_bit(rank: int, preset: str) -> None:
    def begin() -> Any:
        model = net(layers=7)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        every = {"streaming": 12}.get(preset, 6)
        return model, optimizer, gw.outer(model, optimizer, preset, every=every)

    for cut in (1, 4, 7, 12):  # before, between and amid meetings
        model, optimizer, outer = begin()
        train(model, optimizer, rank, range(cut))
        saved = copy.deepcopy([one.state_dict() for one in (outer, model, optimizer)])
        train(model, optimizer, rank, range(cut, 26))
        again = begin()
        for one, state in zip((again[2], again[0], again[1]), saved, strict=True):
            one.load_state_dict(state)
        train(again[0], again[1], rank, range(cut, 26))
        outer._reductions.finish()
        again[2]._reductions.finish()
        for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
            assert torch.equal(a, b)
        assert outer._reductions.fingerprint() == again[2]._reductions.fingerprint()


def through(form: str, outer: Any, rank: int, folder: Path) -> Callable[[Any], None]:
    """Save a state in a form; returns what loads it into another handle."""
    if form == "full":
        state: Any = outer.full_state_dict()
    elif form == "list":
        state = [None] * dist.get_world_size()
        dist.all_gather_object(state, outer.state_dict())
    elif form == "file":
        torch.save(outer.state_dict(), folder / f"{rank}.pt")
        state = torch.load(folder / f"{rank}.pt", weights_only=True)
    elif form == "folder":
        outer.save(folder)
        return lambda other: other.load(folder)
    else:
        dcp.save({"outer": outer.checkpoint()}, checkpoint_id=folder)
        return lambda other: other.load(folder, "outer")
    return lambda other: other.load_state_dict(state)


@on(2, "full", "list", "file", "folder", "dcp")
def test_every_form_of_a_state_goes_on_bit_for_bit(rank: int, form: str, tmp_path: Path) -> None:
    """Saved while an average is under way."""

    def begin() -> Any:
        model = net(layers=7)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        return model, optimizer, gw.outer(model, optimizer, "streaming", every=12, residual=1.0)

    model, optimizer, outer = begin()
    train(model, optimizer, rank, range(3))
    assert outer._reductions._meeting is not None
    load = through(form, outer, rank, tmp_path)
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    train(model, optimizer, rank, range(3, 14))
    again = begin()
    load(again[2])
    for one, state in zip(again, saved, strict=False):
        one.load_state_dict(state)
    train(again[0], again[1], rank, range(3, 14))
    for name, values in weights_of(model).items():
        assert torch.equal(again[0].get_parameter(name).detach(), values)
    assert outer._reductions.fingerprint() == again[2]._reductions.fingerprint()


@on(4, ("ddp", "folder"), ("fsdp2", "dcp"), ("fsdp2", "full"))
def test_ranks_of_a_replica_save_their_parts(
    rank: int, kind: str, form: str, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))

    def begin() -> Any:
        model = of_several(kind, mesh["ranks"])
        optimizer = sgd(model)
        codec = {"codec": "qsgd:bits=4", "residual": 1.0}
        return (
            model,
            optimizer,
            gw.outer(model, optimizer, every=4, group=mesh["replicas"], **codec),
        )

    model, optimizer, outer = begin()
    train(model, optimizer, rank // 2, range(5))
    load, saved = through(form, outer, rank, tmp_path), copy.deepcopy(model.state_dict())
    train(model, optimizer, rank // 2, range(5, 9))
    again = begin()
    load(again[2])
    again[0].load_state_dict(saved)
    train(again[0], again[1], rank // 2, range(5, 9))
    assert outer._reductions.fingerprint() == again[2]._reductions.fingerprint()


DAMAGED = {
    "by": [None, (0.5,), (-1.0, 0.5), (0.5, "x")],
    "begun": [3, "x", None],
    "averages": [None, {}, 3],
    "steps": ["5", -1, 2.0],
    "met": [-1, True],
    "lr": [float("nan"), -1.0, "x"],
    "momentum": [2.0],
    "weights": [[], {"head.bias": [1, 2]}],
}


@on(2)
def test_a_damaged_state_changes_nothing(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=4, codec="none", delay=2)
    train(model, optimizer, rank, range(4))
    state = outer.state_dict()
    train(model, optimizer, rank, range(4, 7))
    before = outer._reductions.fingerprint(), outer.lr, outer.stats()["optimizer_steps"]
    less = {k: v[:-1] for k, v in state["outer"]["averages"].items()}
    for key, values in {**DAMAGED, "averages": [*DAMAGED["averages"], less]}.items():
        for value in values:
            damaged = {**state, "outer": {**state["outer"], key: value}}
            refuses("", lambda damaged=damaged: outer.load_state_dict(damaged))
            after = outer._reductions.fingerprint(), outer.lr, outer.stats()["optimizer_steps"]
            assert after == before, (key, value)
    outer.load_state_dict(state)
    assert outer.stats()["optimizer_steps"] == 4


@on(2)
def test_a_replica_that_joins_begins_where_all_met(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=3, codec="qsgd:bits=4")
    train(model, optimizer, rank, range(7))
    state, own = outer.full_state_dict(), outer.state_dict()
    theta = outer.outer_weights()
    for part in ({"every": 3}, None):
        refuses("no outer weights", lambda part=part: outer.load_state_dict({**own, "outer": part}))
    other = {**own, "outer": {**own["outer"], "rule": "sign"}}
    refuses("is of rule=sign, and this is rule=nesterov", lambda: outer.load_state_dict(other))
    outer.detach()
    alone = net(seed=5)
    group = [dist.new_group([one]) for one in range(2)][rank]
    again = gw.outer(alone, sgd(alone), every=3, codec="qsgd:bits=4", group=group)
    again.load_state_dict(state)
    for name, values in again.outer_weights().items():
        assert torch.equal(values, theta[name])
        assert torch.equal(alone.get_parameter(name).detach(), values)


@on(4)
def test_ranks_without_rows(rank: int) -> None:
    """Of one fragment a rank may have none, of the whole model not."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    inside, between = mesh["ranks"].get_group(), mesh["replicas"]
    layers = torch.nn.ModuleList([torch.nn.Linear(80, 80), torch.nn.Linear(80, 1)])
    model: Any = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=inside)
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=2, fragments=2, codec="qsgd:bits=4", group=between)
    for step in range(8):
        if step == 4:
            outer.update(bits=3).wait()
        model(torch.ones(3, 80)).sum().backward()
        optimizer.step()
    assert outer.plan.version == 1
    assert same_everywhere(torch.cat([p.detach().flatten() for p in model.parameters()]))
    outer.recover(between)
    thin = DistributedDataParallel(torch.nn.Linear(8, 1), process_group=inside)
    said = "no weight has rows for all 2 ranks of a replica"
    refuses(said, lambda: gw.outer(thin, sgd(thin), group=between))


def of_several(kind: str, ranks: DeviceMesh, seed: int = 0) -> Any:
    """A replica of several ranks."""
    model = net(seed)
    if kind == "ddp":
        return DistributedDataParallel(model, process_group=ranks.get_group())
    for layer in model.layers:
        fully_shard(layer, mesh=ranks)
    return fully_shard(model, mesh=ranks)


@on(4, "ddp", "fsdp2")
def test_ranks_of_a_replica_share_the_work(rank: int, kind: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "ranks"))
    model = of_several(kind, mesh["ranks"])
    optimizer = sgd(model)
    how = {"every": 4, "lr": 0.8, "momentum": 0.5, "fragments": 2, "delay": 1, "mix": 0.5}
    with torch.no_grad():
        model(torch.ones(2, 5))  # after which FSDP2 leaves the root's weights whole
    outer = gw.outer(model, optimizer, codec="none", group=mesh["replicas"], **how)
    for wrong in (None, mesh["ranks"]):
        refuses("are in one replica, whose module", lambda wrong=wrong: outer.recover(wrong))
    train(model, optimizer, rank // 2, range(16))  # ranks of a replica have the same batches
    parts = fragments_of(NAMES, 4, 2)
    rest = {k: v for k, v in how.items() if k != "fragments"}
    replicas, _ = reference(2, 16, parts, **rest)
    found = {
        name.removeprefix("module."): p.full_tensor() if kind == "fsdp2" else p
        for name, p in weights_of(model).items()
    }
    close(found, replicas[rank // 2])
    # half of the rows each
    rows = sum(values.numel() for values in outer.outer_weights().values())
    assert rows < 0.6 * sum(p.numel() for p in net().parameters())


@on(2)
def test_what_replicas_must_have_alike_is_checked(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=2, codec="qsgd:bits=4")
    train(model, optimizer, rank, range(2))
    theta = outer.outer_weights()
    outer.lr = 0.5 + rank / 4
    train(model, optimizer, rank, range(2, 3))
    said = "rank 1 differs from rank 0 in lr: 0.75, not 0.5"
    raises(gw.ConfigError, lambda: train(model, optimizer, rank, range(3, 4)), said)
    outer.lr = 0.5
    outer._reductions.taken += 2 * rank  # as of one that has missed a meeting
    said = "rank 1 differs from rank 0 in optimizer steps: 8, not 6"
    raises(gw.ConfigError, lambda: train(model, optimizer, rank, range(4, 6)), said)
    outer._reductions.taken = 6
    with torch.no_grad():
        model.layers[1].weight[0, 0] = float("nan") if rank == 1 else 0.0
    step = range(6, 8)
    raises(gw.ConfigError, lambda: train(model, optimizer, rank, step), "rank 1", "not finite")
    for name, values in outer.outer_weights().items():  # nothing of either was applied
        assert torch.equal(values, theta[name])
    refuses(
        "outer: momentum=1.0 must be at least 0 and below 1",
        lambda: setattr(outer, "momentum", 1.0),
    )


@on(2)
def test_replicas_that_drift_apart_are_named(rank: int) -> None:
    model = net()
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=1, codec="bf16")
    train(model, optimizer, rank, range(1))
    if rank == 1:
        outer._reductions.fragments[0].weights["head.bias"].theta.add_(1e-3)
    raises(gw.ConfigError, lambda: train(model, optimizer, rank, range(1, 2)), "outer weights")


@on(2)
def test_words_are_short(rank: int) -> None:
    """Of a weight whose name JSON would write in many characters; and on the CPU."""
    model = torch.nn.ModuleDict({"\U0001f600" * 110: torch.nn.Linear(3, 3)})
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=1, codec="none")
    for p in model.parameters():
        p.grad = torch.full_like(p, 1.0 if rank else float("nan"))
    raises(gw.ConfigError, optimizer.step, "rank 0", "is not finite")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    torch.set_default_device("meta")
    try:
        optimizer.step()
    finally:
        torch.set_default_device(None)
    assert outer.stats()["rounds"] == 1


@on(2)
def test_what_was_frozen_and_is_trained_is_told(rank: int) -> None:
    model = net()
    model.embed.requires_grad_(False)
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=2, codec="none")
    train(model, optimizer, rank, range(2))
    model.embed.requires_grad_(True)
    with pytest.warns(UserWarning, match=r"embed.weight was frozen as gw.outer was called"):
        train(model, optimizer, rank, range(2, 4))
    outer.detach()


@on(2)
def test_bytes_are_those_of_the_codec(rank: int) -> None:
    model = net(width=128)
    optimizer = sgd(model)
    outer = gw.outer(model, optimizer, every=2, codec="qsgd:bits=4")
    expected = outer._reductions.expected()
    train(model, optimizer, rank, range(6))
    stats = outer.stats()
    numel = sum(p.numel() for p in model.parameters())
    averages = stats["wire_bytes"] - 3 * (48 + WORD)  # and a word to the other replica
    assert averages == pytest.approx(3 * expected.wire_bytes, rel=0.02)
    assert 8 * averages / (3 * numel) < 5.5  # of 4 bits and a scale per 128 values
    assert stats["steps"] == 3
    assert stats["raw_bytes"] == 3 * 4 * numel


@on(2)
def test_wrong_arguments_say_what_to_do(rank: int) -> None:
    model = net()
    optimizer = sgd(model)

    def refused(said: str, *of: Any, **how: Any) -> None:
        refuses(said, lambda: gw.outer(model, optimizer, *of, **how))

    refused("did you mean 'diloco'", "dilocko")
    refused("fragments=5 or 10", every=100, fragments=7)
    refused("at most 5", every=100, fragments=10)
    refused("use less", every=10, fragments=5, delay=2)
    refused("every=0", every=0)
    refused("outer: lr=-1 must be above 0", lr=-1)
    refused("outer: rule='adam' must be 'nesterov' or 'sign'", rule="adam")
    refused("biased", codec="topk", residual=0.0)
    refused("biased", codec="powersgd", residual=0.0)
    refused("did you mean 'momentum'", momentun=0.5)
    other = gw.outer(model, optimizer, "streaming", every=4, bits=2)
    assert "qsgd:bits=2" in str(other)
    refused("weights of this model meet already: detach() that handle before")
    for how in ({"lr": 0.5}, {"delay": 1}, {"error_feedback": False}):
        refuses(
            f"update: {next(iter(how))} is as gw.outer was told",
            lambda how=how: other.update(**how),
        )
    other.detach()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "ranks"))
    ddp = DistributedDataParallel(net())
    refuses("one replica", lambda: gw.outer(ddp, sgd(ddp), group=mesh["ranks"]))
    for other in (3, sgd(net())):
        refuses("no torch.optim.Optimizer of this", lambda other=other: gw.outer(model, other))
    refuses("ranks disagree", lambda: gw.outer(model, optimizer, every=2 + rank))


def test_momentum_fits_the_number_of_meetings() -> None:
    def fitted(rounds: int, preset: str | None = None, **given: Any) -> tuple[float, float]:
        found = settings_of(preset, given, rounds)
        return found.lr, found.momentum

    assert fitted(1000, "diloco") == fitted(200) == (0.7, 0.9)  # the papers' runs
    assert fitted(10) == (1.0, 0.0)  # plain averages
    assert fitted(30, "muloco") == (0.93, 0.33)
    assert fitted(30, "streaming", lr=0.5) == (0.5, 0.33)
    assert fitted(3, "sparseloco") == (1.0, 0.0)
    with pytest.warns(UserWarning, match=r"over 10 of 30 meetings.*use momentum=0.33"):
        assert fitted(30, momentum=0.9) == (0.7, 0.9)
    refuses("outer: rounds=0 must be a whole number", lambda: fitted(0))


def test_weights_that_fp32_cannot_keep_are_refused() -> None:
    for dtype in (torch.float64, torch.complex64):
        model = torch.nn.Linear(4, 4, dtype=dtype)
        said = f"weight is {dtype}, and outer weights are fp32: use weights in fp32, bf16 or fp16"
        refuses(said, lambda model=model: gw.outer(model, sgd(model)))
    model = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
    refuses("weight is torch.bfloat16", lambda: gw.outer(model, sgd(model), "demo"))
    refuses("offload='no': use True or False", lambda: gw.outer(model, sgd(model), offload="no"))
    refuses("preset ['demo']", lambda: gw.outer(model, sgd(model), ["demo"]))


def test_layers_are_dealt_out_in_turn() -> None:
    names = ["embed.weight", *(f"h.{n}.w" for n in range(5)), "head.weight"]
    dealt = fragments_of(names, 12, 3)
    outside = ["embed.weight", "head.weight"]
    assert dealt == [["h.0.w", "h.2.w", "h.4.w"], ["h.1.w", "h.3.w"], outside]
    assert fragments_of(names, 10, None) == [[f"h.{n}.w" for n in range(5)], outside]
    assert fragments_of(["a.weight"], 10, None) == [["a.weight"]]
    assert [OuterSettings(every=6, fragments=3).due(t) for t in range(1, 7)] == [
        None, 1, None, 2, None, 0,
    ]  # fmt: skip
