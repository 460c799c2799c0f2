"""ARM's NEON gives the same bytes as x86: kernels cross-compiled as for a wheel, in an emulator.

Needs aarch64-linux-gnu-gcc and qemu-aarch64 (Debian: gcc-aarch64-linux-gnu, libc6-dev-arm64-cross,
qemu-user); without them the tests are skipped. On an ARM machine, test_prebuilt.py tests more.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from codec_calls import call, gradient, payloads, same
from gradwire import codecs
from gradwire.lang import forms, layout
from gradwire.lang.layout import native_name
from gradwire.lang.native import build, isa, jit
from products import one_in

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
pytestmark = pytest.mark.skipif(
    shutil.which(COMPILER) is None or shutil.which(EMULATOR) is None,
    reason=f"no {COMPILER} or no {EMULATOR}",
)

CODECS = {
    "identity": codecs.get("identity"),
    "fp16": codecs.get("fp16"),
    "qsgd": codecs.get("qsgd"),
    "qsgd-l2": codecs.get("qsgd", bits=7, scale="l2", block=50),
    "qsgd-stochastic": codecs.get("qsgd", rounding="stochastic"),
    "terngrad": codecs.get("terngrad"),
    "topk": codecs.get("topk", density=0.1),
    "threelc": codecs.get("threelc"),
    "rotated": codecs.get("rotated"),
}
CASES = [*((name, torch.float32) for name in CODECS), ("qsgd", torch.bfloat16)]
SIZES = [1, 130, 5003]
KEY, SHARED, START = 2**63 + 5, 12, 640


def compile_for_arm(codec: codecs.Codec, dtype: torch.dtype, folder: Path) -> Path:
    """A static program of the codec's kernels, with the flags of a wheel's library."""
    (unit,) = build.units([("kernel", codec)], [native_name(dtype)])
    driver = Path(__file__).with_name("remote.c").read_text("utf-8")
    names = f"#define FORMS {', '.join(forms.FORMS)}\n"
    (folder / "kernel.c").write_text(unit.text + names + driver, "utf-8")
    flags = [*jit.FLAGS, *isa.level("armv8-a").flags, "-static"]
    jit.run([COMPILER, *flags, "kernel.c", "-o", "kernel", "-lm"], folder)
    return folder / "kernel"


@pytest.mark.parametrize(("name", "dtype"), one_in(4, CASES), ids=str)
def test_neon_gives_the_same_bytes(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    codec = CODECS[name]
    lay, table = layout(codec, dtype), forms.derive(codec, native_name(dtype)).table
    asked, expected = [], []
    for form in forms.FORMS:
        for numel in SIZES:
            values, residual = gradient(numel, dtype), gradient(numel, seed=4)
            own, *peers = payloads(codec, dtype, numel)
            workspace = lay.workspace_nbytes(np.array([numel]), 2)
            head = [forms.FORMS.index(form), numel, dtype.itemsize, len(own), workspace]
            head += [3, 1, 2, len(table), START, KEY - 2**64, SHARED]
            parts = [values.view(torch.uint8), residual.view(torch.uint8), own, *peers]
            data = b"".join(part.numpy().tobytes() for part in parts)
            asked.append(struct.pack("<12q", *head) + data + np.array(table, "<f4").tobytes())
            expected.append(
                call(
                    codec, form, values, target="eager", payload=own, residual=residual,
                    peers=peers, rank=1, factor=1 / 3, key=KEY, shared=SHARED, start=START,
                )
            )  # fmt: skip
    program = compile_for_arm(codec, dtype, tmp_path)
    done = subprocess.run(
        [EMULATOR, str(program)], input=b"".join(asked), capture_output=True, timeout=120,
        check=True,
    )  # fmt: skip
    answer = np.frombuffer(done.stdout, np.uint8)
    for wanted in expected:
        for tensor in (wanted.payload, wanted.values, wanted.residual):
            # a copy, since the output may be unaligned
            got = torch.from_numpy(answer[: tensor.nbytes].copy()).view(tensor.dtype)
            assert same(got, tensor)
            answer = answer[tensor.nbytes :]
    assert not answer.size
