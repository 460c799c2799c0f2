"""What it costs to synchronise a gradient, by the papers' formulas; and the choices that follow.

Those of sparse gradients (ARTOPK) stand in gradwire.controllers.flexible.

Partitions (HIPRESS 3.3, Eqs. 1 and 2, Table 3): a gradient of m bytes in K partitions, of which a
codec leaves a share r. `send`, `encode` and `decode` are measured curves: bytes -> seconds.

    uncompressed   a send(m/K)
    compressed     a send(r m/K) + b encode(m/K) + c decode(r m/K)

a counts the sends that follow each other, b and c the encodes and decodes that no send hides. More
than N partitions go in batches of N.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gradwire.errors import ConfigError

Curve = Callable[[float], float]


@dataclass(frozen=True)
class Strategy:
    """A way to synchronise, by the serial steps of N ranks and K partitions (HIPRESS Table 3).

    Attributes:
        name: in tables.
        sends, encodes, decodes: a, b and c above.
        fixed: K, by N, where it cannot be chosen.
    """

    name: str
    sends: Callable[[int, int], float]
    encodes: Callable[[int, int], float]
    decodes: Callable[[int, int], float]
    fixed: Callable[[int], int] | None = None


def _ranks(n: int) -> int:
    return n


def _one(n: int) -> int:
    return 1


def _deep(n: int) -> int:
    """The depth of a binomial tree."""
    return (n - 1).bit_length()


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


STRATEGIES = {
    made.name: made
    for made in (
        Strategy("ring", lambda n, k: 2 * (n - 1), lambda n, k: n, lambda n, k: n),
        Strategy(
            "parameter_server", lambda n, k: 2 * n, lambda n, k: k + 1, lambda n, k: n + 1
        ),
        # Aggregators beside the workers, which keep what is for themselves.
        Strategy("colocated", lambda n, k: 2 * (n - 1), lambda n, k: k, lambda n, k: n),
        # Compressed sums, so that one encode and one decode are left.
        Strategy("low_rank", lambda n, k: 2 * (n - 1), lambda n, k: 1, lambda n, k: 1),
        # Ours: what the graphs of gradwire.algorithms take, without segments, on a link slower than
        # the kernels (tests_tools/sim/test_costs.py); a sum of payloads decodes each. Every rank
        # sums one part of N. Its first messages leave together, and the last results arrive
        # together.
        Strategy(
            "sra", lambda n, k: 2 * (n - 1), lambda n, k: n, lambda n, k: 2 * (n - 1), fixed=_ranks
        ),
        # Whole gradients, on a binomial tree of 2^L ranks (an upper bound for other numbers): on
        # the longest path ranks sum 1, 2, ... L payloads, and send as many at a time down again.
        Strategy(
            "tree",
            lambda n, k: _deep(n) + _triangle(_deep(n)),
            lambda n, k: _deep(n) + 1,
            lambda n, k: _triangle(_deep(n)) + 1,
            fixed=_one,
        ),
        Strategy("all_gather", lambda n, k: n - 1, lambda n, k: 1, lambda n, k: n, fixed=_one),
    )
}  # fmt: skip


def two_level(per_machine: int) -> Strategy:
    """Hierarchical, on machines of so many ranks, as of ours above: K = N parts; what is sent
    inside a machine costs nothing."""
    inside = per_machine - 1

    def others(n: int) -> int:  # machines
        return n // per_machine - 1

    return Strategy(
        "two_level",
        lambda n, k: 2 * others(n) * per_machine,
        lambda n, k: n - 1,
        lambda n, k: inside * (2 * others(n) + 1) + others(n),
        fixed=_ranks,
    )


@dataclass(frozen=True)
class Decision:
    """How a gradient is best synchronised.

    Attributes:
        compress: whether a codec pays.
        partitions: the best number.
        seconds: expected.
        uncompressed_seconds, compressed_seconds: each with its best number of partitions.
    """

    compress: bool
    partitions: int
    seconds: float
    uncompressed_seconds: float
    compressed_seconds: float


def uncompressed(strategy: Strategy, ranks: int, nbytes: float, parts: int, send: Curve) -> float:
    """Eq. 1, in seconds."""
    return _batches(ranks, parts) * strategy.sends(ranks, parts) * send(nbytes / parts)


def compressed(
    strategy: Strategy,
    ranks: int,
    nbytes: float,
    parts: int,
    share: float,
    send: Curve,
    encode: Curve,
    decode: Curve,
) -> float:
    """Eq. 2, in seconds; `share` is that of the bytes which the codec leaves."""
    each = nbytes / parts
    return _batches(ranks, parts) * (
        strategy.sends(ranks, parts) * send(share * each)
        + strategy.encodes(ranks, parts) * encode(each)
        + strategy.decodes(ranks, parts) * decode(share * each)
    )


def decide(
    strategy: Strategy,
    ranks: int,
    nbytes: float,
    share: float,
    send: Curve,
    encode: Curve,
    decode: Curve,
    candidates: Iterable[int] = (),
) -> Decision:
    """Whether to compress a gradient, and in how many partitions.

    Args:
        nbytes: of the gradient; `share`: of these, what a codec leaves.
        candidates: numbers of partitions; 1 to N unless given.

    Raises:
        ConfigError: there is one rank, nothing to send, or a share that is not above 0.
    """
    if ranks < 2 or not nbytes > 0 or not share > 0:
        raise ConfigError(
            f"{ranks} ranks, {nbytes} bytes, a share of {share}: give 2 ranks or more, and numbers "
            "above 0"
        )
    numbers = list(candidates) or range(1, ranks + 1)
    if strategy.fixed is not None:
        numbers = [strategy.fixed(ranks)]
    of = strategy, ranks, nbytes
    plain = {k: uncompressed(*of, k, send) for k in numbers}
    coded = {k: compressed(*of, k, share, send, encode, decode) for k in numbers}
    best = [min(costs, key=costs.__getitem__) for costs in (plain, coded)]
    seconds = plain[best[0]], coded[best[1]]
    compress = seconds[1] < seconds[0]
    return Decision(compress, best[compress], seconds[compress], *seconds)


def _batches(ranks: int, parts: int) -> int:
    return -(-parts // ranks)
