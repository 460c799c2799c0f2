"""`gradwire sim`: rows of predictions for methods and algorithms, along a sweep of one parameter.

A row: method, codec, algorithm, ranks, per_node, net, model, numel, seconds, compute_seconds,
wire_bytes, limit_seconds, of_limit, backward_seconds, buckets, messages, exact, machine (of the
curves), with --cross-barrier cross_barrier, barrier_seconds and forward_seconds, and sweep and
value where a parameter was swept (docs/laboratory/simulator.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gradwire import codecs as codec_table
from gradwire.aggregators import Aggregator, Compressed, Dense, registry
from gradwire.collectives import Options
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import Codec
from gradwire_tools.bench.micro import curves as measuring
from gradwire_tools.bench.micro.kernels import check_threads
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.rows import row_kind
from gradwire_tools.bench.train import methods
from gradwire_tools.predict import sim_sweep
from gradwire_tools.predict.sim_sweep import Point
from gradwire_tools.sim import Curves, Scenario, curves, predict
from gradwire_tools.sim.crossing import predict_crossing
from gradwire_tools.sim.predict import check_seconds

_SIM = (
    "codec:text algorithm:text model:text ranks:positive seconds:amount wire_bytes:amount "
    "messages:count limit_seconds:amount?"
)
_SIM_MORE = "machine:text? cross_barrier:flag barrier_seconds:amount forward_seconds:amount"
_SIM_MARKS = "codec backward_seconds buckets"
_SWEPT = f"{_SIM} sweep:text value:plain"
KINDS = (
    row_kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", _SIM_MORE, sweep="rate"),
    row_kind("sim", _SIM_MARKS, f"{_SWEPT} net:network", _SIM_MORE, sweep="latency"),
    row_kind("sim", f"{_SIM_MARKS} sweep", f"{_SWEPT} net:text", _SIM_MORE),
    row_kind("sim", _SIM_MARKS, f"{_SIM} net:text", _SIM_MORE),
)

NO_CURVES = Curves("none", 1, {})
SWEPT = (
    *("ranks", "rate", "latency", "per_node", "cores", "backward", "segments", "partitions"),
    "bucket_mb",
)

Row = dict[str, Any]
Method = Codec | Aggregator
# One point of a sweep: what its row begins with, what it needs curves of, and what predicts it.
Case = tuple[Row, Iterable[Method], Callable[[Curves], Row]]


@dataclass(frozen=True)
class WantedStep:
    """The command line's request.

    Attributes:
        algorithms: each is combined with each codec or method.
        ranks, net, model, per_node, cores, backward: see gradwire_tools.sim.Scenario.
        options: fields of gradwire.Options except the algorithm; None leaves the default.
        sweep: NAME=VALUE,VALUE...: one of `SWEPT`, or an option of the codecs.
        threads: threads per kernel.
        file: the file of curves; if it does not exist, curves are measured and written to it. None
            uses the user's cache.
        fresh: measure again.
    """

    algorithms: Sequence[str] = ("sra",)
    ranks: int = 4
    net: str = "1gbit,1ms"
    model: str = "resnet50"
    per_node: int = 1
    cores: float | None = None
    backward: float = 0.0
    options: Mapping[str, Any] = field(default_factory=dict)
    sweep: str | None = None
    threads: int = 1
    file: Path | None = None
    fresh: bool = False

    def cases(self, point: Point) -> Iterator[Case]:
        """Those of one point of the sweep.

        Raises:
            ConfigError: an unknown name, an undefined combination or a number out of range.
        """
        raise NotImplementedError

    def at(self, point: Point, algorithm: str) -> dict[str, Any]:
        """What scenarios of all kinds have, at a point of the sweep."""
        given = {key: one for key, one in self.options.items() if one is not None}
        if point.name in ("segments", "partitions"):
            given[point.name] = point.number(point.name, None, whole=True)
        cores = point.number("cores", self.cores)
        return {
            "ranks": point.ranks(self.ranks),
            "net": point.net(self.net),
            "options": Options(algorithm=algorithm, **given),
            "per_node": int(point.number("per_node", self.per_node, whole=True)),
            "cores": math.inf if cores is None else cores,
            "backward": point.number("backward", self.backward),
        }


@dataclass(frozen=True)
class WantedCollectives(WantedStep):
    """The request for the collectives of a step.

    Attributes:
        codecs: codecs or aggregators, NAME or NAME:OPTION=VALUE:..., where error_feedback=true
            keeps residuals.
        bucket_mb: at which DDP closes a bucket; None: as DDP does unless told.
        cross_barrier: whether steps are predicted with and without their barrier.
        forward: seconds of computing, for cross_barrier; None: half of `backward`.
    """

    codecs: Sequence[str] = ("qsgd",)
    bucket_mb: float | None = None
    cross_barrier: bool = False
    forward: float | None = None

    def cases(self, point: Point) -> Iterator[Case]:
        for text in self.codecs:
            for algorithm in self.algorithms:
                scenario = self._scenario(text, algorithm, point)
                row = {"method": f"gradwire:{text}", "codec": text}
                predicted = partial(predict, scenario)
                if self.cross_barrier:
                    forward = scenario.backward / 2 if self.forward is None else self.forward
                    if not forward:
                        raise ConfigError(
                            "--cross-barrier: averages go on while the next forward computes: give "
                            "--backward or --forward, in seconds"
                        )
                    check_seconds("forward", forward)
                    predicted = partial(predict_crossing, scenario, forward)
                yield row, scenario.priced, predicted

    def _scenario(self, text: str, algorithm: str, point: Point) -> Scenario:
        options: dict[str, Any] = dict(methods.parse(f"gradwire:{text}").alone())
        if point.name is not None and point.name not in SWEPT:
            swept = f"gradwire:{text.split(':')[0]}:{point.name}={point.value}"
            options.update(methods.parse(swept).alone())
        feedback = options.pop("error_feedback", False)
        if not isinstance(feedback, bool):
            raise ConfigError(f"codec {text!r}: error_feedback={feedback!r}: use true or false")
        if "algorithm" in options:
            raise ConfigError(f"codec {text!r}: give algorithms with --algorithm")
        try:
            codec = method(str(options.pop("codec")), **options)
        except ConfigError as error:
            if point.name in (None, *SWEPT):
                raise
            known = f"--sweep {point.name}: {use_one_of(point.name, SWEPT)}"
            raise ConfigError(f"{known}, or an option of the codec: {error}") from None
        common = self.at(point, algorithm)
        megabytes = point.number("bucket_mb", self.bucket_mb)
        if megabytes is not None and not 0 < megabytes < 1e6:
            raise ConfigError(f"bucket_mb={megabytes:g}: give MiB, a number above 0")
        closed = None if megabytes is None else max(1, int(megabytes * (1 << 20)))
        return Scenario(
            codec=codec, model=self.model, feedback=feedback, bucket_bytes=closed, **common
        )


def method(name: str, **options: Any) -> Method:
    """The codec or aggregator that --codec names; raises ConfigError if it names none."""
    made = registry.get(name, **options)
    if made == Dense():
        return codec_table.get(name)  # raises what says how to send gradients uncompressed
    codec = made.codec if isinstance(made, Compressed) else None
    return made if codec is None or made != Compressed(codec) else codec


@stamped
def run(wanted: WantedStep) -> Iterator[Row]:
    """Yield a row for each point of the sweep, algorithm, and codec or method.

    Raises:
        ConfigError: as `WantedStep.cases`; it is raised before anything is measured.
    """
    cases = [
        (case, point) for point in sim_sweep.points(wanted.sweep) for case in wanted.cases(point)
    ]
    needed = [codec for (_, codecs, _), _ in cases for codec in codecs]
    known = known_curves(needed, wanted.threads, wanted.file, wanted.fresh)
    for (row, _, predicted), point in cases:
        yield {**row, **predicted(known), "machine": known.machine, **point.keys}


def known_curves(
    needed: Iterable[Method],
    threads: int,
    file: Path | None,
    fresh: bool,
) -> Curves:
    """The curves of these; arguments as the fields of `WantedStep`.

    Raises:
        ConfigError: a number of threads that makes no sense, or the file is not one of curves.
    """
    check_threads(threads)
    if file is None:
        return measuring.measured(needed, threads, fresh)
    if fresh or not file.exists():
        measuring.measured(needed, threads, fresh).save(file)
    return curves.load(file)
