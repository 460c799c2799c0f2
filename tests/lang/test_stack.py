"""Kernels run in threads with small stacks: large blocks are in the workspace."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from codec_calls import differing, fixed
from gradwire.codecs import DGC, QSGD, AdaComp, Codec, OneBit, RandomK, Rotated, ThreeLC, TopK
from gradwire.lang import kernels, layout, ops
from gradwire.lang.emit import c, c_stack
from gradwire.lang.forms import FORMS
from gradwire.lang.native import jit
from products import EXHAUSTIVE, one_in

STACK = 256 << 10  # bytes; the bound in docs/internals/kernels.md
MOST = 65536  # the most values of a block


@dataclass(frozen=True)
class Many(Codec):
    """Eight fields of codes, and elements that are kept from loop to loop."""

    block: int = MOST

    def encode(self, g: Any) -> Any:
        x = g.blocks(self.block)
        fields, value = {}, x
        for i in range(4):
            value = ops.map(lambda v: ops.sqrt(ops.abs(v)) / 1.5 + 0.25, value)
            largest = ops.fp32(ops.reduce(max, value))
            scaled = ops.map(lambda v, s=largest: v / s * 15.0, value)
            fields |= {
                f"size{i}": largest,
                f"code{i}": ops.uint(4, scaled),
                f"few{i}": ops.uint(1, scaled),
            }
        return ops.concat(**fields)

    def decode(self, **fields: Any) -> Any:
        terms = [
            fields[f"code{i}"] * fields[f"size{i}"] + fields[f"few{i}"] * 1e-3 for i in range(4)
        ]
        return ops.map(lambda *t: sum(t[1:], t[0]), *terms)


CODECS: list[Codec] = [
    QSGD(bits=7, block=MOST, scale="l2"),
    OneBit(block=MOST),
    Rotated(block=MOST),
    ThreeLC(block=MOST),
    RandomK(1 / MOST),
    TopK(1e-4),
    Many(),
]
LARGEST = ("encode_ef", "decode_sum", "reduce_encode_ef")  # the other forms are parts of these
SMALL: list[Codec] = [OneBit(block=None), DGC(), AdaComp()]


@pytest.mark.parametrize("codec", one_in(2, CODECS), ids=repr)
def test_large_blocks_leave_the_same_bytes(codec: Codec, pytestconfig: pytest.Config) -> None:
    given = [fixed(2 * layout(codec).block + 100)]
    forms = FORMS if pytestconfig.getoption("exhaustive") else LARGEST
    faults = differing(codec, forms, given, threads=3)
    if forms is FORMS:
        faults += differing(codec, forms, given)
    assert not faults, "\n".join(faults)


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(codec, marks=[] if isinstance(codec, (Rotated, TopK)) else [EXHAUSTIVE])
        for codec in [*CODECS, *SMALL]
    ],
    ids=repr,
)
def test_frames_are_small(codec: Codec, tmp_path: Path) -> None:
    """By gcc's -fstack-usage: a sweep and the copy that it calls take twice the largest frame."""
    text = c.prelude() + c.source(codec, "fp32", LARGEST)
    (tmp_path / "a.c").write_text(text, "utf-8")
    flags = [flag for flag in jit.FLAGS if flag != "-shared"]
    subprocess.run(["gcc", *flags, "-fstack-usage", "-c", "a.c"], cwd=tmp_path, check=True)
    rows = [line.split("\t") for line in (tmp_path / "a.su").read_text("utf-8").splitlines()]
    largest = max(rows, key=lambda row: int(row[1]))
    assert 2 * int(largest[1]) <= STACK - 32768, largest


def test_every_thread_has_room_for_large_arrays() -> None:
    for codec in [*CODECS, *SMALL]:
        large = codec in CODECS
        assert (c_stack.scratch_nbytes(c.source(codec, "fp32")) > 0) == large, codec
        numels, made = torch.tensor([1]).numpy(), kernels(codec, target="c", forms=())
        needed = [made.workspace_nbytes(numels, threads) for threads in (1, 3)]
        if large:
            assert needed[1] - needed[0] >= 2 * c_stack.ON_STACK, codec
        else:
            assert needed == [layout(codec).workspace_nbytes(numels, t) for t in (1, 3)], codec


@dataclass(frozen=True)
class Gathers(Codec):
    """Gathers `number` values per entry."""

    number: int

    def encode(self, g: Any) -> Any:
        chosen = ops.topk(ops.abs(g), ops.share(0.1))
        values = {f"v{i}": ops.gather(g * (i + 1.0), chosen) for i in range(self.number)}
        return ops.concat(chosen=chosen, **values)

    def decode(self, chosen: Any, v0: Any, **others: Any) -> Any:
        return ops.scatter(v0, chosen)


def test_as_many_values_as_can_be_are_gathered() -> None:
    assert differing(Gathers(14), ("encode_ef", "decode_sum"), [fixed(612)], threads=2) == []
