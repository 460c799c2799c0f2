"""What a call cannot have is refused in one line that says what to do instead; one that a rank
alone refuses is refused by its peers, long before the timeout."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from scenario import Model, batch, by_layer, own_mesh, sharded
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.aggregators import Aggregator, Context, Steps
from gradwire.collectives import AllReduce
from gradwire.groups import communicator
from ranks import caught, on, raises, refuses
from training import BareFSDP1, everywhere, mlp

# ---- what FSDP2 modules cannot have: refused by gradwire, or by FSDP2, whose errors are passed on

WEIGHTS = {"*": "randomshift:bits=8"}
TOO_FEW = gw.Options(algorithm="hierarchical", nodes=(0,))


def whole() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def two_meshes() -> nn.Module:
    model = Model()
    fully_shard(model.first, mesh=own_mesh())
    fully_shard(model, mesh=whole())
    return model


def custom_all_gather() -> nn.Module:
    model = sharded()
    before = model._get_fsdp_state()._fsdp_param_group._all_gather_comm

    class Own:
        allocate = before.allocate
        __call__ = before.__call__

    model.set_custom_all_gather(Own())
    return model


def derived_all_gather() -> nn.Module:
    class Mine(DefaultAllGather):
        pass

    model = sharded()
    model.first.set_custom_all_gather(Mine())
    gw.attach(model, "qsgd").detach()  # of gradients alone
    return model


def attached() -> nn.Module:
    model = sharded()
    gw.attach(model)
    return model


def tied_across_groups() -> nn.Module:
    model = Model()
    model.spare.weight = model.first.weight
    fully_shard(model.first, mesh=whole())
    return fully_shard(model, mesh=whole())


def several_dtypes() -> nn.Module:
    model = Model()
    model.second.bfloat16()
    return fully_shard(model, mesh=whole())


OURS: list[tuple[str, Callable[[], nn.Module], dict[str, Any]]] = [
    ("not Model: wrap it first", Model, {}),
    ("or shard it, attach(fully_shard(model))", Model, {}),
    ("(FSDP1): shard the model with fully_shard", BareFSDP1, {}),
    ("from replicate: wrap the bare model, attach(Dist", lambda: replicate(Model()), {}),
    (
        "(the root) is replicated, not sharded: wrap it with DDP",
        lambda: replicate_with_fsdp(Model(), mesh=whole()),
        {},
    ),
    (
        "(the root) and first are sharded over different process groups, and a handle has one",
        two_meshes,
        {},
    ),
    (
        'powersgd is an aggregator: it needs gw.attach or gw.register; use "randomshift:bits=8"',
        sharded,
        {"weights": "powersgd"},
    ),
    ("second.weight has a custom all-gather, Own (set_custom", custom_all_gather, {}),
    ("custom all-gather, Mine", derived_all_gather, {}),
    ("has a handle attached", attached, {}),
    (
        'an FSDP2 module a codec: write gw.attach(model, "qsgd:bits=4"); `gradwire doctor',
        sharded,
        {"codec": "auto", "weights": None},
    ),
    ("weights and keep are for FSDP2", lambda: DDP(nn.Linear(4, 4)), {}),
    *(
        (said, sharded, options)
        for said, options in (
            ("takes a codec, not powersgd", {"codec": "powersgd"}),
            ("coalesce_bytes is for DDP's", {"options": gw.Options(coalesce_bytes=5)}),
            (
                "FSDP2 has no algorithm 'ring': use one of sra, hierarchical",
                {"options": gw.Options(algorithm="ring")},
            ),
            ("the machine of each of the 2 ranks", {"options": TOO_FEW}),
            ("matches no parameter", {"exclude": ["decoder.*"]}),
            ("sends a part of the values", {"weights": "topk:density=0.1"}),
            ("sends a part of the values", {"weights": "randomk:density=0.1"}),
            ("onebit:block=1024 is for gradients", {"weights": "onebit"}),
            ("rounding=stochastic", {"weights": "qsgd:rounding=dithered"}),
            ("matches no parameter", {"weights": {"nothing.*": "bf16"}}),
            (
                "use one of none, payload, redraw, reference",
                {"weights": "randomshift", "options": gw.Options(keep="all")},
            ),
            ("give weights, too", {"weights": None, "options": gw.Options(keep="payload")}),
            ("give a codec by name", {"weights": 8}),
        )
    ),
]
# Named by what FSDP2 says: as the module is sharded, or at its first forward.
FSDP2S: list[tuple[str, Callable[[], nn.Module]]] = [
    ("it should be a factor of 2, not 3", lambda: sharded(reshard_after_forward=3)),
    ("shared with a parameter already managed by another FSDP group", tied_across_groups),
    ("uniform original parameter dtype", several_dtypes),
]


def test_what_is_refused_is_named(rank: int) -> None:
    for said, make, options in OURS:
        model = make()
        of = {"weights": WEIGHTS, **options}
        assert "\n" not in refuses(said, lambda m=model, of=of: gw.attach(m, **of))
    for said, make in FSDP2S:

        def trained(make: Callable[[], Any] = make) -> None:
            model = make()
            gw.attach(model, weights=WEIGHTS)
            model(batch(0)).sum().backward()

        assert not isinstance(raises((ValueError, AssertionError), trained, said), gw.ConfigError)
    for options in ({"bits": 2 + rank}, {"weights": {"*": f"randomshift:bits={7 + rank}"}}):
        refuses("disagree", lambda o=options: gw.attach(sharded(), **o))
    # Nothing is left behind.
    model = sharded()
    handle = gw.attach(model, weights=WEIGHTS)
    model(batch(0)).sum().backward()
    assert torch.isfinite(model.first.weight.grad.to_local()).all()
    handle.detach()


# ---- by one rank alone

REFUSING = 1


def wrapped(sharded: bool = False) -> Any:
    return by_layer(mlp(64, 64, 64)) if sharded else DDP(mlp(64, 64, 64))


def refused(rank: int, said: str, error: BaseException | None) -> None:
    """The refusing rank has its own error, the others have one that names it."""
    assert isinstance(error, gw.ConfigError), error
    assert str(error).startswith(f"rank {REFUSING}: ") == (rank != REFUSING), error
    assert said in str(error), error


WRONG = [
    (False, "no argument 'includes'", {"includes": 1}),
    (False, "options=5", {"options": 5}),
    (False, "no file", {"plan": "/nowhere"}),
    (False, "policy", {"policy": "lgreco", "exclude": ["*"]}),
    (True, "coalesce_bytes", {"options": gw.Options(coalesce_bytes=1)}),
    (True, "weights", {"weights": "nonsense"}),
    (True, "mixed", {"policy": gw.Replan(mixed=True)}),
]


@on(2, *WRONG)
def test_attach(rank: int, sharded: bool, said: str, wrong: dict[str, Any]) -> None:
    """And the next one is one more try of all."""
    model = wrapped(sharded)
    right = {"weights": "randomshift"} if "weights" in wrong else {}
    for _ in range(2):
        given = wrong if rank == REFUSING else right
        refused(rank, said, caught(lambda given=given: gw.attach(model, **given)))  # type: ignore[misc]
    # All of them refuse.
    assert isinstance(caught(lambda: gw.attach(model, **wrong)), gw.ConfigError)
    handle = gw.attach(model)
    model(torch.ones(2, 64)).sum().backward()
    assert handle.stats()["steps"] == 1


@on(2, ({"bits": 99}, True), ({"seed": -1}, False), ({"op": "min"}, True))
def test_collective(rank: int, wrong: dict[str, Any], prepared: bool) -> None:
    """Who refuses one may make another in its place, and ranks have counted the same calls. Peers
    are told what it was once it leaves instead."""
    group = dist.new_group()
    watchdog, look = communicator(group).watchdog, communicator(group).watchdog._look_for_the_end
    store, looked = dist.distributed_c10d._get_default_store(), f"looked {wrong}"
    x = torch.ones(64)

    def noted(place: Any) -> None:
        look(place)
        if watchdog._refused:
            store.set(looked, "")

    watchdog._look_for_the_end = noted  # type: ignore[method-assign]

    def run(**given: Any) -> BaseException | None:
        return caught(lambda: gw.all_reduce(x, group=group, **given))

    if prepared:
        assert run() is None
    for _ in range(2):
        assert isinstance(run(**wrong), gw.ConfigError)
    if rank == REFUSING:
        assert isinstance(run(**wrong), gw.ConfigError)
        store.wait([looked])  # the peer knows of it while it waits
    assert run(name="other") is None
    if rank == REFUSING:
        error = run(**wrong)
        assert isinstance(error, gw.ConfigError), error
        dist.destroy_process_group(group)
    else:
        error = run()
        assert isinstance(error, gw.TransportError), error
        assert "It had refused this call: " in str(error), error


@dataclass(frozen=True)
class Unordered(Aggregator):
    """Asks in another order on each rank."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        order = contexts if contexts[0].rank else contexts[::-1]
        yield [AllReduce(c.gradient, of=c) for c in order]
        return [c.gradient for c in contexts]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize


