"""Kernels of target c under sanitizers: no payload makes them access memory out of bounds.

For every registered codec, a program of its generated C and harness.c decodes valid payloads, then
10^4 mutated ones, in every form that reads payloads, in buffers of exact size. `make test-all` uses
10^5 mutations, and GRADWIRE_FUZZ multiplies the number for long runs.
"""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from codec_calls import gradient
from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.errors import CodecError
from gradwire.lang import decode, encode, forms, layout
from gradwire.lang.emit import c, c_stack
from gradwire.lang.layout import native_name
from gradwire.lang.native import jit
from products import EXHAUSTIVE
from ranks import caught

HARNESS = Path(__file__).with_name("harness.c").read_text("utf-8")
# Not all of "undefined": checks of pointer arithmetic take gcc minutes per codec. And one more: a
# cast that overflows gives different numbers on different machines.
SANITIZERS = (
    "address,alignment,bounds,shift,signed-integer-overflow,integer-divide-by-zero,vla-bound,"
    "float-cast-overflow"
)
FLAGS = (
    "-std=gnu11", "-O1", "-g1", f"-fsanitize={SANITIZERS}", "-fno-sanitize-recover=all",
    "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-fopenmp", "-w",
)  # fmt: skip
MUTATIONS = 10_000 * int(os.environ.get("GRADWIRE_FUZZ", "1"))
PAYLOADS = 4
# Threads that spin at barriers would take most of the time.
ENVIRONMENT = {"ASAN_OPTIONS": "detect_leaks=0", "OMP_WAIT_POLICY": "passive"}

# Codecs that need other options to have several entries in payloads of few values.
OPTIONS: dict[str, dict[str, Any]] = {
    "topk": {"density": 0.1},
    "mstopk": {"density": 0.1, "values": "fp32"},
    "dgc": {"density": 0.02},
    "graddrop": {"density": 0.05},
    "hardthreshold": {"threshold": 0.02, "density": 0.3},
    "adacomp": {"block": 100, "density": 0.3},
    "randomk": {"density": 0.2, "values": "fp32"},
}
CASES: dict[str, tuple[Codec, torch.dtype]] = {
    **{
        name: (codecs.get(name, **OPTIONS.get(name, {})), torch.float32) for name in codecs.REGISTRY
    },
    "qsgd of fp16": (codecs.get("qsgd", bits=7, block=50), torch.float16),
    "qsgd stochastic": (codecs.get("qsgd", block=50, rounding="stochastic"), torch.float32),
    "identity of bf16": (codecs.get("identity"), torch.bfloat16),
    "topk of bf16": (codecs.get("topk", density=0.05), torch.bfloat16),
    "rotated in large blocks": (codecs.get("rotated", block=16384), torch.float32),
}
# Codecs with matrices have no kernels: torch's BLAS does their work.
FUSED = [name for name, (codec, _) in CASES.items() if forms.derive(codec, "fp32").fused]
# Codecs that send the number of entries: a wrong number is an error.
COUNTED = [name for name in FUSED if any(f.capacity for f in layout(*CASES[name]).fields)]


def sizes(codec: Codec, dtype: torch.dtype) -> list[int]:
    """A few values, one ragged block, and full blocks with a ragged last one."""
    block = layout(codec, dtype).block
    return sorted({1, 37, min(block + 5, 300), 2 * block + 3 if block <= 1024 else block + 5})


def kernels(codec: Codec, dtype: torch.dtype) -> str:
    """The C of the forms that read payloads."""
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs.values()
    readers = [p for p in programs if p.form not in ("encode", "encode_ef")]
    return c.prelude() + c.emit(readers, layout(codec, dtype), native)


def corpus(codec: Codec, dtype: torch.dtype) -> bytes:
    """The input of harness.c: valid payloads of several sizes."""
    table = forms.derive(codec, native_name(dtype)).table
    parts = [struct.pack("<qq", dtype.itemsize, len(table)), np.array(table, "<f4").tobytes()]
    numels = sizes(codec, dtype)
    parts.append(struct.pack("<q", len(numels)))
    lay, scratch = layout(codec, dtype), c_stack.scratch_nbytes(kernels(codec, dtype))
    for numel in numels:
        room = [
            lay.workspace_nbytes(np.full(rows, numel), threads) + threads * scratch
            for rows in (1, 2)
            for threads in (1, 2)
        ]
        parts.append(struct.pack("<7q", numel, lay.nbytes(numel), *room, PAYLOADS))
        for seed in range(PAYLOADS):
            payload = encode(codec, gradient(numel, dtype, seed), key=seed, target="eager")
            parts.append(payload.numpy().tobytes())
    return b"".join(parts)


def fuzz(text: str, data: bytes, folder: Path, mutations: int) -> subprocess.CompletedProcess[str]:
    """Compile kernels with the harness, and run the program."""
    (folder / "fuzz.c").write_text(text + HARNESS, "utf-8")
    (folder / "corpus").write_bytes(data)
    jit.run([jit.compiler(), *FLAGS, "fuzz.c", "-o", "fuzz", "-lm"], folder)
    return start(folder, mutations)


