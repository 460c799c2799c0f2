"""The laws that codecs answer for alone: unbiased, non-finite travels, residuals, sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from codec_calls import CODECS, DTYPES, WIDTHS, call, gradient
from gradwire.codecs import QSGD, Cast, Codec, Identity, TernGrad
from gradwire.lang import ROW, kernels, layout

STOCHASTIC: list[Codec] = [
    QSGD(),
    QSGD(bits=1, block=16),
    QSGD(bits=8, metadata="fp32"),
    QSGD(bits=3, scale="max", block=50),
    QSGD(bits=6, scale="l2"),
    TernGrad(),
    TernGrad(bits=5),
    TernGrad("ternary"),
]
EVERY = [*CODECS, *WIDTHS, *STOCHASTIC]


def round_trip(codec: Codec, values: torch.Tensor, key: int = 7) -> torch.Tensor:
    payload = call(codec, "encode", values, key=key).payload
    return call(codec, "decode", values, payload=payload, key=key).values


def grid_step(codec: Codec, values: torch.Tensor) -> torch.Tensor:
    """Law: error <= one step of the grid, a little wider for the metadata's outward rounding."""
    assert isinstance(codec, (QSGD, TernGrad))
    block = codec.block if isinstance(codec, QSGD) else values.numel()
    steps = []
    for x in values.double().split(block):
        span = x.max() - x.min()
        if isinstance(codec, TernGrad):
            step = x.abs().max() if codec.form == "ternary" else span / (2**codec.bits - 1)
        elif codec.scale == "minmax":
            # bf16 rounds the lowest point by up to 2^-7 of itself, and the step by 2^-7
            lost = 2**-7 if codec.metadata == "bf16" else 2**-23
            step = (span + lost * x.abs().max()) / (2**codec.bits - 1) * (1 + lost)
        else:
            size = x.abs().max() if codec.scale == "max" else x.norm()
            step = size / codec.levels * (1 + 2**-6)
        steps.append(step.expand(len(x)))
    return torch.cat(steps) + values.abs().double() * 2**-22


@pytest.mark.parametrize("codec", STOCHASTIC, ids=repr)
def test_stochastic_codecs_are_unbiased(codec: Codec) -> None:
    """Law 3: over 10^4 draws the mean error is within 5 standard errors, element by element."""
    draws, n = 10_000, 48
    values = gradient(n, seed=3)
    made = kernels(codec, torch.float32, "c")
    size = made.layout.nbytes(n)
    payloads = torch.zeros(draws, size, dtype=torch.uint8)
    decoded = torch.zeros(draws, n)
    rows = np.zeros(draws, ROW)
    rows["payload"] = payloads.data_ptr() + np.arange(draws) * size
    rows["numel"], rows["key"] = n, np.arange(draws)
    rows["values"] = values.data_ptr()
    made.run("encode", rows)
    rows["values"] = decoded.data_ptr() + np.arange(draws) * n * 4
    made.run("decode", rows)
    error = decoded.double() - values.double()
    mean, variance = error.mean(0), error.var(0)
    # one draw in 10^4 of a step that is nearly never taken has no normal distribution
    floor = 8 * grid_step(codec, values) / draws
    assert (mean.abs() <= 5 * (variance / draws).sqrt() + floor).all()


