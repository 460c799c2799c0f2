"""What attach warns of once per process, at the user's line: a biased codec without error feedback,
error feedback around what does not contract, and codecs that nothing compiles. And what it refuses:
deep gradient compression with the optimiser's own momentum."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.optimizer import _global_optimizer_pre_hooks

import gradwire as gw
from ranks import as_processes, caught, on, refuses
from rooms.handles import bias, uncompiled
from training import backward, batch, mlp, sharded


def net() -> nn.Sequential:
    return mlp(20, 40, 30, between=nn.Identity)


def told(call: Any, what: str = "biased") -> list[str]:
    """The warnings that a call gives in a process that has given none, for lines of this file."""
    bias._warned.clear()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        call()
    for one in found:
        if what in str(one.message):
            assert one.filename == __file__, one
    return [str(one.message) for one in found if what in str(one.message)]


def test_attaching(rank: int) -> None:
    for make in (lambda: DDP(net()), lambda: sharded(net())):
        for given, name in (
            (("topk",), "topk:density=0.01"),
            (("qsgd:bits=4,block=128,rounding=nearest",), "qsgd:bits=4:rounding=nearest"),
            ((gw.QSGD(bits=2, rounding="nearest"),), "qsgd:bits=2:rounding=nearest"),
        ):
            (message,) = told(lambda make=make, given=given: gw.attach(make(), *given))
            assert f"0.weight and 1 more go through {name}, which is biased" in message
            assert "give gw.attach error_feedback=True" in message
            once = told(lambda make=make, given=given: [gw.attach(make(), *given) for _ in "ab"])
            assert len(once) == 1
            assert not told(
                lambda make=make, given=given: gw.attach(make(), *given, error_feedback=True)
            )
        for given in ((), ("terngrad",), (None,), ("fp16",), ("rotated",)):
            assert not told(lambda make=make, given=given: gw.attach(make(), *given)), given
        some = told(lambda make=make: gw.attach(make(), codecs={"2.weight": "onebit"}))
        assert "2.weight go through onebit:block=1024" in some[0]
    assert not told(lambda: gw.attach(DDP(net()), "powersgd"))  # it always has error feedback
    model = DDP(net())
    handle = gw.attach(model, "qsgd")
    (message,) = told(lambda: handle.update("tbq"))
    assert "give handle.update error_feedback=True" in message
    for module in (DDP(net()), sharded(net())):  # a warning that is an error changes nothing
        handle = gw.attach(module, "qsgd")
        bias._warned.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert isinstance(caught(lambda handle=handle: handle.update("tbq")), UserWarning)
        assert handle.update(bits=3).version == 1
        handle.detach()
        assert "(detached)" in str(handle).splitlines()[0]
        refuses("detached", lambda handle=handle: handle.update(bits=2))


def test_growing(rank: int) -> None:
    loose, unbiased = "grow without bound", ("terngrad", "qsgd:bits=1", "thc:bits=2:code=2")
    diverging = (*unbiased, "qsgd:bits=2:rounding=nearest")
    others = ("qsgd:bits=4", "qsgd:bits=2:block=32", "thc", "topk", "adacomp", None)
    cases = [(given, lambda: DDP(net())) for given in (*diverging, *others)]
    shards = [(given, lambda: sharded(net())) for given in ("terngrad", "qsgd:bits=4")]
    for given, make in [*cases, *shards]:

        def attach(feedback: bool, make: Any = make, given: Any = given) -> Any:
            return gw.attach(make(), given, error_feedback=feedback)

        found = told(lambda attach=attach: attach(True), loose)
        assert len(found) == (given in diverging), given
        for message in found:
            assert f"0.weight and 1 more go through {given.partition(':')[0]}:" in message
            assert ("leave error_feedback out" in message) == (given in unbiased)
            assert not told(lambda attach=attach: attach(False), loose)
    assert not told(lambda: gw.attach(DDP(net()), "powersgd"), loose)


def interpreted_on_one(rank: int, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What a call returns where rank 1 alone has no compiler, and the warnings of that."""
    made: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setenv("GRADWIRE_CC", "no-such-compiler")
            patch.setenv("GRADWIRE_KERNELS", "no-such-folder")
        said = told(lambda: made.append(call()), "no compiled kernels")
    return made[0], said


