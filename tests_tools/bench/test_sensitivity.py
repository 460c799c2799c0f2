"""`bench adapt --sensitivity loss`: runs from a checkpoint are the training that was recorded but
for the compressed group, and both tables give plans within their budgets."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from gradwire.aggregators import Compressed, Dense, ErrorFeedback
from gradwire.codecs import TopK
from gradwire.controllers import Bits, Density, Rank
from gradwire.controllers.tables import nbytes
from gradwire.errors import ConfigError
from gradwire_tools.bench.adapt import checkpoint as of_checkpoint
from gradwire_tools.bench.adapt.checkpoint import Checkpoint
from gradwire_tools.bench.adapt.record import Recording, stepped
from gradwire_tools.bench.paper import sensitivity
from gradwire_tools.bench.paper.adapt import Config
from gradwire_tools.report import page

Row = dict[str, Any]


@pytest.fixture(scope="module")
def recording(recorded: tuple[Path, list[Row]]) -> Recording:
    return Recording.read(recorded[0])


@pytest.fixture(scope="module")
def checkpoint(recording: Recording) -> Checkpoint:
    return Checkpoint(recording, 3, recording.steps)


def test_a_run_that_compresses_nothing_is_the_recorded_training(
    recording: Recording, checkpoint: Checkpoint
) -> None:
    assert [name for name, _ in checkpoint.averages] == [name for name, _ in recording.parameters]
    for (_, mine), (_, stored) in zip(checkpoint.averages, recording.averages(3), strict=True):
        torch.testing.assert_close(mine, stored, rtol=1e-4, atol=1e-7)
    assert checkpoint.change({}) == 0
    assert 0 < abs(checkpoint.bf16_change) < 0.01


def test_only_the_group_is_compressed(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first step, against the exact mean; and residuals are kept from step to step."""
    steps: list[torch.Tensor] = []

    def kept(task: Any, model: Any, optimizer: Any, average: torch.Tensor, step: int) -> None:
        steps.append(average.clone())
        stepped(task, model, optimizer, average, step)

    monkeypatch.setattr(of_checkpoint, "stepped", kept)
    checkpoint.change({})
    exact = steps[: checkpoint.steps]
    (group,) = [
        one
        for one in sensitivity.groups(checkpoint.averages, Density(0.01), 3)
        if one.layer.name == "blocks.0"
    ]
    names = [checkpoint.averages[i][0] for i in group.places]
    assert len(names) == 4
    assert all(name.startswith("blocks.0.") for name in names)
    changed = checkpoint.change(group.methods(group.layer.reference, feedback=True))
    assert changed != 0
    sizes = [gradient.numel() for _, gradient in checkpoint.averages]
    first, second = (list(one.split(sizes)) for one in steps[checkpoint.steps :])
    for i, (mine, mean) in enumerate(zip(first, exact[0].split(sizes), strict=True)):
        if i in group.places:
            at = mine != 0  # at most two ranks' largest values, each rounded to fp16
            assert 0 < at.sum() <= 2 * max(1, int(0.01 * len(mine)))
        else:
            assert torch.equal(mine, mean)
    steps.clear()
    checkpoint.change(dict.fromkeys(group.places, Dense()))
    torch.testing.assert_close(steps[0], exact[0], rtol=1e-5, atol=1e-8)
    steps.clear()
    plain = Compressed(TopK(density=0.01))
    assert checkpoint.change(dict.fromkeys(group.places, plain)) != changed
    assert isinstance(
        group.methods(group.layer.reference, feedback=True)[group.places[0]], ErrorFeedback
    )
    assert not torch.equal(second[group.places[0]], steps[1].split(sizes)[group.places[0]])


def test_groups_have_the_errors_and_bytes_of_their_matrices(checkpoint: Checkpoint) -> None:
    for family in (Bits(), Rank(4), Density(0.01)):
        found = sensitivity.groups(checkpoint.averages, family, 4)
        assert [one.layer.name for one in found] == ["embedding", "position", "blocks.0", "output"]
        for one in found:
            assert 1 < len(one.layer.methods) <= 4
            shape = max(
                (tuple(checkpoint.averages[i][1].shape) for i in one.places),
                key=lambda shape: shape[0] * shape[1],
            )
            assert one.layer.methods[one.layer.reference] == family.reference(shape)
            sizes = nbytes(one.layer.methods, shape), nbytes(family.methods(shape), shape)
            assert sizes[0].max() == sizes[1].max()
            assert sizes[0].min() < 0.5 * sizes[1].max()
            for choice, method in enumerate(one.layer.methods):
                sent = sum(
                    method.payload_bytes(tuple(checkpoint.averages[i][1].shape), torch.float32)
                    for i in one.places
                )
                assert one.layer.nbytes[choice] == sent


def test_rows(recorded: tuple[Path, list[Row]]) -> None:
    config = Config(references=("powersgd:rank=4",), at=(3,), policies=("uniform", "lgreco"))
    rows = list(sensitivity.run([recorded[0]], config, quick=True))
    assert Counter(row["row"] for row in rows) == {
        "cell": rows[-1]["run"] is not None and sum(row["row"] == "cell" for row in rows),
        "correlation": 1,
        "plan": 4,
    }
    assert {(row["at"], row["steps"], row["ranks"]) for row in rows} == {(3, 4, 2)}
    cells = [row for row in rows if row["row"] == "cell"]
    (correlation,) = [row for row in rows if row["row"] == "correlation"]
    assert correlation["cells"] == len(cells)
    assert correlation["groups"] == len({row["group"] for row in cells}) == 4
    for name in ("pearson", "spearman", "spearman_of_choices", "spearman_of_groups"):
        assert -1 <= correlation[name] <= 1
    plans = {(row["policy"], row["sensitivity"]): row for row in rows if row["row"] == "plan"}
    for (policy, table), row in plans.items():
        uniform = plans["uniform", table]
        assert row["of_uniform"] >= 1
        if policy == "uniform":
            assert row["of_uniform"] == 1
        elif table == "error":
            assert row["error_l2"] <= uniform["error_l2"] * (1 + 1e-9)
        else:
            assert row["loss_expected"] <= uniform["loss_expected"] + 1e-12
        # What a table expects of a plan is what its cells cost, if they cost anything.
        by = {(cell["group"], cell["method"]): cell["loss_change"] for cell in cells}
        expected = sum(max(0.0, by[chosen]) for chosen in row["choices"].items())
        assert row["loss_expected"] == pytest.approx(expected)
    # One group alone, then all of them: the loss of a plan was measured, not added up.
    assert plans["uniform", "loss"]["loss_change"] == plans["uniform", "error"]["loss_change"]
    assert "Error and loss by group" in page.render(rows)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"policies": ("accordion",)}, "keeps to no budget"),
        ({"families": ("mixed",)}, "losses are of one family"),
    ],
)
def test_what_has_no_losses_is_refused(
    recorded: tuple[Path, list[Row]], given: Row, told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        next(sensitivity.run([recorded[0]], Config(**given)))
