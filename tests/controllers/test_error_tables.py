"""Error tables: errors are those of the codecs themselves, bytes those of their payloads."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
import torch

from gradwire import lang
from gradwire.aggregators import Compressed, Dense, PowerSGD
from gradwire.codecs import QSGD, Cast, OneBit, RandomShift, TopK
from gradwire.controllers import (
    Bits,
    Budget,
    CodecBits,
    Density,
    Family,
    LGreco,
    Mixture,
    Rank,
    segments,
    table,
    tables,
)
from gradwire.controllers import losses as losses_module
from gradwire.controllers.error import global_l2, terms, total
from gradwire.controllers.layer import plan_error, plan_global_error
from gradwire.controllers.losses import losses, norms
from products import EXHAUSTIVE

SHAPES = [(1, 1), (3, 43), (64, 129), (16, 3, 3, 3)]


def gradient(*shape: int, seed: int = 0) -> torch.Tensor:
    """Rows of different size, some of zeros."""
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(*shape, generator=draw) * torch.logspace(-1, -6, shape[0]).view(
        -1, *[1] * (len(shape) - 1)
    )
    values[::7] *= 0
    return values


def measured(codec: lang.Codec, values: torch.Tensor, key: int = 0) -> float:
    """By target eager, which compiles nothing."""
    flat = values.reshape(-1)
    payload = lang.encode(codec, flat, key, "eager")
    sent = lang.decode(codec, payload, len(flat), key=key, target="eager")
    return float((flat - sent).double().norm())


def unlike(codec: lang.Codec, values: torch.Tensor, keys: range, rel: float) -> list[str]:
    """The codec, unless its error is the mean of what is measured."""
    (found,) = losses(values, [Compressed(codec)])
    expected = math.sqrt(np.mean([measured(codec, values, key) ** 2 for key in keys]))
    near = found == pytest.approx(expected, rel=rel, abs=1e-12)
    return [] if near else [f"{codec}, {tuple(values.shape)}: {found}, measured {expected}"]


def test_the_definition() -> None:
    errors = np.array([3.0, 4.0])
    assert total(terms(errors, "l2")) == 7
    assert total(terms(errors, "squared")) == 25
    assert global_l2(errors) == 5
    layers = tables([("a", gradient(8, 8)), ("b", gradient(9, 8))], Rank(1))
    choices = [one.reference for one in layers]
    assert Budget.of(layers, 2).error == 2 * plan_error(layers, choices, "l2")
    square = plan_error(layers, choices, "squared")
    assert math.sqrt(square) == pytest.approx(plan_global_error(layers, choices))


@pytest.mark.parametrize("one_in", [5, pytest.param(1, marks=EXHAUSTIVE)])
def test_errors_of_dithered_codecs_are_the_mean_of_measured_ones(one_in: int) -> None:
    faults = []
    options = list(product((1, 2, 5, 8), (16, 128, 1000), ("bf16", "fp32")))
    for bits, block, metadata in options[::one_in]:
        codec = QSGD(bits=bits, block=block, metadata=metadata)
        for offset in (0.0, 3.3):  # far from zero, rounding of the grid's numbers matters
            faults += unlike(codec, gradient(40, 129) + offset, range(1, 13), 0.02)
    for bits, block in list(product((2, 5, 8), (16, 1024)))[::one_in]:
        shift = RandomShift(bits=bits, block=block)
        faults += unlike(shift, gradient(40, 129) + 0.3, range(1, 101), 0.03)
    assert not faults, "\n".join(faults)


def test_choices_of_bits_of_a_codec() -> None:
    found = CodecBits(RandomShift(bits=5, block=64)).methods((9, 9))
    assert found == [Compressed(RandomShift(bits=b, block=64)) for b in range(2, 9)]
    assert CodecBits(QSGD(bits=1)).methods((9, 9))[0] == Compressed(QSGD(bits=1))


OTHERS: list[lang.Codec] = [
    TopK(density=0.01), TopK(density=0.5), TopK(density=0.2, values="fp32"), TopK(density=1.0),
    Cast("fp16"), Cast("bf16"), OneBit(), QSGD(rounding="nearest"), QSGD(scale="max", bits=3),
]  # fmt: skip


def test_errors_of_other_codecs_are_the_measured_ones() -> None:
    faults = []
    for codec, shape in product(OTHERS, SHAPES):
        faults += unlike(codec, gradient(*shape), range(1), 1e-5)
    assert not faults, "\n".join(faults)


def test_errors_of_ranks_are_what_singular_values_leave() -> None:
    for shape in ((64, 129), (129, 64), (16, 3, 3, 3)):
        values = gradient(*shape)
        matrix = values.view(shape[0], -1).double()
        left, sizes, right = torch.linalg.svd(matrix, full_matrices=False)
        for rank in (1, 3, 8):
            kept = left[:, :rank] * sizes[:rank] @ right[:rank]
            (found,) = losses(values, [PowerSGD(rank=rank)])
            assert found == pytest.approx(float((matrix - kept).norm()), rel=1e-6), (shape, rank)


def test_errors_of_ranks_of_large_matrices_are_nearly_so(monkeypatch: pytest.MonkeyPatch) -> None:
    values = gradient(300, 257)
    methods = [PowerSGD(rank=rank) for rank in (2, 4, 8)]
    exact = losses(values, methods)
    monkeypatch.setattr(losses_module, "_WHOLE", 16)
    near = losses(values, methods)
    assert (near >= exact * (1 - 1e-6)).all()
    assert near == pytest.approx(exact, rel=0.02)


def test_dense_and_unknown_methods() -> None:
    values = gradient(8, 9)
    found = losses(values, [Dense(), Dense(torch.bfloat16), PowerSGD(rank=8)])
    assert found[0] == found[2] == 0  # a rank that does not shrink is sent dense
    assert found[1] == pytest.approx(float((values - values.bfloat16().float()).norm()))
    assert np.isnan(losses(values * math.inf, [Dense()])).all()
    assert (losses(torch.zeros(4, 4), [Compressed(QSGD()), PowerSGD(rank=1)]) == 0).all()
    assert losses(torch.zeros(0, 4), [Dense()]) == [0]


def test_any_memory_format_and_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        values = gradient(16, 4, 3, 3).to(dtype)
        last = values.to(memory_format=torch.channels_last)
        assert not last.is_contiguous()
        one, other = (table("w", given, Mixture()) for given in (values, last))
        assert one.errors.tolist() == other.errors.tolist(), dtype
        assert (one.norm, one.top_norm) == (other.norm, other.top_norm), dtype
    (scalar,) = tables([("scale", torch.tensor(3.0))], Bits())
    assert scalar.nbytes.tolist() == [2]


def test_norms() -> None:
    values = torch.arange(200.0).view(10, 20)
    assert norms(values) == (
        pytest.approx(float(values.norm())),
        pytest.approx(math.hypot(199, 198)),
    )
    assert norms(torch.zeros(0)) == (0, 0)


FAMILIES: list[Family] = [
    Bits(), Bits(blocks=(64, 512)), Density(), Density(per_decade=3), Rank(), Mixture(),
]  # fmt: skip


def test_bytes_are_those_of_payloads() -> None:
    """By the methods' formulas; every 9th choice is encoded, too."""
    faults = []
    for family, shape in product(FAMILIES, SHAPES):
        values = gradient(*shape)
        one = table("weight", values, family)
        assert one.methods[one.reference] == family.reference(shape)
        assert len(set(one.methods)) == len(one.methods)
        for at, (method, nbytes) in enumerate(zip(one.methods, one.nbytes, strict=True)):
            told = {int(nbytes), method.payload_bytes(shape, torch.float32)}
            if isinstance(method, Compressed) and at % 9 == 0:
                told.add(lang.encode(method.codec, values.reshape(-1), 0, "eager").numel())
            if len(told) > 1:
                faults.append(f"{method}, {shape}: {sorted(told)} bytes")
    assert not faults, "\n".join(faults)


