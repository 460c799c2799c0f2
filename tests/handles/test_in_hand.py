"""`gw.attach` and `gw.register` on what users have in hand: compiled, checkpointed, wrapped."""

from __future__ import annotations

import warnings
from functools import partial
from itertools import cycle, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from ranks import on, refuses
from rooms.handles import original, plain_name, plain_names
from training import BareFSDP1, mlp, sharded, train

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


net = partial(mlp, 20, 40, 3)


def compiled(module: nn.Module) -> Any:
    """torch gives no module for one that is compiled already."""
    return module if original(module) is not module else torch.compile(module, backend="eager")


def compiled_layers(model: nn.Sequential) -> nn.Sequential:
    for at in (0, 2):
        model[at] = sharded(compiled(model[at]))
    return model


class FabricLike(nn.Module):
    """As Lightning Fabric's: the module that synchronises, and the one that the user wrote."""

    def __init__(self, forward: nn.Module, original: nn.Module) -> None:
        super().__init__()
        self._forward_module = forward
        self._original_module = original

    def forward(self, x: torch.Tensor) -> Any:
        return self._forward_module(x)


class Holder(nn.Module):
    """A wrapper of a script's own."""

    def __init__(self, **held: nn.Module) -> None:
        super().__init__()
        for name, module in held.items():
            setattr(self, name, module)

    def forward(self, x: torch.Tensor) -> Any:
        return next(self.children())(x)


def fabric_like() -> nn.Module:
    bare = net()
    return FabricLike(DDP(bare), bare)


WRAPPED = {
    "compiled DDP": lambda: compiled(DDP(net())),
    "DDP of a compiled module": lambda: DDP(compiled(net())),
    "compiled twice": lambda: compiled(DDP(compiled(net()))),
    "DDP of checkpointed layers": lambda: DDP(
        nn.Sequential(*(checkpoint_wrapper(layer) for layer in net()))
    ),
    "Fabric": fabric_like,
    "compiled Fabric": lambda: compiled(fabric_like()),
    ".module": lambda: Holder(module=DDP(net())),
    ".model in .module": lambda: Holder(module=Holder(model=DDP(net()))),
    "compiled FSDP2": lambda: compiled(sharded(net())),
    "FSDP2 of a compiled module": lambda: sharded(compiled(net())),
    "FSDP2 of compiled layers": lambda: sharded(compiled_layers(net())),
    "FSDP2 in a wrapper": lambda: Holder(model=sharded(net())),
}


# Others wrap in two ways what these wrap in one.
WITHIN = ("compiled DDP", "DDP of a compiled module", "Fabric", ".module", "FSDP2 in a wrapper")


@on(2, *(name for name in WRAPPED if name not in WITHIN))
@on(2, *WITHIN, exhaustive=True)
def test_wrapped_modules_are_found(rank: int, what: str) -> None:
    model = WRAPPED[what]()
    # Names are those of the bare model, and so are patterns.
    handle = gw.attach(model, bits=8, exclude=["0.*"], codecs={"2.weight": "qsgd:bits=4"})
    planned = {p.name: p.how.split(",")[0] for p in handle.plan.parameters}
    assert list(planned) == NAMES, what
    assert planned["2.weight"] == "QSGD(bits=4", what
    assert planned["0.weight"] == "dense", what
    train(model, range(2))
    assert handle.stats()["wire_bytes"] > 0, what
    # They count from a number of the handle's own.
    assert {step % (1 << 32) for step in handle.state_dict()["steps"].values()} == {2}, what
    handle.detach()


def test_compiling_changes_no_gradient(rank: int) -> None:
    """And a state moves into a compiled model."""
    torch._dynamo.reset()
    found, states = [], []
    for make in (
        lambda: DDP(net()),
        lambda: compiled(DDP(net())),
        lambda: DDP(compiled(net())),
    ):
        model = make()
        handle = gw.attach(model, bits=4, error_feedback=True)
        train(model, range(3))
        states.append(handle.state_dict())
        handle.load_state_dict(states[0])
        found.append([p.grad.clone() for p in model.parameters()])
    for other in found[1:]:
        for p, q in zip(found[0], other, strict=True):
            assert torch.equal(p, q)


class LightningModule(nn.Sequential):
    """As Lightning's, before its strategy has wrapped it."""


class TrainerLike:
    def __init__(self, model: nn.Module) -> None:
        self.strategy = SimpleNamespace(model=model)


