"""Golden files: payloads, whose bytes are a promise to other versions, and the generated C.

A payload file starts with the case's description, so a change of layout shows which field moved.
After an intended change run `pytest tests/golden --update-golden` and read the diff.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from codec_calls import call, gradient
from gradwire import codecs
from gradwire.codecs import Codec
from gradwire.lang import layout, show

HERE = Path(__file__).parent

CASES: dict[str, Codec] = {
    "identity": codecs.get("identity"),
    "fp16": codecs.get("fp16"),
    "bf16": codecs.get("bf16"),
    "qsgd": codecs.get("qsgd"),
    "qsgd-7-max-fp32": codecs.get("qsgd", bits=7, scale="max", metadata="fp32", block=50),
    "qsgd-3-l2-nearest": codecs.get("qsgd", bits=3, scale="l2", rounding="nearest"),
    "terngrad": codecs.get("terngrad"),
    "terngrad-ternary": codecs.get("terngrad", form="ternary"),
}
NUMEL = 300


def compare(path: Path, text: str, update: bool) -> None:
    if update:
        path.write_text(text, "utf-8")
    assert path.read_text("utf-8") == text, f"{path.name} changed: see the docstring of this file"


def describe(codec: Codec, payload: torch.Tensor) -> str:
    """A field a paragraph, its bytes in hexadecimal, 32 a line."""
    lay = layout(codec)
    offsets = lay.offsets(NUMEL)
    text = [f"{codec!r}, {NUMEL} values in blocks of {lay.block}: {offsets[-1]} bytes"]
    for f, begin, end in zip(lay.fields, offsets, offsets[1:], strict=False):
        text.append(f"\n{f.name}: {f.dtype}, {f.scope.name.lower()} scope, bytes {begin} to {end}")
        data = bytes(payload[begin:end].tolist())
        text += [data[i : i + 32].hex() for i in range(0, len(data), 32)]
    return "\n".join(text) + "\n"


@pytest.mark.parametrize("target", ["eager", "c"])
@pytest.mark.parametrize("name", CASES)
def test_payload(name: str, target: str, pytestconfig: pytest.Config) -> None:
    codec = CASES[name]
    payload = call(codec, "encode", gradient(NUMEL), target=target, key=2**63 + 5).payload
    update = pytestconfig.getoption("--update-golden") and target == "eager"
    compare(HERE / f"{name}.payload.txt", describe(codec, payload), bool(update))


@pytest.mark.parametrize("name", ["identity", "qsgd", "terngrad"])
def test_c(name: str, pytestconfig: pytest.Config) -> None:
    compare(
        HERE / f"{name}.c", show(CASES[name], "c"), bool(pytestconfig.getoption("--update-golden"))
    )


def test_ir(pytestconfig: pytest.Config) -> None:
    compare(
        HERE / "qsgd.ir.txt",
        show(CASES["qsgd"], "ir") + "\n",
        bool(pytestconfig.getoption("--update-golden")),
    )


def test_every_codec_has_a_golden_payload() -> None:
    assert set(codecs.REGISTRY) <= set(CASES)