def test_densities_in_equal_ratios() -> None:
    def kept(family: Density, *shape: int) -> list[float]:
        return [m.codec.density for m in family.methods(shape)]  # type: ignore[attr-defined]

    assert kept(Density(0.01, per_decade=2, least=1e-3, most=1e-1), 512, 512) == pytest.approx(
        [0.001, 0.00316, 0.01, 0.0316, 0.1]
    )
    wide = kept(Density(0.01, per_decade=10), 4096, 4096)
    assert (len(wide), wide[0], wide[-1]) == (61, 1e-6, 1.0)
    # A small layer: one density for each number of values, the reference's own kept.
    assert kept(Density(0.01, per_decade=10), 10, 12)[:2] == [0.01, 0.02]


def test_densities_in_equal_ratios_save_more() -> None:
    """A large layer of small values then sends next to nothing, less than d/10."""
    draw = torch.Generator().manual_seed(0)
    scales = {(400, 500): 0.01, (40, 30): 1.0, (30, 20): 1.0}
    named = [
        (f"{shape}", scale * torch.randn(shape, generator=draw).pow(5))
        for shape, scale in scales.items()
    ]
    narrow, wide = (tables(named, Density(0.01, per_decade=n)) for n in (None, 10))
    budget = Budget.of(narrow)
    assert budget == Budget.of(wide)
    plans = [LGreco().propose(layers, budget) for layers in (narrow, wide)]
    assert plans[1].error <= budget.error
    assert plans[1].nbytes < 0.5 * plans[0].nbytes


def test_ranges_of_choices() -> None:
    shape = (512, 512)
    bits = [m.codec.bits for m in Bits(bits=4).methods(shape)]  # type: ignore[attr-defined]
    assert bits == [2, 3, 4, 5, 6, 7, 8]
    kept = [m.codec.density for m in Density(0.01).methods(shape)]  # type: ignore[attr-defined]
    assert kept == pytest.approx([i / 1000 for i in range(1, 101)])
    assert max(m.codec.density for m in Density(0.3).methods(shape)) == 1  # type: ignore[attr-defined]
    assert [m.rank for m in Rank(4).methods(shape)] == [2, 3, 4, 5, 6, 7, 8]  # type: ignore[attr-defined]
    assert [m.rank for m in Rank(4, least=1, most=5).methods(shape)] == [1, 2, 3, 4, 5]  # type: ignore[attr-defined]
    assert Rank(4).methods((8, 8)) == [PowerSGD(rank=2), PowerSGD(rank=3), Dense()]
    assert Rank(4).reference((8, 8)) == Dense()
    assert Mixture().reference(shape) == Bits().reference(shape)
    assert len(Mixture().methods(shape)) == 7 + 100 + 7


def test_vectors_go_as_bf16() -> None:
    (one,) = tables([("bias", torch.randn(10))], Bits())
    assert one.methods == (Dense(torch.bfloat16),)
    assert one.nbytes.tolist() == [20]


def test_large_matrices_are_split_into_rows() -> None:
    assert segments((10, 3), 9) == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert segments((2, 100), 9) == [(0, 1), (1, 2)]
    values = gradient(10, 64)
    made = tables([("w", values), ("bias", torch.ones(900))], Bits(), most=320)
    assert [one.label for one in made] == ["w[0:5]", "w[5:10]", "bias"]
    for one, part in zip(made[:2], (values[:5], values[5:]), strict=True):
        assert one.errors == pytest.approx(losses(part, one.methods))
