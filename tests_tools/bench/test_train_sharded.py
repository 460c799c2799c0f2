"""`bench train --sharded`: rows and bytes on real processes; what learned levels are for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from bench_runs import OPTIONS, TINY, Found, trained

from gradwire.codecs import Identity
from gradwire.lang.kernels import decode, encode
from gradwire_tools.bench.tasks import get
from gradwire_tools.bench.train import sharded
from gradwire_tools.bench.train.method_run import MethodRun
from gradwire_tools.bench.train.sharded import layers
from gradwire_tools.predict.simulate_sharded import sent_by
from gradwire_tools.sim import Net
from gradwire_tools.sim.sharded import ShardedScenario, predict_sharded
from gradwire_tools.sim.shards import codecs_of
from machines import priced
from products import EXHAUSTIVE
from ranks import on
from rooms.handles import SMALLEST

SHARDED = replace(
    TINY,
    task_options={**OPTIONS, "width": 64, "validation_sequences": 17},
    methods=(
        *("fsdp-fp32", "fsdp-bf16", "fsdp-mixed", "gradwire:w=bf16:g=bf16", "qsdp:w=8:g=8"),
        *("qsdp:w=8:g=8:keep=none", "gradwire:g=qsgd:bits=4", "qsdp:w=4diff:g=4"),
    ),
    steps=2, evaluate_every=1, sharded=True,
)  # fmt: skip
RANKS, STEPS = SHARDED.nodes, SHARDED.steps


def test_blocks_and_large_layers_are_sharded_by_themselves() -> None:
    for options, names in (
        ({"layers": 2, "width": 64}, ["blocks.0", "blocks.1"]),
        ({"layers": 1, "width": 256}, ["blocks.0", "embedding", "output"]),
        ({"layers": 1, "width": 256, "tied": True}, ["blocks.0"]),
    ):
        model = get("gpt", **options).model(0)
        named = {module: name for name, module in model.named_modules()}
        assert sorted(named[module] for module in layers(model)) == names


@pytest.fixture(scope="module")
def tiny() -> Found:
    return trained(SHARDED)


def simulated(method: str, **given: Any) -> tuple[int, ...]:
    """Bytes of weights and gradients, and between replicas where `given` has some, by the
    simulator: tests_tools/sim/test_sharded_steps.py compares it with formulas and payloads."""
    model = get("gpt", **SHARDED.task_options).model(0)
    shapes = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    groups = tuple(
        tuple(shape for name, shape in shapes if name.startswith("blocks.") is in_block)
        for in_block in (True, False)
    )
    weights, gradients = sent_by(sharded.parse(method))
    free = priced(dict.fromkeys(codecs_of(groups, weights, gradients), (0.0, 0.0, 0.0)))
    given = {"ranks": RANKS, "hop": gradients, **given}
    inside = Identity() if "inside" in method else gradients
    scenario = ShardedScenario(
        net=Net("none"), weights=weights, gradients=inside, groups=groups, **given
    )
    row = predict_sharded(scenario, free)
    return tuple(STEPS * row[f"{kind}_wire_bytes"] for kind in KINDS if f"{kind}_wire_bytes" in row)


KINDS = ("weights", "gradients", "replicas")


def sent_in(found: Found) -> dict[str, tuple[int, ...]]:
    """Bytes by method, as of `simulated`."""
    keys = [f"{kind}_wire_bytes" for kind in KINDS]
    return {m: tuple(r[key] for key in keys if key in r) for m, r in found.summaries.items()}


@pytest.mark.multiprocess
def test_bytes_are_those_of_the_simulator(tiny: Found) -> None:
    """What gradwire leaves to torch is counted, too."""
    sent = sent_in(tiny)
    sent.pop("qsdp:w=4diff:g=4")  # no weights in so few steps
    assert sent == {method: simulated(method) for method in sent}


@pytest.mark.multiprocess
def test_rows_have_the_keys_of_sharded_runs(tiny: Found) -> None:
    assert list(tiny.summaries) == list(SHARDED.methods)
    assert len(tiny.evaluations) == 3 * len(SHARDED.methods)
    for row in tiny.rows:
        assert row["sharded"] is True
        assert (row["policy"], row["accumulate"]) == (sharded.POLICY, 1)
        assert row["wire_bytes"] == row["weights_wire_bytes"] + row["gradients_wire_bytes"]
    full = tiny.summaries["fsdp-fp32"]["final_loss"]
    assert full < tiny.evaluations[0]["loss"]
    for method, row in tiny.summaries.items():
        assert row["final_loss"] == pytest.approx(full, rel=0.02), method
        assert row["ideal_step_seconds"] > 0
        assert row["target_from"] == "fsdp-fp32"
    best = tiny.summaries["fsdp-bf16"]["utility_against"]
    assert best in ("fsdp-bf16", "fsdp-mixed", None)
    assert best is None or tiny.summaries[best]["utility"] == 1.0
    before = [row for row in tiny.evaluations if row["step"] == 0]
    assert {row["wire_bytes"] for row in before} == {0}  # evaluations are not counted
    assert len({row["loss"] for row in before}) > 1  # quantised weights, as they are gathered


@pytest.mark.multiprocess
def test_the_baseline_trains_as_ddp_does(tiny: Found) -> None:
    found = trained(replace(SHARDED, sharded=False, methods=("torch-fp32",)))
    ddp, ours = found.summaries["torch-fp32"], tiny.summaries["fsdp-fp32"]
    assert ours["final_loss"] == pytest.approx(ddp["final_loss"], rel=1e-6)
    assert "sharded" not in ddp


@pytest.mark.multiprocess
def test_weights_are_gathered_for_each_micro_batch_gradients_once(tiny: Found) -> None:
    methods = ("fsdp-fp32", "qsdp:w=8:g=8")
    found = trained(replace(SHARDED, accumulate=2, methods=methods))
    assert {row["accumulate"] for row in found.rows} == {2}
    for method in methods:
        once, twice = tiny.summaries[method], found.summaries[method]
        assert twice["weights_wire_bytes"] == 2 * once["weights_wire_bytes"]
        assert twice["gradients_wire_bytes"] == once["gradients_wire_bytes"]
        assert twice["final_loss"] == pytest.approx(once["final_loss"], rel=0.05)


@pytest.mark.multiprocess
def test_machines_replicate_what_their_ranks_shard() -> None:
    """Gradients are scattered in both micro-batches, and cross in the last one; bytes of torch's
    methods and of gradwire's are those of the simulator."""
    methods = ("fsdp-fp32", "fsdp-bf16", "gradwire:w=bf16:g=qsgd:bits=4:inside=full")
    methods += ("gradwire:g=bf16", "truncate:w=2:g=2")
    hsdp = {"per_node": 2, "accumulate": 2}
    found = trained(replace(SHARDED, methods=methods, **hsdp))
    of_all = {"ranks": 4, "replicas": 2, **hsdp}
    for row in found.rows:
        assert {key: row[key] for key in of_all} == of_all
    sent = sent_in(found)
    assert sent == {method: simulated(method, **of_all) for method in methods}
    full = sent["fsdp-fp32"]
    assert full[2] == full[1] // 3  # a shard crosses once, and is scattered twice
    assert sent["gradwire:w=bf16:g=qsgd:bits=4:inside=full"][2] < full[2] / 6
    for method in methods[:4]:
        assert found.summaries[method]["final_loss"] == pytest.approx(
            found.summaries["fsdp-fp32"]["final_loss"], rel=0.02
        )
        assert found.summaries[method]["ideal_step_seconds"] > 0


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_composed_rows_have_bytes_by_kind() -> None:
    config = replace(SHARDED, nets=("none",), timed_steps=6, methods=("fsdp-fp32", "qsdp:w=8:g=8"))
    found = trained(replace(config, interleaved=False))
    assert all(row["composed"] and row["sharded"] for row in found.rows)
    for row in found.rows:
        assert row["wire_bytes"] == row["weights_wire_bytes"] + row["gradients_wire_bytes"]


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_networks_with_buffers_on_three_ranks() -> None:
    options = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16}
    config = replace(SHARDED, task="image", task_options=options, nodes=3)
    found = trained(replace(config, methods=("fsdp-fp32", "qsdp:w=8:g=8")))
    full, ours = (row["final_loss"] for row in found.summaries.values())
    assert ours == pytest.approx(full, rel=0.05)


