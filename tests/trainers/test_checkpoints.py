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
from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks import one_by_one

pytestmark = pytest.mark.multiprocess


def needs(*packages: str) -> pytest.MarkDecorator:
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: gradwire[{packages[0]}]")


@needs("lightning")
def test_checkpoints_of_lightning_have_all_ranks(tmp_path: Path) -> None:
    import lightning_runs as ranks

    both = [
        ranks.trains_and_resumes,
        ranks.shards_and_resumes,
        ranks.fabric_saves_all_ranks,
        ranks.fabric_loads_shards,
        ranks.batches_accumulate_and_a_checkpoint_may_lack_gradwire,
    ]
    one_by_one(2, both, tmp_path)
    one_by_one(3, [ranks.resumes_on_three], tmp_path)


@needs("transformers", "accelerate")
def test_checkpoints_of_transformers_have_all_ranks(tmp_path: Path) -> None:
    import transformers_runs as ranks

    both = [
        ranks.trains_and_resumes,
        ranks.a_checkpoint_without_gradwire_warns,
        ranks.the_backend_is_of_a_group_that_is_made_first,
    ]
    one_by_one(2, both, tmp_path)


@needs("accelerate")
def test_checkpoints_of_accelerate_have_all_ranks(tmp_path: Path) -> None:
    import accelerate_runs as ranks

    one_by_one(2, [ranks.trains_and_resumes], tmp_path)
    one_by_one(3, [ranks.a_part_of_the_ranks_is_refused], tmp_path)


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


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_keras_averages_and_saves_all_ranks(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := [name for name in ("keras", backend) if find_spec(name) is None]:
        pytest.skip(f"not installed: {', '.join(missing)} (gradwire[keras])")
    import keras_runs as ranks

    monkeypatch.setenv("KERAS_BACKEND", backend)  # of each process that imports Keras
    both = [
        ranks.averages_are_torchs,
        ranks.trains_and_resumes,
        ranks.odd_steps,
        ranks.what_is_refused,
    ]
    one_by_one(2, both + [ranks.tensorflow_alone] * (backend == "tensorflow"), tmp_path)
    one_by_one(1, [ranks.alone], tmp_path)


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
