"""`gradwire bench error`: what methods lose on recorded gradients, beside what they send.

The gradients are those of `gradwire bench record`. Each method averages the consecutive steps of a
point on ranks that are threads of this process, through the coroutines, collectives and kernels of
training, and its averages a_t are compared with the exact means m_t, in float64:

    nmse            sum over steps of |a_t - m_t|^2 / sum over steps of |m_t|^2
    nmse_of_fed     the same against m_t plus the mean residual: against what the ranks fed in
    nmse_of_sum     |sum of a_t - sum of m_t|^2 / |sum of m_t|^2: what is lost over all steps
    cosine          of a_t and m_t, mean over steps

State (residuals, bases, momentum) starts fresh at each point and is carried over its steps. Only
the parameters count that `attach` compresses: those of two dimensions and more.

Bits per value are those that a rank feeds into collectives in one step: `packed_bits` as gradwire
packs them, without headers of messages, and `input_bits` as papers count them, with 32 bits for the
position of each value of a sparse payload (UTIL 2.3, 3.1.3). `wire_bytes` is what a rank sends in
a step, headers included.

Rows are of all parameters together (`row: total`) and, on request, of each (`row: layer`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gradwire.aggregators import Aggregator, ErrorFeedback, registry
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.codecs.text import parse
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.planner import make_plan
from gradwire.planner.rules import Rules
from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.in_process import Counted, InProcessRanks
from gradwire_tools.bench.adapt.recording import Recording
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.workers import Advance, unseen

_ERROR = (
    "task:text at:count steps:positive ranks:positive method:text algorithm:text "
    "error_feedback:flag numel:count nmse:amount? nmse_of_fed:amount? nmse_of_sum:amount? "
    "cosine:number? input_bits:amount packed_bits:amount wire_bytes:amount?"
)
_ERROR_MORE = "nmse_by_step:times recorded:options"
KINDS = (
    row_kind("bench error", "nmse error_feedback", _ERROR, _ERROR_MORE, row="total"),
    row_kind(
        "bench error", "nmse error_feedback", f"{_ERROR} layer:text", _ERROR_MORE, row="layer"
    ),
)


Row = dict[str, Any]

METHODS = (
    "fp16", "qsgd:bits=4", "terngrad", "topk:density=0.01", "powersgd:rank=4",
    "artopk:density=0.01",
)  # fmt: skip
QUICK_METHODS = ("qsgd:bits=4", "topk:density=0.01", "powersgd:rank=2")


@dataclass(frozen=True)
class Measured:
    """A method, and how its collectives run.

    Attributes:
        method: as the user wrote it.
        inner: averages gradients; without error feedback around it.
        feedback: with which error feedback it is measured: False, True or both.
    """

    method: str
    inner: Aggregator
    options: Options
    feedback: tuple[bool, ...]

    def aggregator(self, feedback: bool, recording: Recording) -> Aggregator:
        """What averages the compressed parameters.

        Raises:
            ConfigError: `attach` would refuse it.
        """
        blank = [
            (name, torch.empty(shape, dtype=torch.float32, device="meta"))
            for name, shape in map(recording.parameters.__getitem__, _compressed(recording))
        ]
        rules = replace(Rules(default=self.inner), feedback=feedback)
        make_plan(blank, rules, recording.ranks, self.options)
        wrap = feedback and RESIDUAL not in self.inner.states((64, 64))
        return ErrorFeedback(self.inner) if wrap else self.inner


@stamped
def run(
    folders: Sequence[str | Path] = (),
    methods: Sequence[str] | None = None,
    algorithm: str | None = None,
    at: Sequence[int] | None = None,
    layers: bool = False,
    quick: bool = False,
    advance: Advance = unseen,
) -> Iterator[Row]:
    """Yield the rows.

    Args:
        folders: with recordings; none if `quick`: then a tiny one is made and deleted.
        methods: names of codecs and aggregators with options (also those of `gradwire.Options`,
            and error_feedback=true or false; without it, both are measured if both are possible).
        algorithm: of collectives; a method's own option precedes it.
        at: only these points.
        layers: rows for each parameter, too.
        advance: called with every step.

    Raises:
        ConfigError: an unknown method, option, algorithm or point, or a folder without a complete
            recording.
    """
    chosen = methods if methods is not None else (QUICK_METHODS if quick else METHODS)
    measured = [method(text, algorithm) for text in chosen]
    if not folders and not quick:
        raise ConfigError("no folder of recorded gradients given: gradwire bench record makes one")
    with record.recordings(folders, at, quick, advance) as found:
        for folder, recording in found:
            _check(folder, recording, measured)
        for folder, recording in found:
            for point in at or recording.at:
                for one in measured:
                    for feedback in one.feedback:
                        yield from _one(folder, recording, point, one, feedback, layers, advance)


def method(text: str, algorithm: str | None = None) -> Measured:
    """The method that `text` names.

    Raises:
        ConfigError: an unknown name or option, or a bad value.
    """
    try:
        name, given = parse(text)
        known = {field.name for field in fields(Options)}
        of_run: dict[str, Any] = {} if algorithm is None else {"algorithm": algorithm}
        of_run |= {key: given.pop(key) for key in list(given) if key in known}
        asked = given.pop("error_feedback", None)
        if not isinstance(asked, bool | None):
            raise ConfigError(f"error_feedback={asked!r}: use true or false")
        inner = registry.get(name, **given)
        own = RESIDUAL in inner.states((64, 64))  # it keeps the error itself
        if asked is False and own:
            raise ConfigError("it keeps its error itself: leave error_feedback out")
        both = (False, True) if asked is None else (asked,)
        options = Options(**{"threads": 1, **of_run})
    except ConfigError as error:
        raise ConfigError(f"method {text!r}: {error}") from error
    return Measured(text, inner, options, (True,) if own else both)


def _check(folder: Path, recording: Recording, measured: Sequence[Measured]) -> None:
    """Raise ConfigError for what cannot be measured on a recording."""
    if recording.ranks < 2:
        raise ConfigError(f"{folder} has 1 rank, which sends nothing: record 2 or more")
    if not _compressed(recording):
        raise ConfigError(f"{folder} has no parameter of two dimensions or more")
    for one in measured:
        for feedback in one.feedback:
            try:
                one.aggregator(feedback, recording)
            except ConfigError as error:
                raise ConfigError(f"method {one.method!r}: {error}") from error


def _compressed(recording: Recording) -> list[int]:
    """Indices of the parameters that `attach` compresses."""
    return [i for i, (_, shape) in enumerate(recording.parameters) if len(shape) >= 2]


def _one(
    folder: Path,
    recording: Recording,
    at: int,
    one: Measured,
    feedback: bool,
    layers: bool,
    advance: Advance,
) -> Iterator[Row]:
    """The rows of one method at one point."""
    places = _compressed(recording)
    parameters = [recording.parameters[i] for i in places]
    sums = [Sums(shape) for _, shape in parameters]
    sent, aggregator = 0.0, one.aggregator(feedback, recording)
    with closing(InProcessRanks(recording.ranks, parameters, aggregator, one.options)) as ranks:
        for step in range(recording.steps):
            what = f"{recording.task} at {at}: {one.method}"
            advance(what + (", error feedback" if feedback else ""), step, recording.steps)
            whole = recording.gradients(folder, at, step)
            gradients = [[of_rank[i] for i in places] for of_rank in whole]
            residuals = ranks.residual_mean()
            averages, wire_bytes = ranks.average(gradients)
            sent += wire_bytes
            columns = zip(sums, zip(*gradients, strict=True), residuals, averages, strict=True)
            for kept, of_ranks, residual, average in columns:
                kept.add(of_ranks, residual, average)
    common = {
        "task": recording.task, "at": at, "steps": recording.steps, "ranks": recording.ranks,
        "method": one.method, "algorithm": one.options.algorithm, "error_feedback": feedback,
        "recorded": dict(recording.run),
    }  # fmt: skip

    def row(members: Sequence[Counted], sums: Sequence[Sums], **of: Any) -> Row:
        found = figures(sums)
        values = found["numel"] * recording.steps
        bits = {
            "input_bits": sum(member.input_bits for member in members) / values,
            "packed_bits": sum(member.packed_bits for member in members) / values,
        }
        return {**of, **common, **found, **bits}

    counted = ranks.members[0]
    yield row(counted, sums, row="total", layer=None, wire_bytes=sent / recording.steps)
    for member, kept in zip(counted, sums, strict=True) if layers else ():
        yield row([member], [kept], row="layer", layer=member.name, wire_bytes=None)


class Sums:
    """The sums of one parameter, of the average a, the exact mean m, and f, the mean of what ranks
    fed in.

    Attributes:
        numel: its values.
        steps: of each step so far |a - m|^2, |m|^2, |a|^2, a . m, |a - f|^2 and |f|^2.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.numel = math.prod(shape)
        self.steps: list[list[float]] = []
        self._lost = torch.zeros(shape, dtype=torch.float64)
        self._exact = torch.zeros(shape, dtype=torch.float64)

    def add(
        self, gradients: Sequence[torch.Tensor], residual: torch.Tensor, average: torch.Tensor
    ) -> None:
        """Add a step: all ranks' gradients, the mean of their residuals before, and the average."""
        mean = torch.zeros_like(self._exact)
        for gradient in gradients:
            mean += gradient
        mean /= len(gradients)
        a = average.double()
        lost, fed = a - mean, mean + residual
        late = a - fed
        pairs = ((lost, lost), (mean, mean), (a, a), (a, mean), (late, late), (fed, fed))
        self.steps.append([float((x * y).sum()) for x, y in pairs])
        self._lost += lost
        self._exact += mean

    def of_sum(self) -> tuple[float, float]:
        """|sum of a - sum of m|^2 and |sum of m|^2, over all steps."""
        return float(self._lost.square().sum()), float(self._exact.square().sum())


def figures(parts: Sequence[Sums]) -> dict[str, Any]:
    """numel, nmse, nmse_by_step, nmse_of_fed, nmse_of_sum and cosine of these parameters as one
    vector; null where the exact mean is zero."""
    steps = np.sum([part.steps for part in parts], axis=0)
    error, exact, _, _, fed_error, fed = steps.sum(0).tolist()
    cosines = [p / math.sqrt(a * m) for _, m, a, p, _, _ in steps.tolist() if a and m]
    return {
        "numel": sum(part.numel for part in parts),
        "nmse": _ratio(error, exact),
        "nmse_by_step": [_ratio(*step[:2]) for step in steps.tolist()],
        "nmse_of_fed": _ratio(fed_error, fed),
        "nmse_of_sum": _ratio(*map(sum, zip(*(part.of_sum() for part in parts), strict=True))),
        "cosine": sum(cosines) / len(steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
