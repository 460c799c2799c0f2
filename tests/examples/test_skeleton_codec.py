"""The tests that a codec should pass, on the skeleton. Copy this file with it."""

from __future__ import annotations

import runpy
from itertools import product
from pathlib import Path

import pytest
import torch

from codec_calls import call, gradient, ragged_sizes
from gradwire.errors import ConfigError
from gradwire.lang import layout

EXAMPLE = Path(__file__).parents[2] / "examples" / "skeleton_codec.py"
SignMean = runpy.run_path(str(EXAMPLE))["SignMean"]


def test_targets_agree_at_every_size_and_dtype() -> None:
    codec, dtypes = SignMean(block=100), (torch.float32, torch.float16, torch.bfloat16)
    for dtype, n in product(dtypes, ragged_sizes(100)):
        values = gradient(n, dtype)
        compiled = call(codec, "encode_ef", values, target="c")
        defined = call(codec, "encode_ef", values, target="eager")
        assert torch.equal(compiled.payload, defined.payload)
        assert torch.equal(compiled.residual, defined.residual)


def test_values_are_the_block_means() -> None:
    codec, values = SignMean(block=64), gradient(200)
    payload = call(codec, "encode", values).payload
    decoded = call(codec, "decode", values, payload=payload).values
    for x, y in zip(values.split(64), decoded.split(64), strict=True):
        assert torch.equal(y > 0, x > 0)
        assert torch.allclose(y.abs(), x.abs().mean().expand(len(x)), rtol=2**-8)


def test_error_feedback_sends_everything_in_the_end() -> None:
    values, residual, sent = gradient(1000), torch.zeros(1000), torch.zeros(1000)
    for _ in range(50):
        result = call(SignMean(), "encode_ef", values, residual=residual)
        sent += call(SignMean(), "decode", values, payload=result.payload).values
        residual = result.residual
    assert torch.allclose(sent + residual, 50 * values, rtol=1e-3, atol=1e-3)


def test_non_finite_travels_in_its_block() -> None:
    values = gradient(1000)
    values[300] = float("nan")
    payload = call(SignMean(), "encode", values).payload
    decoded = call(SignMean(), "decode", values, payload=payload).values
    assert not torch.isfinite(decoded[256:512]).any()
    assert torch.isfinite(decoded[:256]).all()


def test_size_and_errors() -> None:
    assert layout(SignMean()).nbytes(1024) == 4 * 2 + 1024 // 8
    with pytest.raises(ConfigError, match="block=0"):
        SignMean(block=0)


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "times smaller" in capsys.readouterr().out
