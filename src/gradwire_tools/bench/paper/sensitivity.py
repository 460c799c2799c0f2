"""`gradwire bench adapt --sensitivity loss`: what compressing a group of layers costs in loss,
beside the error that it makes (THESIS 4.4, 4.6.4, B.6).

From a checkpoint of uncompressed training, short runs on the same batches. In each run one group of
layers is compressed, by one choice, and all else is averaged in fp32. `loss_change` is the
validation loss at the end of a run, less that of the run in which nothing is compressed. The error
is the L2 norm of what the choice loses of the averaged gradient: its mean over the ranks and the
steps of that run.

So there are two tables of groups and choices, with equal bytes. Policies decide on either, within
`alpha` times what the uniform plan loses by that table, and their plans are run from the checkpoint
as well. A choice that lowers the loss counts as one that does not change it.

A group is a block of the model: the matrices whose names agree up to the first number, as
"blocks.0", or, without a number, in all but the last part. A choice is a method of the group's
largest matrix; at most `CHOICES` are taken, whose bytes are nearest to equal ratios. topk runs with
error feedback, PowerSGD has its own.

Rows, of each task, point and reference:

    row: cell         a group and a choice: nbytes per rank and step, error, loss_change
    row: correlation  of error and loss_change, over all cells: pearson, spearman; spearman over
                      the choices of a group (mean of the groups), over the groups at the reference;
                      bf16_loss_change: of a run with all matrices in bf16, which tells the noise
    row: plan         a policy's plan by one of the tables (`sensitivity`): ratio, of_uniform,
                      error_l2, loss_change as measured, loss_expected as the table of losses has it
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.aggregators import Aggregator, Dense, ErrorFeedback
from gradwire.controllers import Budget, Density, Family, Layer, LGreco, Mixture, Uniform, registry
from gradwire.controllers.layer import plan_error, plan_nbytes
from gradwire.controllers.losses import losses, norms
from gradwire.controllers.tables import nbytes
from gradwire.errors import ConfigError
from gradwire_tools.bench.adapt.checkpoint import Checkpoint, Methods
from gradwire_tools.bench.adapt.record import Named, recordings
from gradwire_tools.bench.paper.adapt import ACCORDION, Config
from gradwire_tools.bench.progress import cells, progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind

STEPS = 50  # of a run, as the thesis has them
CHOICES = 7  # of a group
QUICK = (4, 3)  # the same of a quick run
POLICIES = (Uniform.name, LGreco.name)
TABLES = ("error", "loss")

_OF_TABLE = "task:text at:count steps:positive ranks:positive family:text reference:text"
_KIND = partial(row_kind, "bench adapt --sensitivity")
KINDS = (
    _KIND(
        "loss_change group",
        f"{_OF_TABLE} group:text method:text numel:positive nbytes:count error:amount "
        "loss_change:number",
        row="cell",
    ),
    _KIND(
        "pearson spearman",
        f"{_OF_TABLE} groups:positive cells:positive pearson:number? spearman:number? "
        "spearman_of_choices:number? spearman_of_groups:number? loss:number "
        "bf16_loss_change:number",
        row="correlation",
    ),
    _KIND(
        "loss_change policy",
        f"{_OF_TABLE} policy:text sensitivity:text ratio:amount of_uniform:amount "
        "error_l2:amount loss_change:number loss_expected:number choices:options fallback:text?",
        row="plan",
    ),
)


@stamped
def run(
    folders: Sequence[str | Path] = (),
    config: Config | None = None,
    quick: bool = False,
    steps: int | None = None,
) -> Iterator[Row]:
    """Yield the rows of recordings' models, at the recordings' points.

    Args:
        folders: of `gradwire bench record`, which name the task, its options, ranks and seed.
        config: of `bench adapt`, whose metrics, models and sigmas say nothing here.
        quick: end within 45 seconds on two idle cores: a tiny recording, made and deleted, if no
            folder is given.
        steps: of a run; 50, or 4 if `quick`.

    Raises:
        ConfigError: no folder, or one without a complete recording or a point; one of one rank;
            only mixed families are asked for; a policy that does not decide on a table alone.
    """
    config = config or Config()
    each, choices = QUICK if quick else (STEPS, CHOICES)
    steps = steps if steps is not None else each
    if steps < 1:
        raise ConfigError(f"--run-steps {steps}: run 1 step or more from a checkpoint")
    if not folders and not quick:
        raise ConfigError("--sensitivity loss trains what a recording did: give its folder")
    for text in config.policies or ():
        if registry.get(text).name in ACCORDION:
            raise ConfigError(f"--policies {text}: it keeps to no budget: leave it out")
    compared = [one for one in config.compared() if not isinstance(one[1], Mixture)]
    if not compared:
        raise ConfigError("--families mixed: losses are of one family: use bits, topk or rank")
    with recordings(folders, config.at, quick) as found:
        for recording in found:
            if recording.ranks < 2:
                raise ConfigError(f"{recording.folder} has 1 rank, which sends nothing: record 2")
        points = [(one, at) for one in found for at in config.at or one.at[-1 if quick else 0 :]]
        checkpoint = lru_cache(maxsize=1)(partial(Checkpoint, steps=steps))
        yield from cells(
            "{0[0].task} at {0[1]}: {1[1].name}",
            lambda point, of: _rows(checkpoint(*point), config, choices, *of),
            points,
            compared,
        )


@dataclass(frozen=True, eq=False)
class LayerGroup:
    """Layers that are compressed together.

    Attributes:
        places: of its matrices among the model's parameters.
        layer: its choices, with the L2 norms of their errors.
    """

    places: tuple[int, ...]
    layer: Layer

    @classmethod
    def of(
        cls, name: str, places: Sequence[int], averages: Named, family: Family, most: int
    ) -> LayerGroup:
        """The group of these parameters with at most so many choices, from the averaged gradients
        of all."""
        mine = [averages[i][1] for i in places]
        shape = tuple(max(mine, key=torch.Tensor.numel).shape)
        reference = family.reference(shape)
        methods = _spread(family.methods(shape), reference, shape, most)
        errors = np.array([losses(gradient, methods) for gradient in mine])
        sent = np.array([nbytes(methods, tuple(gradient.shape)) for gradient in mine])
        both = np.array([norms(gradient) for gradient in mine])
        return cls(
            tuple(places),
            Layer(
                name,
                sum(gradient.numel() for gradient in mine),
                tuple(methods),
                sent.sum(0),
                np.sqrt((errors**2).sum(0)),
                methods.index(reference),
                *np.sqrt((both**2).sum(0)).tolist(),
            ),
        )

    def methods(self, choice: int, feedback: bool) -> Methods:
        """By place; nothing, if the choice is to send the group as it is."""
        method = self.layer.methods[choice]
        if method == Dense():
            return {}
        return dict.fromkeys(self.places, ErrorFeedback(method) if feedback else method)


def groups(averages: Named, family: Family, most: int) -> list[LayerGroup]:
    """A model's groups, in its order, with at most so many choices each; vectors are in none."""
    found: dict[str, list[int]] = {}
    for i, (name, gradient) in enumerate(averages):
        if gradient.dim() > 1:
            numbered = re.match(r"(.*?\.)?\d+(?=\.|$)", name)
            label = numbered[0] if numbered else name.rpartition(".")[0] or name
            found.setdefault(label, []).append(i)
    return [LayerGroup.of(label, places, averages, family, most) for label, places in found.items()]


