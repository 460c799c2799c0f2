"""`bench train` without a run: names of methods, checks of the configuration, `plan`, summary rows,
and what the terminal shows of them."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from torch import nn

from command_line import refused
from gradwire.errors import ConfigError
from gradwire_tools import lab
from gradwire_tools.bench.train import methods, run, sharded, view
from gradwire_tools.bench.train.applied import ring_bytes
from gradwire_tools.bench.train.config import TrainConfig, plan
from gradwire_tools.bench.train.rows import summaries
from gradwire_tools.demo import RATES, fastest


def test_names_are_read_into_options() -> None:
    for name in methods.NAMED:
        method = methods.parse(name)
        assert method.name == name
        method.check()
    method = methods.parse("gradwire:qsgd:bits=2:error_feedback=true:scale=max:x=0.5")
    assert method.options == {
        "codec": "qsgd", "bits": 2, "error_feedback": True, "scale": "max", "x": 0.5,
    }  # fmt: skip
    for name in (
        "topk:density=0.01:policy=accordion:stale=none",
        "qsgd:policy=accordion:policy.share=0.75:share=0.5:policy.eta=0.2",
    ):
        methods.parse(name).check(2, [("a", (64, 64))])


def test_what_ddp_does_is_no_option_of_a_codec() -> None:
    for name, *expected in (
        ("powersgd:rank=8:bucket_mb=1:cross_barrier=true", 1, True, {"rank": 8}),
        ("gradwire:qsgd:cross_barrier=false", None, False, {}),
        ("gradwire-qsgd4:cross_barrier=true", None, True, {"bits": 4}),
        ("torch-fp16-hook:bucket_mb=0.5", 0.5, False, {"dtype": "fp16"}),
        ("truncate:ratio=4:bucket_mb=2", 2, False, {"ratio": 4}),
    ):
        method = methods.parse(name)
        options = {key: one for key, one in method.options.items() if key != "codec"}
        assert [method.bucket_mb, method.cross_barrier, options] == expected
        method.check(2, [("a", (64, 64))])
        if name != "gradwire:qsgd:cross_barrier=false":
            with pytest.raises(ConfigError, match="are for `bench train`"):
                method.alone()
    for name in ("qsdp:w=8:g=8:cross_barrier=true", "fsdp-bf16:bucket_mb=1", "qsgd:bucket_mb=1"):
        with pytest.raises(ConfigError, match=f"{name}.* is for DDP"):
            TrainConfig(sharded=True, methods=(name,)).check()


# Of FSDP2: a name, the codecs of weights and gradients, and options of `attach`.
LEARNED, SHIFT = "learnedlevels:rounding=stochastic", "randomshift"
SHARDED: tuple[tuple[str, str | None, str, dict[str, Any]], ...] = (
    ("qsdp:w=5:g=4:learned:keep=payload", "learnedlevels:bits=5", f"{LEARNED}:bits=4",
     {"keep": "payload"}),
    ("qsdp:w=4diff:g=4", f"{SHIFT}:bits=4", "qsgd:bits=4", {"keep": "reference"}),
    (f"gradwire:w={SHIFT}:bits=5:block=512:g=qsgd:bits=4", f"{SHIFT}:bits=5:block=512",
     "qsgd:bits=4", {}),
    ("qsdp:w=6:block=256:g=4:keep=payload:error_feedback=true", f"{SHIFT}:bits=6:block=256",
     "qsgd:bits=4", {"keep": "payload", "error_feedback": True}),
    ("gradwire:g=bf16", None, "bf16", {}),
    ("gradwire:g=qsgd:bits=4:inside=full", None, "qsgd:bits=4", {"inside": "full"}),
)  # fmt: skip


def test_sharded_names_are_read_into_codecs_and_options() -> None:
    for name, *expected in SHARDED:
        found = sharded.parse(name)
        assert [found.weights, found.gradients, found.options] == expected
        assert found.learned == ("learned" in name)


WRONG_METHODS = (
    ("nccl", "unknown method 'nccl': use one of torch-fp32"),
    ("gradwire", "unknown method"),
    ("gradwire:", "unknown method"),
    ("gradwire:qsgd:bits", "expected OPTION=VALUE, found 'bits'"),
    ("gradwire:qsgd:=4", "expected OPTION=VALUE"),
    ("gradwire:qsgd:bits=4:bits=2", "'bits' is given twice"),
    ("gradwire:qsdg", "unknown codec or aggregator 'qsdg'"),
    ("qsdg:bits=4", "unknown method 'qsdg:bits=4'.*auto, flexible.*`gradwire codec list`"),
    ("gradwire:qsgd:bitz=4", "no option 'bitz'"),
    ("qsgd:algoritm=ring", r"use one of .* \(did you mean 'algorithm'\?\)"),
    ("qsgd:policy=lgreco:evry=50", r"\(did you mean 'every'\?\)"),
    ("qsgd:scale=foo:policy=lgreco", "must be .*'l2'$"),
    ("qsgd:policy=lgreco:every=-1", "method 'qsgd:policy=lgreco:every=-1': Replan: every=-1"),
    ("gradwire:qsgd:bits=99", "bits"),
    ("qsgd:cross_barrier=1", "cross_barrier=1: use true or false"),
    ("torch-fp32:cross_barrier=true", "is for methods of a codec or aggregator of gradwire's"),
    ("auto:cross_barrier=true", "auto and flexible time each step"),
    ("flexible:cross_barrier=true", "auto and flexible time each step"),
    ("truncate:ratio=2:cross_barrier=true", "torch's hooks end with backward"),
    ("qsgd:bucket_mb=0", "bucket_mb=0: give MiB, a number above 0"),
    ("torch-powersgd:rank=4:bucket_mb=1", "torch's PowerSGD needs one bucket"),
    ("torch-fp32:bits=1", "method torch-fp32 has no option 'bits': use one of bucket_mb"),
    ("outer:dilocko:every=3", "preset 'dilocko': did you mean 'diloco'"),
    ("outer:diloco:every=0", "outer: every=0 must be at least 1"),
    ("outer:codec=qsgd:bitz=4", "no option 'bitz'"),
    ("outer:codec=qsgd:codec=topk", "no option 'codec'"),  # radial has one
    ("truncate:ratio=0.5", "write truncate:ratio=N, with a number of 1 or more"),
    ("truncate:ratio=nan", "write truncate:ratio=N"),
    ("truncate:ratio=many", "write truncate:ratio=N"),
    ("truncate", "write truncate:ratio=N"),
    ("truncate:bits=4", "write truncate:ratio=N"),
    ("torch-powersgd:rank=1.5", "write torch-powersgd:rank=N, with a whole number"),
    ("torch-powersgd:rank=0", "with a whole number of 1 or more"),
    ("torch-powersgd:rank", "expected OPTION=VALUE"),
    # On four ranks, with the task's shapes.
    ("thc:bits=2:code=2:saturate=false", "saturate=false' on 4 ranks: "),
    ("qsgd:seed=-1", "seed"),
    ("qsgd:coalesce_bytes=-1", "coalesce_bytes=-1"),
    ("qsgd:include=weight", "give a list of patterns"),
    ("powersgd:rank=5000", "rank"),
    # With a policy.
    ("qsgd:policy=best", "unknown policy 'best'"),
    ("terngrad:policy=lgreco", "no choices around"),
    ("qsgd:policy=lgreco:every=0", "Replan: every=0"),
    ("qsgd:every=30", "'every'"),
    ("qsgd:policy=accordion:policy.share=2", "Accordion: share=2"),
    ("qsgd:policy=lgreco:policy.best=2", "has no option 'best'"),
    ("qsgd:keep=payload", "has no option 'keep'"),  # of weights
    ("qsgd:policy.share=0.5", "'policy.share'"),
    # That watch the network.
    ("auto:pause=1", "has no option 'pause': use one of codecs, methods, policy, trial"),
    ("auto:trial=-1", "trial=-1"),
    ("flexible:density=0.1", "has no option 'density': use one of steps, seconds, gain"),
    ("flexible:gain=0", "gain=0"),
    ("flexible:steps=1.5", "steps=1.5"),
    ("flexible:steps=0", "steps=0"),
    ("flexible:seconds=0", "seconds=0"),
    # Of FSDP2.
    ("fsdp-fp32", "trains under FSDP2: give --sharded, too"),
    ("qsdp:w=8:g=8", "trains under FSDP2: give --sharded, too"),
    ("truncate:w=2:g=2", "trains under FSDP2: give --sharded, too"),
)
WRONG_SHARDED_METHODS = (
    ("torch-fp32", "averages DDP's gradients: leave --sharded out, or use fsdp-fp32"),
    ("gradwire:qsgd:bits=4", "averages DDP's gradients"),
    ("truncate:ratio=4", "averages DDP's gradients"),
    ("fsdp", "unknown method 'fsdp'"),
    ("fsdp-fp8", "unknown method 'fsdp-fp8' with --sharded: did you mean 'fsdp-fp32'"),
    ("qsdp", "write qsdp:w=BITS:g=BITS"),
    ("qsdp:w=8", "write qsdp:w=BITS:g=BITS"),
    ("qsdp:w=eight:g=8", "w=eight is no number of bits"),
    ("qsdp:w=8:g=4diff", "g=4diff is no number of bits"),
    ("qsdp:w=4diff:g=4:keep=none", "differences of weights need keep=reference"),
    ("gradwire:w=bf16:g=bf16:learned", "learned is for a codec with levels"),
    ("qsdp:w=99:g=4", "method 'qsdp:w=99:g=4': weights='randomshift:bits=99'"),
    ("qsdp:w=8:g=4:inside=codec", "inside is one of full"),
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
)
WRONG_FIELDS: tuple[tuple[dict[str, Any], str], ...] = (
    *(({"methods": (text,)}, told) for text, told in WRONG_METHODS),
    *(({"methods": (text,), "sharded": True}, told) for text, told in WRONG_SHARDED_METHODS),
    ({"task": "speech"}, "unknown task"),
    ({"task_options": {"depth": 1}}, "no option 'depth'"),
    ({"methods": ()}, "no methods"),
    ({"methods": ("thc", "torch-fp32", "thc")}, "methods contain duplicates: thc$"),
    ({"seeds": ()}, "no seeds"),
    ({"seeds": (1, 1)}, "seeds contain duplicates"),
    ({"seeds": (1, 2**63)}, f"seed {2**63}: seeds are below 2\\^63"),
    ({"seeds": (0, -1)}, "seed -1: seeds are 0 or more"),
    ({"nets": ("1gbit,1ms", "1000mbit,1ms")}, "nets contain duplicates: 1gbit,1ms$"),
    ({"nets": ("1gbit,1hour",)}, "1hour"),
    ({"nets": ("1gbit,1ms",), "net": "c1"}, "leave the schedule out"),
    ({"nets": ("c1-small",), "net": "none", "methods": ("auto",)}, "train it as a whole"),
    ({"target_at": 0.04}, r"target_at is 0.04: with 200 steps .*; give 0.05 or more"),
    ({"target_at": 0.01, "steps": 900}, "give 0.0112 or more"),
    ({"target_at": 0.5, "steps": 5}, "give 1 or more"),
    ({"target_at": 0.1, "patience": 2}, "with 20 steps .*; give 0.5 or more"),
    ({"target_at": 0.4, "budget_seconds": 9.0}, "with 20 steps .*; give 0.5 or more"),
    ({"target_at": 1.5}, "target_at is 1.5"),
    ({"target_at": 0.6, "target": 2.0}, "exclude each other"),
    ({"nodes": 0}, "nodes is 0, must be at least 1"),
    ({"per_node": 0}, "per_node is 0, must be at least 1"),
    ({"per_node": 2}, "ranks that share a machine need --sharded"),
    ({"steps": -1}, "steps is -1"),
    ({"evaluate_every": 0}, "evaluate_every is 0"),
    ({"budget_seconds": 9.0, "evaluate_every": 50}, "must not exceed the task's warm-up"),
    ({"patience": 0}, "patience is 0, must be at least 1"),
    ({"validate": True}, "give nets to compose"),
)


def test_wrong_fields_are_refused_before_anything_starts() -> None:
    refused(lambda fields: TrainConfig(**fields).check(), WRONG_FIELDS)
    for fields in (
        {"target_at": 0.05}, {"target_at": 1.0, "steps": 5}, {"target_at": 0.0112, "steps": 900},
        {"nets": ("c1-small",), "net": "none"},
    ):  # fmt: skip
        TrainConfig(methods=("torch-fp32",), **fields).check()  # the least share
    with pytest.raises(ConfigError, match="a policy is for `bench train`"):
        methods.parse("qsgd:policy=lgreco").how()
    untouched: Any = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="use `bench train`"):
        methods.parse("flexible").apply(untouched)


def test_what_nothing_compiles_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach` would send bf16, in rows that name a codec."""
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    for name in ("gradwire:qsgd", "gradwire:topk:error_feedback=true"):
        with pytest.raises(ConfigError, match="no compiled kernels to measure: GRADWIRE_CC="):
            methods.parse(name).check()
    for name in ("gradwire:bf16", "gradwire:powersgd", "gradwire:qsgd:target=eager"):
        methods.parse(name).check()


