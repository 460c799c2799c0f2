"""torch's own suite of process groups and DDP, three ranks, over gloo or over our backend.

    python -m torchs_suite BACKEND [NAME ...]

prints the outcome of each test as JSON: "passed", "skipped", or the end of its error. Over
"gradwire" the suite believes that it has gloo: groups are made of our backend in gloo's place, with
the codec identity, so that DDP modules have handles and their averages are exact.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import unittest
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

RANKS = 3
OURS = "TORCHS_SUITE_OURS"  # in the environment of ranks over our backend

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "GRADWIRE_CODEC": "identity"}
os.environ.setdefault("TEMP_DIR", tempfile.mkdtemp())

from torch.testing._internal import common_distributed, common_utils  # noqa: E402
from torch.testing._internal.distributed import distributed_test  # noqa: E402

from ends import forkserver  # noqa: E402


def ours_in_place_of_gloo() -> None:
    """Requests for gloo get our backend, which reports its name as gloo."""
    c10d: Any = dist.distributed_c10d
    make, told = c10d._new_process_group_helper, c10d.get_backend

    def helper(size: int, rank: int, ranks: Any, backend: Any, *more: Any, **named: Any) -> Any:
        if str(backend) in ("gloo", "cpu:gloo,cuda:gloo"):
            backend = c10d.Backend("gradwire")
        return make(size, rank, ranks, backend, *more, **named)

    def get_backend(group: Any = None) -> str:
        name = told(group)
        return "gloo" if name == "gradwire" else name

    c10d._new_process_group_helper = helper
    c10d.get_backend = dist.get_backend = get_backend


class Suite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    def setUp(self) -> None:
        super().setUp()
        self._start_processes(forkserver().Process)

    @classmethod
    def _run(cls, *args: Any, **named: Any) -> None:
        torch.set_num_threads(1)
        if OURS in os.environ:
            ours_in_place_of_gloo()
        super()._run(*args, **named)


# Ranks are forked from a server with a fixed environment, so all share one folder.
distributed_test.initialize_temp_directories = lambda: None
distributed_test.cleanup_temp_dir = lambda: None


def names() -> list[str]:
    return sorted(unittest.defaultTestLoader.getTestCaseNames(Suite))


def outcome(name: str) -> str:
    result = unittest.TestResult()
    Suite(name).run(result)
    if result.skipped:
        return "skipped"
    wrong = [*result.errors, *result.failures]
    return "passed" if not wrong else wrong[0][1][-1500:]


def main(arguments: Sequence[str]) -> None:
    backend, *chosen = arguments
    if backend == "gradwire":
        os.environ[OURS] = "1"
    for folder in ("barrier", "test_dir", "init_dir"):
        os.makedirs(os.path.join(os.environ["TEMP_DIR"], folder), exist_ok=True)
    common_distributed.TIMEOUT_OVERRIDE.clear()
    common_distributed.TIMEOUT_DEFAULT = 60
    common_utils.GRAPH_EXECUTOR = common_utils.cppProfilingFlagsToProfilingMode()
    for name in chosen or names():
        print(json.dumps({"test": name, "outcome": outcome(name)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
