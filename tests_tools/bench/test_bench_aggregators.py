"""`bench aggregators`: rows of torch's hook and of aggregators, from the same turns."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import forked
import pytest
import torch

from gradwire.aggregators import PowerSGD, registry
from gradwire_tools.bench import tasks
from gradwire_tools.bench.micro import aggregators
from gradwire_tools.bench.micro.aggregators import _Measured
from gradwire_tools.bench.train import methods

METHODS = ["torch-powersgd:rank=2", "powersgd:rank=2", "qsgd:bits=4", "torch-fp16-hook"]


SMALL = partial(tasks.get, data="digits", channels=8, hidden=128)


def with_small_tasks() -> None:
    tasks.get = SMALL  # type: ignore[assignment]


@pytest.mark.multiprocess
def test_a_row_per_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "get", SMALL)
    monkeypatch.setattr(forked, "prepare", with_small_tasks)
    rows = list(aggregators.run(METHODS, "image", quick=True))
    assert [row["method"] for row in rows] == METHODS
    for row in rows:
        assert (row["task"], row["ranks"]) == ("image", 2)
        assert row["ms_per_million"] == pytest.approx(1e9 * row["seconds"] / row["numel"])
        # Seconds are without those of an empty hook, so they may be below 0 by chance.
        known = row["seconds"] > 0
        expected = pytest.approx(row["limit_seconds"] / row["seconds"]) if known else None
        assert row["of_limit"] == expected
        assert row["limit_seconds"] > 0
        assert row["state_bytes_per_value"] == row["state_bytes"] / row["numel"]
    # What methods send and keep.
    theirs, ours, quantised, cast = rows
    assert [row["rounds"] for row in rows] == [3, 2, 1, 1]
    assert all(row["orthogonal_share"] or row["seconds"] <= 0 for row in (ours, theirs))
    assert quantised["orthogonal_share"] is None
    assert cast["wire_bytes"] == 2 * cast["numel"]  # 2 (N-1)/N of 16 bits
    assert ours["wire_bytes"] == pytest.approx(theirs["wire_bytes"], rel=0.1)
    assert 4 < theirs["state_bytes_per_value"] < 5
    assert 3 < ours["state_bytes_per_value"] < 5  # no residual of vectors
    assert quantised["state_bytes"] == 0
    assert theirs["peak_extra_bytes"] is None
    assert ours["peak_extra_bytes"] > ours["state_bytes"]


def test_a_time_within_that_of_an_empty_hook_has_no_shares() -> None:
    parameters = [torch.zeros(10)]
    made = SimpleNamespace(
        name="a", spent=[[0.1, 0.1, 0.025]], sent=[0, 8], steps=2,
        model=SimpleNamespace(parameters=lambda: parameters), _state=lambda: (0, 1),
        applied=SimpleNamespace(traffic=lambda steps: {"wire_bytes": 8, "peak_extra_bytes": None}),
    )  # fmt: skip
    for idle, shares in ((0.1, (None, None)), (0.2, (None, None)), (0.0, (0.5, 0.25))):
        row = _Measured.row(made, SimpleNamespace(spent=[[idle]]), 0.05, "gpt")  # type: ignore[arg-type]
        assert (row["of_limit"], row["orthogonal_share"]) == shares


def test_every_aggregator_is_measured_by_default() -> None:
    chosen = aggregators.default_methods([4, 32])
    theirs, *ours = chosen[:3]
    assert theirs == "torch-powersgd:rank=4"
    assert ours == ["powersgd:rank=4", "powersgd:rank=4:orthogonal=qr"]
    assert set(registry.REGISTRY) <= {name.partition(":")[0] for name in chosen}
    assert PowerSGD(4).orthogonal != "qr"
    for name in chosen:
        methods.parse(name).check()