def test_a_method_that_watches_trains_alone() -> None:
    names = ("torch-fp32", "auto", "torch-fp16-hook", "flexible")
    config = TrainConfig(methods=names, seeds=(0, 3))
    parts = [("torch-fp32", "torch-fp16-hook"), ("auto",), ("flexible",)]
    assert config.groups() == [(seed, part) for seed in (0, 3) for part in parts]
    alone = replace(config, interleaved=False, seeds=(1,))
    assert alone.groups() == [(1, (name,)) for name in names]


def test_the_default_network_without_a_lab_is_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab, "available", lambda: "no right to make namespaces")
    said: list[str] = []
    assert plan(quick=True, announce=said.append).net == "none"
    assert "no right to make namespaces" in said[0]
    monkeypatch.setattr(lab, "available", lambda: None)
    said.clear()
    assert plan(announce=said.append).net == "1gbit,1ms"
    assert plan(quick=True, announce=said.append).net == "100mbit,1ms"
    assert plan(net="none", announce=said.append).net == "none"
    assert not said


def test_a_plan_holds_what_is_given(tmp_path: Path) -> None:
    assert plan(nets=(" 1000MBIT,1000us",)).nets == ("1gbit,1ms",)
    # Arguments override quick.
    config = plan(
        quick=True, net="none", nodes=3, steps=7, methods=("torch-fp32",), task_options={"width": 8}
    )
    assert (config.nodes, config.steps, config.methods) == (3, 7, ("torch-fp32",))
    assert config.task_options["width"] == 8
    assert config.budget_seconds is None
    # A quick run under FSDP2 compares with both baselines.
    quickly = plan(sharded=True, quick=True, net="none")
    assert quickly.methods == sharded.COMPARED_QUICKLY
    assert plan(sharded=True, net="none").methods == sharded.COMPARED
    # What a file says, not where it is.
    file = tmp_path / "dip.yaml"
    file.write_text("by: step\nphases:\n  - {from: 0, net: '400mbit,1ms'}\n")
    assert plan(net=str(file)).net == "400mbit,1ms"
    file.write_text(file.read_text() + "  - {from: 4, net: '4mbit,1ms'}\n")
    assert plan(net=str(file)).net == "dip(step: 0 400mbit,1ms; 4 4mbit,1ms)"