def error(codec: Any, values: torch.Tensor) -> float:
    payload = encode(codec, values, 7)
    return (decode(codec, payload, values.numel(), values.dtype, 7) - values).norm().item()


@on(2, 3, 5, 4, 2, exhaustive=True)
def test_learned_levels_have_a_smaller_error(rank: int, bits: int) -> None:
    """In every large layer of the gpt task, on this rank's shards."""
    task = get("gpt", layers=1, width=256, heads=4, validation_sequences=17)
    method = sharded.parse(f"qsdp:w={bits}:g={bits}:learned")
    run = MethodRun.start(method, task, 0, 1)
    run.train(4)
    run.backward()
    run.optimizer.step()
    handle: Any = run.applied.handle
    handle.learn_levels()
    run.optimizer.zero_grad()
    run.train(2)
    run.backward()  # gradients that no level was learned from
    levels, ratios = handle.plan.levels, {}
    shards = dict(run.model.named_parameters())
    for p in handle.plan.parameters:
        if p.numel >= SMALLEST:
            of = shards[p.name]
            for kind, codec, tensor in (("weights", p.weight, of), ("gradients", p.codec, of.grad)):
                values = tensor.to_local().detach().reshape(-1)
                learned = replace(codec, levels=getattr(levels, kind)[p.name])
                ratios[p.name, kind] = error(learned, values) / error(codec, values)
    assert len(ratios) >= 6  # both kinds, of the block's three large matrices
    assert {place: ratio for place, ratio in ratios.items() if not ratio < 1.0} == {}
