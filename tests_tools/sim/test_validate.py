"""The simulator against the lab, at a point that is robust to other load."""

from __future__ import annotations

import pytest

from gradwire.errors import ConfigError
from gradwire_tools.bench.paper import validate
from machines import USUAL
from products import EXHAUSTIVE

KEYS = {
    "ranks", "net", "method", "algorithm", "numel", "measured_seconds", "simulated_seconds",
    "error", "of_limit", "runs", "spread", "run",
}  # fmt: skip


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.parametrize("measured", [False, True])
def test_a_slow_link_takes_what_is_predicted(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is wide: docs/laboratory/simulator.md has the errors on a quiet machine, point by
    point.

    On such a link it makes little difference whether this machine's curves are measured.
    """
    if not measured:
        monkeypatch.setattr(validate.measuring, "measured", lambda *_, **__: USUAL)
    (row,) = validate.run([2], ["50mbit,5ms"], ["qsgd"], ["sra"], numel=1_000_000, runs=2)
    assert row.keys() == KEYS
    assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
    assert -0.35 < row["error"] < 0.2, row


def test_slow_runs_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least counts; a run that is as fast as simulated, or faster, is not repeated."""
    lab = iter([2.0, 1.3, 1.05, 0.7])

    def measured(*_: object) -> dict[str, float]:
        return {"seconds": next(lab), "of_limit": 0.5, "wire_bytes": 1}

    monkeypatch.setattr(validate, "available", lambda: None)
    monkeypatch.setattr(validate.measuring, "measured", lambda *_, **__: USUAL)
    monkeypatch.setattr(validate, "predict", lambda *_: {"seconds": 1.0, "wire_bytes": 1})
    monkeypatch.setattr(validate, "_measured", measured)
    first, second = validate.run([2], ["1gbit,1ms"], ["qsgd"], ["sra", "ring"])
    assert (first["runs"], first["measured_seconds"]) == (3, 1.05)
    assert first["spread"] == pytest.approx(2.0 / 1.05 - 1)
    assert (second["runs"], second["measured_seconds"]) == (1, 0.7)


def test_without_a_lab_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "available", lambda: "no namespaces")
    with pytest.raises(ConfigError, match="no namespaces"):
        next(validate.run())
