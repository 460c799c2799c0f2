"""Combines the buckets of a pass into scopes, by their order alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.aggregators import Aggregator


@dataclass(frozen=True)
class Share:
    """The part of a bucket that belongs to a scope.

    Attributes:
        bucket: its index within the pass.
        places: indices of its parameters.
    """

    bucket: int
    places: tuple[int, ...]


@dataclass(frozen=True)
class Split:
    """The parameters of a bucket, by the scope of their aggregators."""

    bucket: tuple[int, ...]
    model: tuple[int, ...]

    @staticmethod
    def of(aggregators: Sequence[Aggregator]) -> Split:
        whole = [aggregator.scope == "model" for aggregator in aggregators]
        by_scope = [
            tuple(place for place, found in enumerate(whole) if found is wanted)
            for wanted in (False, True)
        ]
        return Split(*by_scope)


class Coalescing:
    """The buckets of one pass.

    Args:
        coalesce_bytes: buckets are combined until they hold at least as many bytes, or the pass
            ends.
    """

    def __init__(self, coalesce_bytes: int) -> None:
        self._coalesce_bytes = coalesce_bytes
        self._count = 0
        self._held: list[Share] = []
        self._held_bytes = 0
        self._model: list[Share] = []

    def add(self, split: Split, nbytes: int, is_last: bool) -> list[list[Share]]:
        """Add the next bucket; returns the scopes that are now complete, in order."""
        number, self._count = self._count, self._count + 1
        if split.bucket:
            self._held.append(Share(number, split.bucket))
            self._held_bytes += nbytes
        if split.model:
            self._model.append(Share(number, split.model))
        due = []
        if self._held and (is_last or self._held_bytes >= self._coalesce_bytes):
            due.append(self._held)
            self._held, self._held_bytes = [], 0
        if self._model and is_last:
            due.append(self._model)
            self._model = []
        return due
