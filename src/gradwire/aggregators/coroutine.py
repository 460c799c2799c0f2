"""The coroutine of one aggregator over the parameters of a scope, with checks of what it yields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradwire.aggregators.contract import aggregator_error, find_fault, kind, start_coroutine
from gradwire.aggregators.error_feedback import rounded
from gradwire.aggregators.protocol import Aggregator, Averages, Context, Steps
from gradwire.collectives import Request
from gradwire.errors import ConfigError


class Coroutine:
    """One aggregator's coroutine over its parameters of a scope.

    Args:
        aggregator: the aggregator.
        contexts: of the parameters, whose gradients are replaced by the averages.

    Attributes:
        requests: the collectives that it waits for.
        results: their results on this rank, in the same order.
        sent: this rank's contributions, if the aggregator returned them.
    """

    def __init__(self, aggregator: Aggregator, contexts: Sequence[Context]) -> None:
        self.aggregator = aggregator
        self.contexts = contexts
        self.requests: Sequence[Request] = ()
        self.results: list[torch.Tensor] = []
        self.sent: Sequence[torch.Tensor] | None = None
        self._steps: Steps | None = None
        self._members = {context.member for context in contexts}
        self._single = False  # whether it has yielded one collective, not a list

    def resume(self, number: int) -> bool:
        """Run to the next yield. True if it yielded requests, for round `number`; False if it has
        ended, and the gradients are replaced by the averages.

        Raises:
            ConfigError: it yields or returns something invalid.
            Exception: the aggregator's own.
        """
        results, self.results = self.results, []
        try:
            if self._steps is None:
                self._steps = start_coroutine(self.aggregator, self.contexts)
                yielded = next(self._steps)
            else:
                yielded = self._steps.send(results[0] if self._single else results)
        except StopIteration as end:
            self.requests = ()
            self._take(end.value, number)
            return False
        self._single = isinstance(yielded, Request)
        self.requests = [yielded] if isinstance(yielded, Request) else yielded
        if not isinstance(self.requests, (list, tuple)):
            raise self._error(number, f"yielded {kind(yielded)}, not a collective or a list")
        return True

    def context_of(self, request: Any, number: int) -> Context:
        """The context of the parameter that a request belongs to.

        Raises:
            ConfigError: it is not a request, its `of` is not a context of this scope, or its values
                are not a contiguous 1-D tensor.
        """
        if not isinstance(request, Request):
            raise self._error(number, f"yielded a list with {kind(request)}")
        context, values = request.of, request.values
        if context is None:
            context = self.contexts[0]
        elif not isinstance(context, Context):
            raise self._error(number, f"yielded a collective of {kind(context)}, not a context")
        elif context.member not in self._members:
            what = "yielded a collective of a parameter that is not in its scope"
            raise self._error(number, what, context.name)
        if values is context.gradient:
            return context
        if not isinstance(values, torch.Tensor):
            raise self._error(number, f"yielded {kind(values)} as values", context.name)
        if values.dim() != 1 or not values.is_contiguous():
            shape = f"shape {tuple(values.shape)}, strides {values.stride()}"
            what = f"yielded values of {shape}: use contiguous().view(-1)"
            raise self._error(number, what, context.name)
        return context

    def _take(self, ended: object, number: int) -> None:
        """Copy the returned averages into the gradients."""
        found = find_fault(ended, self.contexts)
        if found is not None:
            raise self._error(number, *found)
        averages: Any = ended
        if isinstance(ended, Averages):
            averages, self.sent = ended.averages, ended.sent
        for gradient, average in zip((c.gradient for c in self.contexts), averages, strict=True):
            if average.data_ptr() != gradient.data_ptr():
                gradient.copy_(rounded(average.reshape(-1), None, gradient.dtype))

    def _error(self, number: int, what: str, name: str | None = None) -> ConfigError:
        return aggregator_error(
            self.aggregator, name or self.contexts[0].name, number, f"it {what}"
        )


class Asking(NamedTuple):
    """A request, and who asks for it."""

    coroutine: Coroutine
    context: Context
    request: Request


def ask(active: Sequence[Coroutine], number: int) -> tuple[list[Coroutine], list[Asking]]:
    """Resume coroutines: (those that have not ended, their requests for round `number`).

    Raises:
        ConfigError: an aggregator breaks the contract.
        Exception: an aggregator's own.
    """
    going, found = [], []
    for coroutine in active:
        if coroutine.resume(number):
            going.append(coroutine)
        for request in coroutine.requests:
            found.append(Asking(coroutine, coroutine.context_of(request, number), request))
    return going, found
