"""The names of the baseline methods.

16 bits are the baseline for time: they cost almost no accuracy, so a codec that beats only 32 bits
gains nothing (Beyond Throughput, 2.2). 32 bits are the baseline for the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

FULL = "torch-fp32"
SIXTEEN_BIT = "torch-fp16-hook"
SIXTEEN_BITS = (SIXTEEN_BIT, "torch-bf16-hook")  # the better one is the bar for utility

Row = dict[str, Any]


@dataclass(frozen=True)
class Baselines:
    """The baselines of one kind of run.

    Attributes:
        full: for the loss.
        sixteen_bits: for time: the best one is the bar for utility.
        compared: of these, those among which the best one is the baseline of tables.
    """

    full: str
    sixteen_bits: tuple[str, ...]
    compared: tuple[str, ...]

    @staticmethod
    def of(sharded: bool) -> Baselines:
        """Those of FSDP2 or of DDP."""
        return FSDP2 if sharded else DDP

    @staticmethod
    def of_rows(rows: Sequence[Row]) -> Baselines:
        """Those of the rows of one run."""
        return Baselines.of(bool(rows) and bool(rows[0].get("sharded")))

    @staticmethod
    def among(methods: Collection[str]) -> Baselines:
        """Those of FSDP2 if one of these methods is among them, else DDP's."""
        return Baselines.of(any(name in methods for name in (FSDP2.full, *FSDP2.sixteen_bits)))

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (self.full, *self.sixteen_bits)

    def best(self, summaries: Sequence[Row], key: str) -> Row | None:
        """The 16-bit baseline of a table: the row with the least time under `key`; rows that have
        none come last."""
        found = [row for row in summaries if row["method"] in self.compared]
        return min(found, key=lambda row: (row[key] is None, row[key] or 0.0), default=None)

    def against(self, baseline: Row | None) -> str:
        """The name of a table's baseline, which may be missing."""
        return self.compared[0] if baseline is None else str(baseline["method"])


DDP = Baselines(FULL, SIXTEEN_BITS, (SIXTEEN_BIT,))
_FSDP2_SIXTEEN_BITS = ("fsdp-bf16", "fsdp-mixed")
FSDP2 = Baselines("fsdp-fp32", _FSDP2_SIXTEEN_BITS, _FSDP2_SIXTEEN_BITS)
