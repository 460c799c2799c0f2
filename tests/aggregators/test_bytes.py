"""Bytes of aggregators: of a payload by its formula, and those that all ranks send, by round."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from averaging import Shape, sent_bytes
from gradwire.aggregators import (
    THC,
    Aggregator,
    ARTopK,
    ErrorFeedback,
    GlobalTopK,
    LWTopK,
    PowerSGD,
    Radial,
    SparseLoCo,
    TopKC,
    selection,
)
from gradwire.codecs import QSGD
from gradwire.engine import HEADER_BYTES
from gradwire.lang import layout
from products import exhaustive
from rooms.engine import ALIGNMENT

Found = tuple[float, list[tuple[float, float]]]  # of a payload, and at least and at most of a round


def reduced(ranks: int, nbytes: int, values: int) -> tuple[int, int]:
    """An all-reduce in chunks of whole blocks of 1024."""
    found = 2 * (ranks - 1) * (nbytes + min(ranks, -(-values // 1024)) * HEADER_BYTES)
    return found, found


def of_artopk(made: ARTopK, ranks: int, *numels: int) -> Found:
    """Positions from the leader, k values all-reduced; norms of all ranks."""
    (numel,), size = numels, 2 if made.values == "fp16" else 4
    k, laid = max(1, int(made.density * numel)), layout(selection.Positions(made.density))
    packed, bits = selection.packed_nbytes(made.density, numel), int(laid.position[len("uint") :])
    assert 0 <= packed - 2 * laid.blocks(numel) - k * bits / 8 < 3  # at most three planes
    rounds = [(ranks - 1) * packed, 2 * (ranks - 1) * size * k]
    if made.leader != "round_robin":
        rounds = [ranks * (ranks - 1) * 16, 2 * (ranks - 1) * packed, rounds[1]]
    more = 2 * ranks * (ranks - 1) * (HEADER_BYTES + ALIGNMENT)  # messages of a round, at most
    return packed + size * k, [(nbytes, nbytes + more) for nbytes in rounds]


def of_lwtopk(made: LWTopK, ranks: int, *numels: int) -> Found:
    payloads = [layout(made.codec).nbytes(n) for n in numels]
    aligned = sum(-(-nbytes // 16) * 16 for nbytes in payloads)
    return sum(payloads), [(ranks * (ranks - 1) * (aligned + HEADER_BYTES),) * 2]


def of_globaltopk(made: GlobalTopK, ranks: int, *numels: int) -> Found:
    """Dense: 2 (N - 1) / N of them from each of two."""
    dense = 4 * sum(numels)
    return dense, [(2 * dense, 2 * dense + 8 * HEADER_BYTES)]


def of_thc(made: THC, ranks: int, *numels: int) -> Found:
    """Ranges and numbers."""
    (numel,) = numels
    parts = (2 * numel // made.chunk, numel // made.chunk), (made.bits * numel // 8, numel)
    return sum(nbytes for nbytes, _ in parts), [reduced(ranks, *part) for part in parts]


def of_topkc(made: TopKC, ranks: int, *numels: int) -> Found:
    """Norms of all parameters and the chosen chunks, padding included; no more than `bits`."""
    chunks = sum(-(-numel // made.size) for numel in numels)
    sent = int(made.bits * sum(numels) / 8 - 2 * chunks) // (made.width * made.size)
    assert made.cut(*numels) == (chunks, sent)
    parts = (2 * chunks, chunks), (made.width * sent * made.size, sent * made.size)
    return sum(nbytes for nbytes, _ in parts), [reduced(ranks, *part) for part in parts]


def of_sparseloco(made: SparseLoCo, ranks: int, *numels: int) -> Found:
    """Codes of 2 bits and positions of 8: 10 bits per value that is kept; five numbers. Of 16 bits
    and positions of 9: 25 bits; one number."""
    (numel,) = numels
    width, numbers = (10, 5) if made.bits == 2 else (25, 1)
    nbytes = numel // made.chunk * made.keep * width // 8 + 4 * numbers
    padded = -(-nbytes // 16) * 16 + HEADER_BYTES
    return nbytes, [(ranks * (ranks - 1) * (nbytes + HEADER_BYTES), ranks * (ranks - 1) * padded)]


def of_radial(made: Radial, ranks: int, *numels: int) -> Found:
    """All values of all ranks."""
    nbytes = sum(layout(made.codec).nbytes(n) for n in numels)
    padded = sum(-(-layout(made.codec).nbytes(n) // 16) * 16 for n in numels)
    pairs = ranks * (ranks - 1)
    return nbytes, [(pairs * (nbytes + HEADER_BYTES), pairs * (padded + HEADER_BYTES))]


ONE, SEVERAL = [(60, 80)], [(60, 80), (33,), (9, 9)]
LARGE, MODEL = [(640, 128)], [(640, 128), (100,), (26, 31), ()]
CASES: list[tuple[Callable[..., Found], Any, int, list[Any]]] = [
    (of_artopk, ARTopK(0.1, "round_robin", values="fp16"), 2, ONE),
    (of_artopk, ARTopK(0.01, "variance", values="fp32"), 3, ONE),
    (of_artopk, ARTopK(1, "auto", values="fp16"), 5, ONE),
    (of_lwtopk, LWTopK(0.02), 3, SEVERAL),
    (of_globaltopk, GlobalTopK(0.02), 2, [(64, 96), (2048,)]),
    (of_sparseloco, SparseLoCo(), 3, [(256, 1024)]),
    (of_sparseloco, SparseLoCo(keep=32, bits=16, transform="dct"), 2, [(256, 1024)]),
    (of_radial, Radial(), 3, SEVERAL),
    (of_radial, Radial(QSGD(bits=4)), 2, ONE),
    (of_thc, THC(5, 4, chunk=256), 3, [(160, 1024)]),
    (of_topkc, TopKC(0.5, None, "fp16", scope="layer"), 2, LARGE),
    (of_topkc, TopKC(2, None, "bf16", scope="layer"), 3, LARGE),
    (of_topkc, TopKC(4, 32, "fp32", scope="layer"), 5, LARGE),
    (of_topkc, TopKC(2, 64), 3, MODEL),
]
MORE: list[tuple[Callable[..., Found], Any, int, list[Any]]] = [
    (of_artopk, ARTopK(0.1, "round_robin", values="fp32"), 3, ONE),
    (of_thc, THC(4, 4, chunk=256), 2, [(160, 1024)]),
    (of_thc, THC(8, 3, chunk=256), 5, [(160, 1024)]),
    (of_topkc, TopKC(8, None, "fp16", scope="layer"), 3, LARGE),
]


@pytest.mark.parametrize(("formula", "made", "ranks", "shapes"), [*CASES, *exhaustive(*MORE)])
def test_bytes_are_those_of_the_formula(
    formula: Callable[..., Found], made: Aggregator, ranks: int, shapes: list[Shape]
) -> None:
    payload, rounds = formula(made, ranks, *map(math.prod, shapes))
    told = sum(made.payload_bytes(shape, torch.float16) for shape in shapes)
    whole = isinstance(made, TopKC) and len(shapes) > 1  # whose shares of it are rounded up
    assert 0 <= told - payload <= whole * (128 + len(shapes))
    fed = made if isinstance(made, THC) else ErrorFeedback(made)
    for sent in sent_bytes(ranks, shapes, fed, steps=ranks):
        for nbytes, (least, most) in zip(sent, rounds, strict=True):
            assert least <= nbytes <= most


def test_layers_of_a_bucket_share_two_collectives_and_vectors_alone_one() -> None:
    """And a payload of PowerSGD is dense where that is smaller."""
    rest: list[Shape] = [(50,), (2, 3), (), (0,), (5, 0)]
    for layers, rounds in ((1, 2), (2, 2), (30, 2), (0, 1)):
        shapes = [s for _ in range(layers) for s in ((24, 16), (9,), (16, 12))] or rest
        sent = sent_bytes(2, shapes, ErrorFeedback(PowerSGD(2)), steps=2)
        assert [len(of_step) for of_step in sent] == [rounds] * 2
    for shape in ((12, 20), (33, 17), (8, 3, 3, 3), (64, 7), *rest):
        numel, factors = math.prod(shape), 3 * (shape[0] + math.prod(shape[1:])) if shape else 1
        expected = factors if len(shape) > 1 and factors < numel else numel
        assert PowerSGD(3).payload_bytes(shape, torch.float32) == 4 * expected
