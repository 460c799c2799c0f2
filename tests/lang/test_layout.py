"""Sizes and offsets of payloads, and the planes of codes, against their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from codec_calls import CODECS, DTYPES, WIDTHS, call, gradient, ragged_sizes
from gradwire.codecs import QSGD, Codec, Identity, TernGrad
from gradwire.errors import ConfigError
from gradwire.lang import ROW, kernels, layout, semantics
from gradwire.lang.layout import element_nbytes, planes


@pytest.mark.parametrize("codec", [*CODECS, *WIDTHS], ids=repr)
def test_sizes_are_exact(codec: Codec) -> None:
    for dtype in DTYPES:
        lay = layout(codec, dtype)
        for n in ragged_sizes(lay.block):
            payload = call(codec, "encode", gradient(n, dtype), target="eager").payload
            assert payload.numel() == lay.nbytes(n)
            if not lay.variable:
                assert lay.offsets(n)[-1] == lay.nbytes(n)
        assert lay.nbytes(0) == 0


def test_qsgd_ratios() -> None:
    n = 2**20

    def ratio(codec: Codec) -> float:
        return 4 * n / layout(codec).nbytes(n)

    assert ratio(QSGD(bits=4, block=128)) >= 7.5  # 64 + 4 bytes for 512
    assert ratio(QSGD(bits=4, block=128, metadata="fp32")) >= 7.1
    assert ratio(QSGD(bits=4, block=1024)) >= 7.9
    assert ratio(TernGrad()) > 15.9


def test_block_and_splittable() -> None:
    assert layout(QSGD(block=100)).block == 100
    assert layout(Identity()).block == 1024
    assert layout(QSGD()).splittable
    assert not layout(TernGrad()).splittable


def test_workspace() -> None:
    numels = np.array([0, 1, 1024, 5000])
    assert layout(QSGD()).workspace_nbytes(numels) == 0
    # one float per block and one more per row, for each of minimum and maximum
    assert layout(TernGrad()).workspace_nbytes(numels) == 4 * 2 * ((0 + 1 + 1 + 5) + 4)


def test_workspace_may_be_given() -> None:
    codec, values = TernGrad(), gradient(5000)
    made = kernels(codec, torch.float32, "c")
    payload = torch.zeros(made.layout.nbytes(5000), dtype=torch.uint8)
    rows = np.zeros(1, ROW)
    rows["values"], rows["payload"], rows["numel"] = values.data_ptr(), payload.data_ptr(), 5000
    rows["key"] = 7
    workspace = torch.empty(made.layout.workspace_nbytes(rows["numel"]), dtype=torch.uint8)
    made.run("encode", rows, workspace=workspace)
    assert torch.equal(payload, call(codec, "encode", values, target="eager").payload)
    with pytest.raises(AssertionError):
        made.run("encode", rows, workspace=workspace[:-1])


def test_a_row_is_64_bytes() -> None:
    assert ROW.itemsize == 64
    assert [ROW.fields[name][1] for name in ROW.names] == list(range(0, 64, 8))


def test_planes() -> None:
    assert planes(8) == ((8, 0),)
    assert planes(7) == ((4, 0), (2, 4), (1, 6))
    assert planes(5) == ((4, 0), (1, 4))
    assert planes(3) == ((2, 0), (1, 2))


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("m", [1, 7, 8, 9, 128, 129])
def test_packing_is_as_defined(bits: int, m: int) -> None:
    codes = torch.randint(0, 2**bits, (3, m), generator=torch.Generator().manual_seed(bits))
    packed = semantics.pack(codes, f"uint{bits}")
    assert packed.shape == (3, element_nbytes(f"uint{bits}", m))
    assert torch.equal(semantics.unpack(packed, f"uint{bits}", m), codes)
    # the definition, value by value
    expected, begin = torch.zeros_like(packed), 0
    for width, at in planes(bits):
        length = -(-m * width // 8)
        for i in range(m):
            byte, place = begin + i % length, i // length * width
            expected[:, byte] |= (((codes[:, i] >> at) & (2**width - 1)) << place).to(torch.uint8)
        begin += length
    assert torch.equal(packed, expected)


def test_an_integer_gradient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"torch\.int64.*torch\.float32"):
        layout(QSGD(), torch.int64)