def test_the_demo_takes_the_fastest_network_that_shows_communication() -> None:
    parameters, nodes = 5_000_000, 4
    sent = ring_bytes(parameters, 2, nodes)
    for ideal in (0.001, 0.01, 0.05, 0.2, 1.0):
        net, reason = fastest(ideal, parameters, nodes)
        rate, _, latency = net.partition(",")
        bits = {r: lab.Network.parse(r + ",1ms").rate_bits_per_s for r in RATES}
        long_enough = [r for r in RATES if sent * 8 / bits[r] >= 5 * ideal]
        assert (rate, latency) == ((long_enough or RATES[-1:])[0], "1ms")
        assert rate in reason
        assert "hide" not in reason  # what was not measured is not claimed
        assert "on a faster network the gain is smaller" in reason
    # Ring bytes.
    assert ring_bytes(1000, 4, 1) == 0
    assert ring_bytes(1000, 4, 2) == 4000
    assert ring_bytes(1000, 2, 4) == 3000


def summary(losses: dict[tuple[str, int], list[float | None]], **fields: Any) -> list[Any]:
    """Summary rows of runs whose losses, at steps 0, 10, ..., are given; a step takes 1 s,
    with seed 1 a tenth more."""
    names = tuple(dict.fromkeys(method for method, _ in losses))
    seeds = tuple(dict.fromkeys(seed for _, seed in losses))
    evaluations: list[dict[str, Any]] = []
    ends: list[dict[str, Any]] = []
    for (method, seed), values in losses.items():
        for turn, loss in enumerate(values):
            known = dict.fromkeys(("metric", "loss", "rolling_metric", "rolling_loss"), loss)
            evaluations.append({
                "method": method, "seed": seed, "step": 10 * turn, "seconds": (10.0 + seed) * turn,
                **known, "wire_bytes": 100 * turn, "link_bytes": None, "peak_extra_bytes": None,
                "metric_name": "accuracy", "timing_only": method.startswith("truncate"),
            })  # fmt: skip
        ends.append({
            "method": method, "seed": seed, "step_seconds": 1.0 + seed,
            "step_seconds_quartiles": [0.9 + seed, 1.1 + seed], "step_seconds_mean": 1.25 + seed,
            "timed_steps": 10, "timed_bytes": 10.0, "ideal_step_seconds": 0.5,
            "kernel_seconds": 0.25 + seed, "exposed_seconds": None, "mean_ratio": 4.0 + seed,
            "plan_changes": 2 * seed,
        })  # fmt: skip
    config = TrainConfig(methods=names, seeds=seeds, **fields)
    return list(summaries(config, evaluations, ends))


