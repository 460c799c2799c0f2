"""A rank that raises where others gather weights is named by them, long before the timeout.

tests/multiprocess/test_faults.py has ranks that die.
"""

from __future__ import annotations

import torch
from scenario import by_layer
from torch import nn

import gradwire as gw
from ranks import caught, on, raises, raises_alone

pytestmark = on(3)
RAISING = 1


def three_layers() -> nn.Sequential:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    return by_layer(model, reshard_after_forward=True)  # type: ignore[no-any-return]


def test_an_exception_where_others_gather_is_told(rank: int) -> None:
    """Of frozen layers no gradients are reduced: the others are ahead by a gather."""
    model = three_layers()
    model[1:].requires_grad_(False)
    gw.attach(model, weights="randomshift:bits=8", options=gw.Options(keep="none"))
    if rank == RAISING:
        model[2].register_full_backward_pre_hook(lambda *_: 1 / 0)
    said = "backward raised an exception at step", "of the sharded module of", ", weights"
    raises_alone(
        rank, RAISING, ZeroDivisionError,
        lambda: model(torch.randn(4, 64)).square().mean().backward(), *said,
    )  # fmt: skip


@on(3, True, False)
def test_an_exception_in_forward_is_told(rank: int, records: bool) -> None:
    """The others gather the last layer's weights; then all go on."""
    model = three_layers()
    model[0].set_modules_to_forward_prefetch([model[1]])  # a gather is under way
    handle = gw.attach(model, weights="randomshift:bits=8")
    x = torch.randn(4, 64)
    for _ in range(2):
        with torch.set_grad_enabled(records):
            assert caught(lambda: model(x)) is None
        if rank == RAISING:
            hook = model[0].register_forward_hook(lambda *_: 1 / 0)
        said = f"rank {RAISING}: forward raised an exception"
        with torch.set_grad_enabled(records):
            raises_alone(rank, RAISING, ZeroDivisionError, lambda: model(x), said)
        if rank == RAISING:
            hook.remove()  # what it would gather is not what the others do
            raises(gw.TransportError, lambda: model(x))
        model.reset_iter_state()
        handle.recover()
    model(x).square().mean().backward()


@on(3, "payload", "none")
def test_one_evaluates_a_batch_more(rank: int, keep: str) -> None:
    """It waits for weights, where the others wait for gradients, or gather in backward."""
    model = three_layers()
    gw.attach(model, weights="randomshift:bits=8", options=gw.Options(keep=keep))
    x = torch.randn(4, 64)

    def run() -> None:
        if rank == RAISING:
            with torch.no_grad():
                model(x)
        for _ in range(2):
            model(x).square().mean().backward()

    raises(gw.ConfigError, run, ", weights", "make the same calls")


@on(3, "payload", "reference")
def test_a_forward_that_all_ranks_leave_early_needs_no_recovery(rank: int, keep: str) -> None:
    """At one place: an early exit. Training goes on as if it had not been run."""
    ours, twin = three_layers(), three_layers()
    twin.load_state_dict(ours.state_dict())
    gatherings = [
        gw.attach(m, weights="randomshift:bits=8", options=gw.Options(keep=keep))
        for m in (ours, twin)
    ]
    ours[0].set_modules_to_forward_prefetch([ours[1]])  # a gather may be under way
    pairs = [(m, torch.optim.SGD(m.parameters(), lr=0.1)) for m in (ours, twin)]
    for step, (records, place) in enumerate([(True, 1), (False, 0), (True, 2)]):
        hook = ours[place].register_forward_hook(lambda *_: 1 / 0)
        for _ in range(2):
            with torch.set_grad_enabled(records):
                error = caught(lambda: ours(torch.ones(4, 64)))
            assert isinstance(error, ZeroDivisionError), error
        hook.remove()
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        for a, b in zip(ours.parameters(), twin.parameters(), strict=True):
            assert torch.equal(a.to_local(), b.to_local())
    assert gatherings[0].stats()["steps"] == gatherings[1].stats()["steps"] == 3
    with torch.no_grad():
        assert torch.equal(ours(x), twin(x))
        ours[0].register_forward_hook(lambda *_: 1 / 0)
        assert isinstance(caught(lambda: ours(x)), ZeroDivisionError)
        for model in (ours, twin):
            model[2].weight.mul_(2)  # which was not gathered before the exit
        assert torch.equal(ours[2](x), twin[2](x))


def test_ranks_that_leave_a_forward_at_unlike_places_are_told(rank: int) -> None:
    """None of them waits for a gather: they find it as they begin the next forward."""
    model = three_layers()
    gw.attach(model, weights="randomshift:bits=8")
    if rank == RAISING:
        model[0].set_modules_to_forward_prefetch([model[1]])
    model[0].register_forward_hook(lambda *_: 1 / 0)
    assert isinstance(caught(lambda: model(torch.ones(4, 64))), ZeroDivisionError)
    raises(gw.TransportError, lambda: model(torch.ones(4, 64)), "forward raised an exception")
