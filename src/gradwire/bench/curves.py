"""Measures this machine for `gradwire sim`: the kernels' curves and the engine's overheads.

Kernels run on parts of arrays that exceed the caches, as gradients do. For each form, the seconds
per call are fitted by CALL + values * (VALUE + payloads * PAYLOAD), by non-negative least squares
of relative errors. The engine is measured between two ranks of this machine over gloo: posting,
latency, processor time per byte, and the time of a tiny all-reduce beyond the simulated time.

The results are kept in the user's cache, by processor, version and number of threads.
"""

from __future__ import annotations

import hashlib
import itertools
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from gradwire import __version__
from gradwire.bench import workers
from gradwire.bench.provenance import processor
from gradwire.codecs import Identity, name_of
from gradwire.lab import Network
from gradwire.lang import ROW, Codec, jit, kernels
from gradwire.sim import Curves, curves
from gradwire.sim.calibrate import engine
from gradwire.sim.curves import Curve

FORMS = ("encode", "encode_ef", "decode", "decode_sum", "reduce_encode", "reduce_encode_ef")
VALUES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
PAYLOADS = (1, 3, 7)
_ARRAY = 1 << 24  # values, 64 MB; each call uses the next part
_TURNS = 9
_SLOW_S = 0.2  # if a call takes longer, larger sizes are skipped
_TIMEOUT_S = 120.0
# The shares of a link's rate that TCP gets in the lab, with one busy connection and with several,
# and the seconds that several lose at first (docs/internals/simulator.md). They are constants
# because not every machine has a lab.
_GOODPUT = {"goodput": 0.985, "shared": 0.965, "settling": 0.003}


@dataclass(frozen=True)
class Config:
    """The workers' arguments: none."""


def measured(
    codecs: Iterable[Codec],
    threads: int = 1,
    fresh: bool = False,
    advance: workers.Advance | None = None,
) -> Curves:
    """The curves of these codecs, and of Identity, on this machine.

    Args:
        threads: threads per kernel.
        fresh: ignore cached results.
        advance: called before every codec that is measured.

    Raises:
        WorkerError: a rank that measures the engine failed.
    """
    wanted = list(dict.fromkeys([*codecs, Identity()]))
    file = _cache(threads)
    known = None if fresh or not file.exists() else curves.load(file)
    if known is None:
        known = engine(
            Curves(processor(), threads, _all([Identity()], threads, advance)), _overheads()
        )
    known = replace(known, link=replace(known.link, **_GOODPUT))
    missing = [codec for codec in wanted if str(codec) not in known.codecs]
    if missing:
        known = replace(known, codecs={**known.codecs, **_all(missing, threads, advance)})
    known.save(file)
    return known


def _all(
    codecs: Sequence[Codec], threads: int, advance: workers.Advance | None
) -> dict[str, dict[str, Curve]]:
    found = {}
    for index, codec in enumerate(codecs):
        if advance is not None:
            advance(f"kernels of {name_of(codec)}", index, len(codecs))
        found[str(codec)] = kernel_curves(codec, threads)
    return found


def kernel_curves(codec: Codec, threads: int) -> dict[str, Curve]:
    """The curve of each form of a codec, for fp32 values."""
    values = torch.randn(_ARRAY, generator=torch.Generator().manual_seed(0))
    residual = torch.zeros(_ARRAY)
    return {form: fit(_points(codec, form, threads, values, residual)) for form in FORMS}


Point = tuple[int, int, float]  # values, payloads, seconds


def _points(
    codec: Codec, form: str, threads: int, values: torch.Tensor, residual: torch.Tensor
) -> list[Point]:
    """Median seconds of calls of several sizes."""
    made = kernels(codec, torch.float32)
    sums = form.startswith(("decode_sum", "reduce"))
    points: list[Point] = []
    for numel in VALUES:
        payload = torch.zeros(made.layout.nbytes(numel), dtype=torch.uint8)
        size = np.array([numel])
        workspace = torch.empty(made.workspace_nbytes(size, threads), dtype=torch.uint8)
        rows = np.zeros(1, ROW)
        rows["payload"], rows["numel"], rows["key"] = payload.data_ptr(), numel, 1
        rows["values"], rows["residual"] = values.data_ptr(), residual.data_ptr()
        made.run("encode", rows, threads=threads, workspace=workspace)  # a payload to decode
        for payloads in PAYLOADS if sums else (0,):
            peers = payload.repeat(max(payloads, 1))
            rows["source"] = peers.data_ptr()
            places = np.arange(payloads)
            distances = np.concatenate([places * payload.numel(), places])  # and origins
            own = form != "decode_sum"
            times = []
            for first in itertools.islice(itertools.cycle(range(0, _ARRAY, numel)), 1 + _TURNS):
                rows["values"] = values.data_ptr() + 4 * first
                rows["residual"] = residual.data_ptr() + 4 * first
                begun = time.perf_counter()
                made.run(
                    form, rows, threads=threads, workspace=workspace,
                    distances=distances,
                    ranks=payloads + own if sums else 1, rank=0 if own else -1,
                )  # fmt: skip
                times.append(time.perf_counter() - begun)
            points.append((numel, payloads, statistics.median(times[1:])))
            if points[-1][2] > _SLOW_S:
                return points
    return points


def fit(points: Sequence[Point]) -> Curve:
    """The three non-negative numbers with the least squared relative error."""
    values, payloads, seconds = (np.array(column, dtype=float) for column in zip(*points))  # noqa: B905
    columns = np.stack([np.ones_like(values), values, values * payloads], axis=1)
    scaled = columns / seconds[:, None]
    best, least = np.zeros(3), np.inf
    used = range(3) if payloads.any() else range(2)
    for count in range(1, len(used) + 1):
        for chosen in map(list, itertools.combinations(used, count)):
            found, *_ = np.linalg.lstsq(scaled[:, chosen], np.ones(len(points)), rcond=None)
            error = float(((scaled[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least:
                best, least = np.zeros(3), error
                best[chosen] = found
    return float(best[0]), float(best[1]), float(best[2])


def _overheads() -> dict[str, float]:
    """The engine's costs, measured by two ranks; see gradwire.bench.curves_worker."""
    worker, network = "gradwire.bench.curves_worker", Network.parse("none")
    (found,) = workers.rows(worker, Config(), 2, network, _TIMEOUT_S)
    return found


def _cache(threads: int) -> Path:
    key = f"{processor()}, {threads} threads, gradwire {__version__}, torch {torch.__version__}"
    key += " ".join(jit.kernel_flags())  # flags change the kernels' speed
    name = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return jit.cache_folder() / f"curves-{name}.json"