def test_the_target_is_the_baselines_last_loss_with_the_tolerance() -> None:
    rows = summary({("gradwire-qsgd4", 0): [5.0, 2.0, 1.0], ("torch-fp32", 0): [5.0, 3.0, 2.0]})
    assert [row["target"] for row in rows] == [pytest.approx(2.02)] * 2
    assert {row["target_from"] for row in rows} == {"torch-fp32"}
    assert [row["time_to_target"] for row in rows] == [10.0, 20.0]
    assert [row["final_loss"] for row in rows] == [1.0, 2.0]
    # Without the baseline, the first method is named instead; a given target counts.
    rows = summary({("gradwire-fp16", 0): [5.0, 3.0], ("gradwire-qsgd4", 0): [5.0, 3.1]})
    assert {row["target_from"] for row in rows} == {"gradwire-fp16"}
    assert [row["time_to_target"] for row in rows] == [10.0, None]
    (row,) = summary({("torch-fp32", 0): [5.0, 3.0, 2.0]}, target=4.0)
    assert (row["target"], row["target_from"], row["time_to_target"]) == (4.0, "given", 10.0)


def test_summaries_have_times_to_further_targets() -> None:
    """To the baseline's loss at 60 % and 80 % of its run, and its last with the tolerance."""
    full = [9.0, 5.0, 4.0, 3.0, 2.0, 1.0]
    rows = summary({("torch-fp32", 0): full, ("qsgd", 0): [9.0, 3.0, 3.0, 2.5, 2.0, 1.02]})
    assert rows[0]["times_to_by_seed"] == {"0.6": [30.0], "0.8": [40.0], "last": [50.0]}
    assert rows[1]["times_to_by_seed"] == {"0.6": [10.0], "0.8": [40.0], "last": [None]}


