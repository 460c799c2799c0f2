"""The laws that depend on the codec alone: unbiased, non-finite travels, residuals, sizes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from codec_calls import CODECS, DTYPES, UNFUSED, WIDTHS, call, gradient
from gradwire import codecs
from gradwire.codecs import (
    DGC,
    QSGD,
    TBQ,
    AdaComp,
    Cast,
    Codec,
    GradDrop,
    HardThreshold,
    Identity,
    LearnedLevels,
    LowRank,
    MSTopK,
    OneBit,
    RandomK,
    RandomShift,
    Rotated,
    Saturating,
    TernGrad,
    ThreeLC,
    TopK,
)
from gradwire.codecs.qsgd import ROUNDINGS
from gradwire.lang import ROW, kernels, layout
from products import in_turn

TARGETS = ["c", "eager"]
# codecs whose errors are within a step of a grid
STOCHASTIC: list[Codec] = [
    QSGD(),
    QSGD(bits=1, block=16),
    QSGD(bits=8, metadata="fp32"),
    QSGD(bits=3, scale="max", block=50),
    QSGD(bits=6, scale="l2"),
    QSGD(rounding="stochastic"),
    QSGD(bits=1, block=16, rounding="stochastic"),
    QSGD(bits=8, rounding="stochastic", metadata="fp32"),
    QSGD(bits=3, scale="max", rounding="stochastic"),
    TernGrad(),
    TernGrad(bits=5),
    TernGrad("ternary"),
]
UNBIASED: list[Codec] = [
    *STOCHASTIC,
    *(c for c in CODECS if isinstance(c, (RandomK, RandomShift, Rotated))),
    *(c for c in CODECS if isinstance(c, LearnedLevels) and c.rounding == "stochastic"),
]
# codecs that work with error feedback
PARTIAL: list[Codec] = [
    *(c for c in CODECS if isinstance(c, (OneBit, TBQ, TopK, DGC, GradDrop, HardThreshold))),
    MSTopK(density=0.1, values="fp32"),
    ThreeLC(),
    ThreeLC(sparsity=1.75, block=33),
    AdaComp(block=100, density=0.1),
    RandomK(density=0.1),
    *UNFUSED,
]
EVERY = list(dict.fromkeys([*CODECS, *WIDTHS, *UNBIASED, *PARTIAL]))
# in fp32 and half precision, of which each codec has one in `make test`
PRODUCT = [
    *in_turn([codec for codec in EVERY if codec not in WIDTHS], DTYPES, always=1),
    *((codec, torch.float32) for codec in WIDTHS),
]
# an entry that is not finite is sent as such, and the others as they are
ENTRYWISE = (Identity, Cast, Saturating, TBQ, TopK, MSTopK, DGC, GradDrop, HardThreshold)


def round_trip(codec: Codec, values: torch.Tensor, key: int = 7, target: str = "c") -> torch.Tensor:
    payload = call(codec, "encode", values, key=key, target=target).payload
    return call(codec, "decode", values, payload=payload, key=key, target=target).values


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


@pytest.mark.parametrize("codec", [*UNBIASED, Rotated("full", 4, 32)], ids=repr)
def test_stochastic_codecs_are_unbiased(codec: Codec) -> None:
    """Law 3: over 10^4 draws the mean error is within 5 standard errors, element by element."""
    # interpreted codecs take a millisecond per draw
    draws, n = 1000 if codec == Rotated("full", 4, 32) else 10_000, 48
    values = gradient(n, seed=3)
    made = kernels(codec, torch.float32, "c")
    size = made.layout.nbytes(n)
    payloads = torch.zeros(draws, size, dtype=torch.uint8)
    decoded = torch.zeros(draws, n)
    rows = np.zeros(draws, ROW)
    rows["payload"] = payloads.data_ptr() + np.arange(draws) * size
    rows["numel"], rows["key"], rows["shared"] = n, np.arange(draws), np.arange(draws) + 2**40
    rows["values"] = values.data_ptr()
    made.run("encode", rows)
    rows["values"] = decoded.data_ptr() + np.arange(draws) * n * 4
    made.run("decode", rows)
    error = decoded.double() - values.double()
    mean, variance = error.mean(0), error.var(0)
    # one draw in 10^4 of a step that is nearly never taken has no normal distribution
    step = grid_step(codec, values) if codec in STOCHASTIC else values.max() - values.min()
    floor = 8 * step / draws
    assert (mean.abs() <= 5 * (variance / draws).sqrt() + floor).all()


@pytest.mark.parametrize(
    "codec", [c for c in UNBIASED if not isinstance(c, (Rotated, RandomShift))], ids=repr
)
def test_sums_over_ranks_are_unbiased(codec: Codec) -> None:
    """The mean over many elements, where a common bias would add up."""
    values = torch.full((2**18,), 0.3)
    values[::2] = -0.55
    values[7::100] = 1.0
    error = (round_trip(codec, values) - values).double()
    assert abs(error.mean()) <= 4.5 * error.std() / len(error) ** 0.5 + 1e-8


@pytest.mark.parametrize(
    ("codec", "dtype"),
    in_turn([c for c in EVERY if isinstance(c, (QSGD, TernGrad))], DTYPES, always=1),
    ids=str,
)
def test_error_is_within_one_step(codec: Codec, dtype: torch.dtype) -> None:
    values = gradient(3001, dtype)
    error = (round_trip(codec, values).double() - values.double()).abs()
    # values of half precision are rounded once more when they are stored
    rounding = {torch.float32: 0.0, torch.float16: 2**-11, torch.bfloat16: 2**-8}[dtype]
    step = grid_step(codec, values.float())
    size = torch.maximum(values.abs().double(), step)
    assert (error <= step + rounding * 2 * size + 6e-8 * (dtype == torch.float16)).all()


@pytest.mark.parametrize(("codec", "dtype"), PRODUCT, ids=str)
def test_zeros_decode_to_zeros(codec: Codec, dtype: torch.dtype) -> None:
    values = torch.zeros(1030, dtype=dtype)
    values[::3] = -0.0
    assert torch.equal(round_trip(codec, values), values)


@pytest.mark.parametrize("value", [1.0, -3.14159, 1e-30, 1e30, -1e-12, 65504.0, 3e38])
@pytest.mark.parametrize(
    "codec",
    [
        Identity(),
        QSGD(scale="max", rounding="stochastic", metadata="fp32"),
        TernGrad(),
        TernGrad("ternary"),
        *(c for c in CODECS if isinstance(c, (RandomShift, LearnedLevels))),
        *(c for c in WIDTHS if isinstance(c, QSGD)),
    ],
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
    for size in (1e-30, 1e-10, 1.0, 1e10, 1e30, 1.5e38, 3e38):
        # dithered values overflow above half the largest float32
        codec = QSGD(bits=bits, rounding=ROUNDINGS[size == 3e38], metadata=metadata)
        values = torch.rand(1000, generator=torch.Generator().manual_seed(1)) * 2 - 1
        values = values * size
        decoded = round_trip(codec, values)
        assert torch.isfinite(decoded).all()
        error = (decoded.double() - values.double()).abs()
        assert (error <= grid_step(codec, values)).all()
        assert decoded.double().std() > 0.3 * size


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize(("codec", "dtype"), PRODUCT, ids=str)
def test_non_finite_travels_in_its_block(codec: Codec, dtype: torch.dtype, bad: float) -> None:
    """Law 4: what is scaled by Inf or NaN decodes to no finite value, the rest is untouched.

    What is scaled by it is a block, or the row; of a codec that sends entries, the entry itself.
    """
    values = gradient(2500, dtype)
    lay = layout(codec, dtype)
    at = 1300
    clean = round_trip(codec, values)
    values[at] = bad
    decoded = round_trip(codec, values)
    if isinstance(codec, ENTRYWISE):
        touched = torch.arange(2500) == at
    elif isinstance(codec, AdaComp):  # the scale of all that is sent
        touched = decoded != 0
        assert touched[at]
    elif codec in UNFUSED and isinstance(codec, Rotated):  # what was rotated with it, and its
        touched = decoded.isnan()  # blocks, and what was rotated with those
        assert touched[:2048].all()
    elif lay.splittable:
        touched = torch.arange(2500) // lay.block == at // lay.block
    else:
        touched = torch.ones(2500, dtype=torch.bool)
    assert not torch.isfinite(decoded[touched]).any()
    if lay.splittable or isinstance(codec, TBQ):
        assert torch.equal(decoded[~touched], clean[~touched])
    else:  # it may have taken the place of another entry
        assert torch.isfinite(decoded[~touched]).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_nothing_is_lost(codec: Codec, target: str) -> None:
    """Law 2: gradient + residual before == sent + residual after, to the last rounding."""
    residual = torch.zeros(2000)
    for step in range(20 if target == "c" else 5):
        values = gradient(2000, seed=step)
        made = {"key": step, "shared": step, "target": target}
        result = call(codec, "encode_ef", values, residual=residual, **made)
        sent = call(codec, "decode", values, payload=result.payload, **made).values
        before = values.double() + residual.double()
        after = sent.double() + result.residual.double()
        size = before.abs() + sent.abs() + result.residual.abs()
        assert ((before - after).abs() <= size * 2**-23).all()
        residual = result.residual


@pytest.mark.parametrize("codec", PARTIAL, ids=repr)
def test_error_feedback_sends_all_in_the_end(codec: Codec) -> None:
    """For a constant gradient, the mean of what has been sent converges to it."""
    values = torch.randn(2000, generator=torch.Generator().manual_seed(4)) * 1e-3
    residual, errors = torch.zeros(2000), []
    for step in range(400):
        made = {"key": step, "shared": step}
        residual = call(codec, "encode_ef", values, residual=residual, **made).residual
        errors.append(float(residual.norm() / values.norm()) / (step + 1))
    assert sum(errors[360:]) < 0.75 * sum(errors[160:200]) < 0.5 * 40


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_residuals_stay_clean(codec: Codec, target: str) -> None:
    """Law 4: a non-finite step leaves every residual finite."""
    values, residual = gradient(2000), gradient(2000, seed=1)
    values[5], values[600] = float("nan"), float("-inf")
    result = call(codec, "encode_ef", values, residual=residual, target=target)
    assert torch.isfinite(result.residual).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("codec", EVERY, ids=repr)
def test_every_size_round_trips(codec: Codec, target: str) -> None:
    block = layout(codec).block
    for n in (0, 1, 15, 16, 17, block - 1, block, block + 1, 2 * block):
        values = gradient(n)
        decoded = round_trip(codec, values, target=target)
        assert decoded.shape == values.shape
        assert torch.isfinite(decoded).all()


def codes(n: int, block: int, bits: int) -> int:
    """Bytes of codes, block by block, computed from docs/reference/wire-format.md."""
    sizes = [block] * (n // block) + [n % block] * (n % block > 0)
    return sum(-(-m * w // 8) for m in sizes for w in (8, 4, 2, 1) if bits & w)


def entries(n: int, block: int, k: int, bits: int) -> int:
    """Bytes of a selection of `k` entries of `bits` bits."""
    place = (block - 1).bit_length()
    value = codes(k, 128, bits) if bits < 16 else k * bits // 8
    return 2 * -(-n // block) + codes(k, 128, place) + value


# (codec, bytes of n values, from docs/reference/wire-format.md)
SIZES: list[tuple[Codec, Callable[[int], int]]] = [
    (Identity(), lambda n: 4 * n),
    (Cast("bf16"), lambda n: 2 * n),
    (QSGD(), lambda n: 4 * -(-n // 128) + codes(n, 128, 4)),
    (TernGrad(), lambda n: 8 + codes(n, 1024, 2)),
    (OneBit(block=100), lambda n: 8 * -(-n // 100) + codes(n, 100, 1)),
    (OneBit(block=None), lambda n: 8 + codes(n, 1024, 1)),
    (TBQ(threshold=0.01), lambda n: codes(n, 1024, 2)),
    (ThreeLC(), lambda n: 4 + -(-n // 80) + n // 80 * 16 + -(-(n % 80) // 5)),
    (TopK(density=0.05), lambda n: entries(n, 256, max(1, int(0.05 * n)), 16)),
    (MSTopK(0.1, "fp32"), lambda n: entries(n, 256, max(1, int(0.101 * n)), 32)),
    (DGC(density=0.02), lambda n: entries(n, 512, max(1, int(0.02 * n)), 16)),
    (GradDrop(density=0.05), lambda n: entries(n, 256, min(n, max(64, int(0.0625 * n))), 16)),
    (HardThreshold(0.02, 0.1), lambda n: entries(n, 256, max(1, int(0.1 * n)), 16)),
    (AdaComp(100, 0.1), lambda n: 4 + entries(n, 100, max(1, int(0.1 * n)), 1)),
    (RandomK(density=0.1), lambda n: 2 * -(-n // 10)),
    (RandomShift(5, 100), lambda n: 8 * -(-n // 100) + codes(n, 100, 5)),
    (LearnedLevels(3, 64), lambda n: 8 * -(-n // 64) + codes(n, 64, 3)),
    (Rotated(bits=6, block=96), lambda n: 4 * -(-n // 96) + codes(n, 96, 6)),
    (Saturating(), lambda n: codes(n, 1024, 4)),
    (LowRank(2, 50), lambda n: (-(-n // 50) + 50) * 2 * 2),
]


@pytest.mark.parametrize(
    ("codec", "nbytes"), SIZES, ids=lambda x: repr(x) if isinstance(x, Codec) else ""
)
def test_bytes_are_accounted(codec: Codec, nbytes: Callable[[int], int]) -> None:
    """Law 5: a payload has the size that docs/reference/wire-format.md says."""
    assert layout(codec).nbytes(0) == 0
    for n in (1, 7, 63, 64, 99, 100, 1023, 1024, 1025, 5000, 100_003):
        assert layout(codec).nbytes(n) == nbytes(n), n


def test_the_size_of_every_codec_is_checked() -> None:
    assert {made for made, _ in codecs.REGISTRY.values()} == {type(codec) for codec, _ in SIZES}


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
