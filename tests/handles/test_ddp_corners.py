"""DDP modules used in ways that DDP bears, forbids or takes in silence."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ends import ends
from gradwire.aggregators import Observation, Rounds
from leftovers import until
from ranks import caught, refuses
from rooms.handles import hook_state
from training import Acts, nothing

pytestmark = pytest.mark.multiprocess


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8))


def step(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
    model(x).square().sum().backward()


class Words(nn.Module):
    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8, sparse=sparse)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, sparse: bool = False) -> torch.Tensor:
        function = partial(nn.functional.embedding, weight=self.words.weight, sparse=True)
        return self.last((function if sparse else self.words)(x))  # type: ignore[no-any-return]


def test_what_does_not_travel_in_buckets_is_refused_by_name(rank: int) -> None:
    model = DDP(Words())
    for options in ({}, {"exclude": ["words.weight"]}):
        refuses("words.weight has sparse", lambda o=options: gw.attach(model, **o))
        model(torch.arange(4)).sum().backward()  # as DDP's buckets are built
    inner = net()
    named = [("0.weight", inner[0].weight)]
    delayed = DDP(
        inner, delay_all_reduce_named_params=named, param_to_hook_all_reduce=inner[1].weight
    )
    refuses("0.weight is in delay_all_reduce_named_params", lambda: gw.attach(delayed))
    inner = net()
    _apply_optimizer_in_backward(torch.optim.SGD, [inner[1].bias], {"lr": 0.1})
    stepping = DDP(inner)
    refuses("1.bias has an optimizer that runs in backward", lambda: gw.attach(stepping))


def test_what_is_refused_at_attach_is_refused_later(rank: int) -> None:
    for forwards in (0, 1, 5):
        model = DDP(net())
        gw.attach(model)
        for _ in range(forwards):
            step(model)
        _apply_optimizer_in_backward(torch.optim.SGD, [model.module[1].bias], {"lr": 0.1})
        refuses("1.bias has an optimizer that runs in backward", lambda m=model: step(m))
    model = DDP(Words(sparse=False))
    gw.attach(model)
    model(torch.arange(4)).sum().backward()
    model.module.words.sparse = True
    refuses("words.weight has sparse", lambda: model(torch.arange(4)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.last(x), self.last.weight, self.last.weight.T


def test_a_returned_parameter_keeps_no_hook(rank: int) -> None:
    model = DDP(Tied())
    handle = gw.attach(model)
    for _ in range(3):
        outputs = model(torch.ones(4, 8))
        sum(out.sum() for out in outputs).backward()
        assert not model.module.last.weight._backward_hooks
    handle.detach()


def test_a_handle_stays_where_it_is(rank: int) -> None:
    model = DDP(net())
    handle = gw.attach(model)
    refuses("detach", lambda: gw.attach(model))
    for of in (copy.deepcopy, pickle.dumps, lambda h: torch.save(h, io.BytesIO())):
        refuses("save its state_dict()", lambda of=of: of(handle))
    handle.detach()
    refuses("was detached", lambda: handle.update(bits=3))


def test_averages_over_ranks_with_inputs_are_refused(rank: int) -> None:
    for detached in (False, True):  # a detached module has the hook still
        model = DDP(net())
        handle = gw.attach(model)
        if detached:
            handle.detach()
        with model.join(divide_by_initial_world_size=False):
            assert "divide_by_initial_world_size" in str(caught(partial(step, model)))


def warned(body: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        body()
    return [str(one.message) for one in found if "DDP" in str(one.message)]


def test_what_ddp_takes_in_silence_is_warned_of_once(rank: int) -> None:
    model = DDP(net())
    gw.attach(model)
    assert not warned(lambda: step(model))
    model.to(torch.float64)
    x = torch.ones(4, 8, dtype=torch.float64)
    (said,) = warned(lambda: [model(x) for _ in range(8)])
    assert "parameter 0.weight is of torch.float64 now" in said

    inner = net()
    inner[1].weight.requires_grad_(False)
    model = DDP(inner)
    gw.attach(model)
    inner[1].weight.requires_grad_(True)
    (said,) = warned(lambda: [step(model) for _ in range(3)])
    assert "parameter 1.weight requires a gradient" in said

    model = DDP(net())
    gw.attach(model)
    with torch.no_grad():
        assert not warned(lambda: model.module(torch.ones(4, 8)))  # to validate
    (said,) = warned(lambda: step(model.module))
    assert "call the DDP module" in said
    assert not warned(lambda: step(model.module))


def test_ended_rounds_leave_nothing_to_the_collector(rank: int) -> None:
    """They hold gradients, and copies of them for an observer."""
    model = DDP(net(), bucket_cap_mb=0.0001)
    handle = gw.attach(model, "powersgd:rank=2", options=gw.Options(coalesce_bytes=0))
    stop = handle.observe(lambda _: None)
    gc.collect()
    gc.disable()
    try:
        for _ in range(2):
            step(model)
        assert until(lambda: not (alive(Rounds) or alive(Observation)))
    finally:
        gc.enable()
        stop()


def test_dropped_modules_leave_nothing(rank: int) -> None:
    """Nor do buckets that DDP has built anew."""
    made: list[weakref.ref[Any]] = []
    for _ in range(3):
        model = DDP(net(), bucket_cap_mb=0.0001)
        handle = gw.attach(model, "powersgd:rank=2", options=gw.Options(coalesce_bytes=0))
        for _ in range(4):
            step(model)
        parts = model, handle, handle._reductions, handle._reductions.owner
        made += [weakref.ref(one) for one in parts]
        del parts
    assert until(lambda: not alive(Rounds))
    del model, handle
    gc.collect()
    last = gw.attach(DDP(net()))  # a group forgets those before as it opens the next
    assert until(lambda: gc.collect() >= 0 and not any(one() for one in made)), made
    last.detach()


def alive(kind: type) -> list[Any]:
    return [one for one in gc.get_objects() if type(one) is kind]


class Transposed(nn.Module):
    """Weights whose memory is not in their order; `straight`: the same weights in order."""

    def __init__(self, straight: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrix = torch.randn(40, 32).T
        filters = torch.randn(32, 16, 3, 3).to(memory_format=torch.channels_last)
        self.matrix = nn.Parameter(matrix.contiguous() if straight else matrix)
        self.filters = nn.Parameter(filters.contiguous() if straight else filters)
        assert self.matrix.is_contiguous() == self.filters.is_contiguous() == straight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Gradients are the same bits whatever the order in memory."""
        factors = torch.randn(2, 32 * 16 * 9, generator=torch.Generator().manual_seed(int(x)))
        of_matrix, of_filters = factors[0, : 32 * 40].view(32, 40), factors[1].view(32, 16, 3, 3)
        return (self.matrix * of_matrix).sum() + (self.filters * of_filters).sum()


