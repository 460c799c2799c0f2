"""The rows of `gradwire bench transports`, and its errors."""

from __future__ import annotations

import pytest

from gradwire.bench import transports
from gradwire.errors import ConfigError
from gradwire.transport import shm_library


@pytest.mark.multiprocess
def test_rows_and_what_shared_memory_is_for() -> None:
    """Bounds far from what an idle machine does (docs/transports.md), for this one is busy."""
    rows = list(transports.run([64, 1 << 22], quick=True))
    assert all(row.keys() == {"transport", "bytes", "latency_us", "gbps"} for row in rows)
    by = {(row["transport"], row["bytes"]): row for row in rows}
    assert len(by) == len(rows) == 4
    for row in rows:
        assert row["latency_us"] > 0
        assert row["gbps"] > 0
    assert by["shm", 64]["latency_us"] < by["gloo", 64]["latency_us"] / 2
    assert by["shm", 1 << 22]["gbps"] > by["gloo", 1 << 22]["gbps"]


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--bytes 0"):
        list(transports.run([0]))
    with pytest.raises(ConfigError, match="--bytes 1k"):
        list(transports.run(["64", "1k"]))
    monkeypatch.setattr(shm_library, "unavailable", lambda: "no compiler")
    with pytest.raises(ConfigError, match="no shared memory here: no compiler"):
        list(transports.run([64]))
