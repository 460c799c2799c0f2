"""Resolve an aggregator's requests into collectives: checked once, then cached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gradwire.collectives import Operation, Options, Request, check_legal
from gradwire.lang import Codec, rng
from gradwire.partition import Spec


@dataclass(frozen=True, eq=False)
class Route:
    """The collective of a round that carries a request. Equal requests share one object."""

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


def resolve(
    request: Request,
    name: str,
    keys: rng.Keys,
    rotation: int,
    number: int,
    given: Options,
    world_size: int,
) -> ResolvedRequest:
    """Resolve and check a request.

    Args:
        name, keys, rotation: of its parameter.
        number: its index among the parameter's requests of the round.
        given: the handle's options.

    Raises:
        ConfigError: a field of the request is invalid, or `check_legal` refuses it.
    """
    request.check()
    route = _route(request.operation, given, request.algorithm, request.segments)
    spec = request.spec(f"{name} ({number + 1})" if number else name, rotation, world_size)
    check_legal(route.operation, spec, route.options, world_size)
    if number:
        more = number * rng.GOLDEN
        keys = rng.Keys(rng.mix64(keys.own + more), rng.mix64(keys.shared + more))
    return ResolvedRequest(request.codec, given, route, spec, keys)


@lru_cache(maxsize=256)
def _route(
    operation: Operation, given: Options, algorithm: str | None, segments: int | None
) -> Route:
    """The request's own options, else the handle's. Collectives other than all_reduce use sra by
    default; in two levels, they use the handle's machines."""
    if segments is not None:
        given = replace(given, segments=segments)
    if algorithm is None and operation.verb != "all_reduce":
        algorithm = "sra"
    if algorithm in (None, given.algorithm) and operation.op:
        return Route(operation, given)
    options = given.through(algorithm or "sra")
    if algorithm == given.algorithm == "hierarchical" and operation.shards:
        inside = given.inside if operation.op else options.inside
        options = replace(options, nodes=given.nodes, inside=inside)
    return Route(operation, options)
