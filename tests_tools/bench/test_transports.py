"""The rows of `gradwire bench transports`, and its errors."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError
from gradwire.transport import shm_library
from gradwire_tools.bench.network import transports
from products import EXHAUSTIVE


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_rows() -> None:
    rows = list(transports.run([64, 1 << 22], quick=True))
    assert all(row.keys() == {"transport", "bytes", "latency_us", "gbps", "run"} for row in rows)
    assert len({(row["transport"], row["bytes"]) for row in rows}) == len(rows) == 4
    for row in rows:
        assert row["latency_us"] > 0
        assert row["gbps"] > 0


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--bytes 0"):
        list(transports.run([0]))
    with pytest.raises(ConfigError, match="--bytes 1k"):
        list(transports.run(["64", "1k"]))
    monkeypatch.setattr(shm_library, "unavailable", lambda: "no compiler")
    with pytest.raises(ConfigError, match="no shared memory here: no compiler"):
        list(transports.run([64]))
