"""`bench profile`: the parts of a bucket's time, and a trace for a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.bench import profile
from gradwire.bench.profile_worker import _had_to_wait
from gradwire.engine.trace import WIRE, Span


def test_parts_add_up_and_a_step_is_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    rows = list(profile.run(numel=200_000, trace=str(trace), quick=True))
    seconds = {row["part"]: row["seconds"] for row in rows}
    for row in rows:
        assert (row["ranks"], row["net"], row["parameters"]) == (2, "none", 30)
        assert row["numel"] == pytest.approx(200_000, rel=0.02)
    # medians of parts, so the sum is approximate
    parts = sum(seconds[part] for part in ("hook", "compute", "inbound", "outbound"))
    assert seconds["python"] == pytest.approx(parts, rel=0.5)
    assert 0 < seconds["kernels"] < seconds["bucket"]
    assert rows[-1]["part"] == "compile_1024"
    assert 0 < seconds["compile_1024"] < 1  # a loose bound, for busy machines
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute", "inbound", "outbound"} <= {event["tid"] for event in events}
    assert any(event["name"].startswith("run kernel: merge") for event in events)


@pytest.mark.parametrize(("seconds", "slept"), [(2e-3, True), (1e-4, False)])
def test_only_waits_that_found_their_message_have_lost_time(seconds: float, slept: bool) -> None:
    step = Span("inbound", "borrow", begin=1.0, seconds=seconds + 1e-5, cpu_seconds=1e-4)
    wait = Span("inbound", f"{WIRE}receive", begin=1.0, seconds=seconds, cpu_seconds=9e-5)
    assert _had_to_wait(step, [wait]) is slept
    elsewhere = Span("outbound", f"{WIRE}send", begin=1.0, seconds=2e-3, cpu_seconds=0.0)
    before = Span("inbound", f"{WIRE}receive", begin=0.9, seconds=2e-3, cpu_seconds=0.0)
    assert not _had_to_wait(step, [elsewhere, before])