def test_what_has_none_is_told_what_to_pass(rank: int) -> None:
    torch._dynamo.reset()

    class Raises(nn.Module):
        @property
        def module(self) -> nn.Module:
            raise AssertionError("not looked at")

    hooked = DDP(net())
    hooked.register_comm_hook(None, default_hooks.fp16_compress_hook)
    for match, given in (
        ("attach(DistributedDataParallel(model))", net()),
        ("attach(DistributedDataParallel(model))", compiled(net())),
        ("attach(DistributedDataParallel(model))", Raises()),
        ("if it is wrapped, pass what wraps it, not its .module", DDP(net()).module),
        ("trainer.strategy.model in on_fit_start", LightningModule(nn.Linear(2, 2))),
        (
            "encoder (DDP module), decoder (DDP module)",
            Holder(encoder=DDP(net()), decoder=DDP(net())),
        ),
        ("several modules", Holder(module=DDP(net()), model=DDP(net()))),
        ("several modules", Holder(module=DDP(net()), net=DDP(net()))),
        ("such as head.weight: pass model.model", Holder(model=DDP(net()), head=nn.Linear(3, 3))),
        ("pass .strategy.model of it", TrainerLike(DDP(net()))),
        ("pass .strategy.model of it", TrainerLike(compiled(DDP(net())))),
        ("FSDP1): shard the model with fully_shard", BareFSDP1()),
        ("trainer.strategy.model (Lightning", TrainerLike(net())),
        ("communication hook", hooked),
        ("not str", "model"),
        ("not list", [DDP(net())]),
    ):
        told = refuses("", lambda given=given: gw.attach(given))
        assert match in told
        of_trainer = isinstance(given, (TrainerLike, LightningModule))
        assert of_trainer or "Lightning" not in told


@on(2, backend="gradwire")
def test_registered(rank: int) -> None:
    turns = cycle([*product((False, True), (True, False))][1:])  # each pair meets several wraps
    for wrap in (
        DDP,
        lambda module: compiled(DDP(module)),
        sharded,
        lambda module: compiled(sharded(module)),
        lambda module: Holder(module=DDP(module)),
    ):
        compile_first, before = next(turns)
        bare = compiled(net()) if compile_first else net()
        model = None if before else wrap(bare)
        registration = gw.register(bare if before else model, exclude=["0.*"], bits=8)
        assert registration.settled == (not before)
        model = wrap(bare) if before else model
        train(model, range(2))
        assert registration.settled
        handle = registration.handle
        assert handle is not None
        planned = {p.name: p.codec for p in handle.plan.parameters}
        assert list(planned) == NAMES
        assert [name for name, codec in planned.items() if codec] == ["2.weight"]
        assert planned["2.weight"].bits == 8
        assert handle.stats()["wire_bytes"] > 0
        registration.withdraw()
        train(model, range(2, 3))
        assert handle.stats()["steps"] == 2
        torch._dynamo.reset()


def test_a_single_process_needs_no_group(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrap in (nn.Module.train, compiled):
        model, x = wrap(net()), torch.randn(8, 20)
        caplog.clear()
        with caplog.at_level("INFO", "gradwire"):
            handle = gw.attach(model, "topk", density=0.1, error_feedback=True)
        assert [r.getMessage() for r in caplog.records] == [
            "attach: a single process sends nothing, so nothing is compressed"
        ]
        model(x).square().mean().backward()
        assert list(handle.plan.parameters[0].shape) == [40, 20]
        assert [p.name for p in handle.plan.parameters] == NAMES
        assert handle.stats()["steps"] == 1
        of_two = [{**handle.state_dict(), "rank": rank, "world_size": 2} for rank in (0, 1)]
        for one in of_two:
            facts = one["parameters"].items()
            one["parameters"] = {n: {**f, "feedback": "weight" in n} for n, f in facts}
            one["aggregators"] = {"0.weight": {"residual": torch.ones(800)}}
        before = str(handle.state_dict())
        with warnings.catch_warnings():  # a user may want an error, which changes nothing
            warnings.simplefilter("error")
            with pytest.raises(UserWarning, match="are dropped"):
                handle.load_state_dict([{**one, "seed": 9} for one in of_two])
        assert str(handle.state_dict()) == before
        with pytest.warns(UserWarning, match="are dropped") as warned:
            handle.load_state_dict(of_two)
        assert warned[0].filename == __file__
        assert handle.history() == []
        assert handle.learn_levels() == 0
        handle.observe(print)()
        handle.recover()
    for method, given in (
        ("auto", {}),
        ("qsgd", {"policy": "lgreco"}),
        ("qsgd", {"weights": "fp8"}),
    ):
        assert gw.attach(net(), method, **given).stats()["ratio"] == 1
    monkeypatch.setenv("WORLD_SIZE", "2")  # a launcher's: the group was forgotten
    with pytest.raises(gw.ConfigError, match="wrap it first"):
        gw.attach(net())


def test_names_lose_what_wrappers_add() -> None:
    assert plain_name("_orig_mod.layers.0._checkpoint_wrapped_module.weight") == "layers.0.weight"
    assert plain_name("weight") == "weight"
    assert plain_name("my_orig_mod.weight") == "my_orig_mod.weight"
    one, two = object(), object()
    assert plain_names([("a._orig_mod.w", one), ("b.w", two)]) == [("a.w", one), ("b.w", two)]
    # a tied one has one name twice; two things keep two names
    assert plain_names([("a._orig_mod.w", one), ("a.w", one)]) == [("a.w", one), ("a.w", one)]
    assert [n for n, _ in plain_names([("a._orig_mod.w", one), ("a.w", two)])] == [
        "a._orig_mod.w",
        "a.w",
    ]


def test_a_compiled_module_is_its_original() -> None:
    bare = net()
    assert original(bare) is bare
    assert original(compiled(bare)) is bare
    assert original(compiled(Holder(model=bare))) is not bare