def _spread(
    methods: Sequence[Aggregator], reference: Aggregator, shape: tuple[int, ...], most: int
) -> list[Aggregator]:
    """At most so many of the methods, the reference among them, by bytes in equal ratios."""
    if len(methods) <= most:
        return list(methods)
    sizes, at = np.log(nbytes(methods, shape)), methods.index(reference)
    wanted = np.linspace(sizes.min(), sizes.max(), most)
    kept = {int(np.abs(sizes - one).argmin()) for one in wanted}
    nearest = min(kept, key=lambda i: float(abs(sizes[i] - sizes[at])))
    return [methods[i] for i in sorted(kept - {nearest} | {at})]


def _rows(
    checkpoint: Checkpoint, config: Config, most: int, reference: str, family: Family
) -> Iterator[Row]:
    """Of one family, at one checkpoint."""
    feedback = isinstance(family, Density)
    of_table: Row = {
        "task": checkpoint.recording.task, "at": checkpoint.at, "steps": checkpoint.steps,
        "ranks": checkpoint.recording.ranks, "family": family.name, "reference": reference,
    }  # fmt: skip
    found = groups(checkpoint.averages, family, most)
    changes = [np.zeros(len(group.layer.methods)) for group in found]
    total, done = sum(map(len, changes)), 0
    for group, into in zip(found, changes, strict=True):
        for choice, method in enumerate(group.layer.methods):
            progress(f"{group.layer.name}: {method}", done, total)
            methods = group.methods(choice, feedback)
            into[choice] = checkpoint.change(methods) if methods else 0.0
            done += 1
            yield {
                "row": "cell",
                **of_table,
                "group": group.layer.name,
                "method": str(method),
                "numel": group.layer.numel,
                "nbytes": int(group.layer.nbytes[choice]),
                "error": float(group.layer.errors[choice]),
                "loss_change": float(into[choice]),
            }
    yield {"row": "correlation", **of_table, **_correlations(checkpoint, found, changes)}
    yield from _plans(checkpoint, config, found, changes, of_table, feedback)


