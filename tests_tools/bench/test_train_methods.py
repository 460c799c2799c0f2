"""Methods of `bench train` without gradwire, rolling averages, patience, and policies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from bench_runs import OPTIONS, TINY, refused, trained

from gradwire.errors import ConfigError
from gradwire_tools.bench.train import methods
from gradwire_tools.bench.train.rolling import rolling, stalled


def test_a_run_stalls_without_a_new_least_average() -> None:
    assert rolling([4.0, 2.0, 3.0, 1.0], 2) == [4.0, 3.0, 2.5, 2.0]
    assert rolling([5.0], 3) == [5.0]
    # A run stalls without a new least average.
    for averages, expected in (
        ([3.0, 2.0, 1.0], False),
        ([3.0, 1.0, 2.0, 1.0], True),
        ([3.0, 1.0, 2.0, 0.9], False),
        ([3.0, 2.0], False),
        ([3.0, math.nan, math.nan], True),
        ([math.nan, math.nan, 2.0], False),
    ):
        assert stalled(averages, 2) is expected, averages


@pytest.mark.multiprocess
def test_patience_ends_each_method_by_itself() -> None:
    """At so high a rate of learning, losses rise again: those of truncate at another step."""
    options = {**OPTIONS, "peak_learning_rate": 0.5, "warmup": 2}
    names = ("torch-fp16-hook", "truncate:ratio=100")
    config = replace(TINY, task_options=options, methods=names, steps=200, evaluate_every=2)
    found = trained(replace(config, patience=4, rolling=1))
    for method in names:
        losses = [row["rolling_loss"] for row in found.of(method)]
        assert not stalled(losses[:-1], 4)
        assert stalled(losses, 4)
        last = found.of(method)[-1]["step"]
        assert found.summaries[method]["steps"] == last < 200


@pytest.mark.multiprocess
def test_a_policy_chooses_while_a_method_trains() -> None:
    adaptive = "qsgd:bits=4:policy=lgreco:every=8:first=4:average=4:share=1.0"
    names = ("torch-fp16-hook", "qsgd:bits=4", adaptive)
    config = replace(TINY, methods=names, steps=48, evaluate_every=24)
    torchs, uniform, chosen = trained(config).summaries.values()
    assert (torchs["mean_ratio"], torchs["plan_changes"]) == (None, None)
    assert uniform["plan_changes"] == 0
    assert chosen["plan_changes"] >= 1
    assert chosen["mean_ratio"] > 1.01 * uniform["mean_ratio"] > 6


def test_methods_with_a_policy_are_checked_before_a_run() -> None:
    def check(text: str) -> None:
        methods.parse(text).check(2, [("a", (64, 64))])

    check("topk:density=0.01:policy=accordion:stale=none")
    check("qsgd:policy=accordion:policy.share=0.75:share=0.5:policy.eta=0.2")
    refused(
        check,
        [
            ("qsgd:policy=best", "unknown policy 'best'"),
            ("terngrad:policy=lgreco", "no choices around"),
            ("qsgd:policy=lgreco:every=0", "Replan: every=0"),
            ("qsgd:every=30", "'every'"),
            ("qsgd:policy=accordion:policy.share=2", "Accordion: share=2"),
            ("qsgd:policy=lgreco:policy.best=2", "has no option 'best'"),
            ("qsgd:policy.share=0.5", "'policy.share'"),
        ],
    )
    with pytest.raises(ConfigError, match="a policy is for `bench train`"):
        methods.parse("qsgd:policy=lgreco").how()


def test_what_nothing_compiles_is_refused_before_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """`attach` would send bf16, in rows that name a codec."""
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    for name in ("gradwire:qsgd", "gradwire:topk:error_feedback=true"):
        with pytest.raises(ConfigError, match="no compiled kernels to measure: GRADWIRE_CC="):
            methods.parse(name).check()
    for name in ("gradwire:bf16", "gradwire:powersgd", "gradwire:qsgd:target=eager"):
        methods.parse(name).check()
