"""Models' shapes against their known totals; buckets against DDP's own function."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from machines import IDENTITY, QSGD

from gradwire.errors import ConfigError
from gradwire_tools.bench.tasks.gpt import Gpt
from gradwire_tools.sim import models
from gradwire_tools.sim.buckets import ddp_buckets

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
    for text in (*NEITHER, *HUGE):
        with pytest.raises(ConfigError, match="--model"):
            models.shapes(text)


def test_buckets_are_ddps() -> None:
    """As DDP rebuilds them after the first step, in the order in which gradients come."""
    for name in ("resnet50", "gpt2"):
        shapes = models.shapes(name)
        tensors = [torch.empty(shape, device="meta") for shape in reversed(shapes)]
        limits = [dist._DEFAULT_FIRST_BUCKET_BYTES, 25 << 20]
        expected, _ = dist._compute_bucket_assignment_by_size(tensors, limits)
        found = ddp_buckets(shapes, QSGD, False, 4)
        sizes = [[spec.numel for spec in bucket] for bucket in found]
        assert sizes == [[tensors[i].numel() for i in bucket] for bucket in expected], name


def test_matrices_are_compressed_and_the_rest_is_not() -> None:
    shapes = models.shapes("resnet50")
    for feedback in (False, True):
        specs = [s for bucket in ddp_buckets(shapes, QSGD, feedback, 8) for s in bucket]
        for spec, shape in zip(reversed(specs), shapes, strict=True):
            assert spec.numel == math.prod(shape)
            assert spec.codec == (QSGD if len(shape) > 1 else IDENTITY)
            assert spec.feedback == (feedback and len(shape) > 1)
    assert len({spec.rotation for spec in specs}) == 8
