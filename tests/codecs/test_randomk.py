"""RandomK: positions are the same on all ranks, and sums have the positions of the payloads."""

from __future__ import annotations

import torch

from codec_calls import call, gradient, round_trip
from gradwire.codecs import RandomK
from gradwire.lang import layout


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
