"""Codecs that select: which values they keep, and how many, against their definitions."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_calls import call, gradient, round_trip
from gradwire.codecs import DGC, AdaComp, Codec, GradDrop, HardThreshold, MSTopK, RandomK, TopK
from gradwire.lang import layout, rng

MILLION = 1_000_000
SEEDS = st.integers(0, 2**31)
DENSITIES = (0.001, 0.1, 1.0)  # few, since each is compiled


def largest(values: torch.Tensor, k: int) -> torch.Tensor:
    """bool[n]: the k largest magnitudes in float64, of equal ones the first, NaN the largest."""
    size = values.double().abs().nan_to_num(nan=math.inf, posinf=1e300)
    order = torch.argsort(size, descending=True, stable=True)
    return torch.zeros(len(values), dtype=torch.bool).index_fill(0, order[:k], True)


@given(
    seed=SEEDS, n=st.integers(1, 3000), density=st.sampled_from(DENSITIES), ties=st.booleans(),
    bad=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=30, deadline=None, derandomize=True)
def test_topk_is_exact(seed: int, n: int, density: float, ties: bool, bad: int) -> None:
    values = gradient(n, seed=seed)
    if ties:
        values = (values * 4).round()
    values[torch.randint(n, (bad,), generator=torch.Generator().manual_seed(seed))] = math.nan
    k = max(1, int(density * n))
    chosen = largest(values, k)
    expected = torch.where(chosen, values, 0.0)
    decoded = round_trip(TopK(density, "fp32"), values)
    assert torch.equal(decoded.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


def test_a_sample_that_misleads_costs_time_only() -> None:
    """Only what is sampled is large, so a floor from it is above most of the k largest."""
    n, codec = 150_000, TopK(0.02, "fp32")
    form = layout(codec)
    every = -(-n // min(2**15, form.staged * form.staging(n)))
    windows = torch.arange(-(-n // every))
    at = windows * every + (rng.uniform(0, 0, windows) * every).long()
    values = gradient(n, seed=3).clamp(-9, 9)
    values[at.clamp(max=n - 1)[::9]] += 1000
    k, sampled = int(0.02 * n), len(at[::9])
    assert 0.02 * len(at) * 4 < sampled < k
    residual = normal(n, 4)
    for form in ("encode", "encode_ef"):
        made, meant = (
            call(codec, form, values, residual=residual, target=target) for target in ("c", "eager")
        )
        assert torch.equal(made.payload, meant.payload)
        assert torch.equal(made.residual, meant.residual)


def normal(n: int, seed: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


# codec, values, at least and at most how many are sent, key
LARGEST: list[tuple[Codec, torch.Tensor, int, int, int]] = [
    *((DGC(0.005, "fp32"), normal(20_000, seed), 100, 100, seed) for seed in range(4)),
    (GradDrop(0.02, "fp32"), normal(100_000, 1), 1600, 2400, 7),
    # all reach any threshold, and there is room for a quarter more
    (
        GradDrop(0.01, "fp32"),
        torch.ones(50_000).index_fill(0, torch.arange(40_000, 50_000), 2.0),
        625,
        625,
        7,
    ),
    *((MSTopK(0.1, "fp32"), normal(10_000, 2) * s, 1000, 1010, 7) for s in (1e-30, 1.0, 1e30)),
    (MSTopK(0.1, "fp32"), torch.full((1000,), -3.0), 101, 101, 7),
]


def test_the_largest_are_sent_and_of_equal_ones_the_first() -> None:
    for codec, values, least, most, key in LARGEST:
        decoded = round_trip(codec, values, key=key)
        count = int((decoded != 0).sum())
        assert least <= count <= most, (codec, key)
        assert torch.equal(decoded, torch.where(largest(values, count), values, 0.0)), (codec, key)


def test_counts_are_within_a_fifth_of_k() -> None:
    faults = []
    for codec in (DGC(), DGC(0.01), GradDrop(), GradDrop(0.001)):
        share = int((round_trip(codec, normal(MILLION, 0), key=0) != 0).sum()) / MILLION
        if abs(share - codec.density) > 0.2 * codec.density:
            faults.append((codec, share))
    assert not faults


@given(seed=SEEDS, n=st.integers(200, 20_000), density=st.just(0.1))
@settings(max_examples=12, deadline=None, derandomize=True)
def test_mstopk_is_within_a_hundredth_of_k(seed: int, n: int, density: float) -> None:
    values = normal(n, seed)
    count = int((round_trip(MSTopK(density, "fp32"), values) != 0).sum())
    k = max(1, math.floor(torch.tensor(n) * torch.tensor(density, dtype=torch.float32)))
    assert k - 1 <= count <= max(1, 1.01 * k) + 1


def test_mstopk_sends_the_largest_beyond_the_resolution_of_its_search() -> None:
    """The search does not tell values apart that are 10^-9 of the largest: the selection does."""
    values = normal(3000, 3) * 1e-4
    for dtype, outlier in (
        (torch.float32, 1e5), (torch.float32, math.inf), (torch.bfloat16, -1e5),
        (torch.float16, 6e4), (torch.float16, -math.inf),
    ):  # fmt: skip
        given = values.to(dtype)
        given[2777] = outlier
        for density in (0.001, 0.1):
            codec = MSTopK(density, "fp32")
            decoded = round_trip(codec, given, target="eager")
            chosen = largest(given, min(layout(codec).capacity(3000), int(given.count_nonzero())))
            chosen &= ~torch.isfinite(given) | math.isfinite(outlier)  # else only what is not
            assert torch.equal(decoded, torch.where(chosen, given, 0)), (dtype, outlier, density)
            overflow = round_trip(MSTopK(density), given, target="eager")[2777]  # sent as fp16
            expected = given[2777].to(torch.float16).to(dtype)
            assert torch.equal(overflow, expected), (dtype, outlier, density)
            if density == 0.1 and dtype == torch.float32:
                assert torch.equal(decoded, round_trip(codec, given)), outlier


def test_non_finite_values_are_always_sent() -> None:
    """Even after more equal values than there is room for."""
    values = torch.ones(5000)
    values[4999], values[4000] = math.nan, -math.inf
    for codec in (TopK(), DGC(0.01), GradDrop(), MSTopK(0.1, "fp32"), HardThreshold(1e-3, 0.01)):
        decoded = round_trip(codec, values)
        assert torch.equal(~torch.isfinite(decoded), ~torch.isfinite(values)), codec


@given(seed=SEEDS, threshold=st.sampled_from((1e-5, 0.01, 5.0)))
@settings(max_examples=15, deadline=None, derandomize=True)
def test_hardthreshold_sends_values_that_reach_it(seed: int, threshold: float) -> None:
    values = gradient(2000, seed=seed)
    reached = values.abs() >= torch.tensor(threshold, dtype=torch.float32)
    room = 100
    chosen = reached & largest(values, room)
    decoded = round_trip(HardThreshold(threshold, room / 2000, "fp32"), values)
    assert torch.equal(decoded, torch.where(chosen, values, 0.0))


def adacomp(x: torch.Tensor, latest: torch.Tensor, block: int) -> tuple[torch.Tensor, float]:
    """(sign of every value that is sent, else 0; the magnitude) in float64."""
    x, latest = x.double(), latest.double()
    sign, tops = torch.zeros(len(x), dtype=torch.float64), []
    for begin in range(0, len(x), block):
        part = slice(begin, begin + block)
        ahead, top = x[part] + latest[part], x[part].abs().max()
        if top > 0:
            tops.append(float(top))
            sign[part] = torch.where(ahead.abs() >= top, torch.where(x[part] >= 0, 1.0, -1.0), 0.0)
    return sign, sum(tops) / max(1, len(tops))


def test_adacomp_follows_the_paper() -> None:
    for seed in range(5):
        block, codec = 50, AdaComp(block=50, density=1.0)
        # sums of eighths are exact, so float64 and fp32 compare equal
        values, residual = ((gradient(1210, seed=s) * 8).round() / 8 for s in (seed, seed + 100))
        values[100:200], residual[100:200] = 0.0, 0.0
        result = call(codec, "encode_ef", values, residual=residual)
        decoded = call(codec, "decode", values, payload=result.payload).values
        sign, scale = adacomp(values + residual, values, block)
        assert torch.equal(torch.sign(decoded).double(), sign)
        assert not decoded[100:200].any()
        assert int((sign != 0).sum()) >= 23  # at least the largest of each other bin
        size = decoded.abs()[sign != 0].double()
        assert torch.allclose(size, torch.full_like(size, scale), rtol=1e-5)


def test_adacomp_adapts_to_the_residual() -> None:
    """The larger the residual, the fewer values a new gradient lifts to the maximum."""
    codec, residual, counts = AdaComp(density=1.0), torch.zeros(51_200), []
    for step in range(12):
        values = normal(51_200, step)
        result = call(codec, "encode_ef", values, residual=residual)
        decoded = call(codec, "decode", values, payload=result.payload).values
        counts.append(int((decoded != 0).sum()) / 51_200)
        residual = result.residual
    assert 0.08 < counts[0] < 0.14
    assert 0.001 < counts[-1] < 0.03


def test_an_index_costs_far_less_than_32_bits() -> None:
    """docs/internals/wire-format.md states these."""
    for codec in (TopK, MSTopK, DGC):
        for density, bits in ((0.01, 11.6), (0.001, 15.0)):
            made = layout(codec(density, "fp16"))
            room = max(f.capacity.of(MILLION) for f in made.fields if f.capacity is not None)
            assert 8 * (made.nbytes(MILLION) - 2 * room) / room <= bits + 0.05, (codec, density)


def test_adacomp_sends_the_sign_of_gradient_and_residual_together() -> None:
    """Chen 2018, Alg. 2: dW decides whether G = residual + dW is sent, the sign is that of G."""
    codec = AdaComp(block=4, density=1.0)
    latest, residual = torch.tensor([-7.0, 0.0, 0.5, 0.0]), torch.tensor([9.0, 1.0, 0.0, -1.0])
    result = call(codec, "encode_ef", latest, residual=residual)
    decoded = call(codec, "decode", latest, payload=result.payload).values
    assert decoded.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert result.residual.tolist() == [0.0, 1.0, 0.5, -1.0]


# ---- RandomK: positions are the same on all ranks, and sums have the positions of the payloads


def sent(codec: RandomK, values: torch.Tensor, key: int, shared: int) -> torch.Tensor:
    payload = call(codec, "encode", values, key=key, shared=shared).payload
    return call(codec, "decode", values, payload=payload, key=-key % 99, shared=shared).values


def test_one_value_per_block_is_sent_and_no_index() -> None:
    codec, values = RandomK(1 / 8, "fp32"), gradient(4000) + 1.0
    assert layout(codec).nbytes(4000) == 4000 / 8 * 4
    assert layout(RandomK(0.01)).nbytes(4000) == 40 * 2
    decoded = sent(codec, values, key=1, shared=5).view(-1, 8)
    kept = decoded != 0
    assert torch.equal(kept.sum(1), torch.ones(500, dtype=torch.int64))
    assert torch.equal(decoded[kept], values.view(-1, 8)[kept])


def test_positions_depend_on_the_shared_key_only() -> None:
    codec, values = RandomK(1 / 8, "fp32"), torch.ones(4000)
    a, b, c = (sent(codec, values, key, shared) for key, shared in ((1, 5), (2, 5), (1, 6)))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_positions_are_uniform() -> None:
    """Chi-squared over 10^5 blocks of 10: 9 degrees of freedom, above 33.7 once in 10^4."""
    decoded = sent(RandomK(0.1, "fp32"), torch.ones(1_000_000), key=1, shared=5)
    seen = decoded.view(-1, 10).sum(0).double()
    assert ((seen - 1e4).square() / 1e4).sum() < 33.7


def test_positions_are_exact_far_into_a_parameter() -> None:
    """Where fp32 cannot represent neighbouring positions."""
    codec, values = RandomK(1 / 10, "fp32"), torch.ones(1000)
    start = 2**31 // 10 * 10
    decoded = round_trip(codec, values, start=start)
    assert torch.equal(decoded.view(-1, 10).sum(1), torch.ones(100))


def test_a_sum_is_not_scaled_again() -> None:
    for unbiased in (False, True):
        codec, factor = RandomK(1 / 8, "fp32", unbiased), 8.0 if unbiased else 1.0
        values = [gradient(1003, seed=s) for s in range(3)]
        payloads = [call(codec, "encode", v, key=s).payload for s, v in enumerate(values)]
        decoded = [
            call(codec, "decode", v, payload=p).values
            for v, p in zip(values, payloads, strict=True)
        ]
        merged = call(codec, "reduce_encode", decoded[0], peers=payloads[1:], factor=1 / 3)
        total = (-0.0 + decoded[0] + decoded[1] + decoded[2]) * torch.tensor(1 / 3)
        assert torch.equal(merged.values, total)
        kept = decoded[0] != 0
        assert torch.equal(decoded[0][kept], values[0][kept] * factor)


def test_a_short_last_block_is_picked_with_its_probability() -> None:
    codec = RandomK(1 / 100, "fp32")
    picked = sum(int((sent(codec, torch.ones(30), 1, s) != 0).sum()) for s in range(400))
    assert 80 <= picked <= 160  # 120 of 400 expected, standard deviation 9.2
