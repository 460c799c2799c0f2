"""Trainers' checkpoints have the residuals of all ranks, and load at another number of ranks.

What ranks do is in a file per trainer, which is imported here only by the test that runs it: the
packages take seconds.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ranks import all_pass

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
    all_pass(2, both, tmp_path)
    all_pass(3, [ranks.resumes_on_three], tmp_path)


@needs("transformers", "accelerate")
def test_checkpoints_of_transformers_have_all_ranks(tmp_path: Path) -> None:
    import transformers_runs as ranks

    both = [ranks.trains_and_resumes, ranks.a_checkpoint_without_gradwire_warns]
    all_pass(2, both, tmp_path)
    all_pass(3, [ranks.resumes_on_three], tmp_path)


@needs("accelerate")
def test_checkpoints_of_accelerate_have_all_ranks(tmp_path: Path) -> None:
    import accelerate_runs as ranks

    all_pass(2, [ranks.trains_and_resumes], tmp_path)
    all_pass(3, [ranks.resumes_on_three, ranks.a_part_of_the_ranks_is_refused], tmp_path)