ORDERED = ["powersgd:rank=2", "dgc:density=0.1", "qsgd:bits=4", None]


def test_values_travel_in_the_order_of_their_parameter(rank: int) -> None:
    for method in ORDERED:
        found = []
        for straight in (True, False):
            model = DDP(Transposed(straight))
            handle = gw.attach(model, method, error_feedback=method == "qsgd:bits=4")
            for seed in range(3):
                model.zero_grad()
                model(torch.tensor(2 * seed + rank)).backward()
            grads = [p.grad.contiguous() for p in model.parameters() if p.grad is not None]
            state = handle.state_dict()["aggregators"]
            found.append(
                grads + [t for name in sorted(state) for _, t in sorted(state[name].items())]
            )
            handle.detach()
        assert len(found[0]) > 2 or method is None
        assert all(map(torch.equal, *found)), method


class Counting(nn.Module):
    """With a frozen parameter that is no float."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()
        self.count = nn.Parameter(torch.tensor([3]), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x).tanh() * self.count  # type: ignore[no-any-return]


def test_a_penalty_of_gradients_and_two_forwards_are_as_in_plain_ddp(rank: int) -> None:
    found = []
    for attached in (True, False):
        model = DDP(Counting())
        if attached:
            gw.attach(model, None)
        for seed in range(2):
            model.zero_grad()
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * seed + rank))
            first, last = model(x.requires_grad_()), model(x.detach() + 1)
            (slope,) = torch.autograd.grad(first.sum(), x, create_graph=True)
            (first.sum() + last.square().sum() + slope.square().sum()).backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(found[0]) == 4
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_assigned_parameters_are_those_of_the_wrapped_module_or_refused(rank: int) -> None:
    inner = net()
    inner.load_state_dict(net().state_dict(), assign=True)
    model = DDP(inner)
    handle = gw.attach(model)
    step(model)
    handle.detach()
    inner.load_state_dict(net().state_dict(), assign=True)
    refuses("no longer in the module", lambda: gw.attach(model))


def test_a_sparse_gradient_of_a_function_is_named(rank: int) -> None:
    model = DDP(Words(sparse=False))
    gw.attach(model)
    backward = model(torch.arange(4), sparse=rank == 0).sum().backward
    if rank == 0:
        assert isinstance(caught(backward), NotImplementedError)  # DDP's own; ours is logged
    else:
        refuses("rank 0: parameter words.weight has sparse gradients", backward)


def test_after_an_error_the_error_comes_again(rank: int) -> None:
    layers = Acts()
    model = DDP(layers)
    handle = gw.attach(model)

    def pass_of(model: nn.Module) -> None:
        model(torch.ones(4, 20)).square().sum().backward()

    def fail() -> None:
        raise ValueError("a layer's own")

    pass_of(model)
    layers.between = fail if rank == 0 else nothing
    error = caught(lambda: pass_of(model))
    layers.between = nothing
    if rank == 0:
        assert isinstance(error, ValueError)
        handle.detach()
        assert hook_state(model).reducer is None
        return  # its reducer has not finished, as without gradwire
    for again in (error, caught(lambda: pass_of(model))):
        assert isinstance(again, gw.TransportError)
        assert "rank 0: backward raised" in str(again)
    handle.detach()
    model(torch.ones(4, 20))  # DDP begins a pass, so it has finished the one before


def crossed(rank: int) -> list[str]:
    """Of two modules, and of a module and a single collective, each over a group of its own."""
    found = []
    for modules in (2, 1):
        group = dist.new_group(timeout=timedelta(seconds=600))
        models = [DDP(net(), process_group=group) for _ in range(modules)]
        for model in models:
            gw.attach(model)
            step(model)
        calls = [model(torch.ones(4, 8)).sum().backward for model in models]
        if modules == 1:
            gw.all_reduce(torch.ones(8), group=group)
            calls.append(partial(gw.all_reduce, torch.ones(8), group=group))

        def run(calls: Any = calls) -> None:
            for call in calls if rank == 0 else reversed(calls):
                call()

        found.append(refuses("", run))
    return found


def test_backwards_in_another_order_are_named() -> None:
    for end in ends(2, crossed, timeout=600.0):
        assert end.error is None, end
        handles = [f"the module of 0.weight (Sequential, handle {n})" for n in (1, 2)]
        for said, names in zip(end.value, (handles, ["single collectives"]), strict=True):
            assert "make the same calls (forwards, backwards, collectives)" in said, said
            assert all(name in said for name in names), said
