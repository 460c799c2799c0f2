"""How many steps the runs behind summary rows had, and what a method sends in a step.

With `--patience` every run ends by itself: the number of steps differs from seed to seed.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire_tools.bench.quantities import plural
from gradwire_tools.bench.rows import Row


def per_step(row: Row, key: str) -> float | None:
    """Of the bytes under `key`, those of a step: the median over seeds, where the row has it."""
    value: float | None = row.get(f"{key}_per_step")
    if value is not None:
        return float(value)
    whole = row.get(key)
    return None if whole is None or not row["steps"] else float(whole) / row["steps"]


def length(rows: Sequence[Row]) -> str:
    """ "60 steps"; "30 to 60 steps", if the runs of these rows ended at different ones."""
    least, most = min(_ends(rows)), max(_ends(rows))
    return plural(most, "step") if least == most else f"{least:,} to {most:,} steps"


def told(rows: Sequence[Row]) -> list[str]:
    """A sentence, if the runs ended at different steps."""
    if len(_ends(rows)) < 2:
        return []
    each = ", ".join(f"{row['method']} after {length([row])}" for row in rows)
    differ = "So last losses, and bytes and times in all, are not of the same steps."
    return [f"Runs ended at different steps: {each}. {differ}"]


def _ends(rows: Sequence[Row]) -> set[int]:
    return {step for row in rows for step in row.get("steps_by_seed") or [row["steps"]]}
