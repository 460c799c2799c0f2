"""Ranks on different nodes of the lab share no memory, though they run on one machine."""

from __future__ import annotations

import io
import sys

import pytest

from gradwire_tools.lab import Network, available, launch
from products import EXHAUSTIVE

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(available() is not None, reason=f"no lab here: {available()}"),
]

PROGRAM = """
import torch.distributed as dist
from gradwire.transport import Mixed
dist.init_process_group("gloo")
print("carried by", Mixed().name)
dist.barrier()
"""


@pytest.mark.parametrize(
    ("net", "name"),
    [
        pytest.param("1gbit,1ms", "torch_p2p", marks=EXHAUSTIVE),
        pytest.param("none", "shm", marks=EXHAUSTIVE),
    ],
)
def test_nodes_count_as_machines(net: str, name: str) -> None:
    out = io.StringIO()
    codes = launch(
        [sys.executable, "-c", PROGRAM], 2, Network.parse(net), timeout=120, stdout=out,
        stderr=io.StringIO(),
    )  # fmt: skip
    assert codes == [0, 0], out.getvalue()
    said = [line.split("carried by ")[1] for line in out.getvalue().splitlines() if "by" in line]
    assert said == [name] * 2
