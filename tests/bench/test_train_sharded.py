"""`bench train --sharded`: methods' names, and rows, bytes and resuming on real processes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench import sharded_methods, train
from gradwire.bench.sharded_run import layers
from gradwire.bench.simulate_sharded import sent_by
from gradwire.bench.tasks import get
from gradwire.bench.train_config import TrainConfig
from gradwire.cli import program
from gradwire.errors import ConfigError
from gradwire.lang import layout
from gradwire.planner.weights import WeightRules
from gradwire.sim import Curves, Net
from gradwire.sim.kernel_costs import FORMS
from gradwire.sim.sharded import ShardedScenario, predict_sharded
from gradwire.sim.shards import codecs_of
from products import EXHAUSTIVE

TINY = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 64, "heads": 2, "validation_sequences": 17},
    nodes=2,
    net="none",
    methods=(
        *("fsdp-fp32", "fsdp-bf16", "fsdp-mixed", "gradwire:w=bf16:g=bf16", "qsdp:w=8:g=8"),
        *("qsdp:w=8:g=8:keep=payload", "gradwire:g=qsgd:bits=4", "qsdp:w=4diff:g=4"),
    ),
    steps=4,
    evaluate_every=2,
    ideal_steps=2,
    timeout_seconds=120,
    sharded=True,
)
RANKS = 2


def test_names_are_read_into_codecs_and_options() -> None:
    found = sharded_methods.parse("qsdp:w=5:g=4:learned:keep=payload")
    assert (found.weights, found.options) == ("learnedlevels:bits=5", {"keep": "payload"})
    assert (found.gradients, found.learned) == ("learnedlevels:rounding=stochastic:bits=4", True)
    found = sharded_methods.parse("qsdp:w=4diff:g=4")
    assert (found.weights, found.options) == ("randomshift:bits=4", {"keep": "reference"})
    found = sharded_methods.parse("gradwire:w=randomshift:bits=5:block=512:g=qsgd:bits=4")
    assert (found.weights, found.gradients) == ("randomshift:bits=5:block=512", "qsgd:bits=4")
    found = sharded_methods.parse("qsdp:w=6:block=256:g=4:keep=payload:error_feedback=true")
    assert (found.weights, found.gradients) == ("randomshift:bits=6:block=256", "qsgd:bits=4")
    assert found.options == {"keep": "payload", "error_feedback": True}
    assert sharded_methods.parse("gradwire:g=bf16").weights is None
    for name in sharded_methods.COMPARED:
        sharded_methods.parse(name).check()


@pytest.mark.parametrize(
    ("methods", "complaint"),
    [
        ("torch-fp32", "averages DDP's gradients: leave --sharded out, or use fsdp-fp32"),
        ("gradwire:qsgd:bits=4", "averages DDP's gradients"),
        ("fsdp-fp8", "unknown method 'fsdp-fp8' with --sharded; known: fsdp-fp32"),
        ("qsdp", "write qsdp:w=BITS:g=BITS"),
        ("qsdp:w=8", "write qsdp:w=BITS:g=BITS"),
        ("qsdp:w=eight:g=8", "w=eight is no number of bits"),
        ("qsdp:w=8:g=4diff", "g=4diff is no number of bits"),
        ("qsdp:w=4diff:g=4:keep=none", "differences of weights need keep=reference"),
        ("gradwire:w=bf16:g=bf16:learned", "learned is for a codec with levels"),
        ("qsdp:w=99:g=4", "method 'qsdp:w=99:g=4': weights='randomshift:bits=99'"),
        ("qsdp:w=8:g=4:keep=all", "keep is one of none, payload, redraw"),
        ("qsdp:w=8:w=8:g=4", "'w' is given twice"),
        ("qsdp:bits=8:w=8:g=4", "comes before w= and g="),
        ("gradwire:w=topk:g=bf16", "weights must all arrive"),
        ("gradwire:w=bf16:g=powersgd", "through a single codec"),
        ("gradwire:g=bf16:keep=payload", "give w=CODEC, too"),
        ("truncate:w=2", "write truncate:w=RATIO:g=RATIO"),
        ("truncate:w=0.5:g=2", "write truncate:w=RATIO:g=RATIO, with numbers of 1 or more"),
        ("truncate:w=2:g=many", "write truncate:w=RATIO:g=RATIO"),
        ("truncate:w=2:g=2:keep=payload", "write truncate:w=RATIO:g=RATIO"),
        ("truncate:ratio=4", "averages DDP's gradients"),
    ],
)
def test_wrong_methods_are_refused_in_one_line(
    methods: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "train", "--sharded", "--net", "none", "--methods", methods]
    assert program.run(arguments) == program.BAD_INPUT
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--methods", "fsdp-fp32"], "trains under FSDP2: give --sharded, too"),
        (["--methods", "qsdp:w=8:g=8"], "trains under FSDP2: give --sharded, too"),
        (["--methods", "truncate:w=2:g=2"], "trains under FSDP2: give --sharded, too"),
        (["--accumulate", "2"], "micro-batches need --sharded"),
        (["--sharded", "--accumulate", "0"], "accumulate is 0, must be at least 1"),
        (
            ["--sharded", "--task", "image", "--task-option", "channels_last=true"],
            "FSDP2 shards contiguous parameters",
        ),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program.run(["bench", "train", "--net", "none", *arguments]) == program.BAD_INPUT
    assert complaint in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("task", "options", "names"),
    [
        ("gpt", {"layers": 2, "width": 64}, ["blocks.0", "blocks.1"]),
        ("gpt", {"layers": 1, "width": 256}, ["blocks.0", "embedding", "output"]),
        ("gpt", {"layers": 1, "width": 256, "tied": True}, ["blocks.0"]),
    ],
)
def test_blocks_and_large_layers_are_sharded_by_themselves(
    task: str, options: dict[str, Any], names: list[str]
) -> None:
    model = get(task, **options).model(0)
    found = layers(model)
    named = {module: name for name, module in model.named_modules()}
    assert sorted(named[module] for module in found) == names


def rows_of(config: TrainConfig, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    """(evaluation rows, summary rows by method)."""
    rows = list(train.run(config, announce=lambda text: None, **options))
    json.dumps(rows, allow_nan=False)
    evaluations = [row for row in rows if row["row"] == "evaluation"]
    return evaluations, {row["method"]: row for row in rows if row["row"] == "summary"}


@pytest.fixture(scope="module")
def tiny() -> tuple[list[Any], dict[str, Any]]:
    return rows_of(TINY)


def sizes() -> tuple[list[tuple[str, tuple[int, ...]]], list[tuple[str, tuple[int, ...]]]]:
    """(name, shape) of the parameters of the block, and of the root."""
    shapes = [
        (n, tuple(p.shape)) for n, p in get("gpt", **TINY.task_options).model(0).named_parameters()
    ]
    block = [one for one in shapes if one[0].startswith("blocks.")]
    return block, [one for one in shapes if one not in block]


def numel(shape: Iterable[int]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product


def payload_bytes(weights: str | None, of: list[tuple[str, tuple[int, ...]]]) -> int:
    """Of one rank's shards, of which each has half of the rows."""
    rules = WeightRules.of(weights, "none")
    total = 0
    for name, shape in of:
        codec = rules.choose((name,), len(shape), numel(shape))
        half = numel(shape) // RANKS
        total += 4 * half if codec is None else layout(codec).nbytes(half)
    return total


