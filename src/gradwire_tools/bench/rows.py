"""Rows of benchmarks: by which keys each kind is known, and what stands under every key.

A module that writes rows has their `KINDS`. A row is checked once, when it is read from a file, so
that what draws it meets no other values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gradwire.errors import ConfigError
from gradwire_tools.lab import Network

Row = dict[str, Any]

_LEAST, _MOST = 1e-100, 1e100  # of numbers other than zero: their ratios stay finite
_LONG = 2**63


@dataclass(frozen=True)
class KeyValue:
    """What may stand under a key: in words, and as a test."""

    words: str
    allows: Callable[[Any], bool]

    def or_null(self) -> KeyValue:
        return KeyValue(f"{self.words} or null", lambda value: value is None or self.allows(value))


@dataclass(frozen=True)
class RowKind:
    """A kind of rows.

    Attributes:
        name: of the command that writes them.
        marks: the keys by which a row is known to be of this kind.
        values: marks that have one given value.
        keys: keys that every row has, and what they hold.
        more: keys that a row may have.
    """

    name: str
    marks: frozenset[str]
    values: Mapping[str, str]
    keys: Mapping[str, KeyValue]
    more: Mapping[str, KeyValue]

    def has(self, row: Row) -> bool:
        return self.marks <= row.keys() and all(row[k] == v for k, v in self.values.items())


def row_kind(name: str, marks: str, keys: str, more: str = "", **values: str) -> RowKind:
    """Of keys as "seconds:amount loss:number?", where `?` allows null."""
    known = frozenset([*marks.split(), *values])
    return RowKind(name, known, values, _values(keys), _values(more))


def check(row: Row, kind: RowKind | None, where: str) -> None:
    """Raise ConfigError, which begins with `where` and names the key, if the row is not as its kind
    is."""
    if not row:
        raise ConfigError(f"{where}: the row has no keys")
    needed = dict(kind.keys) if kind else {}
    allowed = {**needed, **(kind.more if kind else {}), "run": _RUN}
    whose = f", a row of `gradwire {kind.name}`" if kind else ""
    for key, value in allowed.items():
        if key not in row and key not in needed:
            continue
        if key not in row or not value.allows(row[key]):
            found = f"{key!r} is {json.dumps(row[key])[:60]}" if key in row else f"no {key!r}"
            raise ConfigError(f"{where}{whose}: {found}, where {value.words} is needed")


def finite(value: Any) -> Any:
    """What JSON can hold of a row: null in place of numbers that it lacks."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return value


def _values(told: str) -> dict[str, KeyValue]:
    found = {}
    for one in told.split():
        key, _, name = one.partition(":")
        value = _VALUES[name.rstrip("?")]
        found[key] = value.or_null() if name.endswith("?") else value
    return found


def _number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value == 0 or _LEAST <= abs(value) <= _MOST


def _amount(value: Any) -> bool:
    return _number(value) and bool(value >= 0)


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _LONG


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _list(of: Callable[[Any], bool], null: bool = False) -> Callable[[Any], bool]:
    return lambda value: (
        isinstance(value, list) and all((null and one is None) or of(one) for one in value)
    )


def _object(of: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(of, value.values()))


def _tried(value: Any) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("used"), bool):
        return False
    return _text(value.get("setting")) and _amount(value.get("seconds"))


def _network(value: Any) -> bool:
    try:
        return isinstance(value, str) and Network.parse(value, emulated=False).shaped
    except ConfigError:
        return False


def _run(value: Any) -> bool:
    known = _object(lambda one: one is None or _text(one) or _number(one))(value)
    return value is None or (known and _amount(value.get("load") or 0))


_VALUES = {
    "text": KeyValue("a text", _text),
    "number": KeyValue("a number", _number),
    "amount": KeyValue("a number of 0 or more", _amount),
    "integer": KeyValue("an integer", _integer),
    "count": KeyValue("an integer of 0 or more", lambda v: _integer(v) and v >= 0),
    "positive": KeyValue("an integer of 1 or more", lambda v: _integer(v) and v > 0),
    "spread": KeyValue(
        "a list of two numbers, the lower one first,",
        lambda v: _list(_amount)(v) and len(v) == 2 and v[0] <= v[1],
    ),
    "amounts": KeyValue("a list of numbers of 0 or more", lambda v: _list(_amount)(v) and bool(v)),
    "integers": KeyValue("a list of integers", _list(_integer)),
    "numbers": KeyValue("a list of numbers or nulls", _list(_number, null=True)),
    "times": KeyValue("a list of numbers of 0 or more or nulls", _list(_amount, null=True)),
    "targets": KeyValue(
        "an object of lists of numbers of 0 or more or nulls", _object(_list(_amount, null=True))
    ),
    "flag": KeyValue("true or false", lambda v: isinstance(v, bool)),
    "layers": KeyValue("an object of numbers of 0 or more", _object(_amount)),
    "tried": KeyValue("a list of what was tried: setting, seconds and used", _list(_tried)),
    "options": KeyValue("an object", lambda v: isinstance(v, dict)),
    "plain": KeyValue("a text or a number", lambda v: isinstance(v, bool | str) or _number(v)),
    "network": KeyValue("a network as RATE,LATENCY", _network),
}
_RUN = KeyValue("an object of texts and numbers or null", _run)
