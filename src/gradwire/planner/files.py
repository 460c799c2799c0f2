"""Plans in files: saved, pinned by `gw.attach(model, plan=FILE)`, and compared."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gradwire import codecs
from gradwire.aggregators import Aggregator, ErrorFeedback, registry
from gradwire.collectives import Options
from gradwire.errors import ConfigError, of_file
from gradwire.lang import Codec
from gradwire.planner.plan import Plan
from gradwire.planner.rules import exactly

_FORMAT = 2
_DECIDED = ("algorithm", "segments", "coordinated")  # by `gradwire plan`, of the options


@dataclass(frozen=True)
class PlanFile:
    """What a file has of a plan.

    Attributes:
        rows: by parameter: gradient, how it is averaged, and weight, the codec in which FSDP2
            gathers it, both as text; error_feedback; numel; shape. All but the first may be left
            out.
        planned: what `gradwire plan` decided beside methods, and expects: algorithm, segments,
            coordinated, coalesce_bytes, seconds and backward_seconds of a pass; for how many ranks,
            and net, on which network (older files lack both); of other plans {}.
    """

    rows: Mapping[str, Mapping[str, Any]]
    planned: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan) -> PlanFile:
        """What a plan's file has; levels that were learned are left out.

        Raises:
            ConfigError: a codec or an aggregator has no text.
        """
        rows = {}
        for p in plan.parameters:
            feedback = isinstance(p.aggregator, ErrorFeedback)
            row = {"gradient": registry.text(p.inner), "error_feedback": feedback}
            if plan.weights is not None:
                row["weight"] = registry.text(registry.get(p.weight))
            rows[p.name] = {**row, "numel": p.numel, "shape": [*p.shape]}
        return cls(rows)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> PlanFile:
        """The plan in a file.

        Raises:
            ConfigError: there is none; the message says what is wrong, and where.
        """
        try:
            found = json.loads(Path(path).read_text("utf-8"), object_pairs_hook=_once)
        except RecursionError:
            raise ConfigError(f"{path}: no plan: it is nested too deeply") from None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: no plan: {of_file(error)}") from None
        rows = found.get("parameters") if isinstance(found, dict) else None
        version = found.get("gradwire_plan") if isinstance(found, dict) else None
        if not isinstance(rows, dict) or type(version) is not int or version not in (1, _FORMAT):
            raise ConfigError(
                f"{path}: no plan of format {_FORMAT}: write one by handle.plan.save(FILE)"
            )
        for name, row in rows.items():
            if not isinstance(row, dict) or not isinstance(row.get("gradient"), str):
                raise ConfigError(f"{path}: parameter {name} has no 'gradient': {row!r:.60}")
            if version == 1 and "powersgd" in (how := row["gradient"]) and ":rank=" not in how:
                row["gradient"] += ":rank=2"  # its default when such files were written
            _check(f"{path}: parameter {name}", row, _ROW)
            if "numel" in row and row["numel"] != math.prod(row.get("shape", [row["numel"]])):
                raise ConfigError(
                    f"{path}: parameter {name} has numel {row['numel']}, and the shape "
                    f"{row['shape']!r:.60}: they contradict each other"
                )
        planned = found.get("planned", {})
        every, older = _PLANNED.keys(), _PLANNED.keys() - {"ranks", "net"}
        if not isinstance(planned, dict) or planned.keys() not in (set(), older, every):
            raise ConfigError(f"{path}: 'planned' is not what gradwire plan --save writes")
        _check(f"{path}: planned", planned, _PLANNED)
        made = cls(rows, planned)
        where = "planned"
        try:
            made.options(Options())
            for name in rows:
                where = f"parameter {name}"
                made.aggregator(name)
                made.weight(name)
        except ConfigError as error:
            raise ConfigError(f"{path}: {where}: {error}") from None
        return made

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file; it is whole or not there."""
        found = {"gradwire_plan": _FORMAT, "parameters": self.rows}
        found |= {"planned": self.planned} if self.planned else {}
        write_whole(path, json.dumps(found, indent=1) + "\n")

    def aggregator(self, name: str) -> Aggregator:
        """How a parameter's gradient is averaged."""
        inner = registry.get(self.rows[name]["gradient"])
        return ErrorFeedback(inner) if self.rows[name].get("error_feedback") else inner

    def weight(self, name: str) -> Codec | None:
        """The codec in which a parameter is gathered; None: uncompressed."""
        text = self.rows[name].get("weight", "none")
        return None if text == "none" else codecs.get(text)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The shape of a parameter; None: the file does not have it."""
        shape = self.rows.get(name, {}).get("shape")
        return None if shape is None else tuple(shape)

    def by_name(self) -> dict[str, Aggregator]:
        """For `attach`: the pattern of each parameter -> how its gradient is averaged."""
        return {exactly(name): self.aggregator(name) for name in self.rows}

    def weights_by_name(self) -> dict[str, Codec | None] | None:
        """For `attach`; None: the plan leaves weights alone."""
        named = [name for name, row in self.rows.items() if "weight" in row]
        return {exactly(name): self.weight(name) for name in named} or None

    def options(self, given: Options) -> Options:
        """`given`, which decide what `gradwire plan` has decided, or else as that did.

        Raises:
            ConfigError: there is no such algorithm, or it is not defined with these segments.
        """
        if not self.planned or any(getattr(given, n) != getattr(Options(), n) for n in _DECIDED):
            return given
        algorithm, segments, coordinated = (self.planned[name] for name in _DECIDED)
        return replace(given.through(algorithm), segments=segments, coordinated=coordinated)

    def expectation(self, plan: Plan, ranks: int, stats: Mapping[str, Any] | None = None) -> str:
        """What `gradwire plan` expects of a pass, from its first gradient to its last average, and
        what a handle's `stats` have measured; or that it has planned for other ranks, or other
        options than those of the plan in force."""

        def told(seconds: float, backward: float) -> str:
            exposed = 1e3 * (seconds - backward)
            return f"{1e3 * seconds:.4g} ms a pass, {exposed:.4g} of them exposed"

        if self.planned.get("ranks", ranks) != ranks:
            return f"the plan was made for {self.planned['ranks']} ranks, and there are {ranks}"
        used = {**vars(plan.options), "coalesce_bytes": plan.coalesce_bytes}
        for name in (*_DECIDED, "coalesce_bytes"):
            if used[name] != self.planned[name]:
                made, given = (f"{name}={of[name]!r}" for of in (self.planned, used))
                return f"the plan was made for {made}, and attach was given {given}"
        text = told(self.planned["seconds"], self.planned["backward_seconds"])
        if stats is None or not (steps := stats["steps"]):
            return f"the plan expects {text}"
        backward, exposed = stats["backward_seconds"] / steps, stats["exposed_seconds"] / steps
        return f"the plan expects {text}; measured: {told(backward + exposed, backward)}"

    def every_shape(self, path: str | os.PathLike[str]) -> dict[str, tuple[int, ...]]:
        """The shapes of all parameters, by name.

        Raises:
            ConfigError: the file of this path does not have them.
        """
        for name, row in self.rows.items():
            if "shape" not in row:
                raise ConfigError(f"{path}: parameter {name} has no 'shape': save the plan anew")
        return {name: tuple(row["shape"]) for name, row in self.rows.items()}

    def check(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Raise ConfigError unless the file has exactly these parameters, in these shapes. A tied
        one may come once per name; the first counts."""
        first: dict[torch.Tensor, str] = {}
        for name, p in named:
            first.setdefault(p, name)
        shapes = {name: tuple(p.shape) for p, name in first.items()}
        for name, shape in shapes.items():
            if name not in self.rows:
                raise ConfigError(f"plan: the file has no parameter {name}: it is another model's")
            if self.shape(name) not in (None, shape):
                raise ConfigError(
                    f"plan: parameter {name} has the shape {shape}, and {self.shape(name)} in the "
                    "file: it is another model's"
                )
        for name in self.rows:
            if name not in shapes:
                raise ConfigError(f"plan: the module has no parameter {name}, which the file has")


