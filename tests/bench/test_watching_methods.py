"""Methods of `bench train` that measure the network while they train."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.bench import methods, train
from gradwire.bench.method_run import MethodRun
from gradwire.bench.torch_hooks import Applied, Traffic
from gradwire.bench.train_config import TrainConfig
from gradwire.errors import ConfigError
from ranks import as_processes

AUTO = "auto:seconds=0.3:trial=2"
FLEXIBLE = "flexible:seconds=0.3:steps=2:check=2:rest=100"
CONFIG = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=2,
    net="none",
    methods=(AUTO, "torch-fp16-hook", FLEXIBLE),
    steps=150,
    evaluate_every=50,
    ideal_steps=2,
    timeout_seconds=120,
)


def test_a_method_that_watches_trains_alone() -> None:
    config = replace(CONFIG, methods=("torch-fp32", *CONFIG.methods), seeds=(0, 3))
    together = ("torch-fp32", "torch-fp16-hook")
    parts = [together, (AUTO,), (FLEXIBLE,)]
    assert config.groups() == [(seed, part) for seed in (0, 3) for part in parts]


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("auto:pause=1", "no option 'pause'; known: codecs, policy, seconds"),
        ("auto:trial=0", "trial=0"),
        ("flexible:density=0.1", "no option 'density'; known: steps, seconds, gain"),
        ("flexible:gain=0", "gain=0"),
        ("flexible:steps=1.5", "steps=1.5"),
        ("flexible:steps=0", "steps=0"),
        ("flexible:seconds=0", "seconds=0"),
    ],
)
def test_a_wrong_option_is_told_before_anything_is_launched(method: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        methods.parse(method).check()


def test_a_method_that_watches_is_not_composed() -> None:
    composed = replace(CONFIG, net="none", nets=("c1-small",), interleaved=False)
    with pytest.raises(ConfigError, match="train it as a whole"):
        composed.check()
    replace(composed, methods=("torch-fp32",)).check()


def test_flexible_is_for_training() -> None:
    with pytest.raises(ConfigError, match="use `bench train`"):
        methods.parse("flexible").apply(unwrapped())


def unwrapped() -> DistributedDataParallel:
    """A module that no method may touch."""
    return nn.Linear(2, 2)  # type: ignore[return-value]


@pytest.mark.multiprocess
def test_what_they_decide_is_in_rows_and_what_they_measure_counts() -> None:
    rows: list[dict[str, Any]] = list(train.run(CONFIG))
    told = {row["method"]: row for row in rows if row["row"] == "summary"}
    assert list(told) == list(CONFIG.methods)
    decided = [row for row in rows if row["row"] == "decision"]
    lines = {m: [row["line"] for row in decided if row["method"] == m] for m in CONFIG.methods}
    assert not lines["torch-fp16-hook"]
    assert any("in use from now on" in line for line in lines[AUTO])
    assert "the start: tries 5 densities, 2 steps each" in lines[FLEXIBLE][0]
    assert "chooses" in lines[FLEXIBLE][1]
    for name in (AUTO, FLEXIBLE):
        assert told[name]["steps"] == 150
        assert told[name]["seconds"] > 0.3 + 75 * told[name]["step_seconds"]
        assert told[name]["final_loss"] < 0.98 * next(
            row["loss"] for row in rows if row["row"] == "evaluation" and row["method"] == name
        )
    data = {row["step"] for row in rows if row["row"] == "evaluation" and row["method"] == FLEXIBLE}
    assert data == {0, 50, 100, 150}


def flexible_resumes(rank: int) -> None:
    """From a state that was saved with another density in force."""
    first = MethodRun.start(methods.parse(FLEXIBLE), CONFIG.check(), seed=0)
    first.train(6)
    decides = first.applied.flexible
    assert decides is not None
    update = decides._update(0.033, "art_tree")
    while not update.in_force:
        first.train(1)
    own, replicas = first.state(), [first.model_state()]
    assert any("0.033" in facts["codec"] for facts in own["method"]["parameters"].values())
    dist.broadcast_object_list(replicas)
    first.close()
    dist.barrier()
    second = MethodRun.start(methods.parse(FLEXIBLE), CONFIG.check(), seed=0)
    second.load(own, replicas[0])
    assert second.step == first.step
    second.train(6)
    assert all(p.isfinite().all() for p in second.model.parameters())
    second.close()
    dist.barrier()


@pytest.mark.multiprocess
def test_flexible_resumes_whatever_density_was_in_force() -> None:
    as_processes(2, flexible_resumes)


class _Answers:
    """Of `Flexible`, whether steps are training."""

    def __init__(self, *answers: bool) -> None:
        self.step = iter(answers).__next__


class _Run(MethodRun):
    """Takes steps of 10 ms, and trains nothing."""

    taken = 0

    def one_step(self) -> None:
        self.taken += 1
        time.sleep(0.01)


def test_steps_that_are_thrown_away_take_time_and_are_not_counted() -> None:
    answers: Any = _Answers(True, False, False, True)
    applied = Applied(lambda steps: Traffic(0, None), flexible=answers, setup_seconds=5.0)
    of: Any = ("task", "model", "optimizer")
    run = _Run("flexible", 0, *of, applied)
    run.train(2)
    assert (run.step, run.taken) == (2, 4)
    assert run.step_seconds[0] > 5.0  # with what was measured before the first step
    assert 0.03 < run.step_seconds[1] < 1.0