def test_a_method_that_fails_with_one_seed_has_no_time_to_target() -> None:
    rows = summary(
        {
            ("torch-fp32", 0): [5.0, 2.0],
            ("torch-fp32", 1): [5.0, 2.0],
            ("gradwire-qsgd4", 0): [5.0, 2.0],
            ("gradwire-qsgd4", 1): [5.0, 4.0],
        }
    )
    assert rows[0]["time_to_target"] == 10.5
    assert rows[0]["step_seconds"] == 1.5
    assert rows[0]["evaluation_gap_seconds"] == 11.0  # the longest of all seeds
    assert rows[0]["step_seconds_quartiles"] == [0.9, 2.1]
    assert (rows[0]["kernel_seconds"], rows[0]["exposed_seconds"]) == (0.75, None)
    assert (rows[0]["mean_ratio"], rows[0]["plan_changes"]) == (4.5, 1)
    assert rows[1]["time_to_target_by_seed"] == [10.0, None]
    assert rows[1]["final_loss_by_seed"] == [2.0, 4.0]
    assert rows[1]["time_to_target"] is None
    assert rows[1]["final_loss"] == 3.0


def test_seeds_end_by_themselves() -> None:
    row = summary({("torch-fp32", 0): [5.0, 4.0], ("torch-fp32", 1): [5.0, 4.0, 3.0, 3.0]})[0]
    assert (row["steps"], row["steps_by_seed"]) == (10, [10, 30])
    assert row["wire_bytes"] == 200
    assert (row["wire_bytes_per_step"], row["link_bytes_per_step"]) == (10.0, None)
    # Each seed has its own target so the baseline meets it.
    rows = summary({("torch-fp32", 0): [5.0, 2.0], ("torch-fp32", 1): [5.0, 3.0]})
    assert rows[0]["target"] == pytest.approx(1.01 * 2.5)
    assert rows[0]["time_to_target"] == 10.5
    # A loss that is not finite is not averaged away.
    rows = summary({("torch-fp32", 0): [5.0, None], ("gradwire-qsgd4", 0): [5.0, 1.0]})
    assert rows[0]["final_loss"] is None
    assert rows[0]["target"] is None
    assert "not finite" in rows[0]["target_from"]
    assert rows[1]["time_to_target"] is None


