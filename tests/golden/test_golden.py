"""Golden files: payloads, whose bytes must not change between versions, and the generated C.

A payload file starts with the case's description, so a change of layout shows which field moved.
After an intended change run `pytest tests/golden --update-golden` and read the diff.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from codec_calls import call, gradient
from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.lang import Layout, layout, show
from products import EXHAUSTIVE

HERE = Path(__file__).parent

CASES: dict[str, Codec] = {
    "identity": codecs.get("identity"),
    "fp16": codecs.get("fp16"),
    "bf16": codecs.get("bf16"),
    "fp8": codecs.get("fp8", block=100),
    "qsgd": codecs.get("qsgd", rounding="stochastic"),
    "qsgd-7-max-fp32": codecs.get(
        "qsgd", bits=7, scale="max", rounding="stochastic", metadata="fp32", block=50
    ),
    "qsgd-3-l2-nearest": codecs.get("qsgd", bits=3, scale="l2", rounding="nearest"),
    "qsgd-dithered": codecs.get("qsgd", rounding="dithered"),
    "terngrad": codecs.get("terngrad"),
    "terngrad-ternary": codecs.get("terngrad", form="ternary"),
    "onebit": codecs.get("onebit"),
    "onebit-row": codecs.get("onebit", block=None),
    "tbq": codecs.get("tbq", threshold=0.1),
    "threelc": codecs.get("threelc"),
    "topk": codecs.get("topk", density=0.05),
    "topk-fp32": codecs.get("topk", density=0.6, values="fp32"),
    "mstopk": codecs.get("mstopk", density=0.05),
    "dgc": codecs.get("dgc", density=0.05),
    "graddrop": codecs.get("graddrop", density=0.05),
    "hardthreshold": codecs.get("hardthreshold", threshold=0.1, density=0.2),
    "adacomp": codecs.get("adacomp", block=100, density=0.2),
    "randomk": codecs.get("randomk", density=0.1),
    "randomk-unbiased": codecs.get("randomk", density=0.1, values="fp32", unbiased=True),
    "randomshift": codecs.get("randomshift", bits=4, block=100),
    "learnedlevels": codecs.get("learnedlevels", bits=3, block=100),
    "rotated": codecs.get("rotated", rounding="stochastic", block=100),
    "saturating": codecs.get("saturating", bits=3),
}
NUMEL = 300


CHANGED = "golden files changed: see the docstring of this file"


def as_stored(path: Path, text: str, update: bool = False) -> bool:
    """Whether a file has this text, which is written before if `update`."""
    if update:
        path.write_text(text, "utf-8")
    return path.read_text("utf-8") == text


def describe(codec: Codec, payload: torch.Tensor) -> str:
    """One paragraph per part of a field, with its bytes in hexadecimal, 32 per line."""
    lay = layout(codec)
    offsets = lay.offsets(NUMEL)
    size = f"at most {len(payload)}" if lay.variable else str(len(payload))
    text = [f"{codec!r}, {NUMEL} values in blocks of {lay.block}: {size} bytes"]

    def part(title: str, begin: int, end: int) -> None:
        if begin < end:
            text.append(f"\n{title}, bytes {begin} to {end}")
            data = bytes(payload[begin:end].tolist())
            text.extend(data[i : i + 32].hex() for i in range(0, len(data), 32))

    for f, begin, end in zip(lay.fields, offsets, offsets[1:], strict=False):
        kind = "counts" if f.capacity is not None else f.dtype
        part(f"{f.name}: {kind}, {f.scope.name.lower()} scope", begin, end)
    if lay.variable:
        for f, (begin, nbytes) in zip(lay.fields, lay.tails(NUMEL, entries(lay, payload)),
                                      strict=True):  # fmt: skip
            kind = lay.position if f.capacity is not None else f.dtype
            part(f"{f.name}, as long as data are: {kind}", begin, begin + nbytes)
    return "\n".join(text) + "\n"


def entries(lay: Layout, payload: torch.Tensor) -> int:
    """Selected elements, or values of kept blocks."""
    offsets = lay.offsets(NUMEL)
    for f, begin, end in zip(lay.fields, offsets, offsets[1:], strict=False):
        known = payload[begin:end].to(torch.int64)
        if f.capacity is not None:
            return int((known.view(-1, 2) * torch.tensor([1, 256])).sum())
        if any(other.flag == f.name for other in lay.fields):
            sizes = torch.full((lay.blocks(NUMEL),), lay.block)
            sizes[-1] = NUMEL - lay.block * (len(sizes) - 1)
            return int(sizes[known != 0].sum())
    raise AssertionError("no length depends on data")


@pytest.fixture
def default_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with default flags; other tests may have made them with others."""
    monkeypatch.delenv("GRADWIRE_KERNEL_FLAGS", raising=False)
    module = sys.modules["gradwire.lang.kernels"]  # the package also has a function of this name
    monkeypatch.setattr(module, "_made", module._made.__wrapped__)


# of which `make test` compiles encode with the users' flags; lang/test_targets.py has the others
COMPILED = ("qsgd", "threelc", "topk")


def payload_text(name: str, target: str) -> str:
    codec = CASES[name]
    payload = call(codec, "encode", gradient(NUMEL), target=target, key=2**63 + 5).payload
    return describe(codec, payload)


def test_payloads(pytestconfig: pytest.Config) -> None:
    update = bool(pytestconfig.getoption("--update-golden"))
    changed = [
        name
        for name in CASES
        if not as_stored(HERE / f"{name}.payload.txt", payload_text(name, "eager"), update)
    ]
    assert not changed, CHANGED
    # LowRank's payload depends on the BLAS of torch
    assert set(codecs.REGISTRY) - {"lowrank"} <= set(CASES)


@pytest.mark.parametrize(
    "names",
    [COMPILED, pytest.param([n for n in CASES if n not in COMPILED], marks=EXHAUSTIVE)],
    ids=["few", "rest"],
)
def test_payloads_of_compiled_kernels(names: Sequence[str], default_flags: None) -> None:
    changed = [n for n in names if not as_stored(HERE / f"{n}.payload.txt", payload_text(n, "c"))]
    assert not changed, CHANGED


def test_generated_text(pytestconfig: pytest.Config) -> None:
    """C for copies, quantisers and tensor reductions, and the IR of one codec."""
    update = bool(pytestconfig.getoption("--update-golden"))
    texts = {f"{name}.c": show(CASES[name], "c") for name in ("identity", "qsgd", "terngrad")}
    texts["qsgd.ir.txt"] = show(CASES["qsgd"], "ir") + "\n"
    changed = [name for name, text in texts.items() if not as_stored(HERE / name, text, update)]
    assert not changed, CHANGED
