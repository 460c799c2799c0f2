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
from dataclasses import dataclass, fields
from functools import partial
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
from gradwire_tools.bench.adapt.in_process import InProcessRanks
from gradwire_tools.bench.adapt.record import Recording, recordings
from gradwire_tools.bench.progress import cells
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import Row, row_kind

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

METHODS = (
    "fp16", "qsgd:bits=4", "terngrad", "topk:density=0.01", "powersgd:rank=4",
    "artopk:density=0.01",
)  # fmt: skip
QUICK_METHODS = ("qsgd:bits=4", "topk:density=0.01", "powersgd:rank=2")


@dataclass(frozen=True)
class Measured:
    """A method with or without error feedback, and how its collectives run.

    Attributes:
        text: as the user wrote it.
        inner: averages gradients; without error feedback around it.
    """

    text: str
    inner: Aggregator
    options: Options
    feedback: bool

    def __str__(self) -> str:
        return self.text + (", error feedback" if self.feedback else "")

    def aggregator(self, recording: Recording) -> Aggregator:
        """What averages the compressed parameters.

        Raises:
            ConfigError: `attach` would refuse it.
        """
        blank = [
            (name, torch.empty(shape, dtype=torch.float32, device="meta"))
            for name, shape in map(recording.parameters.__getitem__, _compressed(recording))
        ]
        rules = Rules(default=self.inner, feedback=self.feedback)
        try:
            make_plan(blank, rules, recording.ranks, self.options)
        except ConfigError as error:
            raise ConfigError(f"method {self.text!r}: {error}") from error
        wrap = self.feedback and RESIDUAL not in self.inner.states((64, 64))
        return ErrorFeedback(self.inner) if wrap else self.inner


@stamped
def run(
    folders: Sequence[str | Path] = (),
    methods: Sequence[str] | None = None,
    algorithm: str | None = None,
    at: Sequence[int] | None = None,
    layers: bool = False,
    quick: bool = False,
) -> Iterator[Row]:
    """Yield the rows.

    Args:
        folders: with recordings; none, if and only if `quick`: then a tiny one is made and deleted.
        methods: names of codecs and aggregators with options (also those of `gradwire.Options`,
            and error_feedback=true or false; without it, both are measured if both are possible).
        algorithm: of collectives; a method's own option precedes it.
        at: only these points.
        layers: rows for each parameter, too.

    Raises:
        ConfigError: an unknown method, option, algorithm or point, or a folder without a complete
            recording.
    """
    texts = methods if methods is not None else (QUICK_METHODS if quick else METHODS)
    chosen = [one for text in texts for one in parsed(text, algorithm)]
    if not folders and not quick:
        raise ConfigError("no folder of recorded gradients given: gradwire bench record makes one")
    if folders and quick:
        raise ConfigError("--quick makes a recording of its own: give no folder with it")
    with recordings(folders, at, quick) as found:
        for recording in found:
            _check(recording, chosen)
        points = [(recording, point) for recording in found for point in at or recording.at]
        rows = partial(_rows, layers=layers)
        yield from cells("{0[0].task} at {0[1]}: {1}", rows, points, chosen)


def parsed(text: str, algorithm: str | None = None) -> list[Measured]:
    """The method that `text` names, without error feedback, with it, or both.

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
        options = Options(**{"threads": 1, **of_run})
    except ConfigError as error:
        raise ConfigError(f"method {text!r}: {error}") from error
    both = (True,) if own else (False, True) if asked is None else (asked,)
    return [Measured(text, inner, options, feedback) for feedback in both]


def _check(recording: Recording, methods: Sequence[Measured]) -> None:
    """Raise ConfigError for what cannot be measured on a recording."""
    folder = recording.folder
    if recording.ranks < 2:
        raise ConfigError(f"{folder} has 1 rank, which sends nothing: record 2 or more")
    if not _compressed(recording):
        raise ConfigError(f"{folder} has no parameter of two dimensions or more")
    for one in methods:
        one.aggregator(recording)


def _compressed(recording: Recording) -> list[int]:
    """Indices of the parameters that `attach` compresses."""
    return [i for i, (_, shape) in enumerate(recording.parameters) if len(shape) >= 2]


def _rows(point: tuple[Recording, int], one: Measured, layers: bool) -> Iterator[Row]:
    """The rows of one method at one point, from sums over steps of the averages a, the exact means
    m, and f, the means of what ranks fed in."""
    recording, at = point
    places = _compressed(recording)
    parameters = [recording.parameters[i] for i in places]
    # Of each parameter and step |a - m|^2, |m|^2, |a|^2, a . m, |a - f|^2 and |f|^2.
    products = np.zeros((len(places), recording.steps, 6))
    # a - m and m, summed over steps.
    sums = [[torch.zeros(shape, dtype=torch.float64) for _ in "am"] for _, shape in parameters]
    sent, aggregator = 0.0, one.aggregator(recording)
    with closing(InProcessRanks(recording.ranks, parameters, aggregator, one.options)) as ranks:
        for step in range(recording.steps):
            whole = recording.gradients(at, step)
            gradients = [[of_rank[i] for i in places] for of_rank in whole]
            residuals = ranks.residual_mean()
            averages, wire_bytes = ranks.average(gradients)
            sent += wire_bytes
            columns = zip(zip(*gradients, strict=True), residuals, averages, strict=True)
            for i, (of_ranks, residual, average) in enumerate(columns):
                mean = torch.stack(of_ranks).double().mean(0)
                a = average.double()
                lost, fed = a - mean, mean + residual
                late = a - fed
                pairs = ((lost, lost), (mean, mean), (a, a), (a, mean), (late, late), (fed, fed))
                products[i, step] = [float((x * y).sum()) for x, y in pairs]
                sums[i][0] += lost
                sums[i][1] += mean
    members = ranks.members[0]
    of_sums = np.array([[float(of.square().sum()) for of in both] for both in sums])
    common = {
        "task": recording.task, "at": at, "steps": recording.steps, "ranks": recording.ranks,
        "method": one.text, "algorithm": one.options.algorithm, "error_feedback": one.feedback,
        "recorded": dict(recording.run),
    }  # fmt: skip

    def row(parts: slice, **of: Any) -> Row:
        numel = sum(math.prod(member.shape) for member in members[parts])
        values = numel * recording.steps
        return {
            **of,
            **common,
            "numel": numel,
            **_figures(products[parts].sum(0), of_sums[parts].sum(0)),
            "input_bits": sum(member.input_bits for member in members[parts]) / values,
            "packed_bits": sum(member.packed_bits for member in members[parts]) / values,
        }

    yield row(slice(None), row="total", layer=None, wire_bytes=sent / recording.steps)
    for i, member in enumerate(members if layers else ()):
        yield row(slice(i, i + 1), row="layer", layer=member.name, wire_bytes=None)


def _figures(steps: np.ndarray, of_sums: np.ndarray) -> dict[str, Any]:
    """nmse, nmse_by_step, nmse_of_fed, nmse_of_sum and cosine of parameters as one vector, from
    their products by step, and those of sums; null where the exact mean is zero."""
    error, exact, _, _, fed_error, fed = steps.sum(0).tolist()
    cosines = [p / math.sqrt(a * m) for _, m, a, p, _, _ in steps.tolist() if a and m]
    return {
        "nmse": _ratio(error, exact),
        "nmse_by_step": [_ratio(*step[:2]) for step in steps.tolist()],
        "nmse_of_fed": _ratio(fed_error, fed),
        "nmse_of_sum": _ratio(*of_sums.tolist()),
        "cosine": sum(cosines) / len(steps),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
