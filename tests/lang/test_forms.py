"""The derived forms, against torch on the interpreter's encode and decode."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch

from codec_calls import CODECS, DTYPES, call, gradient, key_of, same
from gradwire.codecs import Codec
from gradwire.lang import verify
from products import one_in

N = 2500


def decoded(codec: Codec, payload: torch.Tensor, key: int = 7) -> torch.Tensor:
    return call(codec, "decode", torch.zeros(N), payload=payload, target="eager", key=key).values


def encoded(codec: Codec, values: torch.Tensor, key: int = 7) -> torch.Tensor:
    return call(codec, "encode", values, target="eager", key=key).payload


def of_peers(codec: Codec, origins: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Payloads of these origins, and what they decode to."""
    keys = [key_of(origin) for origin in origins]
    payloads = [
        encoded(codec, gradient(N, seed=s), key) for s, key in zip(origins, keys, strict=True)
    ]
    return payloads, [decoded(codec, p, key) for p, key in zip(payloads, keys, strict=True)]


def encoded_sum(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    """The payload of a sum, with the codec's own encode_sum if it has one."""
    if type(codec).encode_sum is Codec.encode_sum:
        return encoded(codec, x)
    return call(codec, "reduce_encode", x, target="eager").payload  # a sum of one value


@pytest.mark.parametrize("codec", CODECS, ids=repr)
class TestForms:
    def test_decode_multiplies_by_the_factor(self, codec: Codec) -> None:
        payload = encoded(codec, gradient(N))
        values = call(codec, "decode", torch.zeros(N), payload=payload, factor=0.25).values
        assert torch.equal(values, decoded(codec, payload) * 0.25)

    def test_decode_add_adds(self, codec: Codec) -> None:
        payload, before = encoded(codec, gradient(N)), gradient(N, seed=1)
        values = call(codec, "decode_add", before, payload=payload).values
        assert torch.equal(values, before + decoded(codec, payload))

    def test_encode_ef_encodes_the_corrected_values(self, codec: Codec) -> None:
        values, residual = gradient(N), gradient(N, seed=1)
        result = call(codec, "encode_ef", values, residual=residual)
        x = values + residual
        if not verify.takes_latest(codec.encode):
            assert torch.equal(result.payload, encoded(codec, x))
        assert torch.equal(result.residual, x - decoded(codec, result.payload))
        assert torch.equal(result.values, values)

    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_reduce_encode_sums_in_rank_order(self, codec: Codec, rank: int) -> None:
        own = gradient(N)
        peers, terms = of_peers(codec, (4, 1, 2**20))
        terms.insert(rank, own)
        x = terms[0]
        for term in terms[1:]:
            x = x + term
        x = x * 0.25
        given = {"peers": peers, "origins": (4, 1, 2**20)}
        result = call(codec, "reduce_encode", own, rank=rank, factor=0.25, **given)
        assert torch.equal(result.payload, encoded_sum(codec, x))
        assert torch.equal(result.values, decoded(codec, result.payload))

    def test_reduce_encode_ef_keeps_its_error(self, codec: Codec) -> None:
        own, residual = gradient(N), gradient(N, seed=5)
        peers, terms = of_peers(codec, (3,))
        x = ((own + residual) + terms[0]) * 0.5
        result = call(
            codec, "reduce_encode_ef", own, peers=peers, origins=(3,), residual=residual, factor=0.5
        )
        assert torch.equal(result.payload, encoded_sum(codec, x))
        sent = decoded(codec, result.payload)
        assert torch.equal(result.values, sent)
        assert torch.equal(result.residual, (x - sent) / 0.5)

    def test_a_residual_never_becomes_non_finite(self, codec: Codec) -> None:
        values, residual = gradient(N), gradient(N, seed=1)
        values[1234] = float("nan")
        result = call(codec, "encode_ef", values, residual=residual)
        x = values + residual
        error = x - decoded(codec, result.payload)
        kept = torch.where(torch.isfinite(error), error, residual)
        assert not torch.isfinite(error[1234])
        assert torch.equal(result.residual, kept)


@pytest.mark.parametrize(("codec", "dtype"), one_in(3, product(CODECS, DTYPES[1:])), ids=str)
def test_sums_of_16_bit_values_are_computed_in_fp32(codec: Codec, dtype: torch.dtype) -> None:
    own = gradient(N, dtype)
    peer = call(codec, "encode", gradient(N, dtype, 1), target="eager").payload
    result = call(codec, "reduce_encode", own, peers=[peer], factor=1.0)
    other = call(codec, "reduce_encode", own, peers=[peer], target="eager")
    assert same(result.values, other.values)
    assert torch.equal(result.payload, other.payload)
