"""DDP's gradient buckets: the last parameters come first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.codecs import Identity
from gradwire.lang import Codec
from gradwire.partition import Spec, rotation
from gradwire.sim.models import Shapes

Bucket = tuple[Spec, ...]

# DDP closes a bucket when it reaches its size limit. The first is small, so that sending starts
# early.
_FIRST_BYTES = 1 << 20
_BYTES = 25 << 20


def ddp_buckets(shapes: Shapes, codec: Codec, feedback: bool, world_size: int) -> list[Bucket]:
    """The buckets of fp32 gradients of these shapes, in the order in which they become ready.

    Parameters of fewer than two dimensions are sent uncompressed, as in gradwire.planner.
    """
    specs = []
    for number, shape in enumerate(shapes):
        chosen = codec if len(shape) > 1 else Identity()
        spec = Spec(
            f"parameter {number}",
            math.prod(shape),
            torch.float32,
            chosen,
            feedback and len(shape) > 1,
            rotation(number, world_size),
        )
        specs.append(spec)
    return _fill(specs)


def _fill(specs: Sequence[Spec]) -> list[Bucket]:
    filled: list[Bucket] = []
    bucket: list[Spec] = []
    for spec in reversed(specs):
        bucket.append(spec)
        nbytes = sum(one.numel * one.dtype.itemsize for one in bucket)
        if nbytes >= (_BYTES if filled else _FIRST_BYTES):
            filled.append(tuple(bucket))
            bucket = []
    return [*filled, tuple(bucket)] if bucket else filled