@pytest.mark.multiprocess
def test_bytes_of_torch_are_those_of_the_formula(tiny: tuple[list[Any], dict[str, Any]]) -> None:
    block, root = (sum(numel(shape) for _, shape in of) for of in sizes())
    weights = TINY.steps * 4 * (2 * block + root) // RANKS
    gradients = TINY.steps * 4 * (block + root) // RANKS
    expected = {
        "fsdp-fp32": (weights, gradients),
        "fsdp-bf16": (weights // 2, gradients // 2),
        "fsdp-mixed": (weights, gradients // 2),
    }
    for method, (of_weights, of_gradients) in expected.items():
        row = tiny[1][method]
        assert (row["weights_wire_bytes"], row["gradients_wire_bytes"]) == (
            of_weights,
            of_gradients,
        ), method
        assert row["wire_bytes"] == of_weights + of_gradients
    # What gradwire leaves to torch is counted, too.
    assert tiny[1]["gradwire:g=qsgd:bits=4"]["weights_wire_bytes"] == weights


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("method", "codec", "gathers"),
    [
        ("gradwire:w=bf16:g=bf16", "bf16", 2),
        ("qsdp:w=8:g=8", "randomshift:bits=8", 2),
        ("qsdp:w=8:g=8:keep=payload", "randomshift:bits=8", 1),
    ],
)
def test_bytes_of_gradwires_weights_are_those_of_payloads(
    method: str, codec: str, gathers: int, tiny: tuple[list[Any], dict[str, Any]]
) -> None:
    block, root = (payload_bytes(codec, of) for of in sizes())
    found = tiny[1][method]["weights_wire_bytes"] - TINY.steps * (gathers * block + root)
    assert 0 <= found <= TINY.steps * (gathers + 1) * 128  # headers
    ratio = tiny[1]["fsdp-fp32"]["gradients_wire_bytes"] / tiny[1][method]["gradients_wire_bytes"]
    assert ratio == pytest.approx(2 if codec == "bf16" else 4, rel=0.15)


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "method", ["fsdp-fp32", "fsdp-mixed", "gradwire:w=bf16:g=bf16", "qsdp:w=8:g=8"]
)
def test_simulated_bytes_are_those_of_a_run(
    method: str, tiny: tuple[list[Any], dict[str, Any]]
) -> None:
    weights, gradients = sent_by(sharded_methods.parse(method))
    groups = tuple(tuple(shape for _, shape in of) for of in sizes())
    scenario = ShardedScenario(RANKS, Net("none"), weights, gradients, groups)
    curve = dict.fromkeys(FORMS, (0.0, 0.0, 0.0))
    known = {str(codec): curve for codec in codecs_of(groups, weights, gradients)}
    row = predict_sharded(scenario, Curves("a test", 1, known))
    for key in ("weights_wire_bytes", "gradients_wire_bytes"):
        assert TINY.steps * row[key] == tiny[1][method][key]


