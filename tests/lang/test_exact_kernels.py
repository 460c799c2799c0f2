"""Exact: its layout, its errors, and its use by kernels, partitions and the registry."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_exact import ANY, FEEDBACK, PAIRS, REDUCING, SIZES, Memory

import gradwire
from gradwire import codecs
from gradwire.errors import ConfigError
from gradwire.lang import Exact, fingerprint, kernels, layout
from gradwire.partition import Spec, partition
from rooms.engine import ALIGNMENT


def test_the_layout_is_the_values() -> None:
    for dtype in ANY:
        lay = layout(Exact(""), dtype)
        assert (lay.block, lay.splittable, lay.variable) == (1024, True, False)
        assert [lay.nbytes(n) for n in SIZES] == [n * dtype.itemsize for n in SIZES], dtype
        assert lay.workspace_nbytes(np.array(SIZES), threads=3) == 0


def test_dtypes_by_their_names_in_the_language() -> None:
    for name, dtype in (("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)):
        assert layout(Exact(), name) == layout(Exact(), dtype)
        assert fingerprint(Exact(), name) == fingerprint(Exact(), dtype)
    with pytest.raises(ConfigError, match=r"'float64': use a torch\.dtype"):
        layout(Exact(), "float64")


UNDEFINED = [
    ("sum", torch.bool, "op='sum' is not defined for bool"),
    ("min", torch.complex64, "op='min' is not defined for complex64.*float64"),
    ("max", torch.uint16, "op='max' is not defined for uint16.*uint8, int8"),
    ("sum", torch.float8_e5m2, "op='sum' is not defined for float8_e5m2"),
    ("", torch.qint8, "qint8 values mean nothing"),
]


def test_undefined_operations_are_refused() -> None:
    for op, dtype, message in UNDEFINED:
        for refusing in (layout, kernels, fingerprint):
            with pytest.raises(ConfigError, match=message):
                refusing(Exact(op), dtype)
    for unknown in ("avg", "SUM", None, 3):
        with pytest.raises(ConfigError, match=r"op=.* must be 'sum', 'min', 'max' or ''"):
            Exact(unknown)


def test_there_is_no_error_feedback_and_copies_are_not_reduced() -> None:
    made = kernels(Exact(), torch.float32)
    for form in FEEDBACK:
        with pytest.raises(ConfigError, match="without error feedback"):
            made.run(form, Memory(torch.float32, [3], 0).rows)
        with pytest.raises(ConfigError, match="without error feedback"):
            kernels(Exact(), torch.float32, forms=[form])
    for form in REDUCING:
        with pytest.raises(ConfigError, match=f"'{form}' reduces: give it an op"):
            kernels(Exact(""), torch.int32, forms=[form])


def test_target_triton_needs_a_gpu() -> None:
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET"):
        pytest.skip("there is one")
    with pytest.raises(ConfigError, match="target 'triton'"):
        kernels(Exact(), torch.int32, "triton")


def test_it_runs_without_a_compiler_and_on_target_triton() -> None:
    """In a process where Triton interprets kernels, if it is installed."""
    script = """if True:
        import importlib.util, warnings
        import torch
        from gradwire.lang import Exact, decode, encode, kernels

        warnings.simplefilter("error")
        assert kernels(Exact("max"), torch.int64).target == "c"
        warnings.resetwarnings()
        for target in ["c", "triton"] if importlib.util.find_spec("triton") else ["c"]:
            values = torch.arange(-500, 500)
            payload = encode(Exact(), values, target=target)
            found = decode(Exact(), payload, 1000, torch.int64, target=target)
            assert torch.equal(found, values), target
        print("done")
    """
    environment = {**os.environ, "GRADWIRE_CC": "no-such-compiler", "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("done\n", 0), done.stderr


def test_fingerprints_differ() -> None:
    kinds = [(Exact(op), dtype) for op, dtype in PAIRS] + [(Exact(""), dtype) for dtype in ANY]
    assert len({fingerprint(codec, dtype) for codec, dtype in kinds}) == len(kinds)


def test_a_partition_has_its_bytes() -> None:
    specs = [
        Spec(f"p{i}", numel, dtype, Exact(op), rotation=i)
        for i, ((op, dtype), numel) in enumerate(
            [
                (("sum", torch.int64), 5000),
                (("max", torch.bool), 1023),
                (("min", torch.float64), 2049),
                (("", torch.complex128), 1025),
                (("sum", torch.uint8), 0),
            ]
        )
    ]
    sizes = [spec.dtype.itemsize for spec in specs]
    for chunks in (1, 3):
        cut = partition(specs, chunks)
        assert [int(cut.numel[cut.item == i].sum()) for i in range(5)] == [s.numel for s in specs]
        nbytes = cut.numel * np.array(sizes)[cut.item]
        assert (cut.start % 1024 == 0).all()
        whole = int((-(-nbytes // ALIGNMENT) * ALIGNMENT).sum())
        assert sum(sum(of_segment) for of_segment in cut.sizes) == whole


def test_it_is_its_own_plain_form() -> None:
    """An uncompressed chunk needs the same operation."""
    spec = Spec("p", 5000, torch.int32, Exact("max"))
    cut = partition([spec], 2, plain=True)
    assert cut.kinds == ((Exact("max"), torch.int32),)
    assert cut.sizes[0][:2] == cut.sizes[0][2:]
    assert int(cut.numel[cut.chunk >= 2].sum()) == 5000


def test_it_is_not_a_public_codec() -> None:
    for name in ("exact", "Exact"):
        with pytest.raises(ConfigError, match="unknown codec"):
            codecs.get(name)
    assert not any(issubclass(made, Exact) for made, _ in codecs.REGISTRY.values())
    assert all("xact" not in row["codec"] for row in codecs.listing())
    assert not hasattr(codecs, "Exact")
    assert not hasattr(gradwire, "Exact")
