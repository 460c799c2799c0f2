"""Checks of the aggregator contract: `aggregate` is a generator that returns the averages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from gradwire.aggregators.protocol import Aggregator, Averages, Context, Steps
from gradwire.errors import ConfigError


def start_coroutine(aggregator: Aggregator, contexts: Sequence[Context]) -> Steps:
    """The coroutine of an aggregator.

    Raises:
        ConfigError: `aggregate` is not a generator.
    """
    steps: Any = aggregator.aggregate(contexts)
    if isinstance(steps, Generator):
        return steps
    what = f"aggregate returned {kind(steps)}: it must be a generator, with a yield"
    raise aggregator_error(aggregator, contexts[0].name, 0, what)


def find_fault(ended: object, contexts: Sequence[Context]) -> tuple[str, str | None] | None:
    """(what is wrong with an aggregator's return value, the name of the parameter or None if it
    concerns all); None if nothing is wrong."""
    if not isinstance(ended, Averages):
        return _find_fault(ended, contexts, "average")
    return _find_fault(ended.averages, contexts, "average") or _find_fault(
        ended.sent, contexts, "sent part"
    )


def _find_fault(
    values: Any, contexts: Sequence[Context], what: str
) -> tuple[str, str | None] | None:
    count = len(contexts)
    if not isinstance(values, (list, tuple)):
        return f"returned {kind(values)}, not a list of {count} {what}s", None
    if len(values) != count:
        return f"returned {len(values)} {what}s for {count} gradients", None
    for context, value in zip(contexts, values, strict=True):
        if not isinstance(value, torch.Tensor):
            return f"returned {kind(value)} as {what}", context.name
        numel, dtype = context.gradient.numel(), context.gradient.dtype
        if what == "sent part" and context.reduction is not None:
            numel = sum(context.reduction.lengths) or numel
        if value.numel() != numel or not value.is_floating_point():
            found = f"{what} of shape {tuple(value.shape)}, {value.dtype}"
            return f"returned {found}, for {numel} values of {dtype}", context.name
    return None


def aggregator_error(aggregator: Aggregator, name: str, number: int, what: str) -> ConfigError:
    """The error of an aggregator that breaks the contract in round `number`."""
    return ConfigError(f"{aggregator}, parameter {name}, round {number}: {what}")


def kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