def _correlations(
    checkpoint: Checkpoint, found: Sequence[LayerGroup], changes: Sequence[np.ndarray]
) -> Row:
    errors = [group.layer.errors for group in found]
    flat = np.concatenate(errors), np.concatenate(list(changes))
    at = [group.layer.reference for group in found]
    of_groups = (
        np.array([one[c] for one, c in zip(table, at, strict=True)]) for table in (errors, changes)
    )
    within = [_spearman(*both) for both in zip(errors, changes, strict=True)]
    known = [one for one in within if one is not None]
    return {
        "groups": len(found),
        "cells": len(flat[0]),
        "pearson": _pearson(*flat),
        "spearman": _spearman(*flat),
        "spearman_of_choices": sum(known) / len(known) if known else None,
        "spearman_of_groups": _spearman(*of_groups),
        "loss": checkpoint.loss,
        "bf16_loss_change": checkpoint.bf16_change,
    }


def _plans(
    checkpoint: Checkpoint,
    config: Config,
    found: Sequence[LayerGroup],
    changes: Sequence[np.ndarray],
    of_table: Row,
    feedback: bool,
) -> Iterator[Row]:
    """A row per policy and table."""
    by_error = [group.layer for group in found]
    by_loss = [
        replace(layer, errors=np.maximum(change, 0.0))
        for layer, change in zip(by_error, changes, strict=True)
    ]
    raw = 4 * sum(layer.numel for layer in by_error)
    uniform = plan_nbytes(by_error, [layer.reference for layer in by_error])
    measured: dict[tuple[int, ...], float] = {}
    for text in config.policies or POLICIES:
        for name, layers in zip(TABLES, (by_error, by_loss), strict=True):
            plan = registry.get(text).propose(layers, Budget.of(layers, config.alpha))
            if plan.choices not in measured:
                progress(f"{text} by {name}", 0, 1)
                methods: dict[int, Aggregator] = {}
                for group, choice in zip(found, plan.choices, strict=True):
                    methods.update(group.methods(choice, feedback))
                measured[plan.choices] = checkpoint.change(methods)
            chosen: dict[str, Any] = {
                layer.name: str(layer.methods[choice])
                for layer, choice in zip(layers, plan.choices, strict=True)
            }
            yield {
                "row": "plan",
                **of_table,
                "policy": text,
                "sensitivity": name,
                "ratio": raw / plan.nbytes,
                "of_uniform": uniform / plan.nbytes,
                "error_l2": plan_error(by_error, plan.choices, "l2"),
                "loss_change": measured[plan.choices],
                "loss_expected": plan_error(by_loss, plan.choices, "l2"),
                "choices": chosen,
                "fallback": plan.fallback or None,
            }


def _pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """None where a side does not vary."""
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 1 and np.ptp(x) and np.ptp(y) else None


def _spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    ranks = (np.argsort(np.argsort(of, kind="stable"), kind="stable") for of in (x, y))
    return _pearson(*ranks) if np.ptp(x) and np.ptp(y) else None
