"""The simulator against the lab, at a point that a busy machine hardly disturbs."""

from __future__ import annotations

import pytest

from gradwire import lab
from gradwire.bench import validate
from gradwire.errors import ConfigError

KEYS = {
    "ranks", "net", "method", "algorithm", "numel", "measured_seconds", "simulated_seconds",
    "error", "of_limit", "spread",
}  # fmt: skip


@pytest.mark.lab
@pytest.mark.multiprocess
def test_a_slow_link_takes_what_is_predicted() -> None:
    """The bound is wide: docs/simulator.md has what a quiet machine shows, point by point."""
    reason = lab.available()
    if reason is not None:
        pytest.skip(f"no lab: {reason}")
    (row,) = validate.run([2], ["50mbit,5ms"], ["qsgd"], ["sra"], numel=1_000_000, runs=2)
    assert row.keys() == KEYS
    assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
    assert -0.35 < row["error"] < 0.2, row


def test_without_a_lab_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "available", lambda: "no namespaces")
    with pytest.raises(ConfigError, match="no namespaces"):
        next(validate.run())