@pytest.mark.multiprocess
def test_rows_have_the_keys_of_sharded_runs(tiny: tuple[list[Any], dict[str, Any]]) -> None:
    evaluations, summaries = tiny
    assert list(summaries) == list(TINY.methods)
    assert len(evaluations) == 3 * len(TINY.methods)
    for row in [*evaluations, *summaries.values()]:
        assert row["sharded"] is True
        assert (row["policy"], row["accumulate"]) == (sharded_methods.POLICY, 1)
        assert row["wire_bytes"] == row["weights_wire_bytes"] + row["gradients_wire_bytes"]
    full = summaries["fsdp-fp32"]["final_loss"]
    start = evaluations[0]["loss"]
    assert full < start
    for method, row in summaries.items():
        assert row["final_loss"] == pytest.approx(full, rel=0.02), method
        assert row["ideal_step_seconds"] > 0
        assert row["target_from"] == "fsdp-fp32"
    best = summaries["fsdp-bf16"]["utility_against"]
    assert best in ("fsdp-bf16", "fsdp-mixed", None)
    assert best is None or summaries[best]["utility"] == 1.0
    before = [row for row in evaluations if row["step"] == 0]
    assert {row["wire_bytes"] for row in before} == {0}  # evaluations are not counted
    exact = {row["loss"] for row in before if row["weights_wire_bytes"] == 0}
    assert len(exact) > 1  # quantised weights are evaluated as they are gathered