def shown(plan: PlanFile) -> Iterator[dict[str, Any]]:
    """A row for each parameter: parameter, numel, method, and bits, those that a value takes in a
    payload of its fp32 gradient (None: the file has no shape of it)."""
    for name, row in plan.rows.items():
        shape, bits = plan.shape(name), None
        numel = row.get("numel") if shape is None else math.prod(shape)
        if shape is not None and numel:
            bits = 8 * plan.aggregator(name).payload_bytes(shape, torch.float32) / numel
        yield {"parameter": name, "numel": numel, "method": _told(plan, name), "bits": bits}


def differences(a: PlanFile, b: PlanFile) -> Iterator[dict[str, Any]]:
    """A row for each parameter that two plans treat differently, or with different shapes:
    parameter, numel, and `a` and `b`, what each does with it (None: it has no such parameter)."""
    for name in dict.fromkeys([*a.rows, *b.rows]):
        found = [_told(plan, name) for plan in (a, b)]
        shapes = [plan.shape(name) for plan in (a, b)]
        if None not in (*found, *shapes) and shapes[0] != shapes[1]:
            found = [f"{of}, shape {shape}" for of, shape in zip(found, shapes, strict=True)]
        if found[0] != found[1]:
            numel = {**b.rows.get(name, {}), **a.rows.get(name, {})}.get("numel")
            yield {"parameter": name, "numel": numel, "a": found[0], "b": found[1]}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; raises ValueError for a key that it has twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"it has {twice!r:.60} twice")
    return found


def _check(where: str, row: Mapping[str, Any], kinds: _Kinds) -> None:
    for key, (right, what) in kinds.items():
        if key in row and not right(row[key]):
            raise ConfigError(f"{where} has the {key} {row[key]!r:.60}: give {what}")


def _whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _seconds(value: object) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e9  # type: ignore[operator]


_Kinds = Mapping[str, tuple[Callable[[Any], bool], str]]
_ROW: _Kinds = {
    "error_feedback": (lambda value: type(value) is bool, "true or false"),
    "weight": (lambda value: type(value) is str, "a codec in text"),
    "numel": (_whole, "a whole number"),
    "shape": (lambda value: type(value) is list and all(map(_whole, value)), "whole numbers"),
}
_PLANNED: _Kinds = {
    "algorithm": (lambda value: type(value) is str, "a name"),
    "segments": (lambda value: value is None or _whole(value), "a whole number or null"),
    "coordinated": (lambda value: type(value) is bool, "true or false"),
    "coalesce_bytes": (_whole, "a whole number"),
    "ranks": (_whole, "a whole number"),
    "net": (lambda value: type(value) is str, "a text"),
    "seconds": (_seconds, "seconds"),
    "backward_seconds": (_seconds, "seconds"),
}


def _told(plan: PlanFile, name: str) -> str | None:
    row = plan.rows.get(name)
    if row is None:
        return None
    feedback = ", error feedback" if row.get("error_feedback") else ""
    weight = row.get("weight", "none")
    named = [registry.text(registry.get(one), bits=True) for one in (row["gradient"], weight)]
    return named[0] + feedback + ("" if weight == "none" else f", weights {named[1]}")


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` beside `path`, under a name that no other writer has, and rename it: the file is
    whole or not there, also where several ranks write one at the same time."""
    new = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}")
    try:
        new.write_text(text, "utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
