"""`gradwire bench kernels`: what a codec's kernels cost against moving the bytes they must move.

A kernel and a plain copy of the same number of floats take turns (A B A B) on the same threads.
Both are given as medians, and the copy's bytes (read and written) over its time is the bandwidth
of the limit: a kernel at of_limit 1 costs what reading and writing its own bytes costs.

Codecs that keep a share of the values get a row of target "torch-topk" beside their own: the same
selection by torch.topk and a gather.

On a GPU (device cuda, target triton) the same turns are timed by events of the stream, over 256 MB
unless told otherwise, so that no cache holds what is moved.

A row: codec, options, target, device, threads, numel, op, seconds (median), gbps (uncompressed
bytes / s / 1e9), limit_seconds ((bytes read + bytes written) / bandwidth), of_limit
(limit_seconds / seconds), copy_gbps (that bandwidth, so that machines can be compared).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gradwire import codecs as codec_table
from gradwire.bench import methods
from gradwire.codecs import Codec
from gradwire.errors import ConfigError
from gradwire.lang import ROW, Layout, gpu, kernels

NUMEL = {"cpu": 2**24, "cuda": 2**26}
# so that all codecs end in 45 seconds
QUICK_NUMEL = {"c": 2**22, "eager": 2**18, "triton": 2**24}
TARGETS = {"cpu": ("c", "eager"), "cuda": ("triton",)}
OPS = ("encode", "encode_ef", "decode", "decode_add", "decode_sum", "reduce_encode")
PEERS = 3  # whose payloads decode_sum and reduce_encode add
SECONDS_EACH = {"c": 1.0, "eager": 3.0}  # spent on a row's turns
TURNS = {"c": (7, 41), "eager": (3, 5)}  # at least, at most
QUICK_TURNS = {"c": (3, 9), "eager": (1, 1)}
EVENTS, QUICK_EVENTS = 31, 9  # turns on a GPU
FLOAT = 4  # bytes


def run(
    codecs: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    numel: int | None = None,
    threads: Sequence[int] | None = None,
    quick: bool = False,
    device: str = "cpu",
) -> Iterator[dict[str, Any]]:
    """Yield a row for every codec, target, number of threads and op.

    Args:
        codecs: NAME or NAME:OPTION=VALUE:...; all registered codecs by default.
        targets: of "c" and "eager", both by default; on a GPU "triton".
        numel: fp32 values; 2^24 by default (2^22 for c and 2^18 for eager when quick), and on a GPU
            2^26 (2^24).
        threads: numbers of threads; 1 and 2 by default (2 for c and 1 for eager when quick). On a
            GPU always 1.
        quick: fewer turns.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: an unknown codec, option, target or device; no compiler for target c; no GPU,
            or no Triton, for device cuda.
    """
    if device not in TARGETS:
        raise ConfigError(f"unknown device {device!r}: use one of {', '.join(TARGETS)}")
    for target in targets or ():
        if target not in TARGETS[device]:
            known = ", ".join(TARGETS[device])
            raise ConfigError(f"unknown target {target!r} on {device}: use one of {known}")
    if device == "cuda":
        reason = gpu.missing() or ("Triton interprets" if gpu.interpreting() else None)
        if reason is not None:
            raise ConfigError(f"device 'cuda': {reason}")
        threads = (1,)
    chosen = [_parse(name) for name in codecs or codec_table.REGISTRY]
    if numel is not None and numel < 1:
        raise ConfigError(f"numel={numel} must be 1 or more")
    for count in threads or ():
        if count < 1:
            raise ConfigError(f"threads={count} must be 1 or more")
    for codec in chosen:
        for target in targets or TARGETS[device]:
            size = numel or (QUICK_NUMEL[target] if quick else NUMEL[device])
            for count in threads or ((2 if target == "c" else 1,) if quick else (1, 2)):
                yield from _rows(codec, target, size, count, quick, device)


def _parse(name: str) -> Codec:
    options: dict[str, Any] = dict(methods.parse(f"gradwire:{name}").options)
    return codec_table.get(**options)


def _rows(
    codec: Codec, target: str, numel: int, threads: int, quick: bool, device: str
) -> Iterator[dict[str, Any]]:
    made = kernels(codec, torch.float32, target)
    if made.device.type != device:
        return  # every target interprets this codec, on the CPU
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(device)
    result, residual = torch.zeros_like(values), torch.zeros_like(values)
    payload = torch.zeros(made.layout.nbytes(numel), dtype=torch.uint8, device=device)
    needed = made.workspace_nbytes(np.array([numel]), threads, 1 + PEERS)
    workspace = torch.empty(needed, dtype=torch.uint8, device=device)
    mark = made.mark()
    peers = torch.zeros(0, dtype=torch.uint8, device=device)
    for op in OPS:
        # what decodes writes elsewhere, so that every op sees the same input
        rows = np.zeros(1, ROW)
        rows["values"] = (values if op.startswith("encode") else result).data_ptr()
        rows["residual"], rows["payload"] = residual.data_ptr(), payload.data_ptr()
        rows["numel"], rows["key"] = numel, 1
        summed = op in ("decode_sum", "reduce_encode")
        if summed and not peers.numel():
            peers = payload.repeat(PEERS)
        rows["source"] = peers.data_ptr()
        ranks = 1 + PEERS if summed else 1

        def kernel(op: str = op, rows: np.ndarray = rows, ranks: int = ranks) -> None:
            made.run(
                op, rows, threads=threads, workspace=workspace, ranks=ranks,
                distances=np.arange(PEERS) * payload.numel(), factor=1.0 / ranks, mark=mark,
            )  # fmt: skip

        def copy() -> None:
            result.copy_(values)

        seconds, copy_seconds = _take_turns(kernel, copy, threads, target, quick)
        bandwidth = 2 * FLOAT * numel / copy_seconds
        limit = _moved(op, made.layout, numel) / bandwidth
        yield _row(codec, target, device, threads, numel, op, seconds, limit, bandwidth)
    if target != "eager":
        yield from _torch_topk(codec, values, threads, quick)


def _moved(op: str, layout: Layout, numel: int) -> int:
    """Bytes that an op must read and write."""
    values, payload = FLOAT * numel, layout.nbytes(numel)
    selects = any(f.capacity is not None for f in layout.fields)
    # where a codec selects, adding touches what was selected, and nothing else
    touched = 2 * FLOAT * layout.capacity(numel) if selects else 2 * values
    return {
        "encode": values + payload,
        "encode_ef": 3 * values + payload,
        "decode": values + payload,
        "decode_add": touched + payload,
        "decode_sum": 2 * values + PEERS * payload,
        "reduce_encode": 2 * values + (PEERS + 1) * payload,
    }[op]


def _torch_topk(
    codec: Codec, values: torch.Tensor, threads: int, quick: bool
) -> Iterator[dict[str, Any]]:
    """The alternative to a codec that keeps a share of the values: torch.topk, and a gather."""
    density = getattr(codec, "density", None)
    if density is None:
        return
    result, numel, device = torch.zeros_like(values), values.numel(), values.device.type
    k = max(1, int(density * numel))

    def encode() -> None:
        places = torch.topk(values.abs(), k, sorted=False).indices
        places.to(torch.int32)
        values[places].half()

    def copy() -> None:
        result.copy_(values)

    target = "triton" if device == "cuda" else "eager"
    seconds, copy_seconds = _take_turns(encode, copy, threads, target, quick)
    bandwidth = 2 * FLOAT * numel / copy_seconds
    limit = (FLOAT * numel + 6 * k) / bandwidth
    yield _row(codec, "torch-topk", device, threads, numel, "encode", seconds, limit, bandwidth)


def _row(
    codec: Codec,
    target: str,
    device: str,
    threads: int,
    numel: int,
    op: str,
    seconds: float,
    limit: float,
    bandwidth: float,
) -> dict[str, Any]:
    return {
        "codec": codec_table.name_of(codec),
        "options": codec_table.options(codec),
        "target": target,
        "device": device,
        "threads": threads,
        "numel": numel,
        "op": op,
        "seconds": seconds,
        "gbps": FLOAT * numel / seconds / 1e9,
        "limit_seconds": limit,
        "of_limit": limit / seconds,
        "copy_gbps": bandwidth / 1e9,
    }


def _take_turns(
    first: Callable[[], None], second: Callable[[], None], threads: int, target: str, quick: bool
) -> tuple[float, float]:
    """Median seconds of two functions that take turns."""
    if target == "triton":
        return _on_stream(first, second, QUICK_EVENTS if quick else EVENTS)
    return _alternate(first, second, threads, target, quick)


def _on_stream(
    first: Callable[[], None], second: Callable[[], None], turns: int
) -> tuple[float, float]:
    """The same on a GPU: what the stream takes, launches included where it must wait for them."""
    functions = (first, second)
    for _ in range(3):  # compiled code, clocks
        for function in functions:
            function()
    torch.cuda.synchronize()
    marks: list[list[Any]] = [[], []]
    for _ in range(turns):
        for function, pairs in zip(functions, marks, strict=True):
            pair = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
            pair[0].record()
            function()
            pair[1].record()
            pairs.append(pair)
    torch.cuda.synchronize()
    seconds = [statistics.median(a.elapsed_time(b) / 1e3 for a, b in pairs) for pairs in marks]
    return seconds[0], seconds[1]


def _alternate(
    first: Callable[[], None], second: Callable[[], None], threads: int, target: str, quick: bool
) -> tuple[float, float]:
    """Median seconds of two functions that take turns on `threads` threads."""
    fewest, most = QUICK_TURNS[target] if quick else TURNS[target]
    budget = SECONDS_EACH[target] / (20 if quick else 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for function in (first, second):  # pages, caches, compiled code
            function()
        times: tuple[list[float], list[float]] = ([], [])
        begin = time.perf_counter()
        while len(times[0]) < most and (
            len(times[0]) < fewest or time.perf_counter() - begin < budget
        ):
            for function, seconds in zip((first, second), times, strict=True):
                start = time.perf_counter()
                function()
                seconds.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)
    return statistics.median(times[0]), statistics.median(times[1])