@on(2, False, True)
def test_update(rank: int, sharded: bool) -> None:
    """The plan before it stays in force, and the next update works."""
    model = wrapped(sharded)
    handle = gw.attach(model)

    def step() -> None:
        model(torch.ones(2, 64)).sum().backward()

    def steps() -> list[BaseException | None]:
        """Until what was asked for is decided on all ranks, and one more, which may raise it."""
        errors = []
        while any(everywhere(bool(handle._reductions.switch.pending()))):
            errors.append(caught(step))
        return [*errors, caught(step)]

    step()
    for wrong in ({"bits": 99}, {"codec": "auto"}, {"bit": 3}):
        given: dict[str, Any] = wrong if rank == REFUSING else {"bits": 8}
        error = caught(lambda given=given: handle.update(**given).wait())  # type: ignore[misc]
        (told,) = (one for one in steps() if one is not None)
        assert f"rank {REFUSING} has 'refused: " in str(told), told
        assert "has 'accepted'" in str(told), told
        assert isinstance(error, gw.ConfigError), error
        assert (error is told) == (rank != REFUSING), error
    refuses("bits", lambda: handle.update(bits=99))
    assert not any(steps()), "all ranks know it"
    update = handle.update(bits=3)
    assert not any(steps())
    assert update.in_force
    assert handle.plan.parameters[0].codec.bits == 3  # type: ignore[union-attr]
    if not sharded:  # refused before it is prepared
        said = refuses("", handle.update(Unordered()).wait)
        assert re.search("ranks disagree on an update of the plan: rank [01] has '", said), said


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"policy": "lgreco"}, "policy None", "policy LGreco("),
    ({}, {"weights": "randomshift"}, "", ""),
    ({"codec": "auto"}, {}, "auto Auto(", "auto None"),
    (
        {"codec": "auto"},
        {"codec": gw.Auto(watch=7)},
        "policy='lgreco', trial=8, watch=50, changed=0.2)",
        "policy='lgreco', trial=8, watch=7, changed=0.2)",
    ),
]


