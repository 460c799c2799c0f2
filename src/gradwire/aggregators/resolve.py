"""How what an aggregator asks for runs: looked up every step, found and checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from gradwire.collectives import Operation, Options, Request, check_legal
from gradwire.lang import Codec, rng
from gradwire.partition import Spec


@dataclass(frozen=True, eq=False)
class Way:
    """Which collective of a round something goes into: what is asked for in the same words has the
    same."""

    operation: Operation
    options: Options


@dataclass(frozen=True)
class Asked:
    """How one request of a parameter runs.

    Attributes:
        codec: that it asks for.
        given: options that it was found for.
        way: the collective.
        spec: what all ranks know of it.
        keys: of its random numbers.
    """

    codec: Codec | None
    given: Options
    way: Way
    spec: Spec
    keys: rng.Keys


def asked(
    request: Request,
    name: str,
    keys: rng.Keys,
    rotation: int,
    number: int,
    given: Options,
    world_size: int,
) -> Asked:
    """How a request runs.

    Args:
        name, keys, rotation: of its parameter.
        number: how many requests of the parameter the round has before it.
        given: the handle's options.

    Raises:
        ConfigError: a field of the request is none, or `check_legal` refuses it.
    """
    request.check()
    way = _way(request.operation, given, request.algorithm, request.segments)
    spec = request.spec(f"{name} ({number + 1})" if number else name, rotation, world_size)
    check_legal(way.operation, spec, way.options, world_size)
    if number:
        more = number * rng.GOLDEN
        keys = rng.Keys(rng.mix64(keys.own + more), rng.mix64(keys.shared + more))
    return Asked(request.codec, given, way, spec, keys)


@lru_cache(maxsize=256)
def _way(operation: Operation, given: Options, algorithm: str | None, segments: int | None) -> Way:
    """A request runs as it says, else as the handle's options do; collectives that lack their
    algorithm run by sra."""
    if segments is not None:
        given = replace(given, segments=segments)
    reduces = operation.verb == "all_reduce"
    if algorithm is None and not reduces:
        algorithm = "sra"
    if algorithm in (None, given.algorithm) and reduces:
        return Way(operation, given)
    return Way(operation, given.through(algorithm or "sra"))
