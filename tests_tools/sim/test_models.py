"""Models' shapes against their known totals; buckets against DDP's own function: what of them is
compressed, which travel together, and calls per tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist

from command_line import refused
from gradwire.partition import Spec
from gradwire_tools.bench.tasks.gpt import Gpt
from gradwire_tools.sim import Scenario, models, predict
from machines import GBIT, IDENTITY, QSGD, curves, scenario

TOTALS = [
    ("resnet50", 25_557_032),  # torchvision's table
    ("vgg16", 138_357_544),
    ("vgg19", 143_667_240),
    ("bert-base", 109_482_240),  # the hub's BertModel, uncased
    ("bert-large", 335_141_888),
    ("gpt2", 124_439_808),
    ("llama-7b", 6_738_415_616),
]


def test_models_have_their_known_numbers_of_parameters() -> None:
    for name, total in TOTALS:
        assert models.numel(models.shapes(name)) == total, name
    # about what its paper says
    assert models.numel(models.shapes("transformer-xl")) == pytest.approx(151e6, rel=0.005)
    assert {name for name, _ in TOTALS} | {"transformer-xl", "gpt"} == set(models.MODELS)
    assert models.shapes("gpt") == tuple(tuple(one.shape) for one in Gpt().model(0).parameters())
    assert models.shapes(" ResNet50 ") == models.shapes("resnet50")


def test_sizes_are_matrices() -> None:
    assert models.shapes("1e6, 4096x1024,7,2x3x5") == (
        (1, 1_000_000), (4096, 1024), (1, 7), (2, 3, 5),
    )  # fmt: skip
    assert models.shapes("2.5e3") == ((1, 2500),)


NEITHER = ["", "resnet51", "0", "-4", "1.5", "1e6,,3", "4x", "1e-3", "nan", "inf", "-1e999"]
HUGE = ["1e14", "1e999", "1e400x2", "2x1e999", "9" * 5000, "1e7x1e7", "x".join(["1e13"] * 40)]


def test_what_is_neither_is_named() -> None:
    refused(models.shapes, [(text, "--model") for text in (*NEITHER, *HUGE)])


def buckets(shapes: models.Shapes, ranks: int = 4, **given: Any) -> list[list[Spec]]:
    """What is averaged together, in the order of DDP."""
    one = Scenario(ranks, GBIT, QSGD, shapes, **given)
    parts = [part for of in one.scopes for (part,) in of.rounds]
    names = [f"{number}" for number in reversed(range(len(shapes)))]
    return [sorted(part.specs, key=lambda spec: names.index(spec.name)) for part in parts]


def test_buckets_are_ddps() -> None:
    """As DDP rebuilds them after the first step, in the order in which gradients come."""
    for name in ("resnet50", "gpt2", "gpt"):
        shapes = models.shapes(name)
        tensors = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        sizes = [[spec.numel for spec in bucket] for bucket in buckets(shapes)]
        assert sizes == [[tensors[i].numel() for i in bucket] for bucket in expected], name


def test_matrices_are_compressed_and_the_rest_is_not() -> None:
    shapes = models.shapes("resnet50")
    for feedback in (False, True):
        specs = [s for bucket in buckets(shapes, 8, feedback=feedback) for s in bucket]
        for spec, shape in zip(reversed(specs), shapes, strict=True):
            assert spec.numel == math.prod(shape)
            assert spec.codec == (QSGD if len(shape) > 1 else IDENTITY)
            assert spec.feedback == (feedback and len(shape) > 1)
    assert len({spec.rotation for spec in specs}) == 8


SHAPES = ((1024, 512), (512,), (64, 64), (1024, 512), (64, 64), (1024, 512))


def test_small_matrices_are_sent_uncompressed() -> None:
    for least, coded in ((0, 5), (4096, 5), (4097, 3), (1 << 20, 0)):
        (bucket,) = buckets(SHAPES, feedback=True, least=least, coalesce_bytes=1 << 30)
        assert [s.numel for s in bucket] == [1 << 19, 4096, 1 << 19, 4096, 512, 1 << 19]
        assert sum(spec.codec == QSGD for spec in bucket) == coded
        assert all((spec.codec == QSGD) == spec.feedback for spec in bucket)
        assert all(s.numel >= least and s.numel > 512 for s in bucket if s.codec == QSGD)
    most, none = (predict(scenario(2, "1e5", least=n), curves()) for n in (0, 10**5 + 1))
    plain = predict(scenario(2, "1e5", codec=IDENTITY), curves())
    assert most["wire_bytes"] < none["wire_bytes"] == plain["wire_bytes"]


def test_buckets_are_combined() -> None:
    apart = buckets(SHAPES)
    sizes = [4 * sum(spec.numel for spec in bucket) for bucket in apart]
    assert len(apart) == 2
    assert buckets(SHAPES, coalesce_bytes=sizes[0]) == apart
    (all_together,) = buckets(SHAPES, coalesce_bytes=sizes[0] + 1)
    assert all_together == apart[0] + apart[1]


def test_without_batching_every_tensor_has_a_call() -> None:
    """Two ranks, of which each encodes all tensors once, or twice."""
    model, of = "64x64,128x64,64x64,32x64", curves(call=1e-3)
    for algorithm in ("all_gather", "tree"):
        one, many = (
            predict(scenario(2, model, algorithm, segments=1, batched=batched), of)
            for batched in (True, False)
        )
        assert one["compute_seconds"] == pytest.approx(2e-3)
        assert many["compute_seconds"] == pytest.approx(4 * one["compute_seconds"])
