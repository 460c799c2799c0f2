"""What kernels cost on this machine: measured, fitted and kept in the user's cache.

Kernels run on parts of arrays that exceed the caches, as gradients do. For each form, the seconds
per call are fitted by CALL + values * (VALUE + payloads * PAYLOAD), by non-negative least squares
of relative errors.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from gradwire.lang import ROW, Codec, Kernels, kernels
from gradwire.lang.native import cache, jit
from gradwire.planner.files import write_whole

Curve = tuple[float, float, float]  # CALL, VALUE and PAYLOAD

FORMS = ("encode", "encode_ef", "decode", "decode_sum", "reduce_encode", "reduce_encode_ef")
VALUES = (1 << 12, 1 << 15, 1 << 18, 1 << 20)
PAYLOADS = (1, 3, 7)
_ARRAY = 1 << 24  # values, 64 MB; each call uses the next part
_TURNS = 9
_SLOW_S = 0.02  # if a call takes longer, larger sizes are skipped


def measured(codecs: Iterable[Codec], threads: int) -> dict[str, dict[str, Curve]]:
    """The curves of these codecs, by their text, and of others that are known. Those that the
    user's cache does not have are measured, some seconds for each, and kept there."""
    mine = file(threads, "kernels")
    found = _kept(mine) | _kept(file(threads))  # the latter of `gradwire sim`
    missing = [codec for codec in codecs if repr(codec) not in found]
    if missing:
        found |= {repr(codec): kernel_curves(codec, threads) for codec in missing}
        kept = {"machine": processor(), "threads": threads, "codecs": found}
        write_whole(mine, json.dumps(kept, indent=1) + "\n")
    return found


def _kept(path: Path) -> dict[str, dict[str, Curve]]:
    """The curves in a file; none where it is missing or damaged."""
    try:
        codecs = json.loads(path.read_text())["codecs"]
        return {
            codec: {form: (float(a), float(b), float(c)) for form, (a, b, c) in forms.items()}
            for codec, forms in codecs.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}


def kernel_curves(codec: Codec, threads: int, target: str = "auto") -> dict[str, Curve]:
    """The curve of each form of a codec, for fp32 values."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(_ARRAY, generator=generator, dtype=torch.float32)
    residual = torch.zeros_like(values)
    of = kernels(codec, torch.float32, target), threads, values, residual
    return {form: fit(_points(form, *of)) for form in FORMS}


Point = tuple[int, int, float]  # values, payloads, seconds


def _points(
    form: str, made: Kernels, threads: int, values: torch.Tensor, residual: torch.Tensor
) -> list[Point]:
    """Median seconds of calls of several sizes."""
    sums = form.startswith(("decode_sum", "reduce"))
    points: list[Point] = []
    for numel in VALUES:
        payload = torch.zeros(made.layout.nbytes(numel), dtype=torch.uint8)
        room = torch.empty(made.workspace_nbytes(np.array([numel]), threads), dtype=torch.uint8)
        rows = np.zeros(1, ROW)
        rows["payload"], rows["numel"], rows["key"] = payload.data_ptr(), numel, 1
        rows["values"], rows["residual"] = values.data_ptr(), residual.data_ptr()
        made.run("encode", rows, threads=threads, workspace=room)  # a payload to decode
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
                    form, rows, threads=threads, workspace=room,
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


def file(threads: int, name: str = "curves") -> Path:
    """Where the costs of this machine are kept, by processor and number of threads."""
    key = f"{processor()}, {threads} threads, torch {torch.__version__}"
    key += " ".join(jit.kernel_flags())  # flags change the kernels' speed
    digest = hashlib.blake2b(key.encode(), digest_size=8).hexdigest()
    return cache.folder() / f"{name}-{digest}.json"


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