@on(2, *DIFFERENT)
def test_what_differs(
    rank: int, first: dict[str, Any], second: dict[str, Any], of_first: str, of_second: str
) -> None:
    """It is named by what it is, and shown without all that is alike."""
    model, given = wrapped("weights" in second), second if rank == REFUSING else first
    said = refuses("ranks disagree on the call of gw.attach", lambda: gw.attach(model, **given))
    assert re.search(f"rank 0 has '[^;]*{re.escape(of_first)}", said), said
    assert re.search(f"rank 1 has '[^;]*{re.escape(of_second)}", said), said
    assert len(said) < 550, said


@on(2, "metadata", "facts", "no path", "key")
def test_checkpoint(rank: int, damage: str, tmp_path: Path) -> None:
    """Nobody loads anything then."""
    model = wrapped()
    handle = gw.attach(model, error_feedback=True)
    model(torch.ones(2, 64)).sum().backward()
    shared, path = tmp_path / "saved", tmp_path / f"of {rank}"
    handle.save(shared)
    shutil.copytree(shared, path)
    saved = handle.checkpoint()
    model(torch.ones(2, 64)).sum().backward()
    before = handle.state_dict()["aggregators"]["0.weight"]["residual"]
    said, key = "", "gradwire"
    if rank == REFUSING:
        if damage == "metadata":
            (path / ".metadata").unlink()
            said = "has no checkpoint"
        elif damage == "facts":
            saved[f"rank{rank}/facts"].zero_()
            said = "is damaged or not complete"
        elif damage == "no path":
            path, said = None, "has no checkpoint"  # type: ignore[assignment]
        else:
            said, key = "has no state of a handle under 'other'", "other"
    if damage == "facts":
        path = tmp_path / damage
        dcp.save({"gradwire": saved}, checkpoint_id=path)
    error = caught(lambda: handle.load(path, key))
    assert isinstance(error, gw.ConfigError), error
    assert said in str(error), error
    if rank != REFUSING:
        assert f"rank {REFUSING}: " in str(error), error
    assert torch.equal(handle.state_dict()["aggregators"]["0.weight"]["residual"], before)

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "load", load)
        error = raises(gw.TransportError, lambda: handle.load(shared), "closed by peer")
    assert "damaged" not in str(error), "a peer that ends is no damaged checkpoint"
    handle.load(shared)
    assert handle.stats()["steps"] == 2
