"""Layouts: which parameters stand where in tensors that FSDP reduces."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from gradwire.lang import Codec

log = logging.getLogger("gradwire")


@dataclass(frozen=True)
class Part:
    """A parameter's place in what FSDP scatters, where the parts of a rank stand side by side.

    Attributes:
        name: of the parameter.
        codec: Identity leaves it uncompressed.
        shard: how many values of it each rank gets.
    """

    name: str
    codec: Codec
    shard: int


# What is done with a tensor ("all_reduce", "reduce_scatter"), and its number of values.
Key = tuple[str, int]


class Layouts:
    """The parts of tensors, by what is done with them and their number of values.

    Modules of equal layers share a layout, whose parts bear the first one's names. Modules that
    only happen to have as many values cannot be told apart: their tensors remain blobs.
    """

    def __init__(self) -> None:
        self._known: dict[Key, tuple[Part, ...]] = {}
        self._unclear: set[Key] = set()
        self._missed: set[int] = set()

    def add(self, kind: str, parts: tuple[Part, ...], shards: int = 1) -> None:
        """A tensor of `shards` times these parts may come, to be reduced as `kind` says."""
        parts = tuple(part for part in parts if part.shard)
        self._put((kind, shards * sum(part.shard for part in parts)), parts)

    def merge(self, others: Layouts) -> None:
        """Learn what `others` know."""
        for key, parts in others._known.items():
            self._put(key, parts)
        self._unclear |= others._unclear

    def _put(self, key: Key, parts: tuple[Part, ...]) -> None:
        before = self._known.setdefault(key, parts)
        same = [(p.codec, p.shard) for p in before] == [(p.codec, p.shard) for p in parts]
        if not same and key not in self._unclear:
            self._unclear.add(key)
            log.warning(
                "gradwire: two registered modules scatter %d values each, %s and %s first, and "
                "cannot be told apart: both are compressed as blobs",
                key[1],
                before[0].name,
                parts[0].name,
            )

    def get(self, kind: str, numel: int) -> tuple[Part, ...] | None:
        key = (kind, numel)
        return None if key in self._unclear else self._known.get(key)

    def miss(self, numel: int) -> None:
        """Say, once, that a tensor which FSDP scatters is none of those known."""
        unclear = ("reduce_scatter", numel) in self._unclear
        if self._known and not unclear and numel not in self._missed:
            self._missed.add(numel)
            log.warning(
                "gradwire: %d values are scattered as a blob: no registered module has so many. "
                "Were parameters without gradients, or frozen or added since?",
                numel,
            )
