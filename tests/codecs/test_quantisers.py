"""Quantisers against their definitions in float64."""

from __future__ import annotations

import math
from itertools import product

import torch

from codec_calls import DTYPES, call, drawn, gradient, round_trip
from gradwire.codecs import QSGD, TBQ, Float8, LowRank, OneBit, Rotated, Saturating, ThreeLC
from gradwire.lang import layout
from gradwire.planner.weights import weight_codec

# OneBit, TBQ ------------------------------------------------------------------------------------


def test_onebit_sends_the_means_of_each_sign() -> None:
    for block, size in product([1, 64, 1000, None], [1e-25, 1.0, 1e30]):
        values = gradient(201 if block == 1 else 3001) * size
        decoded = round_trip(OneBit(block), values)
        whole = block or len(values)
        for x, y in zip(values.double().split(whole), decoded.double().split(whole), strict=True):
            for sign in (x >= 0, x < 0):
                if sign.any():
                    near = torch.allclose(y[sign], x[sign].mean(), rtol=1e-5, atol=0)
                    assert near, (block, size)


def test_onebit_survives_the_largest_values() -> None:
    values = torch.full((4096,), 3e38)
    values[::2] *= -1
    assert torch.allclose(round_trip(OneBit(), values), values, rtol=1e-6)


def test_tbq_sends_plus_or_minus_the_threshold_or_zero() -> None:
    values = torch.tensor([0.5, 0.499, -0.5, -0.499, 0.0, 80.0, -80.0, math.nan, math.inf])
    expected = torch.tensor([0.5, 0.0, -0.5, 0.0, 0.0, 0.5, -0.5, math.nan, math.nan])
    assert torch.equal(
        round_trip(TBQ(0.5), values).nan_to_num(nan=9.0), expected.nan_to_num(nan=9.0)
    )
    assert layout(TBQ()).nbytes(4096) == 1024


def test_tbq_rounds_an_average_to_nearest() -> None:
    """Two of four ranks suffice; with the threshold itself, all four would have to agree."""
    codec = TBQ(1.0)
    own, peer = torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 0.0, 0.0])
    peers = [call(codec, "encode", p).payload for p in (peer, own * 0, own * 0)]
    merged = call(codec, "reduce_encode", own, peers=peers, factor=0.25)
    assert merged.values.tolist() == [1.0, 0.0, 0.0]


# Float8 -----------------------------------------------------------------------------------------


def test_float8_errs_by_a_sixteenth_of_a_value() -> None:
    """Or by 2^-10 scales, which are the largest magnitude / 448, but no smaller than 2^-126."""
    unit = gradient(3000).clamp(-1, 1)
    unit[::100] = -1.0
    for size in (0.0, 1e-44, 1e-36, 1e-30, 1.0, torch.finfo(torch.float32).max):
        values = (unit * size).double()
        error = (round_trip(Float8(100), values.float()).double() - values.float()).abs()
        least = max(size / 448, 2.0**-126) * 2**-10
        assert (error <= (values.abs() / 16).clamp(min=least) * (1 + 2**-20)).all(), size


# Saturating -------------------------------------------------------------------------------------


def test_saturating_is_exact_on_integers() -> None:
    for bits, dtype in product(range(2, 9), DTYPES):
        codec = Saturating(bits)
        assert codec.most == 2 ** (bits - 1) - 1
        values = torch.arange(-codec.most, codec.most + 1).to(dtype).repeat(40)
        assert torch.equal(round_trip(codec, values, target="eager"), values), (bits, dtype)
        beyond = torch.tensor([codec.most + 1, -codec.most - 1, 300, -300, 6e4, -6e4], dtype=dtype)
        assert round_trip(codec, beyond, target="eager").tolist() == [codec.most, -codec.most] * 3
        assert layout(codec, dtype).nbytes(4096) == 4096 * bits // 8


