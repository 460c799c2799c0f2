"""Law 6 for the language: target c equals the interpreter in every form."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from codec_calls import CODECS, DTYPES, WIDTHS, Result, call, gradient, key_of, ragged_sizes, same
from gradwire.codecs import QSGD, Codec, Identity, TopK
from gradwire.lang import ROW, kernels, layout
from gradwire.lang.forms import FORMS
from products import every_pair, in_turn, one_in

SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 1e-38, 6e-8, 65504.0, 65520.0, 7e4, -3.4e38, 3.4028235e38]
NON_FINITE = [float("inf"), float("-inf"), float("nan")]


def run(codec: Codec, form: str, values: torch.Tensor, target: str, threads: int = 1) -> Result:
    """Run a form with payloads, peers and residuals that do not depend on the target."""
    n = values.numel()
    payload = call(codec, "encode", gradient(n, values.dtype, 1), target="eager", key=1).payload
    peers = []
    if form.startswith("reduce"):
        peers = [
            call(
                codec,
                "encode",
                gradient(n, values.dtype, s),
                target="eager",
                key=key_of(s),
                start=640,
            ).payload
            for s in (2, 3)
        ]
    return call(
        codec, form, values, target=target, payload=payload, residual=gradient(n, seed=4),
        peers=peers, rank=1 if peers else 0, factor=1 / 3, threads=threads, start=640,
        origins=(2, 3)[: len(peers)],
    )  # fmt: skip


def assert_same(a: Result, b: Result, form: str) -> None:
    assert torch.equal(a.payload, b.payload), form
    assert same(a.values, b.values), form
    assert same(a.residual, b.residual), form


CASES = in_turn(CODECS, list(product(DTYPES, FORMS)), always=1)  # each is compiled


@pytest.mark.parametrize(("codec", "kernel"), CASES, ids=str)
def test_c_equals_eager(codec: Codec, kernel: tuple[torch.dtype, str]) -> None:
    dtype, form = kernel
    for n in ragged_sizes(layout(codec, dtype).block):
        values = gradient(n, dtype)
        assert_same(run(codec, form, values, "c"), run(codec, form, values, "eager"), form)


@pytest.mark.parametrize(
    ("codec", "form"),
    in_turn(WIDTHS, ["encode", "encode_ef", "decode_add", "reduce_encode"]),
    ids=str,
)
def test_every_width_of_code(codec: Codec, form: str) -> None:
    for n in ragged_sizes(layout(codec).block):
        values = gradient(n)
        assert_same(run(codec, form, values, "c"), run(codec, form, values, "eager"), form)


@pytest.mark.parametrize("codec", one_in(3, CODECS), ids=repr)
@given(
    numbers=st.lists(
        st.one_of(
            st.sampled_from(SPECIAL + NON_FINITE),
            st.floats(width=32),
            st.floats(-1, 1, width=32),
        ),
        max_size=300,
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_c_equals_eager_on_anything(
    codec: Codec, numbers: list[float], data: st.DataObject, pytestconfig: pytest.Config
) -> None:
    every = pytestconfig.getoption("exhaustive")
    known = [
        kernel
        for other, kernel in (case.values for case in CASES if every or not case.marks)
        if other == codec
    ]
    dtype, form = data.draw(st.sampled_from(known))
    values = torch.tensor(numbers, dtype=torch.float32).to(dtype)
    assert_same(run(codec, form, values, "c"), run(codec, form, values, "eager"), form)


@pytest.mark.parametrize(
    ("codec", "form", "threads"), every_pair(CODECS, FORMS, [2, 3, 5]), ids=str
)
def test_threads_change_nothing(codec: Codec, form: str, threads: int) -> None:
    for n in (1, 130, 9000):
        values = gradient(n)
        assert_same(run(codec, form, values, "c", threads), run(codec, form, values, "c"), form)


@pytest.mark.parametrize("codec", [c for c in CODECS if layout(c).splittable], ids=repr)
def test_a_cut_at_a_block_boundary_changes_no_decoded_value(codec: Codec) -> None:
    block = layout(codec).block
    values = gradient(5 * block + 3)
    whole = call(codec, "encode_ef", values, residual=gradient(values.numel(), seed=9))
    for at in (block, 2 * block, 5 * block):
        for begin, end in ((0, at), (at, values.numel())):
            part = call(
                codec, "encode_ef", values[begin:end], start=begin,
                residual=gradient(values.numel(), seed=9)[begin:end],
            )  # fmt: skip
            assert torch.equal(part.residual, whole.residual[begin:end])


def test_tensor_scope_and_selections_are_not_splittable() -> None:
    assert [layout(c).splittable for c in CODECS[:10]] == [True] * 8 + [False] * 2
    assert not layout(TopK()).splittable


@pytest.mark.parametrize("target", ["c", "eager"])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_a_table_of_rows_equals_its_rows(codec: Codec, target: str) -> None:
    made = kernels(codec, torch.float32, target)
    sizes = [3, 0, 1000, 128, 1, 5000]
    values = [gradient(n, seed=n) for n in sizes]
    payloads = [torch.zeros(made.layout.nbytes(n), dtype=torch.uint8) for n in sizes]
    rows = np.zeros(len(sizes), ROW)
    for row, v, p in zip(rows, values, payloads, strict=True):
        row["values"], row["payload"], row["numel"] = v.data_ptr(), p.data_ptr(), v.numel()
        row["key"] = v.numel()
    made.run("encode", rows, threads=2)
    for v, p in zip(values, payloads, strict=True):
        own = call(codec, "encode", v, key=v.numel(), shared=0, target="eager").payload
        assert torch.equal(p, own)


def test_a_payload_of_one_target_decodes_on_another() -> None:
    codec = QSGD(bits=3, block=50)
    values = gradient(777)
    for encoder, decoder in (("c", "eager"), ("eager", "c")):
        payload = call(codec, "encode", values, target=encoder).payload
        decoded = [
            call(codec, "decode", values, payload=payload, target=t).values
            for t in (encoder, decoder)
        ]
        assert torch.equal(*decoded)


def test_identity_is_exact_in_every_dtype() -> None:
    for dtype in DTYPES:
        values = torch.cat([gradient(3000, dtype), torch.tensor(SPECIAL).to(dtype)])
        values = values[~torch.isnan(values)]
        payload = call(Identity(), "encode", values).payload
        assert torch.equal(payload, values.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("codec", [Identity(), QSGD(), QSGD(bits=3, block=77)], ids=str)
def test_large_decodes_bypass_the_cache_to_any_address(codec: Codec, dtype: torch.dtype) -> None:
    """Enough values for a large call, in rows that begin and end within cache lines."""
    numels = [200_000, 1, 70_007]
    payloads = [call(codec, "encode", gradient(n, dtype, seed=n)).payload for n in numels]
    wanted = [
        call(codec, "decode", torch.zeros(n, dtype=dtype), target="eager", payload=p).values
        for n, p in zip(numels, payloads, strict=True)
    ]
    for shift in (0, 1, 5):
        memory = torch.full((sum(numels) + 3 * 8,), 9.0, dtype=dtype)
        rows, starts, at = np.zeros(3, ROW), [], shift
        for i, (numel, payload) in enumerate(zip(numels, payloads, strict=True)):
            rows[i]["values"], rows[i]["payload"] = memory[at:].data_ptr(), payload.data_ptr()
            rows[i]["numel"], rows[i]["key"], rows[i]["shared"] = numel, 7, 11  # as in `call`
            starts.append(at)
            at += numel + 3
        kernels(codec, dtype, "c").run("decode", rows, threads=2)
        for start, numel, expected in zip(starts, numels, wanted, strict=True):
            assert same(memory[start : start + numel], expected)
            assert memory[start + numel] == 9.0
            assert start == 0 or memory[start - 1] == 9.0
