"""Law 6 for the language: target c equals the interpreter in every form, and the interpreter
follows the forms' definitions.

`make test` has most forms of every codec in fp32, and one in half precision.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import accumulate, product
from typing import Any

import pytest
import torch

from codec_calls import (
    CODECS,
    DTYPES,
    WIDTHS,
    Result,
    call,
    differing,
    fixed,
    gradient,
    key_of,
    ragged_sizes,
    run,
    same,
    table,
    unequal,
)
from gradwire.codecs import QSGD, Codec, Identity
from gradwire.lang import kernels, layout, verify
from gradwire.lang.forms import FORMS
from products import exhaustive, one_in

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 6e-8, 65504.0, 65520.0, 7e4, -3.4e38, 3.4028235e38]
NON_FINITE = [float("inf"), float("-inf"), float("nan"), float("-nan")]


def any_bits(n: int, seed: int) -> torch.Tensor:
    """Values with random bits: subnormals, infinities and NaN among them."""
    made = torch.Generator().manual_seed(seed)
    values = torch.randint(-(2**31), 2**31, (n,), generator=made).to(torch.int32)
    return values.view(torch.float32).nan_to_num(float("nan"), float("inf"), float("-inf"))


def given(codec: Codec, dtype: torch.dtype, turn: int | None = None) -> Iterator[torch.Tensor]:
    """Rows of ragged sizes, of special values, and of any; in a turn, of every second size."""
    block = layout(codec, dtype).block
    few = [0, 1, 17, block - 1, 2 * block + 1, block + 1]
    for n in ragged_sizes(block) if turn is None else [*few[turn % 2 :: 2], 4096 + block + 3]:
        yield fixed(n, dtype)
    yield torch.tensor(SPECIAL * 5).to(dtype)
    yield torch.tensor(NON_FINITE * 9 + SPECIAL).to(dtype)
    yield any_bits(600, seed=1).to(dtype)


def other_with_threads(codec: Codec, form: str) -> Iterator[str]:
    for n in (130, 9000):
        values = fixed(n)
        one = run(codec, form, values, "c")
        for threads in (2, 3, 5):
            found = unequal(run(codec, form, values, "c", threads), one)
            if found:
                yield f"{form} of {n} values with {threads} threads: {found}"


def other_in_a_table(codec: Codec, target: str) -> Iterator[str]:
    """A call over several rows encodes each like a call over it alone."""
    made = kernels(codec, torch.float32, target)
    sizes = [3, 0, 1000, 128, 1, 5000]
    values = [fixed(n, seed=n) for n in sizes]
    found = [torch.zeros(made.layout.nbytes(n), dtype=torch.uint8) for n in sizes]
    made.run("encode", table(values, found, key=sizes), threads=2)
    for v, p in zip(values, found, strict=True):
        own = call(codec, "encode", v, key=v.numel(), shared=0, target="eager").payload
        if not torch.equal(p, own):
            yield f"row of {v.numel()} values on {target}"


def other_where_cut(codec: Codec) -> Iterator[str]:
    """A cut at a block boundary changes no decoded value."""
    block = layout(codec).block
    values, residual = gradient(5 * block + 3), gradient(5 * block + 3, seed=9)
    whole = call(codec, "encode_ef", values, residual=residual)
    for at in (block, 2 * block, 5 * block):
        for begin, end in ((0, at), (at, values.numel())):
            part = call(
                codec, "encode_ef", values[begin:end], start=begin, residual=residual[begin:end]
            )
            if not torch.equal(part.residual, whole.residual[begin:end]):
                yield f"{begin} to {end}"


N = 2500


def other_than_defined(codec: Codec) -> Iterator[str]:
    """The forms of the interpreter, against torch on its encode and decode."""

    def run(form: str, values: torch.Tensor, **how: Any) -> Result:
        return call(codec, form, values, target="eager", **how)

    def encoded(values: torch.Tensor, key: int = 7) -> torch.Tensor:
        return run("encode", values, key=key).payload

    def decoded(payload: torch.Tensor, key: int = 7) -> torch.Tensor:
        return run("decode", torch.zeros(N), payload=payload, key=key).values

    def encoded_sum(x: torch.Tensor) -> torch.Tensor:
        """With the codec's own encode_sum if it has one: a sum of one value."""
        own = type(codec).encode_sum is not Codec.encode_sum
        return run("reduce_encode", x).payload if own else encoded(x)

    own, residual, origins = fixed(N), fixed(N, seed=1), (4, 1, 2**20)
    payload = encoded(own)
    factored = run("decode", torch.zeros(N), payload=payload, factor=0.25)
    found = {"decode by a factor": (factored.values, decoded(payload) * 0.25)}
    added = run("decode_add", residual, payload=payload)
    found["decode_add"] = added.values, residual + decoded(payload)

    fed, x = run("encode_ef", own, residual=residual), own + residual
    if not verify.takes_latest(codec.encode):
        found["encode_ef, payload"] = fed.payload, encoded(x)
    found["encode_ef, residual"] = fed.residual, x - decoded(fed.payload)
    found["encode_ef, values"] = fed.values, own

    keys = [key_of(origin) for origin in origins]
    peers = [encoded(fixed(N, seed=s), key) for s, key in zip(origins, keys, strict=True)]
    sent = [decoded(p, key) for p, key in zip(peers, keys, strict=True)]
    for rank in (0, 1, 3):  # sums are in the order of ranks
        x = reduce(torch.add, [*sent[:rank], own, *sent[rank:]]) * 0.25
        given = {"peers": peers, "origins": origins, "rank": rank, "factor": 0.25}
        merged = run("reduce_encode", own, **given)
        found[f"reduce_encode at {rank}, payload"] = merged.payload, encoded_sum(x)
        found[f"reduce_encode at {rank}, values"] = merged.values, decoded(merged.payload)
        found[f"decode_sum at {rank}"] = run("decode_sum", own, **given).values, x

    given = {"peers": peers[:1], "origins": origins[:1], "residual": residual, "factor": 0.5}
    merged, x = run("reduce_encode_ef", own, **given), ((own + residual) + sent[0]) * 0.5
    found["reduce_encode_ef, payload"] = merged.payload, encoded_sum(x)
    found["reduce_encode_ef, values"] = merged.values, decoded(merged.payload)
    found["reduce_encode_ef, residual"] = merged.residual, (x - merged.values) / 0.5

    bad = own.index_fill(0, torch.tensor(1234), torch.nan)
    fed = run("encode_ef", bad, residual=residual)
    error = bad + residual - decoded(fed.payload)
    assert not torch.isfinite(error[1234])
    kept = torch.where(torch.isfinite(error), error, residual)
    found["encode_ef, residual beside NaN"] = fed.residual, kept
    yield from (part for part, both in found.items() if not torch.equal(*both))


