"""The derived forms of the interpreter, against torch on its encode and decode.

Target c equals the interpreter (test_targets.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import pytest
import torch

from codec_calls import CODECS, Result, call, gradient, key_of
from gradwire.codecs import Codec
from gradwire.lang import verify

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


def run(codec: Codec, form: str, values: torch.Tensor, **given: Any) -> Result:
    return call(codec, form, values, target="eager", **given)


# A law yields what is wrong in a form.


def decode_multiplies_by_the_factor(codec: Codec) -> Iterator[str]:
    payload = encoded(codec, gradient(N))
    values = run(codec, "decode", torch.zeros(N), payload=payload, factor=0.25).values
    if not torch.equal(values, decoded(codec, payload) * 0.25):
        yield "values"


def decode_add_adds(codec: Codec) -> Iterator[str]:
    payload, before = encoded(codec, gradient(N)), gradient(N, seed=1)
    values = run(codec, "decode_add", before, payload=payload).values
    if not torch.equal(values, before + decoded(codec, payload)):
        yield "values"


def encode_ef_encodes_the_corrected_values(codec: Codec) -> Iterator[str]:
    values, residual = gradient(N), gradient(N, seed=1)
    result = run(codec, "encode_ef", values, residual=residual)
    x = values + residual
    if not verify.takes_latest(codec.encode) and not torch.equal(result.payload, encoded(codec, x)):
        yield "payload"
    if not torch.equal(result.residual, x - decoded(codec, result.payload)):
        yield "residual"
    if not torch.equal(result.values, values):
        yield "values"


def reduce_encode_sums_in_rank_order(codec: Codec) -> Iterator[str]:
    own, origins = gradient(N), (4, 1, 2**20)
    peers, decoded_peers = of_peers(codec, origins)
    for rank in (0, 1, 3):
        terms = [*decoded_peers[:rank], own, *decoded_peers[rank:]]
        x = reduce(torch.add, terms) * 0.25
        given = {"peers": peers, "origins": origins, "rank": rank, "factor": 0.25}
        result = run(codec, "reduce_encode", own, **given)
        if not torch.equal(result.payload, encoded_sum(codec, x)):
            yield f"payload at rank {rank}"
        if not torch.equal(result.values, decoded(codec, result.payload)):
            yield f"values at rank {rank}"
        summed = run(codec, "decode_sum", own, **given)
        if not torch.equal(summed.values, x):
            yield f"values of decode_sum at rank {rank}"


def reduce_encode_ef_keeps_its_error(codec: Codec) -> Iterator[str]:
    own, residual = gradient(N), gradient(N, seed=5)
    peers, terms = of_peers(codec, (3,))
    x = ((own + residual) + terms[0]) * 0.5
    result = run(
        codec, "reduce_encode_ef", own, peers=peers, origins=(3,), residual=residual, factor=0.5
    )
    if not torch.equal(result.payload, encoded_sum(codec, x)):
        yield "payload"
    sent = decoded(codec, result.payload)
    if not torch.equal(result.values, sent):
        yield "values"
    if not torch.equal(result.residual, (x - sent) / 0.5):
        yield "residual"


def a_residual_never_becomes_non_finite(codec: Codec) -> Iterator[str]:
    values, residual = gradient(N), gradient(N, seed=1)
    values[1234] = float("nan")
    result = run(codec, "encode_ef", values, residual=residual)
    error = values + residual - decoded(codec, result.payload)
    if torch.isfinite(error[1234]):
        yield "error"
    if not torch.equal(result.residual, torch.where(torch.isfinite(error), error, residual)):
        yield "residual"


LAWS = [
    decode_multiplies_by_the_factor,
    decode_add_adds,
    encode_ef_encodes_the_corrected_values,
    reduce_encode_sums_in_rank_order,
    reduce_encode_ef_keeps_its_error,
    a_residual_never_becomes_non_finite,
]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_every_form_follows_its_definition(codec: Codec) -> None:
    faults = [f"{law.__name__}: {fault}" for law in LAWS for fault in law(codec)]
    assert not faults, "\n".join([repr(codec), *faults])
