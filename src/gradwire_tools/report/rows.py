"""Rows of files, each checked when it is read; and rows sorted by kind, or grouped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from gradwire.errors import ConfigError
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.micro import aggregators, kernels, profile
from gradwire_tools.bench.network import collectives, network, probe, transports
from gradwire_tools.bench.paper import ablation, adapt, error, planner_grid, sensitivity, validate
from gradwire_tools.bench.rows import Row as Row
from gradwire_tools.bench.rows import RowKind, check
from gradwire_tools.bench.train import rows as train
from gradwire_tools.predict import simulate, simulate_outer, simulate_sharded

_WRITERS: tuple[Any, ...] = (
    train, adapt, sensitivity, planner_grid, ablation, error, aggregators, validate,
    simulate_sharded, simulate_outer, simulate, collectives, kernels, profile, transports, probe,
    network, record,
)  # fmt: skip
KINDS: list[RowKind] = [kind for writer in _WRITERS for kind in writer.KINDS]  # the first counts
LINE_BYTES = 16 << 20  # more are no row
_DEPTH = 50  # of arrays and objects in each other


def kind_of(row: Row) -> RowKind | None:
    """The kind of a row; None if it is of none."""
    return next((kind for kind in KINDS if kind.has(row)), None)


def read(*files: Path) -> list[Row]:
    """The rows of files.

    Raises:
        ConfigError: one cannot be read, holds no rows, a line is no row as its kind is, or is there
            twice, in one file or in two (where no run is told, two examinations may have found the
            same); the message names file, line and key.
    """
    seen: dict[bytes, str] = {}
    return [row for file in files for row in _read(file, seen)]


def _read(file: Path, seen: dict[bytes, str]) -> list[Row]:
    """The rows of one file, whose lines are added to `seen`, with their places."""
    rows: list[Row] = []
    mine: dict[bytes, str] = {}
    try:
        with file.open("rb") as opened:
            for number, line in enumerate(iter(lambda: opened.readline(LINE_BYTES + 1), b""), 1):
                where = f"{file}, line {number}"
                if len(line) > LINE_BYTES:
                    raise ConfigError(f"{where} is longer than {LINE_BYTES >> 20} MiB: not a row")
                if not (text := line.strip()):
                    continue
                rows.append(_parsed(line, where))
                first = mine.get(text, seen.get(text))
                if first and (text in mine or first == where or "run" in rows[-1]):
                    raise ConfigError(f"{where} is the same as {first}: leave one of them out")
                mine[text] = f"line {number}"
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"cannot read rows from {file}: {reason}") from error
    if not rows:
        raise ConfigError(f"{file} holds no rows")
    seen.update((line, f"{file}, {place}") for line, place in mine.items())
    return rows


def _parsed(line: bytes, where: str) -> Row:
    try:
        text = line.decode("utf-8").rstrip()
        row = json.loads(text, parse_constant=_refuse, parse_float=_finite)
        deep = _depth(row) > _DEPTH
        if "\\u" in text and isinstance(row, dict) and not deep:
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    except RecursionError:
        row, deep = {}, True
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text: {error.reason}") from error
    except ValueError as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            if not line.endswith(b"\n") and (error.pos == len(text) or text[-1] != "}"):
                reason = "the last line is incomplete: delete it, or run again with --resume"
        raise ConfigError(f"{where} is not JSON: {reason}") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object but {type(row).__name__}")
    if deep:
        raise ConfigError(f"{where} is nested deeper than {_DEPTH} levels: not a row")
    check(row, kind_of(row), where)
    return row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no number of JSON; unknown values are null")


def _finite(digits: str) -> float:
    value = float(digits)
    if abs(value) == float("inf"):
        raise ValueError(f"{digits} is too large")
    return value


def _depth(value: Any) -> int:
    """How many arrays and objects lie in each other."""
    depth, level = 0, [value]
    while level := [one for one in level if isinstance(one, dict | list)]:
        level = [v for one in level for v in (one.values() if isinstance(one, dict) else one)]
        depth += 1
    return depth


def sort(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Checked rows by the name of their kind, each in one; those of no kind are under ""."""
    found: dict[str, list[Row]] = {name: [] for name in [*(kind.name for kind in KINDS), ""]}
    for row in rows:
        kind = kind_of(row)
        found[kind.name if kind else ""].append(row)
    return found


def split(rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
    """The summaries and the evaluations among rows of `bench train`."""
    summaries = [row for row in rows if row["row"] == "summary"]
    return summaries, [row for row in rows if row["row"] == "evaluation"]


def run_of(row: Row, key: str = "run") -> tuple[Any, Any, Any]:
    """(command, commit, date) of the run that a row is from, or that made its recording (`key` is
    `recorded`). All rows of a run share them, and other runs differ."""
    run = row.get(key)
    known = run if isinstance(run, dict) else {}
    return known.get("command"), known.get("commit"), known.get("date")


def grouped(rows: Sequence[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Rows by the values of keys (as text where they cannot be hashed), in their order.

    The values of `run` and `recorded` are those of `run_of`.
    """
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        values = (run_of(row, key) if key in ("run", "recorded") else row.get(key) for key in keys)
        place = tuple(v if isinstance(v, str | int | float) else json.dumps(v) for v in values)
        found.setdefault(place, []).append(row)
    return found
