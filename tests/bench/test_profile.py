"""`bench profile`: the parts of a bucket's time, and a trace that a browser reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gradwire.bench import profile


def test_parts_add_up_and_a_step_is_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    rows = list(profile.run(numel=200_000, trace=str(trace), quick=True))
    seconds = {row["part"]: row["seconds"] for row in rows}
    for row in rows:
        assert (row["ranks"], row["net"], row["parameters"]) == (2, "none", 30)
        assert row["numel"] == pytest.approx(200_000, rel=0.02)
    # medians of parts, so their sum is one only nearly
    parts = sum(seconds[part] for part in ("hook", "compute", "inbound", "outbound"))
    assert seconds["python"] == pytest.approx(parts, rel=0.5)
    assert 0 < seconds["kernels"] < seconds["bucket"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute", "inbound", "outbound"} <= {event["tid"] for event in events}
    assert any(event["name"].startswith("run kernel: merge") for event in events)
