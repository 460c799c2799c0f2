"""Resolve an aggregator's requests into collectives: checked once, then cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gradwire.collectives import Operation, Options
from gradwire.lang import Codec, rng
from gradwire.partition import Spec


@dataclass(frozen=True, eq=False)
class Route:
    """The collective of a round that carries a request; equal ones are one object."""

    operation: Operation
    options: Options


@dataclass(frozen=True)
class ResolvedRequest:
    """How one request of a parameter runs.

    Attributes:
        codec: the request's codec.
        given: the options with which it was resolved.
        route: the collective that carries it.
        spec: its description, equal on all ranks.
        keys: of its random numbers.
    """

    codec: Codec | None
    given: Options
    route: Route
    spec: Spec
    keys: rng.Keys


_one = lru_cache(maxsize=None)(Route)


@lru_cache(maxsize=256)
def route_of(
    operation: Operation, given: Options, algorithm: str | None, segments: int | None
) -> Route:
    """The request's own options, else the handle's. Collectives other than all_reduce use sra by
    default; in two levels, they use the handle's machines."""
    if segments is not None:
        given = replace(given, segments=segments)
    if operation.verb == "all_reduce" and algorithm in (None, given.algorithm):
        return _one(operation, given)
    if operation.op and algorithm == given.algorithm:
        return _one(operation, replace(given, between=Options().between))
    options = given.through(algorithm or "sra")
    if algorithm == given.algorithm == "hierarchical" and operation.shards:
        options = replace(options, nodes=given.nodes)
    return _one(operation, options)