def rows() -> list[dict[str, Any]]:
    common = {"task": "gpt", "net": "none", "ranks": 2, "method": "torch-fp32"}
    at = {"seed": 0, "step": 10, "seconds": 1.5, "loss": 3.14159}
    summary = {
        **common, "row": "summary", "steps": 10, "target": 3.17, "target_from": "torch-fp32",
        "time_to_target": None, "final_loss": 3.14159, "step_seconds": 0.15,
        "ideal_step_seconds": 0.1, "wire_bytes": 1000,
    }  # fmt: skip
    return [{**common, "row": "evaluation", **at}, summary]


def test_watching_passes_every_row_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def made_up(
        config: TrainConfig, progress: Any, announce: Any, state: Any, resume: bool
    ) -> Iterator[dict[str, Any]]:
        announce("two nodes")
        at = {"phase": "training", "method": "torch-fp32", "seed": 0, "step": 5, "steps": 10}
        progress({**at, "seconds": 0.7})
        yield from rows()

    monkeypatch.setattr(run, "run", made_up)
    config = TrainConfig(methods=("torch-fp32",), steps=10)
    for terminal in (False, True):
        screen = io.StringIO()
        console = Console(file=screen, width=120, force_terminal=terminal)
        assert list(view.watch(config, console)) == rows()
        assert "two nodes" in screen.getvalue()
        assert "3.142" in screen.getvalue()
        assert ("step   10" in screen.getvalue()) == (not terminal)


def test_the_table_has_what_matters() -> None:
    screen = io.StringIO()
    summary = rows()[1]
    faster = {**summary, "method": "torch-fp16-hook", "step_seconds": 0.1, "time_to_target": 1.0}
    ours = {**summary, "method": "gradwire-qsgd4", "step_seconds": 0.04, "final_loss": 3.173}
    made = view.table([summary, faster, ours])
    Console(file=screen, width=80).print(made)
    text = screen.getvalue()
    for expected in (
        "150 ms", "faster", "than", "fp16 ", "0.667×", "2.50×", "+1.00 %", "not met",
        "target loss 3.170", "loopback",
    ):  # fmt: skip
        assert expected in text
    for method in ("torch-fp32", "torch-fp16-hook", "gradwire-qsgd4"):
        assert method in text  # the table fits into 80 columns
