"""FSDP2's weights gathered as differences to the last version: nothing drifts."""

from __future__ import annotations

from itertools import cycle, permutations
from typing import Any

import torch
import torch.distributed as dist
from scenario import (
    batch,
    exact,
    gathered,
    message_bytes,
    own_mesh,
    sgd,
    sharded,
    steps,
    train,
    unlike,
)
from torch import nn
from torch.distributed.fsdp import (
    fully_shard,
    register_fsdp_forward_method,
)

import gradwire as gw
from ranks import on

BLOCK = 256
FOUR = {"*.weight": f"randomshift:bits=4:block={BLOCK}", "embedding": "randomshift:bits=4"}


def attached(model: Any, weights: Any = FOUR, codec: Any = None, **options: Any) -> Any:
    return gw.attach(model, codec, weights=weights, options=gw.Options(keep="reference"), **options)


@on(2)
@on((3, 5), exhaustive=True)
def test_one_version_is_sent_once(rank: int) -> None:
    ranks = dist.get_world_size()
    model = sharded(mesh=own_mesh())
    handle = attached(model)
    optimizer = sgd(model)
    # Per version: of four groups a gather, of the frozen one once, and an exchange per forward.
    for step in range(3):
        before = handle.stats()["weights_calls"]
        losses = []
        for last in (False, False, True):
            model.set_requires_gradient_sync(last)
            loss = model(batch(step), spare=True).square().mean()
            losses.append(loss.item())
            loss.backward()
        assert losses[0] == losses[1] == losses[2]
        assert handle.stats()["weights_calls"] - before == (4 if step == 0 else 3) + 3
        if step < 2 or rank:  # this rank alone leaves a step out: that hangs nothing
            optimizer.step()
        optimizer.zero_grad()
    assert not unlike(gathered(model))
    # Weights that no optimizer has changed, also where torch counts no change of a tensor.
    weight = model.first.weight
    for double in (
        lambda: weight.to_local().mul_(2.0),
        lambda: weight.data.mul_(2.0),
        lambda: torch._foreach_mul_([weight], 2.0),
        lambda: weight.to_local().data.mul_(2.0 if rank else 1.0),  # on some ranks
    ):
        with torch.no_grad():
            double()
        decoded, wanted = gathered(model), exact(model)
        error = (decoded["first.weight"] - wanted["first.weight"]).abs().max()
        assert error < 0.1 * wanted["first.weight"].abs().max()
    assert wanted["first.weight"].abs().max() > 0.8
    held = handle.stats()["weights_kept_bytes"]
    assert held >= 4 * sum(p.numel() for p in model.parameters())
    assert f"{held:,} bytes" in str(handle)
    optimizer.step()  # without gradients: nothing changes, and nothing is sent
    assert sent(model, handle) <= 2 * 64 * ranks
    with torch.no_grad():
        weight.to_local().mul_(0.5)
    asked = sent(model, handle) - message_bytes(model, codec_of, ("frozen",)) * (ranks - 1)
    assert 0 < asked <= 2 * 64 * ranks
    handle.detach()
    train(model, 1)


def sent(model: Any, handle: Any) -> int:
    """Bytes of the weights of a forward."""
    before = handle.stats()["weights_wire_bytes"]
    with torch.no_grad():
        model(batch(0), spare=True)
    model.reshard()
    return int(handle.stats()["weights_wire_bytes"] - before)


def codec_of(name: str) -> gw.codecs.RandomShift | None:
    if name.endswith("bias"):
        return None
    return gw.codecs.RandomShift(4, 1024 if name == "embedding" else BLOCK)


class Coder(nn.Module):
    """Of which a script calls parts: its root has no parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coder, self.decoder, self.trained = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.decode(self.encode(x)))  # type: ignore[no-any-return]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.coder(x)  # type: ignore[no-any-return]

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)  # type: ignore[no-any-return]


@on(2, "reference", "payload")
def test_parts_are_called_by_themselves(rank: int, keep: str) -> None:
    """Each computes with the weights of then, whatever has changed them and was called before."""
    model: Any = Coder()
    mesh = own_mesh()
    parts = model.coder, model.decoder
    for module in (*parts, model.trained, model):
        fully_shard(module, mesh=mesh)
    for name in ("encode", "decode"):
        register_fsdp_forward_method(model, name)
    if keep == "payload":
        for part in parts:
            part.requires_grad_(False)
    gw.attach(model, None, weights={"*": "randomshift:bits=8"}, options=gw.Options(keep=keep))
    weights = [part.weight for part in parts]
    optimizer = torch.optim.SGD(weights, lr=1.0, foreach=True)

    def in_place(factor: float) -> None:
        for weight in weights:
            weight.to_local().mul_(factor)

    def behind_the_back(factor: float) -> None:
        for weight in weights:
            weight.to_local().data.mul_(factor if rank else 1.0)  # on some ranks

    def loaded(factor: float) -> None:
        model.load_state_dict({n: t * factor for n, t in model.state_dict().items()})

    def stepped(factor: float) -> None:
        for weight in weights:
            weight.grad = weight.detach() * (1 - factor)
        optimizer.step()

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        model.coder.unshard()
        found = x @ model.coder.weight.detach().T
        model.coder.reshard()
        return found

    x = torch.eye(32)
    # A call, and the matrices that its result is the product of.
    calls = {
        model: [model.coder, model.decoder, model.trained],
        model.encode: [model.coder],
        model.decode: [model.decoder],
        model.decoder: [model.decoder],
        by_hand: [model.coder],
    }
    ways = cycle([in_place, behind_the_back, loaded, stepped])
    factors = cycle([-2.0, -0.5])
    model(x).sum().backward()
    with torch.no_grad():
        model(x)
    for before, call in permutations(calls, 2):
        with torch.inference_mode():
            before(x)
        way = next(ways)
        with torch.no_grad():
            way(next(factors))
            wanted = x
            for part in calls[call]:
                wanted = wanted @ part.weight.full_tensor().T
            found = call(x)
        error = (found - wanted).abs().max() / wanted.abs().max()
        assert error < 0.05, (before, call, way, error)
        assert not unlike({"found": found})
    model.coder.unshard()
    if rank == 0:  # alone, which gathers nothing, and hangs nothing
        model.encode(x)
    model.coder.reshard()
    assert not unlike({"found": model(x)})


def test_states_of_other_weights(rank: int) -> None:
    """Of weights with which it was not saved; and of rank 0 alone: a rank that finds nothing of its
    own makes all ranks send all weights."""
    model = sharded()
    handle, optimizer = attached(model, codec="qsgd:bits=4", error_feedback=True), sgd(model)
    steps(model, optimizer, 0, 2)
    state = handle.full_state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().add_(1.0)
    handle.load_state_dict(state)
    decoded, wanted = gathered(model), exact(model)
    assert all((decoded[name] - wanted[name]).abs().max() < 0.1 for name in wanted)
    handle.load_state_dict(state["ranks"][0])
    decoded, wanted = gathered(model), exact(model)
    assert all(torch.equal(decoded[name], wanted[name]) for name in wanted)
    steps(model, optimizer, 3, 5)
    assert not unlike(gathered(model))
