"""`gradwire bench kernels`: the time of a codec's kernels against the time to move their bytes.

A codec's kernels and a copy of the same number of floats are interleaved (A B A B) on the same
threads. They cycle through several arrays, so that no array is in a cache. All times are medians.
The copy's bytes (read and written) divided by its time give the bandwidth of the limit: a kernel at
of_limit 1 takes as long as reading and writing its own bytes. If a codec needs a statistic of the
whole row before it can encode the first value, the limit counts two reads of the values.

Codecs that keep a share of the values have an additional row of target "torch-topk": the same
selection by torch.topk and a gather.

On a GPU (device cuda, target triton) CUDA events time the stream, over 256 MB by default.

A row: codec, options, target, device, threads, numel, op, seconds (median), gbps (uncompressed
bytes / s / 1e9), limit_seconds ((bytes read + bytes written) / bandwidth), of_limit
(limit_seconds / seconds), copy_gbps (that bandwidth, so that machines can be compared).
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from gradwire import codecs as codec_table
from gradwire.codecs import Codec
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import ROW, Layout, forms, gpu, kernels, passes
from gradwire_tools.bench import interleaved, memory
from gradwire_tools.bench.progress import cells
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.quantities import plural
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.train import methods

KINDS = (
    row_kind(
        "bench kernels",
        "codec op gbps",
        "codec:text op:text target:text numel:count threads:positive seconds:amount gbps:amount "
        "of_limit:amount",
        "device:text options:options? limit_seconds:amount? copy_gbps:amount?",
    ),
    # scripts/gpu_check.py
    row_kind("gpu-check", "check subject", "check:text subject:text passed:flag seconds:amount"),
)

NUMEL = {"cpu": 2**24, "cuda": 2**26}
# All codecs end within 45 seconds.
QUICK_NUMEL = {"c": 2**22, "eager": 2**18, "triton": 2**24}
TARGETS = {"cpu": ("c", "eager"), "cuda": ("triton",)}
OPS = ("encode", "encode_ef", "decode", "decode_add", "decode_sum", "reduce_encode")
PEERS = 3  # number of payloads that decode_sum and reduce_encode add
FLOAT = 4  # bytes
COLD = 2**28  # bytes, more than any cache holds
MOST_SETS = 4
_MOST_THREADS = 64  # where there are fewer cores

T = TypeVar("T")


@stamped
def run(
    codecs: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    numel: int | None = None,
    threads: Sequence[int] | None = None,
    quick: bool = False,
    device: str = "cpu",
) -> Iterator[Row]:
    """Yield a row for every codec, target, number of threads and op.

    Args:
        codecs: NAME or NAME:OPTION=VALUE:...; all registered codecs by default.
        targets: "c" and "eager", both by default; on a GPU "triton".
        numel: fp32 values; 2^24 by default (2^22 for c and 2^18 for eager when quick), and on a GPU
            2^26 (2^24).
        threads: numbers of threads; 1 and 2 by default (2 for c and 1 for eager when quick). On a
            GPU always 1.
        quick: fewer repetitions.
        device: "cpu" or "cuda".

    Raises:
        ConfigError: an unknown codec, option, target or device; no compiler for target c; no GPU,
            or no Triton, for device cuda.
    """
    if device not in TARGETS:
        raise ConfigError(f"unknown device {device!r}: {use_one_of(device, TARGETS)}")
    for target in targets or ():
        if target not in TARGETS[device]:
            known = use_one_of(target, TARGETS[device])
            raise ConfigError(f"unknown target {target!r} on {device}: {known}")
    if device == "cuda":
        reason = gpu.missing() or ("Triton interprets" if gpu.interpreting() else None)
        if reason is not None:
            raise ConfigError(f"device 'cuda': {reason}")
        threads = (1,)
    given = [methods.parse(f"gradwire:{name}").alone() for name in codecs or codec_table.REGISTRY]
    chosen = [codec_table.get(str(o.pop("codec")), **o) for o in map(dict[str, Any], given)]
    if numel is not None and numel < 1:
        raise ConfigError(f"numel={numel} must be 1 or more")
    if numel is not None and device == "cpu":
        memory.check(f"--numel {numel}", FLOAT * numel * _sets(numel) * (3 + PEERS))
    for count in threads or ():
        check_threads(count)
    places = [
        (f"{target} with {plural(count, 'thread')}", target, count)
        for target in targets or TARGETS[device]
        for count in threads or ((2 if target == "c" else 1,) if quick else (1, 2))
    ]

    def rows(named: tuple[str, Codec], place: tuple[str, str, int]) -> Iterator[Row]:
        _, target, count = place
        size = numel or (QUICK_NUMEL[target] if quick else NUMEL[device])
        return _rows(named[1], target, size, count, quick, device)

    every = [(codec_table.name_of(codec), codec) for codec in chosen]
    yield from cells("kernels of {0[0]} on {1[0]}", rows, every, places)


def check_threads(count: int) -> None:
    """Raise ConfigError unless a kernel may run on so many threads here."""
    if count < 1:
        raise ConfigError(f"--threads {count}: a kernel has 1 or more")
    if count > max(os.cpu_count() or 1, _MOST_THREADS):
        raise ConfigError(f"--threads {count}: this machine has {os.cpu_count()} cores")


def _rows(
    codec: Codec, target: str, numel: int, threads: int, quick: bool, device: str
) -> Iterator[Row]:
    made = kernels(codec, torch.float32, target)
    if made.device.type != device:
        return  # the codec has no kernel on this device: it runs eagerly on the CPU
    needed = made.workspace_nbytes(np.array([numel]), threads, 1 + PEERS)
    workspace = torch.empty(needed, dtype=torch.uint8, device=device)
    mark = made.mark()
    places = np.arange(PEERS)
    distances = np.concatenate([places * made.layout.nbytes(numel), places])  # and origins

    def run(op: str, rows: np.ndarray) -> None:
        ranks = 1 + PEERS if op in ("decode_sum", "reduce_encode") else 1
        made.run(
            op, rows, threads=threads, workspace=workspace, ranks=ranks, distances=distances,
            factor=1 / ranks, mark=mark,
        )  # fmt: skip

    sets = [_Arrays(made.layout, numel, device, seed) for seed in range(_sets(numel))]
    for arrays in sets:
        run("encode", arrays.rows("encode"))
        arrays.peers = arrays.payload.repeat(PEERS)
    order = itertools.cycle(range(len(sets)))
    todo = [_in_turn(partial(run, op), [arrays.rows(op) for arrays in sets], order) for op in OPS]
    todo.append(_in_turn(_Arrays.copy, sets, order))
    *seconds, copying = interleaved.medians(todo, threads, target, quick)
    bandwidth = 2 * FLOAT * numel / copying
    measured = [
        (target, op, each, _moved(codec, op, made.layout, numel), bandwidth)
        for op, each in zip(OPS, seconds, strict=True)
    ]
    density = getattr(codec, "density", None)
    if target != "eager" and density is not None:
        measured.append(_torch_topk(density, sets, threads, quick))
    for form, op, each, moved, rate in measured:
        yield {
            "codec": codec_table.name_of(codec),
            "options": codec_table.options(codec),
            "target": form,
            "device": device,
            "threads": threads,
            "numel": numel,
            "op": op,
            "seconds": each,
            "gbps": FLOAT * numel / each / 1e9,
            "limit_seconds": moved / rate,
            "of_limit": moved / rate / each,
            "copy_gbps": rate / 1e9,
        }


class _Arrays:
    """The arrays that kernels, and the copy, read and write."""

    def __init__(self, layout: Layout, numel: int, device: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(numel, generator=generator, dtype=torch.float32)
        self.values = values.to(device)
        self.result = torch.zeros_like(self.values)  # decoded: `values` are the same for every op
        self.residual = torch.zeros_like(self.values)
        self.payload = torch.zeros(layout.nbytes(numel), dtype=torch.uint8, device=device)
        self.peers = self.payload  # the payloads of PEERS peers

    def rows(self, op: str) -> np.ndarray:
        rows = np.zeros(1, ROW)
        rows["values"] = (self.values if op.startswith("encode") else self.result).data_ptr()
        rows["residual"], rows["payload"] = self.residual.data_ptr(), self.payload.data_ptr()
        rows["numel"], rows["key"], rows["source"] = self.values.numel(), 1, self.peers.data_ptr()
        return rows

    def copy(self) -> None:
        self.result.copy_(self.values)


def _sets(numel: int) -> int:
    """The number of sets of arrays to cycle through: in training, gradients are not in a cache."""
    return max(1, min(MOST_SETS, COLD // (FLOAT * numel)))


def _in_turn(
    function: Callable[[T], None], arguments: Sequence[T], order: Iterator[int]
) -> Callable[[], None]:
    """A call of `function` with the next argument in `order`. All functions share `order`, so that
    each gets other arrays than the previous one."""
    return lambda: function(arguments[next(order)])


def _moved(codec: Codec, op: str, layout: Layout, numel: int) -> int:
    """Bytes that an op must read and write."""
    values, payload = FLOAT * numel, layout.nbytes(numel)
    selects = any(f.capacity is not None for f in layout.fields)
    # If the codec selects values, decode_add reads and writes only those.
    touched = 2 * FLOAT * layout.capacity(numel) if selects else 2 * values
    # A statistic of the whole row takes one more read.
    readings = passes.value_reads(forms.derive(codec, "fp32").programs[op])
    return {
        "encode": readings * values + payload,
        "encode_ef": readings * 2 * values + values + payload,
        "decode": values + payload,
        "decode_add": touched + payload,
        "decode_sum": 2 * values + PEERS * payload,
        "reduce_encode": readings * (values + PEERS * payload) + values + payload,
    }[op]


def _torch_topk(
    density: float, sets: Sequence[_Arrays], threads: int, quick: bool
) -> tuple[str, str, float, int, float]:
    """What torch.topk and a gather take: (target, op, seconds, bytes moved, bandwidth)."""
    numel, device = sets[0].values.numel(), sets[0].values.device.type
    k = max(1, int(density * numel))

    def encode(arrays: _Arrays) -> None:
        places = torch.topk(arrays.values.abs(), k, sorted=False).indices
        places.to(torch.int32)
        arrays.values[places].half()

    target = "triton" if device == "cuda" else "eager"
    order = itertools.cycle(range(len(sets)))
    todo = [_in_turn(encode, sets, order), _in_turn(_Arrays.copy, sets, order)]
    seconds, copying = interleaved.medians(todo, threads, target, quick)
    return "torch-topk", "encode", seconds, FLOAT * numel + 6 * k, 2 * FLOAT * numel / copying