def test_saturating_rounds_to_nearest() -> None:
    for bits in (2, 4, 8):
        made = torch.Generator().manual_seed(11)
        near = torch.tensor([0.49999997, 0.5, 0.50000006, 1.5, 1e-45, 3e38, math.inf, math.nan])
        values = torch.cat([near, -near, torch.randn(4000, generator=made) * 2**bits])
        expected = values.round().clamp(-(2 ** (bits - 1) - 1), 2 ** (bits - 1) - 1)
        expected[~values.isfinite()] = math.nan
        found = round_trip(Saturating(bits), values)
        assert torch.equal(found.nan_to_num(999), expected.nan_to_num(999)), bits


def test_saturatings_last_code_marks_non_finite_values() -> None:
    values = torch.randn(1024, generator=torch.Generator().manual_seed(13)) * 1000
    assert int(call(Saturating(8), "encode", values).payload.max()) == 254
    for bad in (math.inf, -math.inf, math.nan):
        values[77] = bad
        assert (call(Saturating(8), "encode", values).payload == 255).nonzero().tolist() == [[77]]


def test_saturating_adds_exactly_and_saturates_the_result() -> None:
    made = torch.Generator().manual_seed(12)
    data = [torch.randint(-7, 8, (1500,), generator=made).float() for _ in range(5)]
    total = torch.stack(data).sum(0)
    assert total.abs().max() > 7
    for rank in (0, 2, 4):
        peers = [call(Saturating(), "encode", d).payload for r, d in enumerate(data) if r != rank]
        result = call(Saturating(), "reduce_encode", data[rank], peers=peers, rank=rank)
        assert torch.equal(result.values, total.clamp(-7, 7)), rank
        written = call(Saturating(), "decode", total, payload=result.payload).values
        assert torch.equal(written, result.values), rank


# 3LC --------------------------------------------------------------------------------------------


def test_threelc_rounds_to_three_values() -> None:
    values = torch.randn(3003, generator=torch.Generator().manual_seed(3))
    for sparsity in (1.0, 1.5, 1.9):
        scale = float(values.double().abs().max()) * sparsity
        expected = (values.double() / scale).round() * scale
        found = round_trip(ThreeLC(sparsity), values, target="eager").double()
        assert torch.allclose(found, expected, rtol=1e-6), sparsity


def used_bits(codec: ThreeLC, values: torch.Tensor) -> float:
    """Used bits of the payload per value."""
    payload = call(codec, "encode", values).payload
    lay, n = layout(codec), len(values)
    flags = payload[lay.offsets(n)[1] : lay.offsets(n)[2]]
    kept = int(flags.sum()) * codec.block  # n is a multiple of the block
    return 8 * sum(lay.tails(n, kept)[-1]) / n


def test_threelc_omits_blocks_of_zeros() -> None:
    """It would take 1.6 bits otherwise. docs/internals/kernels.md has more of these numbers."""
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    assert used_bits(ThreeLC(), values) < 1.45
    assert used_bits(ThreeLC(block=40), values) < 1.15
    assert used_bits(ThreeLC(sparsity=1.75), values) < 0.13


# Rotated, LowRank -------------------------------------------------------------------------------


def test_a_rotation_spreads_outliers_and_is_undone() -> None:
    values = torch.randn(3000, generator=torch.Generator().manual_seed(5)) * 0.01
    values[::50] = 3.0
    for rotation, block in product(["block", "full"], [64, 100]):
        rotated = round_trip(Rotated(rotation, 4, block), values, target="eager") - values
        plain = round_trip(QSGD(4, block), values, target="eager") - values
        assert rotated.norm() < 0.8 * plain.norm(), (rotation, block)
    values = gradient(3001)
    for rotation in ("block", "full"):
        decoded = round_trip(Rotated(rotation, 8, 256, "nearest", "fp32"), values)
        assert (decoded - values).norm() < 0.02 * values.norm(), rotation


