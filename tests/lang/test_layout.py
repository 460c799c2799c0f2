"""Sizes and offsets of payloads, and the planes of codes, against their definition."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from codec_calls import CODECS, DTYPES, WIDTHS, call, gradient, ragged_sizes, table
from gradwire import codecs
from gradwire.codecs import QSGD, Codec, Identity, OneBit, TernGrad, TopK
from gradwire.errors import ConfigError
from gradwire.lang import ROW, kernels, layout, semantics
from gradwire.lang.layout import element_nbytes, planes


def codes(n: int, block: int, bits: int) -> int:
    """Bytes of codes, block by block, computed from docs/internals/wire-format.md."""
    sizes = [block] * (n // block) + [n % block] * (n % block > 0)
    return sum(-(-m * w // 8) for m in sizes for w in (8, 4, 2, 1) if bits & w)


def entries(n: int, block: int, k: int, bits: int) -> int:
    """Bytes of a selection of `k` entries of `bits` bits."""
    place = (block - 1).bit_length()
    value = codes(k, 128, bits) if bits < 16 else k * bits // 8
    return 2 * -(-n // block) + codes(k, 128, place) + value


# bytes of n values, from docs/internals/wire-format.md
SIZES: dict[str | Codec, Callable[[int], int]] = {
    "identity": lambda n: 4 * n,
    "fp16": lambda n: 2 * n,
    "bf16": lambda n: 2 * n,
    "fp8:block=100": lambda n: 4 * -(-n // 100) + n,
    "qsgd": lambda n: 4 * -(-n // 128) + codes(n, 128, 4),
    "terngrad": lambda n: 8 + codes(n, 1024, 2),
    "onebit:block=100": lambda n: 8 * -(-n // 100) + codes(n, 100, 1),
    OneBit(block=None): lambda n: 8 + codes(n, 1024, 1),
    "tbq": lambda n: codes(n, 1024, 2),
    "threelc": lambda n: 4 + -(-n // 80) + n // 80 * 16 + -(-(n % 80) // 5),
    "topk:density=0.05": lambda n: entries(n, 256, max(1, int(0.05 * n)), 16),
    "mstopk:density=0.1:values=fp32": lambda n: entries(n, 256, max(1, int(0.101 * n)), 32),
    "dgc:density=0.02": lambda n: entries(n, 512, max(1, int(0.02 * n)), 16),
    "graddrop:density=0.05": lambda n: entries(n, 256, min(n, max(64, int(0.0625 * n))), 16),
    "hardthreshold:density=0.1": lambda n: entries(n, 256, max(1, int(0.1 * n)), 16),
    "adacomp:block=100:density=0.1": lambda n: 4 + entries(n, 100, max(1, int(0.1 * n)), 1),
    "randomk:density=0.1": lambda n: 2 * -(-n // 10),
    "randomshift:bits=5:block=100": lambda n: 8 * -(-n // 100) + codes(n, 100, 5),
    "learnedlevels:bits=3:block=64": lambda n: 8 * -(-n // 64) + codes(n, 64, 3),
    "rotated:bits=6:block=96": lambda n: 4 * -(-n // 96) + codes(n, 96, 6),
    "saturating": lambda n: codes(n, 1024, 4),
    "lowrank:rank=2:columns=50": lambda n: (-(-n // 50) + 50) * 2 * 2,
}


def test_bytes_are_accounted() -> None:
    """Law 5: a payload has the size that docs/internals/wire-format.md says."""
    counts = (1, 7, 63, 64, 99, 100, 1023, 1024, 1025, 5000, 100_003)
    faults = [
        f"{text}: {n} values take {found} bytes, not {nbytes(n)}"
        for text, nbytes in SIZES.items()
        for n in counts
        if (found := layout(codecs.get(text)).nbytes(n)) != nbytes(n)
    ]
    assert not faults
    assert {codecs.name_of(codecs.get(text)) for text in SIZES} == set(codecs.REGISTRY)


def test_offsets_end_with_the_payload() -> None:
    for codec in [*CODECS, *WIDTHS]:
        for dtype in DTYPES:
            lay = layout(codec, dtype)
            assert lay.nbytes(0) == 0
            if not lay.variable:
                for n in ragged_sizes(lay.block):
                    assert lay.offsets(n)[-1] == lay.nbytes(n), (codec, dtype, n)


def test_block_and_splittable() -> None:
    assert layout(QSGD(block=100)).block == 100
    assert layout(Identity()).block == 1024
    assert layout(QSGD()).splittable
    assert [layout(c).splittable for c in CODECS[:11]] == [True] * 9 + [False] * 2
    assert not layout(TopK()).splittable


def test_workspace() -> None:
    numels = np.array([0, 1, 1024, 5000])
    assert layout(QSGD()).workspace_nbytes(numels) == 0
    # one float per block and one more per row, for each of minimum and maximum
    assert layout(TernGrad()).workspace_nbytes(numels) == 4 * 2 * ((0 + 1 + 1 + 5) + 4)


def test_workspace_may_be_given() -> None:
    codec, values = TernGrad(), gradient(5000)
    made = kernels(codec, torch.float32, "c")
    payload = torch.zeros(made.layout.nbytes(5000), dtype=torch.uint8)
    rows = table([values], [payload], key=7)
    workspace = torch.empty(made.layout.workspace_nbytes(rows["numel"]), dtype=torch.uint8)
    made.run("encode", rows, workspace=workspace)
    assert torch.equal(payload, call(codec, "encode", values, target="eager").payload)
    with pytest.raises(ConfigError, match=f"workspace: {workspace.nbytes - 1} bytes are given"):
        made.run("encode", rows, workspace=workspace[:-1])


def test_a_row_is_64_bytes() -> None:
    assert ROW.itemsize == 64
    assert [ROW.fields[name][1] for name in ROW.names] == list(range(0, 64, 8))


def test_planes() -> None:
    assert planes(8) == ((8, 0),)
    assert planes(7) == ((4, 0), (2, 4), (1, 6))
    assert planes(5) == ((4, 0), (1, 4))
    assert planes(3) == ((2, 0), (1, 2))


def test_packing_is_as_defined() -> None:
    for bits, m in product(range(1, 9), (1, 7, 8, 9, 128, 129)):
        codes = torch.randint(0, 2**bits, (3, m), generator=torch.Generator().manual_seed(bits))
        packed = semantics.pack(codes, f"uint{bits}")
        assert packed.shape == (3, element_nbytes(f"uint{bits}", m))
        assert torch.equal(semantics.unpack(packed, f"uint{bits}", m), codes), (bits, m)
        # the definition, value by value
        expected, begin = torch.zeros_like(packed), 0
        for width, at in planes(bits):
            length = -(-m * width // 8)
            for i in range(m):
                byte, place = begin + i % length, i // length * width
                part = ((codes[:, i] >> at) & (2**width - 1)) << place
                expected[:, byte] |= part.to(torch.uint8)
            begin += length
        assert torch.equal(packed, expected), (bits, m)
