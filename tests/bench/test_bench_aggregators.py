"""`bench aggregators`: rows of torch's hook and of aggregators, from the same turns."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gradwire import ConfigError
from gradwire.aggregators import PowerSGD, registry
from gradwire.bench import aggregators, methods
from gradwire.bench.aggregators_worker import _Measured
from gradwire.bench.methods import Traffic

METHODS = ["torch-powersgd:rank=2", "powersgd:rank=2", "qsgd:bits=4", "torch-fp16-hook"]


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, object]]:
    return {row["method"]: row for row in aggregators.run(METHODS, "image", quick=True)}


@pytest.mark.multiprocess
def test_a_row_per_method(rows: dict[str, dict[str, float]]) -> None:
    assert list(rows) == METHODS
    for row in rows.values():
        assert (row["task"], row["ranks"]) == ("image", 2)
        assert row["ms_per_million"] == pytest.approx(1e9 * row["seconds"] / row["numel"])
        assert row["of_limit"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        assert 0 < row["of_limit"] < 1
        assert row["wall_seconds"] > 0
        assert row["state_bytes_per_value"] == row["state_bytes"] / row["numel"]


@pytest.mark.multiprocess
def test_what_methods_send_and_keep(rows: dict[str, dict[str, float]]) -> None:
    theirs, ours, quantised, cast = (rows[name] for name in METHODS)
    assert (theirs["rounds"], ours["rounds"], quantised["rounds"], cast["rounds"]) == (3, 2, 1, 1)
    assert 0 < ours["orthogonal_share"] < 1
    assert 0 < theirs["orthogonal_share"] < 1
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
        name="a", cpu=[0.1], wall=[0.1], orthogonal=[0.025], sent=[0, 8], steps=2,
        model=SimpleNamespace(parameters=lambda: parameters), _state=lambda: (0, 1),
        applied=SimpleNamespace(traffic=lambda steps: Traffic(8, None)),
    )  # fmt: skip
    for idle, shares in ((0.1, (None, None)), (0.2, (None, None)), (0.0, (0.5, 0.25))):
        row = _Measured.row(made, SimpleNamespace(cpu=[idle]), 0.05, "gpt")  # type: ignore[arg-type]
        assert (row["of_limit"], row["orthogonal_share"]) == shares


def test_every_aggregator_is_measured_by_default() -> None:
    chosen = aggregators.default_methods([4, 32])
    assert chosen[:3] == [
        "torch-powersgd:rank=4",
        "powersgd:rank=4",
        "powersgd:rank=4:orthogonal=qr",
    ]
    assert set(registry.REGISTRY) <= {name.partition(":")[0] for name in chosen}
    assert PowerSGD(4).orthogonal != "qr"
    for name in chosen:
        methods.parse(name).check()


@pytest.mark.parametrize("name", ["torch-powersgd:rank=0", "torch-powersgd:rank=x",
                                  "torch-powersgd:warm=1", "magic"])  # fmt: skip
def test_mistakes_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        list(aggregators.run([name]))
    with pytest.raises(ConfigError, match="one rank sends nothing"):
        list(aggregators.run(ranks=1))
    with pytest.raises(ConfigError, match="chess"):
        list(aggregators.run(task="chess"))
    with pytest.raises(ConfigError, match="'thc:bits=2:code=2:saturate=false' on 2 ranks"):
        list(aggregators.run(["thc:bits=2:code=2:saturate=false"], quick=True))
