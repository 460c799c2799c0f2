"""What an aggregator must give: a generator that ends with the averages."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch

from gradwire.aggregators.protocol import Aggregator, Averages, Context, Steps
from gradwire.errors import ConfigError


def begun(aggregator: Aggregator, contexts: Sequence[Context]) -> Steps:
    """The coroutine of an aggregator.

    Raises:
        ConfigError: `aggregate` is no generator.
    """
    steps: Any = aggregator.aggregate(contexts)
    if isinstance(steps, Generator):
        return steps
    what = f"aggregate returned {kind(steps)}: it must be a generator, with a yield"
    raise wrong(aggregator, contexts[0].name, 0, what)


def fault(ended: object, contexts: Sequence[Context]) -> tuple[str, str | None] | None:
    """What is wrong with what an aggregator returned, and the parameter, where it is of one."""
    if not isinstance(ended, Averages):
        return _fault(ended, contexts, "average")
    return _fault(ended.averages, contexts, "average") or _fault(ended.sent, contexts, "sent part")


def _fault(values: Any, contexts: Sequence[Context], what: str) -> tuple[str, str | None] | None:
    count = len(contexts)
    if not isinstance(values, (list, tuple)):
        return f"returned {kind(values)}, not a list of {count} {what}s", None
    if len(values) != count:
        return f"returned {len(values)} {what}s of {count} gradients", None
    for context, value in zip(contexts, values, strict=True):
        if not isinstance(value, torch.Tensor):
            return f"returned {kind(value)} as {what}", context.name
        numel, dtype = context.gradient.numel(), context.gradient.dtype
        if value.numel() != numel or not value.is_floating_point():
            found = f"{what} of shape {tuple(value.shape)}, {value.dtype}"
            return f"returned {found}, for {numel} values of {dtype}", context.name
    return None


def wrong(aggregator: Aggregator, name: str, number: int, what: str) -> ConfigError:
    """The error of an aggregator that does what it may not, in round `number`."""
    return ConfigError(f"{aggregator}, parameter {name}, round {number}: {what}")


def kind(thing: object) -> str:
    return "None" if thing is None else f"a {type(thing).__name__}"
