"""Rows of files, sorted by kind and checked, so that the sections may rely on their keys."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError

Row = dict[str, Any]

NUMBER, TEXT = "a number", "a text"
MAYBE = " or null"


@dataclass(frozen=True)
class RowKind:
    """A kind of rows.

    Attributes:
        marks: the keys by which a row is known to be of this kind.
        values: marks that have one given value.
        keys: keys that every row has, and what they hold.
    """

    name: str
    marks: frozenset[str]
    keys: Mapping[str, str]
    values: Mapping[str, str]

    def has(self, row: Row) -> bool:
        return self.marks <= row.keys() and all(row[k] == v for k, v in self.values.items())


def _kind(
    name: str, marks: str, numbers: str, maybe: str = "", texts: str = "", **values: str
) -> RowKind:
    keys = dict.fromkeys(texts.split(), TEXT)
    keys |= dict.fromkeys(numbers.split(), NUMBER)
    keys |= dict.fromkeys(maybe.split(), NUMBER + MAYBE)
    return RowKind(name, frozenset([*marks.split(), *values]), keys, values)


KINDS = (
    _kind(
        "bench train", "task method", "ranks seed step seconds", "loss wire_bytes",
        "task net method", row="evaluation",
    ),
    _kind(
        "bench train", "task method", "ranks steps",
        "final_loss target time_to_target step_seconds ideal_step_seconds wire_bytes",
        "task net method", row="summary",
    ),
    _kind(
        "sim --validate", "measured_seconds simulated_seconds",
        "ranks numel measured_seconds simulated_seconds error spread", "", "net method algorithm",
    ),
    _kind(
        "sim", "codec backward_seconds buckets",
        "ranks seconds wire_bytes messages", "limit_seconds", "codec algorithm model net",
    ),
    _kind(
        "bench collectives", "method algorithm nmse limit_seconds",
        "ranks numel seconds wire_bytes", "limit_seconds of_limit nmse", "method algorithm net",
    ),
    _kind(
        "bench kernels", "codec op gbps", "numel threads seconds gbps of_limit", "",
        "codec op target",
    ),
    _kind("bench profile", "method part seconds", "seconds ranks numel", "", "method part net"),
    _kind("bench transports", "transport latency_us", "bytes latency_us gbps", "", "transport"),
)  # fmt: skip


def read(file: Path) -> list[Row]:
    """The rows of one file.

    Raises:
        ConfigError: it cannot be read, holds no rows, or a line is not a JSON object; the message
            names file and line.
    """
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read rows from {file}: {error}") from error
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is not JSON: {error}") from error
        if not isinstance(row, dict):
            kind = type(row).__name__
            raise ConfigError(f"{file}, line {number} is not a JSON object but {kind}")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{file} holds no rows")
    return rows


def sort(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by the name of their kind, each in one; those of no kind are under "".

    Raises:
        ConfigError: a row lacks a key of its kind, or holds something else under it.
    """
    found: dict[str, list[Row]] = {name: [] for name in [*(kind.name for kind in KINDS), ""]}
    for row in rows:
        kind = next((kind for kind in KINDS if kind.has(row)), None)
        if kind is not None:
            _check(row, kind)
        found[kind.name if kind else ""].append(row)
    return found


def _check(row: Row, kind: RowKind) -> None:
    for key, expected in kind.keys.items():
        value = row.get(key)
        good = {
            NUMBER: _is_number(value),
            NUMBER + MAYBE: value is None or _is_number(value),
            TEXT: isinstance(value, str),
        }[expected]
        if not good:
            found = f"{key!r} is {json.dumps(value)[:60]}" if key in row else f"no {key!r}"
            raise ConfigError(
                f"a row of `gradwire {kind.name}` has {found}, where {expected} is needed: "
                f"{json.dumps(row)[:160]}"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of keys (as text where they cannot be hashed), in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        values = (row.get(key) for key in keys)
        place = tuple(v if isinstance(v, str | int | float) else json.dumps(v) for v in values)
        found.setdefault(place, []).append(row)
    return found
