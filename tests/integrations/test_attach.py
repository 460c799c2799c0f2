"""`gw.attach` on real DDP modules over gloo. One start of processes serves many scenarios."""

from __future__ import annotations

import copy
import inspect
import io
import resource
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

import gradwire as gw
from gradwire import codecs
from products import EXHAUSTIVE
from ranks import all_pass, as_processes, caught

pytestmark = pytest.mark.multiprocess


def mlp(width: int = 40) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, width), nn.ReLU(), nn.LayerNorm(width), nn.Linear(width, 3))


class Shortened(nn.Module):
    """Its first layer, whose gradient comes last, is unused in some steps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 20)
        self.third = nn.Linear(20, 20)

    def forward(self, x: torch.Tensor, whole: bool) -> torch.Tensor:
        return self.third(self.second(self.first(x) if whole else x))


def batch(step: int, rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step * 100 + rank)
    return torch.randn(8, 20, generator=generator).to(dtype)


def train(
    model: nn.Module,
    steps: range,
    forward: Callable[[int, torch.Tensor], torch.Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        x = batch(step, dist.get_rank(), dtype)
        out = forward(step, x) if forward else model(x)
        out.float().square().mean().backward()
        optimizer.step()


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().float().reshape(-1) for p in model.parameters()])


def same_everywhere(tensor: torch.Tensor) -> bool:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, tensor)
    return all(torch.equal(gathered[0], other) for other in gathered)


def plain(build: Callable[[], nn.Module], steps: range) -> torch.Tensor:
    model = DDP(build())
    train(model, steps)
    return flat(model)


# ---- scenarios: each runs on every rank, within one process group


def dense_equals_plain_ddp(rank: int) -> None:
    model = DDP(mlp())
    gw.attach(model, codec=None)
    train(model, range(4))
    torch.testing.assert_close(flat(model), plain(mlp, range(4)), rtol=1e-5, atol=1e-6)
    assert same_everywhere(flat(model))


def eight_bits_are_close_to_plain_ddp(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=8)
    train(model, range(4))
    difference = (flat(model) - plain(mlp, range(4))).abs().max()
    assert 0 < difference < 0.02
    assert same_everywhere(flat(model))
    stats = handle.stats()
    assert stats["steps"] == 4
    assert stats["wire_bytes"] > 0
    assert stats["parameters"]["0.weight"]["ratio"] > 3
    assert stats["parameters"]["0.bias"]["codec"] == "dense"


def two_bits_with_error_feedback_train(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=2, block=64, error_feedback=True)
    x = batch(0, rank)
    first = float(model(x).square().mean())
    train(model, range(15))
    assert float(model(x).square().mean()) < first
    assert same_everywhere(flat(model))
    assert handle.stats()["residual_bytes"] == 4 * (20 * 40 + 40 * 3)


def no_sync_accumulates(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, codec=None)
    with model.no_sync():
        model(batch(0, rank)).square().mean().backward()
    assert handle.stats()["steps"] == 0
    model(batch(1, rank)).square().mean().backward()
    reference = DDP(mlp())
    with reference.no_sync():
        reference(batch(0, rank)).square().mean().backward()
    reference(batch(1, rank)).square().mean().backward()
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def static_graph_trains(rank: int) -> None:
    model = DDP(mlp(), static_graph=True)
    gw.attach(model, bits=8)
    train(model, range(4))
    assert same_everywhere(flat(model))
    assert (flat(model) - plain(mlp, range(4))).abs().max() < 0.02


class TwoDtypes(nn.Module):
    """In one bucket each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.first = nn.Linear(40, 100).bfloat16(), nn.Linear(20, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).bfloat16()).float()


def static_graph_of_several_buckets(rank: int) -> None:
    """DDP gives each bucket of its first pass index 0, and is_last() False."""
    for coalesce_bytes in (0, 5000, 1 << 18):  # the first has 3360 bytes, the last 8200
        model, reference = DDP(TwoDtypes(), static_graph=True), DDP(TwoDtypes(), static_graph=True)
        handle = gw.attach(model, codec=None, coalesce_bytes=coalesce_bytes)
        for step in range(2):
            for of in (model, reference):
                of(batch(step, rank)).square().mean().backward()
            for p, q in zip(model.parameters(), reference.parameters(), strict=True):
                assert same_everywhere(p.grad)
                torch.testing.assert_close(p.grad, q.grad, rtol=0.02, atol=1e-4)  # bf16
            assert handle.stats()["steps"] == step + 1


