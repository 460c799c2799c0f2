"""`gradwire bench adapt`: what policies save against a uniform plan of the same error.

A policy decides on error tables (`gradwire.controllers`). They come from recorded gradients, as
averages over ranks and steps of each point, or are seeded with the shapes of a model. The budget is
`alpha` times the error of the uniform plan: the reference for every layer of two dimensions and
more, and bf16 for the others. A reference such as "qsgd:bits=4:block=128" stands for its own family
and, with the others, for a mixed one in which it is the reference, so that both have one budget.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from gradwire.aggregators import Aggregator
from gradwire.controllers import (
    FAMILIES,
    Accordion,
    AccordionLGreco,
    Bayes,
    Bits,
    Budget,
    Density,
    Family,
    Layer,
    Mixture,
    Policy,
    Rank,
    registry,
)
from gradwire.controllers.error import METRICS, check_metric, global_l2, terms, total
from gradwire.controllers.layer import plan_nbytes
from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.adapt.record import Named, Recording, recordings
from gradwire_tools.bench.paper import adapt_whole
from gradwire_tools.bench.paper.adapt_tables import recorded_layers, seeded_layers
from gradwire_tools.bench.paper.adapt_whole import Allocation, Whole
from gradwire_tools.bench.progress import cells
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind
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

Methods = Mapping[str, Callable[[Budget], Allocation]]

ACCORDION = (Accordion.name, AccordionLGreco.name)
POLICIES = (*registry.REGISTRY, *adapt_whole.NAMES)
REFERENCES = ("qsgd:bits=4", "topk:density=0.01", "powersgd:rank=4")
FIGURES = (
    "ratio", "uniform_ratio", "of_uniform", "error", "budget", "error_l2", "error_squared",
    "global_error", "solve_seconds", "bits_by_layer",
)  # fmt: skip
QUICK = {Bayes.name: "bayes:trials=20"}
MODELS = ("resnet50", "transformer-xl", "bert-base")
SIGMAS = (0.3, 1.0, 2.0)
_SHAPE = (4096, 4096)  # of a matrix that every method shrinks


@dataclass(frozen=True)
class Config:
    """What is compared.

    Attributes:
        policies: names with options; None: all, and rows say so where bayes lacks optuna.
        references: of families.
        families: of rows; None: all that the references give.
        blocks: block sizes of bits, beside the reference's.
        models, sigmas, seed: of seeded tables.
        at: only these points of recordings.
        metrics: of errors.
        alpha: the budget over the uniform plan's error.

    Raises:
        ConfigError: an unknown name, a bad option or value, or no family is left.
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
        self.compared()

    def compared(self) -> list[tuple[str, Family]]:
        """The families of rows, each with its reference."""
        unknown = next((name for name in self.families or () if name not in FAMILIES), None)
        if unknown is not None:
            raise ConfigError(f"--families {unknown}: {use_one_of(unknown, FAMILIES)}")
        own = {text: registry.family(text) for text in self.references}
        for text, family in own.items():
            if isinstance(family, Bits):
                own[text] = replace(family, blocks=self.blocks)
        found = list(own.items())
        if len(own) > 1:
            for text, family in own.items():
                others = tuple(other for other in own.values() if other != family)
                found.append((text, Mixture((family, *others))))
        kept = [one for one in found if self.families is None or one[1].name in self.families]
        if not kept:
            raise ConfigError(
                f"--families {','.join(self.families or ())}: --references "
                f"{','.join(self.references)} have none"
            )
        return kept


