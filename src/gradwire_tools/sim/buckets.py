"""DDP's gradient buckets: the last parameters come first."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from gradwire.codecs import Identity
from gradwire.lang import Codec
from gradwire.partition import Spec, rotation
from gradwire_tools.sim.models import Shapes

Bucket = tuple[Spec, ...]

# DDP closes a bucket when it reaches its size limit. The first is small, so that sending starts
# early.
_FIRST_BYTES = 1 << 20
_BYTES = 25 << 20


def ddp_buckets(
    shapes: Shapes,
    codec: Codec,
    feedback: bool,
    world_size: int,
    least: int = 0,
    coalesce_bytes: int = 0,
) -> list[Bucket]:
    """The buckets of fp32 gradients of these shapes, in the order in which they become ready.

    Parameters of fewer than two dimensions, or of fewer values than `least`, are sent uncompressed.
    Buckets are combined until they hold `coalesce_bytes`, as by `gradwire.attach`.
    """
    specs = []
    for number, shape in enumerate(shapes):
        coded = len(shape) > 1 and math.prod(shape) >= least
        chosen = codec if coded else Identity()
        spec = Spec(
            f"parameter {number}",
            math.prod(shape),
            torch.float32,
            chosen,
            feedback and coded,
            rotation(number, world_size),
        )
        specs.append(spec)
    filled = _combined([(spec,) for spec in reversed(specs)], _FIRST_BYTES, _BYTES)
    return _combined(filled, coalesce_bytes, coalesce_bytes)


def _combined(buckets: Sequence[Bucket], first_bytes: int, least_bytes: int) -> list[Bucket]:
    """Buckets of these bytes or more, but for the last."""
    combined: list[Bucket] = []
    waiting: Bucket = ()
    for bucket in buckets:
        waiting += bucket
        nbytes = sum(spec.numel * spec.dtype.itemsize for spec in waiting)
        if nbytes >= (least_bytes if combined else first_bytes):
            combined.append(waiting)
            waiting = ()
    return [*combined, waiting] if waiting else combined
