"""What FSDP2 modules cannot have is refused in one line that says what to do instead: by gradwire,
or by FSDP2 itself, whose errors are passed on as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from scenario import Model, batch, sharded
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather

import gradwire as gw
from ranks import caught
from training import BareFSDP1

WEIGHTS = {"*": "randomshift:bits=8"}
TOO_FEW = gw.Options(algorithm="hierarchical", nodes=(0,))


def whole() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def two_meshes() -> nn.Module:
    model = Model()
    fully_shard(model.first, mesh=DeviceMesh.from_group(dist.new_group(), "cpu"))
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


def ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(4, 4))


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
    ("weights and keep are for FSDP2", ddp, {}),
    *(
        (said, sharded, options)
        for said, options in (
            ("takes a codec, not powersgd", {"codec": "powersgd"}),
            ("coalesce_bytes is for DDP's", {"coalesce_bytes": 5}),
            ("FSDP2 has no algorithm 'ring': use one of sra, hierarchical", {"algorithm": "ring"}),
            ("the machine of each of the 2 ranks", {"options": TOO_FEW}),
            ("matches no parameter", {"exclude": ["decoder.*"]}),
            ("sends a part of the values", {"weights": "topk:density=0.1"}),
            ("sends a part of the values", {"weights": "randomk:density=0.1"}),
            ("OneBit(block=1024) is for gradients", {"weights": "onebit"}),
            ("rounding=stochastic", {"weights": "qsgd:rounding=dithered"}),
            ("matches no parameter", {"weights": {"nothing.*": "bf16"}}),
            (
                "use one of none, payload, redraw, reference",
                {"weights": "randomshift", "keep": "all"},
            ),
            ("give weights, too", {"weights": None, "keep": "payload"}),
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
    faults = []
    for said, make, options in OURS:
        model = make()
        error = caught(lambda m=model, o=options: gw.attach(m, **{"weights": WEIGHTS, **o}))
        if not isinstance(error, gw.ConfigError) or said not in str(error) or "\n" in str(error):
            faults.append((said, error))
    for said, make in FSDP2S:

        def trained(make: Callable[[], Any] = make) -> None:
            model = make()
            gw.attach(model, weights=WEIGHTS)
            model(batch(0)).sum().backward()

        error = caught(trained)
        ours = isinstance(error, gw.ConfigError)
        if ours or not isinstance(error, (ValueError, AssertionError)) or said not in str(error):
            faults.append((said, error))
    for options in ({"bits": 2 + rank}, {"weights": {"*": f"randomshift:bits={7 + rank}"}}):
        error = caught(lambda o=options: gw.attach(sharded(), **o))
        if not isinstance(error, gw.ConfigError) or "disagree" not in str(error):
            faults.append((str(options), error))
    assert not faults, faults
    # Nothing is left behind.
    model = sharded()
    handle = gw.attach(model, weights=WEIGHTS)
    model(batch(0)).sum().backward()
    assert torch.isfinite(model.first.weight.grad.to_local()).all()
    handle.detach()
