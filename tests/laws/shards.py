"""Shards of any lengths and strides, and the machines that hold them."""

from __future__ import annotations

from typing import Any

import torch

from gradwire import Options
from gradwire.collectives import Request, prepare
from gradwire.engine import Communicator
from gradwire.lang import rng
from rooms.collectives import begin

# the machine of each of n ranks
MACHINES: dict[str, Any] = {
    "sra": lambda n: None,
    "pairs": lambda n: tuple(rank // 2 for rank in range(n)),
    "in_turn": lambda n: tuple(rank % 3 for rank in range(n)),
    "one_and_the_rest": lambda n: tuple(min(rank, 1) for rank in range(n)),
    "two_and_alone": lambda n: tuple(max(rank, 1) for rank in range(n)),
    "one_machine": lambda n: (7,) * n,
}
INSIDE = ["codec", "full"]
PATTERNS: dict[str, list[int]] = {
    "equal": [1025],
    "ragged": [1000, 0, 15, 1, 129],
    "one_has_all": [0, 3000, 0, 0, 0, 0, 0, 0],
    "none": [0],
}
GAPS = ["side_by_side", "tight", "wide"]


def way(machines: str, n: int, inside: str = "codec", **how: Any) -> Options:
    nodes = MACHINES[machines](n)
    if nodes is None:
        return Options(**how)
    return Options(algorithm="hierarchical", nodes=nodes, inside=inside, **how)


def lengths_of(pattern: str, n: int) -> tuple[int, ...]:
    known = PATTERNS[pattern]
    return tuple(known[rank % len(known)] for rank in range(n))


def stride_of(lengths: tuple[int, ...], gap: str) -> int:
    """A stride: 0, the least possible, or more."""
    return 0 if gap == "side_by_side" else max(*lengths, 1) + 36 * (gap == "wide")


def places(lengths: tuple[int, ...], stride: int) -> list[slice]:
    """The slice of each rank's shard."""
    begins = [r * stride if stride else sum(lengths[:r]) for r in range(len(lengths))]
    return [slice(b, b + length) for b, length in zip(begins, lengths, strict=True)]


def spread(whole: torch.Tensor, lengths: tuple[int, ...], stride: int, fill: float) -> torch.Tensor:
    """The shards of `whole` at their offsets, with `fill` between them."""
    where = places(lengths, stride)
    memory = torch.full((where[-1].stop,), fill).to(whole.dtype)
    for at, shard in zip(where, whole.split(lengths), strict=True):
        memory[at] = shard
    return memory


def run(comm: Communicator, request: Request, options: Options) -> torch.Tensor:
    """The result of a single collective on this rank; checks law 5."""
    keys = rng.parameter_keys(0, "w", comm.rank)
    running, result = begin(comm.calls, request, "w", options, keys, lambda: 7)
    sent = running.result(60).wire_bytes
    spec = request.spec("w", 0, comm.world_size)
    prepared = prepare(comm.calls, [spec], options, request.operation).prepared[0][0]
    # where lengths depend on data, the formula uses the codec's expected length
    assert sent == prepared.wire_bytes or prepared.program.packings
    return result