# forms that decode, and that encode sums; together, two have every part of the others
TURNS = [("decode_add", "reduce_encode_ef"), ("decode_sum", "reduce_encode")]


@pytest.mark.parametrize(("number", "codec"), list(enumerate(CODECS)), ids=str)
def test_forms_of_a_codec(number: int, codec: Codec, pytestconfig: pytest.Config) -> None:
    """Of fp32 in all threads; and each form of half precision with one codec."""
    every = pytestconfig.getoption("exhaustive")
    forms = FORMS if every else ("encode", "encode_ef", "decode", *TURNS[number % 2])
    half = list(product(DTYPES[1:], FORMS))[slice(None) if every else slice(number, number + 1)]
    faults = [
        fault
        for i, (dtype, form) in enumerate([*product(DTYPES[:1], forms), *half])
        for fault in differing(codec, [form], given(codec, dtype, None if every else i))
    ]
    faults += [fault for form in forms for fault in other_with_threads(codec, form)]
    faults += [fault for target in ("c", "eager") for fault in other_in_a_table(codec, target)]
    if layout(codec).splittable:
        faults += other_where_cut(codec)
    faults += other_than_defined(codec)
    assert not faults, "\n".join([repr(codec), *faults])


@pytest.mark.parametrize("turn", [0, *exhaustive(1, 2, 3)])
def test_every_width_of_code(turn: int, pytestconfig: pytest.Config) -> None:
    """One form of each, another in each turn; CODECS have 4, 6 and 7 bits."""
    some = ("encode", "encode_ef", "decode_add", "reduce_encode")
    left_out = () if pytestconfig.getoption("exhaustive") else (3, 5, 6, 9)
    faults = [
        fault
        for i, codec in enumerate(WIDTHS)
        if i not in left_out
        for fault in differing(codec, [some[(i + turn) % 4]], given(codec, torch.float32))
    ]
    assert not faults, "\n".join(faults)


def test_identity_is_exact_in_every_dtype() -> None:
    for dtype in DTYPES:
        values = torch.cat([gradient(3000, dtype), torch.tensor(SPECIAL).to(dtype)])
        values = values[~torch.isnan(values)]
        payload = call(Identity(), "encode", values).payload
        assert torch.equal(payload, values.view(torch.uint8))


@pytest.mark.parametrize("codec", one_in(2, [Identity(), QSGD(), QSGD(bits=3, block=77)]), ids=str)
def test_large_decodes_bypass_the_cache_to_any_address(codec: Codec) -> None:
    """Enough values for a large call, in rows that begin and end within cache lines."""
    numels = [200_000, 1, 70_007]
    for dtype in DTYPES:
        sent = [call(codec, "encode", gradient(n, dtype, seed=n)).payload for n in numels]
        wanted = [
            call(codec, "decode", torch.zeros(n, dtype=dtype), target="eager", payload=p).values
            for n, p in zip(numels, sent, strict=True)
        ]
        for shift in (0, 1, 5):
            memory = torch.full((sum(numels) + 3 * 8,), 9.0, dtype=dtype)
            ends = list(accumulate((n + 3 for n in numels), initial=shift))
            found = [memory[at : at + n] for at, n in zip(ends, numels, strict=False)]
            rows = table(found, sent, key=7, shared=11)  # as in `call`
            kernels(codec, dtype, "c").run("decode", rows, threads=2)
            assert all(map(same, found, wanted)), (dtype, shift)
            for part in found:
                part.fill_(9.0)
            assert (memory == 9.0).all(), (dtype, shift)
