"""`gradwire bench adapt`: what policies save against a uniform plan of the same error.

A policy decides on error tables (`gradwire.controllers`). They come from recorded gradients, as
averages over ranks and steps of each point, or are seeded with the shapes of a model. The budget is
`alpha` times the error of the uniform plan: the reference for every layer of two dimensions and
more, and bf16 for the others.

Rows, one per task, point, reference, family, metric and policy:

    policy, family, task          the family: bits, topk, rank, or mixed (the choices of all three)
    ratio, uniform_ratio          fp32 bytes / payload bytes, of the plan and of the uniform one
    error, budget, error_metric   "l2": sum of the layers' L2 norms; "squared": of their squares
    solve_seconds                 that the policy took, without tables
    of_uniform                    ratio / uniform_ratio
    error_l2, error_squared, global_error
                                  of the plan by both metrics, and its L2 norm as one vector
    reference, at, sigma, seed    the point of a recording (else null); of seeded tables (else null)
    layers, choices               of the tables, choices in all
    bits_by_layer                 payload bits per value, of the layers that have a choice; null of
                                  methods of `adapt_whole`
    fallback                      why the uniform plan was proposed, or nothing; else null

Accordion's levels are the reference and a higher one with a bit less, or half the density or rank.
It compares norms with the point before, so the first point of a recording has no rows of it. It
keeps to no budget: `budget` is null. `accordion-lgreco` may err as much as Accordion's plan, and
chooses from half the higher level on. Rows of the family topk of recordings have the methods of
`adapt_whole`, too, which are no plans.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from gradwire.controllers import (
    Accordion,
    AccordionLGreco,
    Bayes,
    Budget,
    Density,
    Layer,
    Proposal,
    registry,
)
from gradwire.controllers.error import METRICS, check_metric, global_l2, terms, total
from gradwire.controllers.layer import plan_nbytes
from gradwire.errors import ConfigError
from gradwire_tools.bench.adapt import adapt_tables, adapt_whole, record
from gradwire_tools.bench.adapt.adapt_families import REFERENCES, Compared, compared
from gradwire_tools.bench.adapt.adapt_tables import Named
from gradwire_tools.bench.adapt.recording import Recording
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.workers import Advance, unseen
from gradwire_tools.sim import models

KINDS = (
    row_kind(
        "bench adapt",
        "policy family error_metric",
        "policy:text family:text task:text reference:text error_metric:text layers:positive "
        "choices:positive ratio:amount? uniform_ratio:amount? of_uniform:amount? error:amount? "
        "budget:amount? error_l2:amount? error_squared:amount? global_error:amount? "
        "solve_seconds:amount? fallback:text?",
        "at:count? sigma:amount? seed:count? bits_by_layer:layers?",
    ),
)


Row = dict[str, Any]

ACCORDION = (Accordion.name, AccordionLGreco.name)
POLICIES = (*registry.REGISTRY, *adapt_whole.NAMES)
FIGURES = (
    "ratio", "uniform_ratio", "of_uniform", "error", "budget", "error_l2", "error_squared",
    "global_error", "solve_seconds", "bits_by_layer",
)  # fmt: skip
QUICK = {Bayes.name: "bayes:trials=20"}
MODELS = ("resnet50", "transformer-xl", "bert-base")
SIGMAS = (0.3, 1.0, 2.0)


@dataclass(frozen=True)
class Config:
    """What is compared.

    Attributes:
        policies: names with options; None: all, and rows say so where bayes lacks optuna.
        references: see `adapt_families`.
        families: of rows; None: all that the references give.
        blocks: block sizes of bits, beside the reference's.
        models, sigmas, seed: of seeded tables.
        at: only these points of recordings.
        metrics: of errors.
        alpha: the budget over the uniform plan's error.
    """

    policies: tuple[str, ...] | None = None
    references: tuple[str, ...] = REFERENCES
    families: tuple[str, ...] | None = None
    blocks: tuple[int, ...] = ()
    models: tuple[str, ...] = MODELS
    sigmas: tuple[float, ...] = SIGMAS
    seed: int = 0
    at: tuple[int, ...] | None = None
    metrics: tuple[str, ...] = METRICS
    alpha: float = 1.0
    compared: tuple[Compared, ...] = field(init=False)

    def __post_init__(self) -> None:
        for metric in self.metrics:
            check_metric(metric)
        for model in self.models:
            models.shapes(model)
        for sigma in self.sigmas:
            if not 0 <= sigma <= 10:
                raise ConfigError(f"--sigmas {sigma}: give numbers from 0 to 10")
        if not 0 < self.alpha <= 1000:
            raise ConfigError(f"--alpha {self.alpha}: give a number above 0, up to 1000")
        if not 0 <= self.seed < 2**32:
            raise ConfigError(f"--seed {self.seed}: seeds are 0 to 2^32 - 1")
        for text in self.policies or ():
            if text in adapt_whole.NAMES:
                continue
            policy = registry.get(text)
            if policy.name in ACCORDION and text not in ACCORDION:
                raise ConfigError(f"--policies {text}: its levels are given: write {policy.name}")
        object.__setattr__(self, "compared", compared(self.references, self.families, self.blocks))


@stamped
def run(
    folders: Sequence[str | Path] = (),
    config: Config | None = None,
    quick: bool = False,
    advance: Advance = unseen,
) -> Iterator[Row]:
    """Yield the rows: of recordings, then of seeded tables.

    Args:
        folders: of `gradwire bench record`.
        quick: end within 45 seconds on two idle cores: a tiny recording, made and deleted, if no
            folder is given; one model and one sigma.
        advance: called with every table.

    Raises:
        ConfigError: a folder without a complete recording, or without a point; bayes is asked for,
            and optuna is missing.
    """
    config = config or Config()
    for text in config.policies or ():
        if text not in adapt_whole.NAMES and isinstance(registry.get(text), Bayes):
            Bayes.check()
    if quick:
        policies = config.policies or tuple(QUICK.get(name, name) for name in POLICIES)
        config = replace(
            config, models=config.models[:1], sigmas=config.sigmas[-1:], policies=policies
        )
    with record.recordings(folders, config.at, quick, advance) as recordings:
        for folder, recording in recordings:
            yield from _recorded(folder, recording, config, advance)
    for model in config.models:
        for sigma in config.sigmas:
            yield from _seeded(model, sigma, config, advance)


def _recorded(
    folder: Path, recording: Recording, config: Config, advance: Advance
) -> Iterator[Row]:
    before: dict[str, float] = {}
    for at in config.at or recording.at:
        named = adapt_tables.averages(folder, recording, at)
        common: Row = {"task": recording.task, "at": at, "sigma": None, "seed": None}
        for i, one in enumerate(config.compared):
            advance(f"{recording.task} at {at}: {one.name}", i, len(config.compared))
            layers = adapt_tables.recorded_layers(named, one.family)
            yield from _rows(layers, one, config, common)
            if isinstance(one.family, Density):
                yield from _whole_rows(named, layers, one, config, common)
            if one.around is not None and before:
                layers = adapt_tables.recorded_layers(named, one.around)
                yield from _accordion_rows(layers, one, config, common, before)
        before = {name: float(gradient.double().norm()) for name, gradient in named}


def _seeded(model: str, sigma: float, config: Config, advance: Advance) -> Iterator[Row]:
    common = {"task": model, "at": None, "sigma": sigma, "seed": config.seed}
    for i, one in enumerate(config.compared):
        advance(f"{model}, sigma {sigma:g}: {one.name}", i, len(config.compared))
        layers = adapt_tables.seeded_layers(model, sigma, one.family, config.seed)
        yield from _rows(layers, one, config, common)


def _rows(layers: Sequence[Layer], one: Compared, config: Config, common: Row) -> Iterator[Row]:
    """A row per metric and policy of the registry."""
    for metric in config.metrics:
        budget = Budget.of(layers, config.alpha, metric)
        for text in config.policies or POLICIES:
            if text in (*ACCORDION, *adapt_whole.NAMES):  # not of these layers and budgets alone
                continue
            shared = _shared(text, layers, one, metric, common)
            policy = registry.get(text)
            try:
                found = policy.propose(layers, budget)
            except ConfigError as error:
                if not isinstance(policy, Bayes):
                    raise
                yield {**shared, **dict.fromkeys(FIGURES), "fallback": str(error)}
                continue
            yield {**shared, **_of_plan(layers, found, budget.error)}


def _accordion_rows(
    layers: Sequence[Layer], one: Compared, config: Config, common: Row, before: dict[str, float]
) -> Iterator[Row]:
    """A row per metric and policy of `ACCORDION`."""
    assert one.accordion is not None
    accordion = Accordion(*one.accordion, before=before)
    for metric in config.metrics:
        for policy in (accordion, AccordionLGreco(accordion)):
            if policy.name in (config.policies or POLICIES):
                found = policy.propose(layers, Budget(0.0, metric))
                shared = _shared(policy.name, layers, one, metric, common)
                yield {**shared, **_of_plan(layers, found, None)}


def _whole_rows(
    named: Named, layers: Sequence[Layer], one: Compared, config: Config, common: Row
) -> Iterator[Row]:
    """A row per metric and method of `adapt_whole`."""
    whole = adapt_whole.Whole(named, layers)
    for metric in config.metrics:
        budget = Budget.of(layers, config.alpha, metric)
        for name in adapt_whole.NAMES:
            if name in (config.policies or POLICIES):
                found = whole.outcome(name, budget)
                of = _figures(layers, found.nbytes, found.errors, metric)
                yield {
                    **_shared(name, layers, one, metric, common), **of,
                    "budget": budget.error, "solve_seconds": found.seconds, "bits_by_layer": None,
                    "fallback": found.fallback or None,
                }  # fmt: skip


def _shared(policy: str, layers: Sequence[Layer], one: Compared, metric: str, common: Row) -> Row:
    return {
        "policy": policy, "family": one.name, **common, "reference": one.reference,
        "error_metric": metric, "layers": len(layers),
        "choices": sum(len(layer.methods) for layer in layers),
    }  # fmt: skip


def _of_plan(layers: Sequence[Layer], found: Proposal, budget: float | None) -> Row:
    chosen = list(zip(layers, found.choices, strict=True))
    errors = np.array([one.errors[choice] for one, choice in chosen])
    return {
        **_figures(layers, found.nbytes, errors, found.budget.metric),
        "budget": budget,
        "solve_seconds": found.seconds,
        "bits_by_layer": {
            one.label: round(8 * int(one.nbytes[choice]) / one.numel, 3)
            for one, choice in chosen
            if len(one.methods) > 1
        },
        "fallback": found.fallback or None,
    }


def _figures(layers: Sequence[Layer], nbytes: int, errors: np.ndarray, metric: str) -> Row:
    """Of so many bytes, with the L2 norms of layers' errors."""
    raw = 4 * sum(layer.numel for layer in layers)
    uniform = raw / plan_nbytes(layers, [layer.reference for layer in layers])
    by = {one: total(terms(errors, one)) for one in METRICS}
    return {
        "ratio": raw / nbytes,
        "uniform_ratio": uniform,
        "of_uniform": raw / nbytes / uniform,
        "error": by[metric],
        "error_l2": by["l2"],
        "error_squared": by["squared"],
        "global_error": global_l2(errors),
    }
