"""Ranks on nodes of the lab: a link that it drops is no hang (law 10), and nodes share no memory.

tests/middle/test_calls.py has groups that are destroyed.
"""

from __future__ import annotations

import io
import re
import sys
import time
from pathlib import Path

import pytest

from gradwire_tools.lab import Lab, Network, available, launch
from products import EXHAUSTIVE

pytestmark = [
    pytest.mark.lab,
    pytest.mark.skipif(available() is not None, reason=f"no lab here: {available()}"),
]

TIMEOUT_S = 6

REDUCE = f"""
import datetime, time, torch, torch.distributed as dist, gradwire as gw
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={TIMEOUT_S}))
x = torch.randn(500_000)
gw.all_reduce(x)
print("up", flush=True)
begun = time.monotonic()
try:
    for step in range(10**6):
        gw.all_reduce(x, op="avg", step=step)
        begun = time.monotonic()
except gw.TransportError as error:
    print(f"ended after {{time.monotonic() - begun:.1f}} blaming {{error.peer}}", flush=True)
"""


@EXHAUSTIVE
def test_a_dropped_link_ends_in_an_error_on_every_rank(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with out.open("a") as file, Lab(3, Network.parse("1gbit,1ms")) as lab:
        nodes = [
            lab.spawn(rank, [sys.executable, "-u", "-c", REDUCE], env, stdout=file, stderr=file)
            for rank, env in enumerate(lab.torchrun_env())
        ]
        deadline = time.monotonic() + 60
        while out.read_text().count("up") < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.5)
        lab.set_link(1, up=False)
        assert [node.wait(10 * TIMEOUT_S) for node in nodes] == [0, 0, 0], out.read_text()
    ended = re.findall(r"ended after ([\d.]+) blaming (\d)", out.read_text())
    assert len(ended) == 3, out.read_text()
    for seconds, _ in ended:
        assert float(seconds) < 2 * TIMEOUT_S
    # Ranks that still reach each other agree on the failed rank.
    assert [peer for _, peer in ended].count("1") >= 2, ended


PROGRAM = """
import torch.distributed as dist
from gradwire.transport import Mixed
dist.init_process_group("gloo")
print("carried by", Mixed().name)
dist.barrier()
"""


@EXHAUSTIVE
@pytest.mark.parametrize(("net", "name"), [("1gbit,1ms", "torch_p2p"), ("none", "shm")])
def test_nodes_count_as_machines(net: str, name: str) -> None:
    out = io.StringIO()
    codes = launch(
        [sys.executable, "-c", PROGRAM], 2, Network.parse(net), timeout=120, stdout=out,
        stderr=io.StringIO(),
    )  # fmt: skip
    assert codes == [0, 0], out.getvalue()
    said = [line.split("carried by ")[1] for line in out.getvalue().splitlines() if "by" in line]
    assert said == [name] * 2
