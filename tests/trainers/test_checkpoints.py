"""Trainers' checkpoints have the residuals of all ranks.

Lightning's and Ray's are loaded at another number of ranks, tests/golden/states.py has what all
trainers write at each number.

What ranks do is in a file per trainer, which is imported here only by the test that runs it: the
packages take seconds.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks import one_by_one

pytestmark = pytest.mark.multiprocess


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    why = f"not installed: {', '.join(missing)} (gradwire[{packages[0]}])"
    return pytest.mark.skipif(bool(missing), reason=why)


KERAS = "averages_are_torchs", "trains_and_resumes", "odd_steps", "what_is_refused"
# What so many ranks run, in the file of a trainer, where these packages are.
RUNS: list[tuple[str, tuple[str, ...], dict[int, tuple[str, ...]]]] = [
    ("lightning_runs", ("lightning",), {
        2: ("trains_and_resumes", "shards_and_resumes", "fabric_saves_all_ranks",
            "fabric_loads_shards", "batches_accumulate_and_a_checkpoint_may_lack_gradwire",
            "replicas_train_and_resume"),
        3: ("resumes_on_three",),
    }),
    ("transformers_runs", ("transformers", "accelerate"), {
        2: ("trains_and_resumes", "a_checkpoint_without_gradwire_warns",
            "replicas_train_and_resume",
            "the_backend_is_of_a_group_that_is_made_first"),
    }),
    ("accelerate_runs", ("accelerate",), {
        2: ("trains_and_resumes", "replicas_train_and_resume"),
        3: ("a_part_of_the_ranks_is_refused",),
    }),
    ("keras_runs", ("keras", "torch"), {2: KERAS, 1: ("alone",)}),
    ("keras_runs", ("keras", "tensorflow"), {2: (*KERAS, "tensorflow_alone"), 1: ("alone",)}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "backend", "runs"),
    [
        pytest.param(file, packages[-1], runs, marks=needs(*packages), id="-".join(packages))
        for file, packages, runs in RUNS
    ],
)
def test_checkpoints_have_all_ranks(
    file: str, backend: str, runs: dict[int, tuple[str, ...]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if file == "keras_runs":
        monkeypatch.setenv("KERAS_BACKEND", backend)  # of each process that imports Keras
    of_file = import_module(file)
    for ranks, names in runs.items():
        one_by_one(ranks, [getattr(of_file, name) for name in names], tmp_path)


@needs("ray")
@pytest.mark.timeout(600)
def test_checkpoints_of_ray_have_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    import ray
    import ray_runs

    found = [path for path in sys.path if path]  # workers import what this process does
    environment = {"env_vars": {"PYTHONPATH": os.pathsep.join(found)}}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env=environment)
    try:
        of_two = ray_runs.trains(2, tmp_path, "two")
        ray_runs.trains(2, tmp_path, "two", resumes=True)
        ray_runs.trains(3, tmp_path, "three", resumes=True, other=of_two)
        ray_runs.trains(1, tmp_path, "one")
    finally:
        ray.shutdown()


BESIDE = """
import sys
import tensorflow
import torch
from gradwire.trainers.keras_gradients import CROSSINGS
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
with CROSSINGS["tensorflow"].attaching():
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
assert "torch._dynamo" in sys.modules
assert "triton" not in sys.modules
"""


@needs("keras", "tensorflow", "triton")
def test_ddp_is_made_beside_tensorflow() -> None:
    """Whose LLVM, with triton's, ends the process."""
    subprocess.run([sys.executable, "-c", BESIDE], check=True)
