"""`bench profile`: the parts of a bucket's time, and a trace for a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.engine import Span
from gradwire_tools.bench.micro import profile
from gradwire_tools.bench.micro.profile import _had_to_wait
from rooms.engine import WIRE

PARTS = [
    *("hook", "compute", "inbound", "outbound", "python", "queueing", "wire", "kernels", "bucket"),
    *("overhead", "backward", "compile_1024"),
]
DIFFERENCES = ("compute", "inbound", "outbound", "python", "overhead")  # below 0 by chance


@pytest.mark.multiprocess
def test_every_part_has_a_row_and_a_step_is_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    rows = list(profile.run(numel=200_000, trace=str(trace), quick=True))
    assert [row["part"] for row in rows] == PARTS
    for row in rows:
        assert (row["ranks"], row["net"], row["parameters"]) == (2, "none", 30)
        assert row["numel"] == pytest.approx(200_000, rel=0.02)
        assert row["seconds"] >= 0 or row["part"] in DIFFERENCES
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute", "inbound", "outbound"} <= {event["tid"] for event in events}
    assert any(event["name"].startswith("run kernel: merge") for event in events)


def test_only_waits_that_found_their_message_have_lost_time() -> None:
    for seconds, slept in ((2e-3, True), (1e-4, False)):
        step = Span("inbound", "borrow", begin=1.0, seconds=seconds + 1e-5, cpu_seconds=1e-4)
        wait = Span("inbound", f"{WIRE}receive", begin=1.0, seconds=seconds, cpu_seconds=9e-5)
        assert _had_to_wait(step, [wait]) is slept
        elsewhere = Span("outbound", f"{WIRE}send", begin=1.0, seconds=2e-3, cpu_seconds=0.0)
        before = Span("inbound", f"{WIRE}receive", begin=0.9, seconds=2e-3, cpu_seconds=0.0)
        assert not _had_to_wait(step, [elsewhere, before])
