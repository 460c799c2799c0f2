"""`handle.full_state_dict()`: one checkpoint holds what all ranks have not sent."""

from __future__ import annotations

import io
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_model import backward, dumped, loaded, owed, replicated, same, sharded
from test_sharded import nothing_is_lost
from together import together
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from gradwire.groups import communicator
from ranks import caught
from rooms.integrations import StateGather

pytestmark = pytest.mark.multiprocess


def ddp() -> DDP:
    torch.manual_seed(0)
    return DDP(nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 30), nn.Linear(30, 5)))


def attached(model: DDP) -> gw.Handle:
    """Residuals of a codec's, of a low-rank aggregator's beside its factor, and of a leader's."""
    kept = {"2.weight": "powersgd:rank=2", "3.weight": "artopk:density=0.1"}
    return gw.attach(model, "topk", density=0.1, codecs=kept, error_feedback=True)


def gradients(model: nn.Module, step: int) -> list[torch.Tensor]:
    model.zero_grad()
    made = torch.Generator().manual_seed(100 * step + dist.get_rank())
    model(torch.randn(8, 20, generator=made)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def saved_and_resumed(rank: int, folder: Path) -> None:
    """At the number of ranks that saved, from one file, to the same bits."""
    model = ddp()
    handle = attached(model)
    for step in range(2):
        gradients(model, step)
    whole = handle.full_state_dict()
    first = handle.full_state_dict(rank0_only=True)
    assert bool(first) == (rank == 0)
    assert len(whole["ranks"]) == whole["world_size"] == dist.get_world_size()
    for at, state in enumerate(whole["ranks"]):
        assert state["rank"] == at
        assert set(state["aggregators"]) == {"0.weight", "2.weight", "3.weight"}
    if rank == 0:
        torch.save(first, folder / "full.pt")
    residuals = [state["aggregators"]["0.weight"]["residual"] for state in whole["ranks"]]
    assert not torch.equal(*residuals[:2])  # rank 0's says nothing of rank 1's
    dist.barrier()
    after = [gradients(model, step) for step in (2, 3)]

    model = ddp()
    again = attached(model)
    again.load_state_dict(torch.load(folder / "full.pt", weights_only=True))
    for step, expected in zip((2, 3), after, strict=True):
        assert all(map(torch.equal, gradients(model, step), expected))
    assert again.state_dict()["steps"] == handle.state_dict()["steps"]


def moved(rank: int, folder: Path) -> bytes:
    """At another number of ranks: what it starts from."""
    model = ddp()
    handle = attached(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.load_state_dict(torch.load(folder / "full.pt", weights_only=True, mmap=True))
    found = handle.full_state_dict()
    for step in (2, 3):
        for gradient in gradients(model, step):
            assert gradient.isfinite().all()
    return dumped(found)


def saved(rank: int, folder: Path) -> None:
    model = ddp()
    handle = attached(model)
    gradients(model, 0)
    full = handle.full_state_dict(rank0_only=True)
    if rank == 0:
        torch.save(full, folder / "full.pt")


def shards(rank: int) -> bytes:
    """The state of all ranks, and a list of the states that each has of its own, say the same."""
    how = {"density": 0.1, "error_feedback": True}
    model = sharded()
    handle = gw.attach(model, "topk", **how)
    for step in range(2):
        backward(model, step, spare=True)
    full, first = handle.full_state_dict(), handle.full_state_dict(rank0_only=True)
    assert bool(first) == (rank == 0)
    own = loaded(dumped(handle.state_dict()))
    went_on = [backward(model, step, spare=True) for step in (2, 3)]
    for state in (torch.load(io.BytesIO(dumped(full)), weights_only=True), own):
        again = sharded()
        other = gw.attach(again, "topk", **how)
        other.load_state_dict(state)
        for expected, step in zip(went_on, (2, 3), strict=True):
            for name, gradient in backward(again, step, spare=True).items():
                assert same(gradient, expected[name])
    return dumped(full)


def moved_shards(rank: int, before: bytes) -> bytes:
    full = loaded(before)
    handles = [gw.attach(sharded(), "topk", density=0.1, error_feedback=True) for _ in range(2)]
    for handle, state in zip(handles, (full, full["ranks"]), strict=True):
        handle.load_state_dict(state)
    a, b = (handle.full_state_dict() for handle in handles)
    for name, residual in owed(a).items():
        assert torch.equal(residual, owed(b)[name]), name
    return dumped(a)


def replicas_have_one_state(rank: int) -> None:
    mesh = replicated(2)

    def made() -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(20, 40), mesh=mesh)
        how = {"density": 0.1, "error_feedback": True, "policy": "lgreco"}
        return model, gw.attach(model, "topk", **how)

    def step(model: nn.Module, number: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10 * number + rank)
        model.zero_grad()
        model(torch.randn(8, 20, generator=generator)).square().mean().backward()
        return model.weight.grad.to_local().clone()

    model, handle = made()
    for number in range(2):
        step(model, number)
    full, first = handle.full_state_dict(), handle.full_state_dict(rank0_only=True)
    assert [state["rank"] for state in full["ranks"]] == [0, 1, 2, 3]
    assert bool(first) == (rank == 0)
    error = caught(lambda: handle.full_state_dict(rank0_only=rank == 3))
    assert isinstance(error, gw.ConfigError), error
    assert "disagree on full_state_dict" in str(error)  # on ranks 0 and 1 too, whose shards agree
    if rank == 0:
        assert [state["rank"] for state in first["ranks"]] == [0, 1, 2, 3]
    expected = step(model, 3)
    model, other = made()
    other.load_state_dict(full)
    assert torch.equal(step(model, 3), expected)


def the_code_of_the_page_runs(rank: int, folder: Path) -> None:
    """The code blocks of docs/how-to/checkpointing.md."""
    text = (Path(__file__).parents[2] / "docs" / "how-to" / "checkpointing.md").read_text()
    page: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block, page)
    model = ddp()
    handle, optimizer = attached(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        gradients(model, step)
        optimizer.step()
    page["save"](folder / "all.pt", model, optimizer, handle, 3)
    page["save_own"](folder, handle)
    dist.barrier()
    expected = gradients(model, 3)
    for own in (False, True):
        again = ddp()
        loading, other = attached(again), torch.optim.SGD(again.parameters(), lr=0.1)
        if own:
            again.module.load_state_dict(model.module.state_dict())
            page["load_own"](folder, loading)
        else:
            assert page["load"](folder / "all.pt", again, other, loading) == 3
        assert all(map(torch.equal, gradients(again, 3), expected))


def mistakes(rank: int) -> None:
    model = ddp()
    handle = attached(model)
    gradients(model, 0)
    full = handle.full_state_dict()
    for match, state in (
        ("full_state_dict(rank0_only=True) gives it on all ranks but 0", {}),
        ("not the full_state_dict of a gradwire handle", {**full, "version": 7}),
        ("give the states of all 2 old ranks", {**full, "ranks": full["ranks"][:1] * 2}),
        ("of 1 ranks, not of 2", {**full, "ranks": full["ranks"][:1]}),
        ("not the full_state_dict of a gradwire handle", {**full, "world_size": "2"}),
        ("not the full_state_dict of a gradwire handle", {**full, "version": True}),
        ("not the full_state_dict of a gradwire handle", {**full, "ranks": "01"}),
        ("not int", 3),
    ):
        error = caught(lambda state=state: handle.load_state_dict(state))
        assert isinstance(error, gw.ConfigError), (match, error)
        assert match in str(error), error
    apart = dist.new_group()
    dist.barrier(apart)  # else the peer may still connect its mesh
    gather = StateGather([apart])
    dist.destroy_process_group(apart)
    for _ in range(2):  # as long as someone holds the group, and after
        error = caught(lambda: gather(full["ranks"][rank], rank0_only=False))
        assert isinstance(error, gw.ConfigError), error
        assert "was destroyed" in str(error)
        apart = None  # type: ignore[assignment]


def differs(rank: int) -> None:
    """Told at once, and the next call of all ranks goes on."""
    handle = attached(ddp())
    error = caught(lambda: handle.full_state_dict(rank0_only=rank == 0))
    assert isinstance(error, gw.ConfigError), error
    assert "disagree on full_state_dict" in str(error)
    assert "'rank0_only=True'" in str(error)
    assert len(handle.full_state_dict()["ranks"]) == 2


def gradients_of_a_state_are_not_kept(rank: int) -> None:
    model = ddp()
    handle = attached(model)
    gradients(model, 0)
    state = handle.state_dict()
    state["aggregators"]["0.weight"]["residual"].requires_grad_()
    handle.load_state_dict(state)
    gradients(model, 1)
    assert not handle.state_dict()["aggregators"]["0.weight"]["residual"].requires_grad


def a_rank_that_calls_alone_is_told(rank: int) -> None:
    """By its group's timeout, which rank did not call."""
    model = ddp()
    handle = attached(model)
    if rank == 0:
        member = communicator(model.process_group).member
        assert member is not None
        member.timeout = 0.5
        error = caught(handle.full_state_dict)
        assert isinstance(error, gw.TransportError), error
        assert "rank 1 did not reach full_state_dict" in str(error)


def assert_alike(before: Any, after: Any) -> None:
    """What was not sent is the same, and not nothing."""
    assert owed(after).keys() == owed(before).keys()
    for name, residual in owed(before).items():
        assert residual.any(), name
        torch.testing.assert_close(owed(after)[name], residual)


def test_what_is_owed_moves_to_other_numbers_of_ranks(tmp_path: Path) -> None:
    of_three, of_two = tmp_path / "three", tmp_path / "two"
    of_three.mkdir()
    of_two.mkdir()
    together(3, partial(saved, folder=of_three))
    _, (by_shards, _), (by_two, _), *_ = together(
        2,
        partial(saved_and_resumed, folder=of_two),
        shards,
        partial(moved, folder=of_three),
        partial(the_code_of_the_page_runs, folder=tmp_path),
        mistakes,
        differs,
        gradients_of_a_state_are_not_kept,
        a_rank_that_calls_alone_is_told,
    )
    (by_three, *_), (shards_of_three, *_), _ = together(
        3,
        partial(moved, folder=of_two),
        partial(moved_shards, before=by_shards),
        partial(nothing_is_lost, before=by_shards),
    )
    ((by_one,),) = together(1, partial(moved, folder=of_two))
    before = torch.load(of_two / "full.pt", weights_only=True)
    basis = before["ranks"][0]["aggregators"]["2.weight"]["basis"]
    for ranks, state in ((3, by_three), (1, by_one)):
        after = loaded(state)
        assert after["world_size"] == ranks
        assert_alike(before, after)
        for of_rank in after["ranks"]:  # the factor is alike on all ranks
            assert torch.equal(of_rank["aggregators"]["2.weight"]["basis"], basis)
    assert_alike(loaded(by_shards), loaded(shards_of_three))
    # As load_state_dict's docstring says: of three ranks 0 and 2, and rank 1, at 2/3.
    before = torch.load(of_three / "full.pt", weights_only=True)
    assert_alike(before, loaded(by_two))
    e = [s["aggregators"]["0.weight"]["residual"] for s in before["ranks"]]
    found = [s["aggregators"]["0.weight"]["residual"] for s in loaded(by_two)["ranks"]]
    torch.testing.assert_close(found[0], (e[0] + e[2]) * 2 / 3)
    torch.testing.assert_close(found[1], e[1] * 2 / 3)