@pytest.mark.parametrize("codec", STOCHASTIC, ids=repr)
def test_sums_over_ranks_are_unbiased(codec: Codec) -> None:
    """The mean over many elements, where a common bias would add up."""
    values = torch.full((2**18,), 0.3)
    values[::2] = -0.55
    values[7::100] = 1.0
    error = (round_trip(codec, values) - values).double()
    assert abs(error.mean()) <= 4.5 * error.std() / len(error) ** 0.5 + 1e-8


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [c for c in EVERY if isinstance(c, (QSGD, TernGrad))], ids=repr)
def test_error_is_within_one_step(codec: Codec, dtype: torch.dtype) -> None:
    values = gradient(3001, dtype)
    error = (round_trip(codec, values).double() - values.double()).abs()
    # values of half precision are rounded once more when they are stored
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    step = grid_step(codec, values.float())
    size = torch.maximum(values.abs().double(), step)
    assert (error <= step + rounding * 2 * size + 6e-8 * (dtype == torch.float16)).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_zeros_decode_to_zeros(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.zeros(1030, dtype=dtype)
    values[::3] = -0.0
    assert torch.equal(round_trip(codec, values), values)


@pytest.mark.parametrize("value", [1.0, -3.14159, 1e-30, 1e30, -1e-12, 65504.0, 3e38])
@pytest.mark.parametrize(
    "codec",
    [Identity(), *WIDTHS, QSGD(scale="max", metadata="fp32"), TernGrad(), TernGrad("ternary")],
    ids=repr,
)
def test_constants_are_exact_where_metadata_hold_them(codec: Codec, value: float) -> None:
    values = torch.full((300,), value)
    assert torch.equal(round_trip(codec, values), values)


@pytest.mark.parametrize("bits", range(1, 9))
def test_constants_are_exact_to_the_precision_of_bf16(bits: int) -> None:
    for value in (1.0, 3.14159, -1e-20, 1e20):
        values = torch.full((300,), value)
        error = (round_trip(QSGD(bits=bits), values) - values).abs() / abs(value)
        assert (error <= 2**-7).all()
        if value == 1.0:
            assert (error == 0).all()


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("metadata", ["bf16", "fp32"])
def test_ranges_from_tiny_to_huge_survive(bits: int, metadata: str) -> None:
    codec = QSGD(bits=bits, metadata=metadata)
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e30, 3e38):
        values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 2 - 1
        values = values * size
        decoded = round_trip(codec, values)
        assert torch.isfinite(decoded).all()
        error = (decoded.double() - values.double()).abs()
        assert (error <= grid_step(codec, values)).all()
        assert decoded.double().std() > 0.3 * size


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_non_finite_travels_in_its_block(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    """Law 4: the block with Inf or NaN decodes to no finite value, the others are untouched."""
    values = gradient(2500, dtype)
    lay = layout(codec, dtype)
    at = 1300
    clean = round_trip(codec, values)
    values[at] = bad
    decoded = round_trip(codec, values)
    if isinstance(codec, (Identity, Cast)):
        touched = torch.arange(2500) == at
    elif lay.splittable:
        touched = torch.arange(2500) // lay.block == at // lay.block
    else:
        touched = torch.ones(2500, dtype=torch.bool)
    assert not torch.isfinite(decoded[touched]).any()
    assert torch.equal(decoded[~touched], clean[~touched])


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_nothing_is_lost(codec: Codec) -> None:
    """Law 2: gradient + residual before == sent + residual after, to the last rounding."""
    residual = torch.zeros(2000)
    for step in range(20):
        values = gradient(2000, seed=step)
        result = call(codec, "encode_ef", values, residual=residual, key=step)
        sent = call(codec, "decode", values, payload=result.payload, key=step).values
        before = values.double() + residual.double()
        after = sent.double() + result.residual.double()
        size = before.abs() + sent.abs() + result.residual.abs()
        assert ((before - after).abs() <= size * 2**-23).all()
        residual = result.residual


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_residuals_stay_clean(codec: Codec) -> None:
    """Law 4: a non-finite step leaves every residual finite."""
    values, residual = gradient(2000), gradient(2000, seed=1)
    values[5], values[600] = float("nan"), float("-inf")
    result = call(codec, "encode_ef", values, residual=residual)
    assert torch.isfinite(result.residual).all()


@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_every_size_round_trips(codec: Codec) -> None:
    block = layout(codec).block
    for n in (0, 1, 15, 16, 17, block - 1, block, block + 1, 2 * block):
        values = gradient(n)
        decoded = round_trip(codec, values)
        assert decoded.shape == values.shape
        assert torch.isfinite(decoded).all()


@pytest.mark.parametrize("codec", [Cast("fp16"), Cast("bf16")], ids=repr)
def test_casts_saturate_and_are_exact(codec: Codec) -> None:
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[codec.dtype]
    exact = gradient(3000).to(dtype).float()
    exact = exact[torch.isfinite(exact)]
    assert torch.equal(round_trip(codec, exact), exact)
    largest = torch.finfo(dtype).max
    huge = torch.tensor([largest, -largest, 3.4028235e38, -3.4028235e38])
    assert torch.equal(round_trip(codec, huge), torch.tensor([largest, -largest] * 2))
    # every other value as torch rounds it
    values = gradient(3000)
    assert torch.equal(round_trip(codec, values), values.to(dtype).float())


def test_the_key_alone_changes_the_draw() -> None:
    values = gradient(1000)
    a, b, c = (round_trip(QSGD(), values, key=k) for k in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    nearest = QSGD(rounding="nearest")
    assert torch.equal(round_trip(nearest, values, 1), round_trip(nearest, values, 2))


def test_every_kernel_here_is_compiled() -> None:
    assert all(kernels(codec).target == "c" for codec in EVERY)