@stamped
def run(
    folders: Sequence[str | Path] = (),
    config: Config | None = None,
    quick: bool = False,
) -> Iterator[Row]:
    """Yield the rows: of recordings, then of seeded tables.

    Args:
        folders: of `gradwire bench record`.
        quick: end within 45 seconds on two idle cores: a tiny recording, made and deleted, if no
            folder is given; one model and one sigma.

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
    with recordings(folders, config.at, quick) as found:
        points = [
            (recording, *steps)
            for recording in found
            for steps in pairwise((None, *(config.at or recording.at)))
        ]
        averages = lru_cache(maxsize=2)(Recording.averages)  # of a point and the one before
        rows = partial(_recorded, config, averages)
        name = "{0[0].task} at {0[2]}: {1[1].name}"
        yield from cells(name, rows, points, config.compared())
    name, rows = "{0}, sigma {1:g}: {2[1].name}", partial(_seeded, config)
    yield from cells(name, rows, config.models, config.sigmas, config.compared())


def _recorded(
    config: Config,
    averages: Callable[[Recording, int], Named],
    point: tuple[Recording, int | None, int],
    compared: tuple[str, Family],
) -> Iterator[Row]:
    """Of a family at a point of a recording, of which the point before is known."""
    (recording, before, at), (_, family) = point, compared
    of_table: Row = {"task": recording.task, "at": at, "sigma": None, "seed": None}
    named = averages(recording, at)
    layers = recorded_layers(named, family)
    yield from _rows(layers, _policies(config, layers), config, compared, of_table)
    if isinstance(family, Density):
        whole = Whole(named, layers)
        methods = {name: partial(whole.outcome, name) for name in adapt_whole.NAMES}
        yield from _rows(layers, methods, config, compared, of_table)
    if before is not None and not isinstance(family, Mixture):
        low, high, around = _levels(family)
        layers = recorded_layers(named, around)
        norms = {name: float(of.double().norm()) for name, of in averages(recording, before)}
        accordion = Accordion(low, high, before=norms)
        both = {
            one.name: partial(_outcome, one, layers)
            for one in (accordion, AccordionLGreco(accordion))
        }
        yield from _rows(layers, both, config, compared, of_table)


def _seeded(
    config: Config, model: str, sigma: float, compared: tuple[str, Family]
) -> Iterator[Row]:
    of_table = {"task": model, "at": None, "sigma": sigma, "seed": config.seed}
    layers = seeded_layers(model, sigma, compared[1], config.seed)
    yield from _rows(layers, _policies(config, layers), config, compared, of_table)


def _levels(family: Family) -> tuple[Aggregator, Aggregator, Family]:
    """Accordion's levels: the reference, and what sends less: a bit less, or half the density or
    rank; and choices for LGreco around both (THESIS 4.6.3: half the high level's to twice the low
    one's), whose reference is the low level."""
    high: Family
    around = family
    if isinstance(family, Bits):
        bits = max(2, family.bits - 1)
        high, around = replace(family, bits=bits), replace(family, least=max(2, bits // 2))
    elif isinstance(family, Density):
        half = family.density / 2
        high = replace(family, density=half)
        if family.per_decade is None:
            around = replace(family, least=half / 10, step=half / 10)
    else:
        assert isinstance(family, Rank), family
        rank = max(1, family.rank // 2)
        high, around = replace(family, rank=rank), replace(family, least=max(1, rank // 2))
    return family.reference(_SHAPE), high.reference(_SHAPE), around


def _policies(config: Config, layers: Sequence[Layer]) -> Methods:
    """The policies that decide on these layers and budgets alone."""
    others = (*ACCORDION, *adapt_whole.NAMES)
    return {
        text: partial(_outcome, registry.get(text), layers)
        for text in config.policies or POLICIES
        if text not in others
    }


def _rows(
    layers: Sequence[Layer],
    methods: Methods,
    config: Config,
    compared: tuple[str, Family],
    of_table: Row,
) -> Iterator[Row]:
    """A row per metric and method, of those that the user names."""
    reference, family = compared
    raw = 4 * sum(layer.numel for layer in layers)
    uniform = raw / plan_nbytes(layers, [layer.reference for layer in layers])
    choices = sum(len(layer.methods) for layer in layers)
    for metric in config.metrics:
        budget = Budget.of(layers, config.alpha, metric)
        for name in (name for name in methods if name in (config.policies or POLICIES)):
            row = {
                "policy": name, "family": family.name, **of_table, "reference": reference,
                "error_metric": metric, "layers": len(layers), "choices": choices,
            }  # fmt: skip
            try:
                found = methods[name](budget)
            except ConfigError as error:
                if not name.startswith(Bayes.name):
                    raise
                yield {**row, **dict.fromkeys(FIGURES), "fallback": str(error)}
                continue
            by = {one: total(terms(found.errors, one)) for one in METRICS}
            yield {
                **row,
                "ratio": raw / found.nbytes,
                "uniform_ratio": uniform,
                "of_uniform": raw / found.nbytes / uniform,
                "error": by[metric],
                "error_l2": by["l2"],
                "error_squared": by["squared"],
                "global_error": global_l2(found.errors),
                "budget": None if name in ACCORDION else budget.error,
                "solve_seconds": found.seconds,
                "bits_by_layer": found.bits_by_layer,
                "fallback": found.fallback or None,
            }


def _outcome(policy: Policy, layers: Sequence[Layer], budget: Budget) -> Allocation:
    found = policy.propose(layers, budget)
    chosen = list(zip(layers, found.choices, strict=True))
    bits = {
        one.label: round(8 * int(one.nbytes[choice]) / one.numel, 3)
        for one, choice in chosen
        if len(one.methods) > 1
    }
    errors = np.array([one.errors[choice] for one, choice in chosen])
    return Allocation(found.nbytes, errors, found.seconds, found.fallback, bits)