def start(folder: Path, mutations: int) -> subprocess.CompletedProcess[str]:
    """Run the program that `fuzz` compiled in a folder."""
    return subprocess.run(
        [str(folder / "fuzz"), str(folder / "corpus"), str(mutations), "1"],
        env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True,
        timeout=280 * max(1, mutations // 100_000), check=False,
    )  # fmt: skip


# a selection
FEW = ("topk of bf16",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FEW else [EXHAUSTIVE]) for name in FUSED]
)
def test_no_payload_breaks_a_kernel(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    codec, dtype = CASES[name]
    mutations = MUTATIONS * (10 if pytestconfig.getoption("exhaustive") else 1)
    done = fuzz(kernels(codec, dtype), corpus(codec, dtype), tmp_path, mutations)
    assert done.returncode == 0, f"{name}: {done.stderr[:4000]}"
    counted = re.fullmatch(r"(\d+) decoded, (\d+) refused\n", done.stdout)
    assert counted is not None
    decoded, refused = map(int, counted.groups())
    assert decoded + refused == mutations
    assert decoded > 0
    assert (refused > 0) == (name in COUNTED)


PLANTED = """
char *getenv(const char *);
static int planted(const Row *rows, int64_t n, int32_t ranks, int32_t rank,
                   const int64_t *distances, float factor, int32_t threads, void *workspace,
                   const float *table) {
  const Row *row = rows + n - 1;
  volatile float *values = row->values;
  switch (getenv("PLANTED")[0]) {
    case 'p': return ((volatile uint8_t *)row->payload)[distances[1]] & 0;
    case 'v': values[row->numel] = 0; return 0;
    case 'i': return values[((volatile uint8_t *)row->payload)[0]] > 2;
    case 's': return ((volatile uint8_t *)row->source)[distances[1] * 2] & 0;
    case 'w': ((volatile float *)workspace)[4] = 0; return 0;
    case 'u': return (1 << (32 + (int)(values[0] * values[0]))) & 0;
    case 'm': return -1;
    case 'r': return 1;
    default: return 0;
  }
}
#define decode planted
"""


FAULTS = {
    "payload": "heap-buffer-overflow",
    "values": "heap-buffer-overflow",
    "index": "heap-buffer-overflow",
    "source": "heap-buffer-overflow",
    "workspace": "heap-buffer-overflow",
    "undefined": "runtime error: shift exponent",
    "minus one": "decode of 1 values returned -1",
    "refused": "decode of 1 values returned 1 for row 1 of 1, genuine",
    "none": "",
}


def test_the_harness_finds_planted_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program whose `decode` has the fault that PLANTED names."""
    codec, dtype = CASES["identity"]
    monkeypatch.setenv("PLANTED", "none")
    fuzz(kernels(codec, dtype) + PLANTED, corpus(codec, dtype), tmp_path, 0)
    for fault, said in FAULTS.items():
        monkeypatch.setenv("PLANTED", fault)
        done = start(tmp_path, 1000)
        assert (done.returncode == 0) == (fault == "none"), (fault, done.stderr)
        assert said in done.stderr, fault


def refused(codec: Codec, payload: torch.Tensor, numel: int, target: str, said: str) -> bool:
    error = caught(lambda: decode(codec, payload, numel, target=target))
    return isinstance(error, CodecError) and re.search(said, str(error)) is not None


@pytest.mark.parametrize(
    ("target", "names"), [("c", ("identity", "topk", "lowrank")), ("eager", list(codecs.REGISTRY))]
)
def test_payloads_of_another_size_are_refused(target: str, names: Sequence[str]) -> None:
    faults, numel = [], 300
    for name in names:
        codec = CASES[name][0]
        payload = encode(codec, gradient(numel), target="eager")
        said = rf"a payload of 300 values is uint8\[{len(payload)}\], not uint8\[(\d+)\]"
        bad = {
            "one byte short": (payload[:-1], said),
            "empty": (payload[:0], said),
            "one byte long": (torch.cat([payload, payload[:1]]), said),
            "twice": (torch.cat([payload, payload]), said),
            "of 1000": (encode(codec, gradient(numel + 700), target="eager"), said),
            "integers": (payload.to(torch.int32), "not int32"),
            "signed bytes": (payload.view(torch.int8), "not int8"),
        }
        faults += [(name, how) for how, (p, text) in bad.items()
                   if not refused(codec, p, numel, target, text)]  # fmt: skip
    assert not faults


@pytest.mark.parametrize("target", ["c", "eager"])
def test_payloads_with_impossible_counts_are_refused(target: str) -> None:
    said, faults = r"row 0 of decode|entries of .* values, but at most", []
    for name in COUNTED:
        codec, dtype = CASES[name]
        numel = 2 * layout(codec, dtype).block + 3
        payload = encode(codec, gradient(numel, dtype), target="eager")
        if not decode(codec, payload, numel, dtype, target=target).isfinite().all():
            faults.append(f"{name}: a good payload is not decoded")
        error = caught(
            lambda: decode(codec, torch.full_like(payload, 255), numel, dtype, target=target)  # noqa: B023
        )
        if not isinstance(error, CodecError) or not re.search(said, str(error)):
            faults.append(f"{name}: {error!r}")
    assert not faults