def test_interpreted(rank: int) -> None:
    """bf16 stands in, on all ranks, for what one rank would interpret."""
    bf16, dense = gw.codecs.Cast("bf16"), None
    eager = {"options": gw.Options(target="eager")} if rank == 1 else {}
    for wrap in (DDP, sharded):
        model = wrap(net())
        handle, (message,) = interpreted_on_one(rank, lambda m=model: gw.attach(m, "qsgd"))
        for text in (message, str(handle)):
            assert "rank 1: GRADWIRE_CC=no-such-compiler is not a program; prebuilt" in text
            assert "bf16 is sent in place of slow interpreted codecs" in text
            assert "install a C compiler (apt install gcc), or a wheel that carries" in text
        update = handle.update(bits=3)
        while not update.in_force:  # alike on all ranks, pass by pass
            model(torch.full((3, 20), rank + 1.0)).sum().backward()
        assert [p.codec for p in handle.plan.parameters] == [bf16, dense, bf16, dense]
        assert str(handle).splitlines()[2].split()[:4] == ["bf16", "2", "2,000", "16"]
        for kind, given, codec in (
            (net, {"codec": "topk", "error_feedback": True}, bf16),
            (net, {"codec": None, "codecs": {"0.weight": "onebit"}}, bf16),
            (net, {"policy": "lgreco"}, bf16),
            (lambda: net().half(), {"codec": "qsgd"}, dense),  # which is of 16 bits
            (net, {"codec": "fp16"}, gw.codecs.Cast("fp16")),  # as fast interpreted, or nearly
            (net, {"codec": None}, dense),
            (net, {"codec": "lowrank"}, gw.codecs.LowRank()),
            (net, {"codec": "qsgd:block=128", **eager}, gw.QSGD()),  # slow, as it was asked to be
        ):
            model = wrap(kind())
            handle, said = interpreted_on_one(rank, lambda m=model, g=given: gw.attach(m, **g))
            p = handle.plan.parameters[0]
            assert p.codec == codec, given
            assert p.feedback == ("error_feedback" in given)
            assert handle._reductions.adaptation is None
            assert len(said) == (codec == bf16 or kind is not net), given
            assert ("no compiled kernels" in str(handle)) == bool(said)
    given = {"codec": None, "weights": {"*.weight": "randomshift:bits=4"}}
    model = sharded(net())
    handle, (message,) = interpreted_on_one(rank, lambda: gw.attach(model, **given))
    assert [p.weight for p in handle.plan.parameters] == [bf16, None, bf16, None]
    for method in ("artopk", "globaltopk", "lwtopk", "thc", "powersgd"):
        model = DDP(net())
        handle, said = interpreted_on_one(rank, lambda m=model, how=method: gw.attach(m, how))
        assert (handle.plan.parameters[0].codec == bf16) == (method != "powersgd") == len(said)
    model = DDP(net())
    handle, (message,) = interpreted_on_one(rank, lambda: gw.attach(model, "auto"))
    assert handle._reductions.automatic is None
    with pytest.MonkeyPatch.context() as patch:  # what one rank's environment forbids, all learn
        if rank == 1:
            patch.setenv("GRADWIRE_CACHE", "a/relative/path")
        said = refuses("", lambda: gw.attach(DDP(net()), "qsgd:bits=7:block=33"))
        assert "GRADWIRE_CACHE=a/relative/path" in said
    refused = interpreted_on_one(rank, lambda: caught(lambda: gw.attach(DDP(net()), "dgc")))[0]
    assert "dgc:density=0.001 needs compiled kernels" in str(refused)


@on(2, backend="gradwire")
def test_registering(rank: int) -> None:
    assert told(lambda: gw.register(DDP(net()), "topk"))
    assert not told(lambda: gw.register(DDP(net()), "topk", error_feedback=True))
    assert not told(lambda: gw.register(DDP(net())))
    assert "keep no residuals" in told(lambda: gw.register(blob=True, codec="topk"))[0]