@pytest.mark.multiprocess
def test_the_baseline_trains_as_ddp_does(tiny: tuple[list[Any], dict[str, Any]]) -> None:
    _, found = rows_of(replace(TINY, sharded=False, methods=("torch-fp32",)))
    ddp, ours = found["torch-fp32"], tiny[1]["fsdp-fp32"]
    assert ours["final_loss"] == pytest.approx(ddp["final_loss"], rel=1e-6)
    assert "sharded" not in ddp


@pytest.mark.multiprocess
def test_weights_are_gathered_for_each_micro_batch_gradients_once(
    tiny: tuple[list[Any], dict[str, Any]],
) -> None:
    methods = ("fsdp-fp32", "qsdp:w=8:g=8")
    evaluations, found = rows_of(replace(TINY, accumulate=2, methods=methods))
    assert {row["accumulate"] for row in evaluations} == {2}
    for method in methods:
        once, twice = tiny[1][method], found[method]
        assert twice["weights_wire_bytes"] == 2 * once["weights_wire_bytes"]
        assert twice["gradients_wire_bytes"] == once["gradients_wire_bytes"]
        assert twice["final_loss"] == pytest.approx(once["final_loss"], rel=0.05)


def without_times(rows: list[Any]) -> list[Any]:
    dropped = {"run", "time_to_target", "time_to_target_by_seed", "utility", "utility_against"}
    return [
        {key: value for key, value in row.items() if key not in dropped and "seconds" not in key}
        for row in rows
    ]


@pytest.mark.multiprocess
def test_a_run_that_was_ended_continues_to_the_bit(tmp_path: Path) -> None:
    methods = ("fsdp-bf16", "qsdp:w=6:g=4:error_feedback=true")
    config = replace(TINY, methods=methods, steps=6, save_seconds=0.0)
    whole = without_times(list(train.run(config, announce=lambda text: None)))
    state = tmp_path / "state"
    rows = train.run(config, announce=lambda text: None, state=state)
    for _ in range(6):  # the evaluations at steps 0, 2 and 4: the turn of step 2 is saved
        next(rows)
    rows.close()  # type: ignore[attr-defined]
    assert state.exists()
    again = list(train.run(config, announce=lambda text: None, state=state, resume=True))
    assert without_times(again) == whole


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_composed_rows_have_bytes_by_kind() -> None:
    config = replace(TINY, nets=("none",), timed_steps=6, methods=("fsdp-fp32", "qsdp:w=8:g=8"))
    evaluations, summaries = rows_of(replace(config, interleaved=False))
    assert all(row["composed"] and row["sharded"] for row in evaluations)
    for row in [*evaluations, *summaries.values()]:
        assert row["wire_bytes"] == row["weights_wire_bytes"] + row["gradients_wire_bytes"]


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_networks_with_buffers_on_three_ranks() -> None:
    options = {"data": "digits", "network": "cnn", "channels": 4, "hidden": 16}
    config = replace(TINY, task="image", task_options=options, nodes=3)
    _, summaries = rows_of(replace(config, methods=("fsdp-fp32", "qsdp:w=8:g=8")))
    full, ours = (row["final_loss"] for row in summaries.values())
    assert ours == pytest.approx(full, rel=0.05)


def test_the_quick_run_compares_with_both_baselines() -> None:
    config = train.plan(sharded=True, quick=True, net="none")
    assert config.methods == sharded_methods.COMPARED_QUICKLY
    assert train.plan(sharded=True, net="none").methods == sharded_methods.COMPARED
    assert TrainConfig.from_json(config.to_json()) == config
    with pytest.raises(ConfigError, match="unknown method 'fsdp'"):
        replace(config, methods=("fsdp",)).check()
