"""What of a bucket is compressed, which buckets travel together, and calls per tensor."""

from __future__ import annotations

import pytest
from machines import IDENTITY, QSGD, curves, scenario

from gradwire_tools.sim import predict
from gradwire_tools.sim.buckets import ddp_buckets

SHAPES = ((1024, 512), (512,), (64, 64), (1024, 512), (64, 64), (1024, 512))


def test_small_matrices_are_sent_uncompressed() -> None:
    for least, coded in ((0, 5), (4096, 5), (4097, 3), (1 << 20, 0)):
        (bucket,) = ddp_buckets(SHAPES, QSGD, True, 4, least, 1 << 30)
        assert [s.numel for s in bucket] == [1 << 19, 4096, 1 << 19, 4096, 512, 1 << 19]
        assert sum(spec.codec == QSGD for spec in bucket) == coded
        assert all((spec.codec == QSGD) == spec.feedback for spec in bucket)
        assert all(s.numel >= least and s.numel > 512 for s in bucket if s.codec == QSGD)
    most, none = (predict(scenario(2, "1e5", least=n), curves()) for n in (0, 10**5 + 1))
    plain = predict(scenario(2, "1e5", codec=IDENTITY), curves())
    assert most["wire_bytes"] < none["wire_bytes"] == plain["wire_bytes"]


def test_buckets_are_combined() -> None:
    apart = ddp_buckets(SHAPES, QSGD, False, 4)
    sizes = [4 * sum(spec.numel for spec in bucket) for bucket in apart]
    assert len(apart) == 2
    assert ddp_buckets(SHAPES, QSGD, False, 4, 0, sizes[0]) == apart
    (all_together,) = ddp_buckets(SHAPES, QSGD, False, 4, 0, sizes[0] + 1)
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