@on(2, backend="gradwire")
def test_dropped_in(rank: int) -> None:
    """A model that the backend finds by itself, through a codec that the environment names."""
    os.environ["GRADWIRE_CODEC"] = "topk"
    model = DDP(net(), process_group=dist.new_group(backend="gradwire"))
    (message,) = told(lambda: model(torch.ones(3, 20)).sum().backward())
    assert "gw.register error_feedback=True" in message
    model = DDP(net(), process_group=dist.new_group(backend="gradwire"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(uncompiled, "uncompiled", lambda codecs: "for a test")
        said = told(lambda: model(torch.ones(3, 20)).sum().backward(), "no compiled kernels")
    assert len(said) == 1


@on(1)
def test_alone(rank: int) -> None:
    assert not told(lambda: gw.attach(DDP(net()), "topk"))  # nothing is sent


pytestmark = pytest.mark.multiprocess


Made = Callable[[Any], torch.optim.Optimizer]


def steps(model: DDP, optimizer: torch.optim.Optimizer, rank: int) -> str:
    """What the first step raises; "" if it steps."""
    backward(model, batch(rank))
    before = [p.detach().clone() for p in model.parameters()]
    try:
        optimizer.step()
    except gw.ConfigError as error:
        assert all(map(torch.equal, before, model.parameters())), "it has changed a parameter"
        assert not optimizer.state
        return str(error)
    assert not all(map(torch.equal, before, model.parameters()))
    return ""


def test_one_with_momentum_is_refused_before_it_changes_anything(rank: int) -> None:
    kinds: dict[str, Made] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
        "adamw without": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.0, 0.99)),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
        "second group": lambda p: torch.optim.SGD(
            [{"params": list(p)[:1]}, {"params": list(p)[2:], "momentum": 0.8}], lr=0.1
        ),
        "biases alone": lambda p: torch.optim.SGD(list(p)[1:2], lr=0.1, momentum=0.9),
    }
    found = {}
    for kind, made in kinds.items():
        model = DDP(net())
        handle = gw.attach(model, "dgc", density=0.1, options=gw.Options(coalesce_bytes=0))
        found[kind] = steps(model, made(list(model.parameters())), rank)
        handle.detach()
    assert not _global_optimizer_pre_hooks
    assert found["sgd"] == found["adamw without"] == found["biases alone"] == ""
    assert found["momentum"].startswith(
        "SGD has momentum=0.9 for parameter 0.weight, whose average, by "
        "dgc:density=0.1, includes momentum already: make the "
        "optimizer with momentum=0, or attach with momentum=0"
    )
    assert "AdamW has betas=(0.9, 0.999)" in found["adamw"]
    assert "make the optimizer with betas=(0.0, 0.999)" in found["adamw"]
    assert "RMSprop has momentum=0.5" in found["rmsprop"]
    assert "momentum=0.8 for parameter 2.weight" in found["second group"]


def test_those_made_before_are_seen_updates_followed_and_detach_ends_it(rank: int) -> None:
    model, other = DDP(net()), nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    apart = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    handle = gw.attach(model, "dgc", density=0.1)
    other(torch.ones(3)).sum().backward()
    apart.step()  # holds no attached parameter
    found = [steps(model, optimizer, rank)]
    optimizer.param_groups[0]["momentum"] = 0
    found.append(steps(model, optimizer, rank))
    optimizer.param_groups[0]["momentum"] = 0.5  # as a scheduler may
    found.append(steps(model, optimizer, rank))
    handle.update(momentum=0).wait()
    for _ in range(4):
        backward(model, batch(rank))
    assert handle.plan.version == 1
    assert not _global_optimizer_pre_hooks
    found.append(steps(model, optimizer, rank))
    handle.update(momentum=0.9).wait()
    for _ in range(4):
        backward(model, batch(rank))
    assert handle.plan.version == 2
    optimizer.state.clear()
    found.append(steps(model, optimizer, rank))
    handle.detach()
    found.append(steps(model, optimizer, rank))
    assert [bool(error) for error in found] == [True, False, True, False, True, False]


def cost(rank: int) -> float:
    model = DDP(net())
    gw.attach(model, "dgc", density=0.1)
    (hook,) = _global_optimizer_pre_hooks.values()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook(optimizer, (), {})
    begun = time.perf_counter()
    for _ in range(1000):
        hook(optimizer, (), {})
    return (time.perf_counter() - begun) / 1000


@pytest.mark.timing
def test_it_costs_microseconds_per_step() -> None:
    assert max(as_processes(1, cost)) < 200e-6