def skipped_parameters_are_fine(rank: int) -> None:
    """DDP skips a bucket of parameters that no rank has used, even the last one."""
    if "skip_all_reduce_unused_params" not in inspect.signature(DDP).parameters:
        return  # torch below 2.7
    each: dict[str, Any] = {"bucket_cap_mb": 1e-3, "find_unused_parameters": True}
    model = DDP(Shortened(), skip_all_reduce_unused_params=True, **each)
    handle = gw.attach(model, codec=None)
    reference = DDP(Shortened(), **each)
    for step in range(5):  # DDP rebuilds its buckets after the first; all are used until then
        for of in (model, reference):
            of.zero_grad()
            of(batch(step, rank), step < 2).square().mean().backward()
        assert (model.module.first.weight.grad is None) == (step >= 2)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
    assert handle.stats()["steps"] == 5


def channels_last_is_fine(rank: int) -> None:
    def convolution() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 12, 3), nn.ReLU(), nn.Conv2d(12, 6, 3))

    gradients = []
    for attached in (True, False):
        model = DDP(convolution().to(memory_format=torch.channels_last))
        if attached:
            gw.attach(model, codec=None)
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(2, 4, 9, 9, generator=generator).to(memory_format=torch.channels_last)
        model(x).square().mean().backward()
        gradients.append([p.grad for p in model.parameters()])
    for p, q in zip(*gradients, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def half_precision_trains(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = DDP(mlp().to(dtype))
        gw.attach(model, bits=8)
        train(model, range(3), dtype=dtype)
        assert same_everywhere(flat(model))
        assert torch.isfinite(flat(model)).all()


def several_modules_keep_apart(rank: int) -> None:
    first, second, bare = DDP(mlp()), DDP(mlp(56)), DDP(mlp())
    one, two = gw.attach(first, bits=4), gw.attach(second, bits=8, seed=3)
    train(bare, range(2))  # law 9: what is not attached is not touched
    assert torch.equal(flat(bare), plain(mlp, range(2)))
    both = list(first.parameters()) + list(second.parameters())
    for step in range(3):
        for p in both:
            p.grad = None
        x = batch(step, rank)
        (first(x).square().mean() + second(x).square().mean()).backward()
    assert one.stats()["steps"] == two.stats()["steps"] == 3
    grads = torch.cat([p.grad.reshape(-1) for p in both])
    assert same_everywhere(grads)


def several_groups_at_once(rank: int) -> None:
    group = dist.new_group(list(range(dist.get_world_size())))
    model = DDP(mlp(), process_group=group)
    gw.attach(model, bits=8)
    tensor = torch.full((100,), float(rank))
    gw.all_reduce(tensor, codec="identity", op="avg")
    train(model, range(2))
    assert same_everywhere(flat(model))
    assert torch.equal(tensor, torch.full((100,), (dist.get_world_size() - 1) / 2))


def detach_and_attach_again(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=4)
    error = caught(lambda: gw.attach(model))
    assert isinstance(error, gw.ConfigError)
    assert "detach" in str(error)
    handle.detach()
    train(model, range(3))
    assert handle.stats()["steps"] == 0
    torch.testing.assert_close(flat(model), plain(mlp, range(3)), rtol=1e-5, atol=1e-6)
    again = gw.attach(model, bits=4)
    train(model, range(1))
    assert again.stats()["steps"] == 1


def handles_draw_numbers_of_their_own(rank: int) -> None:
    model, drawn = DDP(mlp()), []
    for _ in range(3):
        handle = gw.attach(model, bits=2)
        model.zero_grad()
        model(batch(0, rank)).square().mean().backward()
        drawn.append(torch.cat([p.grad.reshape(-1).clone() for p in model.parameters()]))
        handle.detach()
    assert all(map(same_everywhere, drawn))
    assert not any(torch.equal(a, b) for a, b in combinations(drawn, 2))


def per_parameter_codecs_and_patterns(rank: int) -> None:
    handle = gw.attach(
        DDP(mlp()), include=["*.bias"], exclude=["2.*"], codecs={"3.weight": gw.QSGD(bits=2)}
    )
    chosen = {p.name: p.codec for p in handle.plan.parameters}
    assert chosen == {
        "0.weight": gw.QSGD(),
        "0.bias": gw.QSGD(),
        "2.weight": None,
        "2.bias": None,
        "3.weight": gw.QSGD(bits=2),
        "3.bias": gw.QSGD(),
    }


def many_codecs_cost_no_more_kernel_calls(rank: int) -> None:
    def calls(bits: list[int], target: str) -> int:
        """The result of two steps, once DDP has rebuilt its buckets."""
        torch.manual_seed(0)
        model = DDP(nn.Sequential(*(nn.Linear(20, 20) for _ in bits)))
        codecs = {f"{n}.weight": gw.QSGD(bits=b) for n, b in enumerate(bits)}
        handle = gw.attach(model, codecs=codecs, options=gw.Options(target=target))
        train(model, range(2))
        before = handle.stats()["kernel_calls"]
        train(model, range(2, 4))
        assert same_everywhere(flat(model))
        return int(handle.stats()["kernel_calls"] - before)

    one, many = (calls(bits, "c") for bits in ([4] * 6, [2, 4, 8] * 2))
    assert many == one > 0
    assert calls([2, 4, 8] * 2, "eager") > one


def nothing_to_compress_still_works(rank: int) -> None:
    model = DDP(nn.LayerNorm(20))
    gw.attach(model)
    train(model, range(2))
    assert same_everywhere(flat(model))


class Mixed(nn.Module):
    """Parameters of four dtypes, two of which codecs support."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(20, 30)
        self.turn = nn.Parameter(torch.randn(30, dtype=torch.complex64))
        self.narrow = nn.Linear(30, 30).bfloat16()
        self.wide = nn.ModuleList(nn.Linear(30, 30).double() for _ in range(3))
        self.last = nn.Linear(30, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.narrow((self.first(x) * self.turn).abs().bfloat16()).double()
        for layer in self.wide:
            x = layer(x)
        return self.last(x.float())


def other_dtypes_go_as_they_are(rank: int) -> None:
    """Next to compressed parameters, in any bucketing."""
    for megabytes, coalesce_bytes in ((25, 1 << 18), (0.0001, 0), (0.0001, 1 << 30), (0.002, 4000)):
        reference = DDP(Mixed(), bucket_cap_mb=megabytes)
        model = DDP(Mixed(), bucket_cap_mb=megabytes)
        handle = gw.attach(model, codec=None, coalesce_bytes=coalesce_bytes)
        for step in range(3):
            x = batch(step, rank)
            for each in (reference, model):
                each.zero_grad()
                each(x).square().mean().backward()
            pairs = zip(model.named_parameters(), reference.parameters(), strict=True)
            for (name, p), q in pairs:
                loose = {"rtol": 1e-2, "atol": 1e-3} if "narrow" in name else {}
                torch.testing.assert_close(p.grad, q.grad, **loose)
        assert handle.stats()["steps"] == 3
        handle.detach()  # then too
        model.zero_grad()
        model(batch(2, rank)).square().mean().backward()
        torch.testing.assert_close(model.module.turn.grad, reference.module.turn.grad)

    model = DDP(Mixed(), bucket_cap_mb=0.002)
    handle = gw.attach(model, bits=8, error_feedback=True)
    train(model, range(3))
    for p in model.parameters():
        assert same_everywhere(p.detach())
    stats = handle.stats()
    told = stats["parameters"]["wide.0.weight"]
    assert told["codec"] == "dense"
    assert (told["payload_bytes"], told["ratio"]) == (7200, 1)
    assert stats["parameters"]["first.weight"]["ratio"] > 3
    raw = sum(p.numel * p.dtype.itemsize for p in handle.plan.parameters if p.how == "dense")
    n = dist.get_world_size()
    sent: list[Any] = [None] * n
    dist.all_gather_object(sent, stats["wire_bytes"])
    assert sum(sent) > 3 * 2 * (n - 1) * raw
    state = handle.state_dict()
    assert state["steps"]["turn"] == 3
    handle.load_state_dict(state)
    train(model, range(3, 5))

    error = caught(lambda: gw.attach(DDP(Mixed()), include=["turn"]))
    assert isinstance(error, gw.ConfigError)
    assert "turn" in str(error)
    assert "complex64" in str(error)


def wrong_input_is_named(rank: int) -> None:
    def refuses(match: str, **arguments: Any) -> None:
        error = caught(lambda: gw.attach(arguments.pop("model", DDP(mlp())), **arguments))
        assert isinstance(error, gw.ConfigError), error
        assert match in str(error), error

    refuses("qsgd", codec="qsdg")
    refuses("bits", bits=9)
    refuses("bitz", bitz=4)
    refuses("options bits", codec=None, bits=2)
    refuses("options={'segments': 2}", options={"segments": 2})
    refuses("seed='a'", seed="a")
    refuses("seed=-1", seed=-1)
    refuses("below 2^64", seed=1 << 64)
    refuses("seed=True", seed=True)
    refuses("coalesce_bytes=True", coalesce_bytes=True)
    refuses("error_feedback='yes'", error_feedback="yes")
    refuses("include=None", include=None)
    refuses("codecs=['0.weight']", codecs=["0.weight"])
    refuses("no parameter", exclude=["encoder.*"])
    refuses("list of patterns", exclude="0.*")
    refuses("DistributedDataParallel", model=mlp())
    hooked = DDP(mlp())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    refuses("communication hook", model=hooked)
    integer = caught(lambda: gw.all_reduce(torch.arange(5)))
    assert isinstance(integer, gw.ConfigError)
    assert "int64" in str(integer)


def plans_that_differ_are_named(rank: int) -> None:
    error = caught(lambda: gw.attach(DDP(mlp()), bits=4 if rank else 2))
    assert isinstance(error, gw.ConfigError)
    assert "0.weight" in str(error)
    error = caught(lambda: gw.all_reduce(torch.zeros(10 + rank)))
    assert isinstance(error, gw.ConfigError)
    assert f"{10 + rank} x" in str(error)


def non_finite_gradients_reach_every_rank(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=4, error_feedback=True)
    x = batch(0, rank)
    if rank == 1:
        x[0, 0] = float("inf")
    model(x).square().mean().backward()
    assert not torch.isfinite(model.module[0].weight.grad).all()
    for state in handle.state_dict()["aggregators"].values():
        assert torch.isfinite(state["residual"]).all()


def bucketing_changes_nothing(rank: int) -> None:
    results = []
    for megabytes in (0.0001, 0.002, 25):
        model = DDP(mlp(), bucket_cap_mb=megabytes)
        gw.attach(model, bits=4)
        train(model, range(4))
        results.append(flat(model))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def small_buckets_go_together(rank: int) -> None:
    """Buckets below the threshold are combined, with bit-identical results."""
    trained, collectives = [], []
    for coalesce_bytes in (0, 1 << 30):
        model = DDP(mlp(2000), bucket_cap_mb=0.02)
        handle = gw.attach(model, bits=4, coalesce_bytes=coalesce_bytes)
        train(model, range(4))
        trained.append(flat(model))
        collectives.append(handle._reductions.owner.core.issued)
        handle.detach()
    assert torch.equal(*trained)
    assert collectives[1] == 4 < collectives[0], collectives


class Pieces(nn.Module):
    """Whose backward pass is several of autograd's: recomputed in pieces, or of several losses."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(20, 20) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        if not self.reentrant:
            return [layer(x) for layer in self.layers]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


def backward_in_pieces(rank: int) -> None:
    for reentrant in (True, False):
        results = []
        for compressed in (False, True):
            model = DDP(Pieces(reentrant), bucket_cap_mb=0.001)
            if compressed:
                gw.attach(model, codec=None, coalesce_bytes=1 << 30)
            for step in range(3):
                model.zero_grad()
                out = model(batch(step, rank).requires_grad_())
                for piece in reversed(out) if isinstance(out, list) else [out]:
                    piece.square().mean().backward()
            results.append(torch.cat([p.grad.view(-1) for p in model.parameters()]))
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)
        assert same_everywhere(results[1])


def state_moves_to_another_world_size(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=2, error_feedback=True)
    train(model, range(2))
    n = dist.get_world_size()
    states: list[Any] = [None] * n
    dist.all_gather_object(states, handle.state_dict())
    # As if twice as many ranks had saved: each new rank gets two states, at half weight.
    doubled = [
        {**s, "rank": s["rank"] + k * n, "world_size": 2 * n} for k in (0, 1) for s in states
    ]
    handle.load_state_dict(doubled)
    for name, state in states[rank]["aggregators"].items():
        found = handle.state_dict()["aggregators"][name]["residual"]
        torch.testing.assert_close(found, state["residual"])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        handle.load_state_dict(doubled[n])
    assert any("residuals start at zero" in str(w.message) for w in told)
    assert not handle.state_dict()["aggregators"]


def a_state_is_a_snapshot(rank: int) -> None:
    """Training changes neither a state that was taken before it nor one that was loaded."""
    model = DDP(mlp())
    handle = gw.attach(model, bits=2, error_feedback=True)
    train(model, range(2))
    state = handle.state_dict()
    kept = copy.deepcopy(state)

    def unchanged() -> None:
        for name, tensors in kept["aggregators"].items():
            assert torch.equal(tensors["residual"], state["aggregators"][name]["residual"])
        assert state["steps"] == kept["steps"]

    train(model, range(2, 4))
    unchanged()
    handle.load_state_dict(state)
    train(model, range(2, 4))
    unchanged()
    after = handle.state_dict()
    assert after["steps"] != kept["steps"]
    assert not torch.equal(
        after["aggregators"]["0.weight"]["residual"], kept["aggregators"]["0.weight"]["residual"]
    )


def state_of_another_plan_is_refused(rank: int) -> None:
    def attached(**arguments: Any) -> gw.Handle:
        model = DDP(mlp())
        handle = gw.attach(model, **{"bits": 2, "error_feedback": True, **arguments})
        train(model, range(2))
        return handle

    handle, state = attached(), attached().state_dict()
    weight, before = "0.weight", copy.deepcopy(handle.state_dict())

    def refuses(match: str, bad: Any, into: gw.Handle = handle) -> None:
        error = caught(lambda: into.load_state_dict(bad))
        assert isinstance(error, gw.ConfigError), error
        assert match in str(error), error

    def with_residual(residual: Any) -> dict[str, Any]:
        kept = {**state["aggregators"], "3.weight": {"residual": residual}}
        return {**state, "seed": 9, "aggregators": kept}

    refuses(f"{weight} has codec QSGD(bits=4", attached(bits=4).state_dict())
    refuses(
        f"{weight} has feedback True in the state and False", state, attached(error_feedback=False)
    )
    refuses("has shape (40,)", with_residual(torch.zeros(40)))
    refuses("has dtype torch.float16", with_residual(torch.zeros(120, dtype=torch.float16)))
    refuses("has device meta", with_residual(torch.zeros(120, device="meta")))
    refuses("not contiguous", with_residual(torch.zeros(240)[::2]))
    refuses("not a tensor", with_residual([0.0] * 120))
    refuses("lacks 'rank'", {"version": 1})
    refuses("empty", [])
    refuses("another.weight", {**state, "steps": {"another.weight": 1}})
    after = handle.state_dict()
    for name, kept in before.pop("aggregators").items():
        assert torch.equal(kept["residual"], after["aggregators"][name]["residual"])
    after.pop("aggregators")
    assert before == after


def copies_are_plain_modules(rank: int) -> None:
    model = DDP(mlp())
    error = caught(lambda: gw.attach(model, bits=9))
    assert isinstance(error, gw.ConfigError)
    handle = gw.attach(model, bits=4)
    train(model, range(1))
    for attached in (True, False):
        if not attached:
            handle.detach()
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies = [
            copy.deepcopy(model),
            torch.load(saved, weights_only=False),
            AveragedModel(model).module,
        ]
        for other in copies:
            bare = copy.deepcopy(other.module)
            train(other, range(1, 3))
            assert torch.equal(flat(other), plain(lambda bare=bare: bare, range(1, 3)))
            own = gw.attach(copy.deepcopy(other), bits=4)
            assert own.stats()["steps"] == 0
    assert handle.stats()["steps"] == 1


def what_ddp_synchronises_is_planned(rank: int) -> None:
    def trained(attach: bool, **arguments: Any) -> torch.Tensor:
        module = mlp()
        module[2].weight.requires_grad_(False)  # before wrapping: DDP ignores it
        model = DDP(module, **arguments)
        module[0].weight.requires_grad_(False)  # after wrapping: it stays in its bucket
        if attach:
            handle = gw.attach(model, codec=None)
            names = [p.name for p in handle.plan.parameters]
            assert names == ["0.weight", "0.bias", "2.bias", "3.weight", "3.bias"]
        train(model, range(3))
        return flat(model)

    for arguments in ({"find_unused_parameters": True}, {"static_graph": True}):
        torch.testing.assert_close(
            trained(True, **arguments), trained(False, **arguments), rtol=1e-5, atol=1e-6
        )

    model = DDP(mlp())
    model.module[3] = nn.Linear(40, 5)
    error = caught(lambda: gw.attach(model))
    assert isinstance(error, gw.ConfigError)
    assert "[(3,), (3, 40)]" in str(error)

    model = DDP(mlp())
    handle = gw.attach(model)
    del handle._reductions._by_parameter[model.module[3].weight]
    error = caught(lambda: train(model, range(1)))
    assert isinstance(error, gw.ConfigError), error
    assert "(3, 40)" in str(error)


def uneven_inputs_join(rank: int) -> None:
    def joined(attach: bool) -> torch.Tensor:
        model = DDP(mlp(), bucket_cap_mb=0.001)
        if attach:
            gw.attach(model, codec=None)
        with model.join():
            train(model, range(2 + 2 * rank))
        return flat(model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, expected = joined(True), joined(False)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert same_everywhere(found)

    model = DDP(mlp())
    handle = gw.attach(model, bits=2, error_feedback=True)
    with model.join():
        train(model, range(4 - rank))
    assert handle.stats()["steps"] == 4
    assert same_everywhere(flat(model))


class Tied(nn.Module):
    """An output layer that is the input layer, transposed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Linear(20, 20), nn.Linear(20, 20)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


def tied_weights_go_by_every_name(rank: int) -> None:
    model = DDP(Tied())
    handle = gw.attach(model, exclude=["head.*"])
    chosen = {p.name: p.codec for p in handle.plan.parameters}
    assert chosen == {"embed.weight": None, "embed.bias": None, "head.bias": None}
    train(model, range(3))
    torch.testing.assert_close(flat(model), plain(Tied, range(3)), rtol=1e-5, atol=1e-6)


def memory_stays_flat(rank: int) -> None:
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(20, 2000), nn.Linear(2000, 100)), bucket_cap_mb=0.2)
    handle = gw.attach(model, bits=4)
    train(model, range(15))
    gradient_bytes = 4 * sum(p.numel() for p in model.parameters())
    # DDP's first bucket has the whole model; messages in flight take at most half of its bytes.
    # How many buckets that is depends on the scheduler, so the peak may come late.
    assert handle.stats()["peak_extra_bytes"] <= gradient_bytes / 2


class Waits(torch.autograd.Function):
    """The identity, whose backward waits for an event."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, event: threading.Event | None) -> torch.Tensor:
        ctx.event = event
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        if ctx.event is not None:
            assert ctx.event.wait(60), "no bucket is averaged before backward ends"
        return grads[0], None


class Halves(nn.Module):
    """Two layers, with a wait between them in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(20, 300), nn.Linear(300, 300)
        self.event: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(Waits.apply(self.first(x), self.event))


def averaging_overlaps_with_backward(rank: int) -> None:
    """The last layer's bucket is averaged while the first layer's gradient is not yet computed."""
    layers = Halves()
    model = DDP(layers, bucket_cap_mb=0.02)
    handle = gw.attach(model, bits=4)
    train(model, range(2))  # DDP rebuilds its buckets after the first iteration
    layers.event = threading.Event()
    reduce = handle._reductions.reduce

    def spied(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = reduce(bucket)
        future.add_done_callback(lambda _: layers.event.set())
        return future

    handle._reductions.reduce = spied
    train(model, range(2, 3))


def asynchronous_all_reduce(rank: int) -> None:
    n = dist.get_world_size()
    tensors = [torch.full((1000,), float(rank + i)) for i in range(5)]
    futures = [gw.all_reduce(t, codec="identity", async_op=True) for t in tensors]
    for i, future in enumerate(futures):
        assert future is not None
        assert torch.equal(future.wait(), torch.full((1000,), float(n * (n - 1) / 2 + n * i)))
    transposed = torch.full((30, 20), float(rank)).t()
    gw.all_reduce(transposed, codec="identity", op="avg")
    assert torch.equal(transposed, torch.full((20, 30), (n - 1) / 2))


SCENARIOS = [
    dense_equals_plain_ddp,
    eight_bits_are_close_to_plain_ddp,
    two_bits_with_error_feedback_train,
    no_sync_accumulates,
    static_graph_trains,
    static_graph_of_several_buckets,
    skipped_parameters_are_fine,
    channels_last_is_fine,
    half_precision_trains,
    several_modules_keep_apart,
    several_groups_at_once,
    detach_and_attach_again,
    handles_draw_numbers_of_their_own,
    per_parameter_codecs_and_patterns,
    many_codecs_cost_no_more_kernel_calls,
    nothing_to_compress_still_works,
    other_dtypes_go_as_they_are,
    wrong_input_is_named,
    plans_that_differ_are_named,
    non_finite_gradients_reach_every_rank,
    bucketing_changes_nothing,
    small_buckets_go_together,
    backward_in_pieces,
    state_moves_to_another_world_size,
    state_of_another_plan_is_refused,
    a_state_is_a_snapshot,
    copies_are_plain_modules,
    what_ddp_synchronises_is_planned,
    uneven_inputs_join,
    tied_weights_go_by_every_name,
    memory_stays_flat,
    averaging_overlaps_with_backward,
    asynchronous_all_reduce,
]


@pytest.mark.timeout(280)
@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=EXHAUSTIVE)])
def test_attach(world_size: int) -> None:
    all_pass(world_size, SCENARIOS, timeout=30, deadline=240)


def two_thousand_steps(rank: int) -> None:
    model = DDP(mlp())
    handle = gw.attach(model, bits=4, error_feedback=True)
    train(model, range(200))
    early, resident = handle.stats()["peak_extra_bytes"], resident_bytes()
    train(model, range(200, 2000))
    assert handle.stats()["peak_extra_bytes"] <= 2 * early
    assert resident_bytes() - resident < 8 << 20


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.timing
def test_two_thousand_steps_leave_memory_flat() -> None:
    as_processes(2, two_thousand_steps, timeout=30, deadline=240)


def alone(rank: int) -> None:
    """World size 1: nothing is encoded, so nothing is kept; states of more ranks still load."""
    model = DDP(mlp())
    handle = gw.attach(model, bits=2, error_feedback=True)
    train(model, range(2))
    assert torch.equal(flat(model), plain(mlp, range(2)))
    assert handle.stats()["residual_bytes"] == 0
    state = handle.state_dict()
    facts = {
        name: {**f, "feedback": f["codec"] != "dense"} for name, f in state["parameters"].items()
    }
    residuals = {"0.weight": {"residual": torch.ones(800)}}
    of_two = {**state, "world_size": 2, "parameters": facts, "aggregators": residuals}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        handle.load_state_dict([of_two, {**of_two, "rank": 1}])
    train(model, range(2, 3))
    # The mean of the two residuals, ones, was added to the gradient; the learning rate is 0.1.
    torch.testing.assert_close(flat(model)[:800], plain(mlp, range(3))[:800] - 0.1)
    assert not handle.state_dict()["aggregators"]


def alone_sharded_or_plain(rank: int) -> None:
    """The same calls, whatever wraps the module; `ratio` can be formatted."""

    def weights() -> torch.Tensor:
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in model.parameters()]
        return torch.cat([p.detach().reshape(-1) for p in whole])

    for wrap in (DDP, fully_shard, nn.Module.train):
        model = wrap(mlp())
        handle = gw.attach(model, "qsgd", bits=4)
        train(model, range(2))
        update = handle.update(bits=3)
        update.wait()
        train(model, range(2, 4))
        assert update.in_force
        assert torch.equal(weights(), plain(mlp, range(4)))
        stats = handle.stats()
        assert (stats["steps"], stats["wire_bytes"], f"{stats['ratio']:.1f}") == (4, 0, "1.0")
        assert f"{stats.get('weights_ratio', 1):.1f}" == "1.0"
        assert handle.metrics()["ratio"] == 1
        assert "one rank sends nothing" in str(handle)
        state = handle.full_state_dict(rank0_only=True)
        assert state["world_size"] == 1
        handle.load_state_dict(state)
        handle.detach()
        train(model, range(4, 5))
        assert torch.equal(weights(), plain(mlp, range(5)))


@pytest.mark.timeout(100)
def test_attach_alone() -> None:
    all_pass(1, [alone, alone_sharded_or_plain], timeout=30, deadline=90)


def test_wrong_options_are_named() -> None:
    for match, options in (
        ("algorithm 'rings'", {"algorithm": "rings"}),
        ("target='cuda': use one of", {"target": "cuda"}),
        ("segments=0", {"segments": 0}),
        ("segments=2.5", {"segments": 2.5}),
        ("threads=-1", {"threads": -1}),
    ):
        with pytest.raises(gw.ConfigError, match=match):
            gw.Options(**options)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Weighed(gw.QSGD):
    weight: float = 1.0


def test_who_misspells_a_name_is_told_the_nearest() -> None:
    """Of an argument, a codec, its option, a plan; and of what other libraries call a codec."""
    attach, register = partial(gw.attach, mlp()), partial(gw.register, mlp())
    handle, collective = attach(), partial(gw.all_reduce, torch.zeros(3))
    update = handle.update
    for call, given, told in (
        (attach, {"excludes": ["*"]}, "attach has no argument 'excludes': did you mean 'exclude'?"),
        (attach, {"codec": "auto", "feedback": True}, "did you mean 'error_feedback'?"),
        (update, {"seeds": 3}, "update has no argument 'seeds': did you mean 'seed'?"),
        (update, {"excludes": ["*"]}, "update has no argument 'excludes': did you mean 'exclude'?"),
        (register, {"excludes": ["*"]}, "register has no argument 'excludes': did you mean"),
        (collective, {"asyncop": True}, "all_reduce has no argument 'asyncop': did you mean"),
        (collective, {"codec": "int8"}, "unknown codec 'int8': did you mean 'qsgd:bits=8'?"),
        (attach, {"codec": "qsdg"}, "'qsdg': did you mean 'qsgd'? Else use one of identity"),
        (attach, {"codec": "QSGD"}, "'QSGD': did you mean 'qsgd'?"),
        (attach, {"codec": "atuo"}, "'atuo': did you mean 'auto'?"),
        (attach, {"codec": "zstd"}, "'zstd': use one of identity"),
        (attach, {"codec": "topk", "densty": 0.1}, "'densty': did you mean 'density'?"),
        (attach, {"codec": "topk", "rank": 4}, "'topk' has no option 'rank': use one of density"),
        (attach, {"weights": "int8"}, "weights='int8': unknown codec: use"),
        (attach, {"keep": "payloads"}, "keep='payloads': did you mean 'payload'?"),
        (attach, {"plan": "measred"}, "plan='measred': did you mean 'measured'?"),
        (attach, {"policy": "l-greco"}, "unknown policy 'l-greco': did you mean 'lgreco'?"),
        (attach, {"algorithm": "rings"}, "unknown algorithm 'rings': did you mean 'ring'?"),
    ):
        error = caught(lambda call=call, given=given: call(**given))
        assert isinstance(error, gw.ConfigError), given
        assert told in str(error)
    for given in codecs.ELSEWHERE.values():
        attach(given)
    own = attach(Weighed(bits=4))  # whose option looks like an argument
    own.update(weight=2.0)
    assert own._reductions.switch.newest.rules.default.codec == Weighed(bits=4, weight=2.0)
    with pytest.raises(gw.ConfigError, match="observe: 3: give a function"):
        handle.observe(3)  # type: ignore[arg-type]


def test_attach_without_a_process_group() -> None:
    assert not dist.is_initialized()
    with pytest.raises(gw.ConfigError, match="init_process_group"):
        gw.all_reduce(torch.zeros(3))
