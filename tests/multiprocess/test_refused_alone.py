"""A call that one rank alone refuses is refused by its peers, long before the timeout."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from sharded_model import by_layer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.aggregators import Aggregator, Context, Steps
from gradwire.collectives import AllReduce
from gradwire.groups import communicator
from ranks import caught, on, refuses
from training import everywhere

REFUSING = 1


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))


def wrapped(sharded: bool) -> nn.Module:
    return by_layer(mlp()) if sharded else DDP(mlp())  # type: ignore[no-any-return]


def refused(rank: int, said: str, error: BaseException | None) -> None:
    """The refusing rank has its own error, the others have one that names it."""
    assert isinstance(error, gw.ConfigError), error
    assert str(error).startswith(f"rank {REFUSING}: ") == (rank != REFUSING), error
    assert said in str(error), error


WRONG = [
    (False, "no argument 'sed'", {"sed": 1}),
    (False, "seed=-1", {"seed": -1}),
    (False, "no file", {"plan": "/nowhere"}),
    (False, "policy", {"policy": "lgreco", "exclude": ["*"]}),
    (True, "coalesce_bytes", {"coalesce_bytes": 1}),
    (True, "weights", {"weights": "nonsense"}),
    (True, "mixed", {"policy": "lgreco", "replan": gw.Replan(mixed=True)}),
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


@dataclass(frozen=True)
class Unordered(Aggregator):
    """Asks in another order on each rank."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        order = contexts if contexts[0].rank else contexts[::-1]
        yield [AllReduce(c.gradient, of=c) for c in order]
        return [c.gradient for c in contexts]

    def payload_bytes(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize


def test_programs_that_differ_are_refused_before_they_are_prepared(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model)
    model(torch.ones(2, 64)).sum().backward()
    error = caught(handle.update(Unordered()).wait)
    assert isinstance(error, gw.ConfigError), error
    assert "ranks disagree on an update of the plan: rank 0 has '" in str(error).replace(
        "rank 1 has", "rank 0 has"
    ), error


DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"policy": "lgreco"}, "policy None", "policy LGreco("),
    ({"codec": "auto"}, {}, "auto Auto(", "auto None"),
    (
        {"codec": "auto"},
        {"codec": "auto", "auto": gw.Auto(watch=7)},
        "weigh='bytes'), trial=8, watch=50, changed=0.2)",
        "weigh='bytes'), trial=8, watch=7, changed=0.2)",
    ),
]


@on(2, *DIFFERENT)
def test_what_differs(
    rank: int, first: dict[str, Any], second: dict[str, Any], of_first: str, of_second: str
) -> None:
    """It is named by what it is, and shown without all that is alike."""
    model, given = DDP(mlp()), second if rank == REFUSING else first
    said = str(caught(lambda: gw.attach(model, **given)))
    assert re.search(f"rank 0 has '[^;]*{re.escape(of_first)}", said), said
    assert re.search(f"rank 1 has '[^;]*{re.escape(of_second)}", said), said
    assert len(said) < 550, said


def test_weights_on_one_rank(rank: int) -> None:
    weights = "randomshift" if rank == REFUSING else None
    error = caught(lambda: gw.attach(by_layer(mlp()), weights=weights))
    assert isinstance(error, gw.ConfigError), error
    assert "ranks disagree on the call of gw.attach" in str(error), error


@on(2, "metadata", "facts", "no path", "key")
def test_checkpoint(rank: int, damage: str, tmp_path: Path) -> None:
    """Nobody loads anything then."""
    model = DDP(mlp())
    handle = gw.attach(model, error_feedback=True)
    model(torch.ones(2, 64)).sum().backward()
    shared, path = tmp_path / "saved", tmp_path / f"of {rank}"
    dcp.save({"gradwire": handle.checkpoint()}, checkpoint_id=shared)
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
    error = caught(lambda: handle.load_checkpoint(path, key))
    assert isinstance(error, gw.ConfigError), error
    assert said in str(error), error
    if rank != REFUSING:
        assert f"rank {REFUSING}: " in str(error), error
    assert torch.equal(handle.state_dict()["aggregators"]["0.weight"]["residual"], before)
    handle.load_checkpoint(shared)
    assert handle.stats()["steps"] == 2


def test_a_peer_that_ends_is_no_damaged_checkpoint(rank: int, tmp_path: Path) -> None:
    handle = gw.attach(DDP(mlp()))
    dcp.save({"gradwire": handle.checkpoint()}, checkpoint_id=tmp_path / "whole")

    def load(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dcp, "load", load)
        error = caught(lambda: handle.load_checkpoint(tmp_path / "whole"))
    assert isinstance(error, gw.TransportError), error
    assert "Connection closed by peer" in str(error), error
    assert "damaged" not in str(error), error
    handle.load_checkpoint(tmp_path / "whole")
