"""One aggregator at work on the parameters of a scope: its coroutine, and what it may not do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gradwire.aggregators.contract import begun, fault, kind, wrong
from gradwire.aggregators.protocol import Aggregator, Averages, Context, Steps
from gradwire.collectives import Request
from gradwire.errors import ConfigError


class Coroutine:
    """A scope's parameters that one aggregator serves.

    Args:
        aggregator: whose.
        contexts: of the parameters.
        gradients: theirs, replaced by the averages.

    Attributes:
        asked: the collectives that it waits for.
        results: what these leave on this rank, in the same order.
        sent: what this rank contributed, where the aggregator says so at its end.
    """

    def __init__(
        self,
        aggregator: Aggregator,
        contexts: Sequence[Context],
        gradients: Sequence[torch.Tensor],
    ) -> None:
        self.aggregator = aggregator
        self.contexts = contexts
        self.gradients = gradients
        self.asked: Sequence[Request] = ()
        self.results: list[torch.Tensor] = []
        self.sent: Sequence[torch.Tensor] | None = None
        self._steps: Steps | None = None
        self._members = {context.member for context in contexts}
        self._single = False  # whether it has yielded one collective, and no list

    def resume(self, number: int) -> bool:
        """Whether it asks for more, in round `number`; else the gradients are averages.

        Raises:
            ConfigError: it yields or returns what no aggregator may.
            Exception: what it raises.
        """
        results, self.results = self.results, []
        try:
            if self._steps is None:
                self._steps = begun(self.aggregator, self.contexts)
                yielded = next(self._steps)
            else:
                yielded = self._steps.send(results[0] if self._single else results)
        except StopIteration as end:
            self.asked = ()
            self._take(end.value, number)
            return False
        self._single = isinstance(yielded, Request)
        self.asked = [yielded] if isinstance(yielded, Request) else yielded
        if not isinstance(self.asked, (list, tuple)):
            raise self._wrong(number, f"yielded {kind(yielded)}, not a collective or a list")
        return True

    def context_of(self, request: Any, number: int) -> Context:
        """The parameter that a request belongs to.

        Raises:
            ConfigError: it is none; or it has no parameter, or none of this scope; or its values
                are no tensor, or not 1-D.
        """
        if not isinstance(request, Request):
            raise self._wrong(number, f"yielded a list with {kind(request)}")
        context, values = request.of, request.values
        if context is None:
            context = self.contexts[0]
        elif not isinstance(context, Context):
            raise self._wrong(number, f"yielded a collective of {kind(context)}, not a context")
        elif context.member not in self._members:
            what = "yielded a collective of a parameter that is not in its scope"
            raise self._wrong(number, what, context.name)
        if values is context.gradient:
            return context
        if not isinstance(values, torch.Tensor):
            raise self._wrong(number, f"yielded {kind(values)} as values", context.name)
        if values.dim() != 1 or not values.is_contiguous():
            shape = f"shape {tuple(values.shape)}, strides {values.stride()}"
            what = f"yielded values of {shape}: use contiguous().view(-1)"
            raise self._wrong(number, what, context.name)
        return context

    def _take(self, ended: object, number: int) -> None:
        """The averages that it returned, into the gradients."""
        found = fault(ended, self.contexts)
        if found is not None:
            raise self._wrong(number, *found)
        averages: Any = ended
        if isinstance(ended, Averages):
            averages, self.sent = ended.averages, ended.sent
        for gradient, average in zip(self.gradients, averages, strict=True):
            if average.data_ptr() != gradient.data_ptr():
                gradient.copy_(average.reshape(-1))

    def _wrong(self, number: int, what: str, name: str | None = None) -> ConfigError:
        return wrong(self.aggregator, name or self.contexts[0].name, number, f"it {what}")