def test_lowrank_is_exact_on_low_rank() -> None:
    made = torch.Generator().manual_seed(6)
    for rank in (1, 3):
        values = torch.randn(40, rank, generator=made) @ torch.randn(rank, 30, generator=made)
        decoded = round_trip(LowRank(rank, 30, "fp32"), values.reshape(-1))
        assert torch.allclose(decoded, values.reshape(-1), rtol=1e-4, atol=1e-4), rank


def test_lowrank_is_close_to_the_best() -> None:
    generator = torch.Generator().manual_seed(7)
    spectrum = torch.diag(0.7 ** torch.arange(50.0))
    left, right = (torch.linalg.qr(torch.randn(60, 50, generator=generator)).Q for _ in range(2))
    values = (left @ spectrum @ right.T).reshape(-1)
    best = torch.linalg.svdvals(values.view(60, 60).double())[4:].norm()
    error = (round_trip(LowRank(4, 60), values) - values).double().norm()
    assert best <= error * 1.01
    assert error < 2.5 * best
    assert layout(LowRank(4, 60)).nbytes(3600) == (60 + 60) * 4 * 2


def test_dithered_errors_are_uniform_whatever_the_value() -> None:
    """10^4 draws at the ends of the grid and between them: the mean error is within 5 standard
    errors of 0, and every error's distribution within 2 % of that of a uniform one."""
    draws = 10_000
    values = torch.linspace(-1.0, 1.0, 64)
    values[1:] = values[1:] * 0.999 + 0.0009  # off the grid's points but at the ends
    values[-1] = 1.0
    even = (torch.arange(draws) + 0.5).view(-1, 1) / draws - 0.5
    for bits, scale in ((2, "minmax"), (3, "max"), (8, "minmax")):
        codec = QSGD(bits, 64, scale, "dithered", "fp32")
        error = (drawn(codec, values, draws).double() - values) * (codec.top / 2)  # in steps
        assert float(error.abs().max()) <= 0.5 + 1e-4, codec
        standard = (error.var(0) / draws).sqrt()
        assert bool((error.mean(0).abs() <= 5 * standard).all()), codec
        assert float((error.sort(0).values - even).abs().max()) < 0.02, codec


def test_dithered_payloads_are_those_of_stochastic_rounding() -> None:
    values = gradient(3000)
    for form in ("encode", "encode_ef"):
        a, b = (
            call(QSGD(5, 100, rounding=rounding), form, values).payload
            for rounding in ("dithered", "stochastic")
        )
        assert torch.equal(a, b)


def test_dithered_magnitudes_up_to_half_the_largest_float_stay_finite() -> None:
    values = torch.linspace(-1.7e38, 1.7e38, 300)
    for bits in (1, 4, 8):
        for key in range(16):
            decoded = round_trip(QSGD(bits, rounding="dithered"), values, key, target="eager")
            assert bool(torch.isfinite(decoded).all()), (bits, key)


def test_blocks_far_from_zero_as_weights_and_as_gradients() -> None:
    """An error is at most a step of the block's own range as weights (CGX 4.3); with the metadata
    of gradients, a step of what the rounded offset makes of it."""
    far = 1000 + 0.1 * torch.randn(8192, generator=torch.Generator().manual_seed(3))
    ramp = torch.linspace(-101.0, -100.0, 8192)
    for bits, values in product((1, 4, 8), (far, ramp)):
        weights = weight_codec("weights", f"qsgd:bits={bits}:rounding=nearest")
        assert isinstance(weights, QSGD)
        for codec, lost in ((weights, 2**-22), (QSGD(bits, rounding="nearest"), 2**-7)):
            x = values.view(-1, codec.block)
            error = (round_trip(codec, values, target="eager").view_as(x) - x).abs().amax(1)
            span = x.amax(1) - x.amin(1)
            step = (span + lost * x.amin(1).abs()) / codec.top * (1 + lost)
            assert bool((error <= step).all()), codec
