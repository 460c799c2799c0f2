"""An aggregator that breaks the contract ends in an error on all ranks, with the aggregator, the
parameter and the round; the group stays usable."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn
from gradwire import ConfigError, TransportError
from gradwire.aggregators import Aggregator, Averages, Context, Dense, ErrorFeedback, Steps
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from gradwire.engine import Communicator
from products import exhaustive
from ranks import as_threads, caught

SHAPES: list[Shape] = [(5, 10), (8,)]


def other(c: Context) -> Context:
    """A context that is not the aggregator's."""
    return Context("elsewhere", (3,), c.gradient[:3], 0, 1, 0, {}, c.keys, object())


Yielded = Callable[[Sequence[Context]], Any]

# Yielded values, and texts of their errors.
YIELDS: dict[str, tuple[Yielded, str]] = {
    "none": (lambda cs: None, "it yielded None, not a collective or a list"),
    "string": (lambda cs: "values", "it yielded a str, not a collective"),
    "tensor": (lambda cs: cs[0].gradient, "it yielded a Tensor, not a collective"),
    "number": (lambda cs: [AllReduce(cs[0].gradient), 5], "it yielded a list with a int"),
    "values": (lambda cs: AllReduce([1.0]), "it yielded a list as values"),
    "two dimensions": (lambda cs: AllReduce(cs[0].gradient.view(5, 10)), r"shape \(5, 10\)"),
    "strided": (lambda cs: AllReduce(cs[0].gradient[::2]), r"strides \(2,\)"),
    "dtype": (lambda cs: AllReduce(cs[0].gradient.to(torch.complex64)), "complex64"),
    "mean of integers": (lambda cs: AllReduce(cs[0].gradient.int()), "all_reduce.*int32"),
    "operator": (lambda cs: AllReduce(cs[0].gradient, "product"), "product"),
    "root": (lambda cs: Broadcast(cs[0].gradient, 7), "root=7"),
    "shards": (lambda cs: ReduceScatter(cs[0].gradient[:7]), "7 values"),
    "lengths": (lambda cs: AllGather(cs[0].gradient, lengths=(1, 2, 3, 44)), "cannot be cut"),
    "codec": (lambda cs: AllReduce(cs[0].gradient, codec="qsgd"), "qsgd"),
    "algorithm": (lambda cs: AllReduce(cs[0].gradient, algorithm="star"), "star"),
    "of": (lambda cs: AllReduce(cs[0].gradient, of="p0"), "it yielded a collective of a str"),
    "of another": (
        lambda cs: AllReduce(cs[0].gradient, of=other(cs[0])),
        "elsewhere.*it yielded a collective of a parameter that is not in its scope",
    ),
}  # fmt: skip

# Returned values, and texts of their errors.
RETURNS: dict[str, tuple[Yielded, str]] = {
    "none": (lambda cs: None, "returned None, not a list of 2 averages"),
    "tensor": (lambda cs: cs[0].gradient, "returned a Tensor"),
    "too few": (lambda cs: [cs[0].gradient], "returned 1 averages for 2 gradients"),
    "none for one": (lambda cs: [cs[0].gradient, None], "p1.*returned None as average"),
    "a size": (lambda cs: [cs[0].gradient, cs[1].gradient[:3]], r"p1.*shape \(3,\)"),
    "integers": (lambda cs: [cs[0].gradient.int(), cs[1].gradient], "p0.*int32"),
    "sent": (
        lambda cs: Averages([c.gradient for c in cs], [cs[0].gradient]),
        "returned 1 sent parts for 2 gradients",
    ),
    "part": (
        lambda cs: Averages([c.gradient for c in cs], [cs[0].gradient[:3], cs[1].gradient]),
        r"p0.*sent part of shape \(3,\)",
    ),
}


@dataclass(frozen=True)
class Bad(Aggregator):
    """Correct rounds, then a wrong value."""

    yields: str = ""
    returns: str = ""
    at: int = 1

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        for _ in range(self.at):
            yield [AllReduce(c.gradient, of=c) for c in contexts]
        if self.yields:
            yield YIELDS[self.yields][0](contexts)
        found: Any = [c.gradient for c in contexts]
        if self.returns:
            found = RETURNS[self.returns][0](contexts)
        return found


@dataclass(frozen=True)
class NoGenerator(Aggregator):
    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        return [c.gradient for c in contexts]


@dataclass(frozen=True)
class Raises(Aggregator):
    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        yield [AllReduce(c.gradient, of=c) for c in contexts]
        raise ZeroDivisionError("a defect of its own")


def error_of(comm: Communicator, aggregator: Aggregator, fed: bool) -> BaseException | None:
    """The error of a scope on this rank. Another handle's scope then succeeds."""
    mine = Parameters(comm, SHAPES, ErrorFeedback(aggregator) if fed else aggregator)
    error = caught(lambda: mine.average(drawn(SHAPES, comm.rank, 0)))
    for average in Parameters(comm, SHAPES, Dense()).average([torch.ones(s) for s in SHAPES]):
        assert torch.equal(average, torch.ones_like(average))
    return error


BAD = [*({"yields": how} for how in YIELDS), *({"returns": how} for how in RETURNS)]


@pytest.mark.parametrize(("ranks", "odd"), [(3, 1), *exhaustive((2, 0), (4, 1), (5, 0))])
def test_the_error_names_aggregator_and_round(ranks: int, odd: int) -> None:
    """One after the other in the same group, in the first or the second round, and with error
    feedback or without."""

    def body(comm: Communicator) -> list[str]:
        faults = []
        for i, bad in enumerate(BAD):
            at, fed = (i + odd) % 2, (i // 2 + odd) % 2
            ((kind, how),) = bad.items()
            text = (YIELDS if kind == "yields" else RETURNS)[how][1]
            error = error_of(comm, Bad(**bad, at=at), bool(fed))
            said = all(word in str(error) for word in ("Bad(", f"round {at}", "parameter "))
            if not isinstance(error, ConfigError) or not re.search(text, str(error)) or not said:
                faults.append(f"{bad}: {error!r}")
        return faults

    assert as_threads(ranks, body, timeout=120) == [[]] * ranks


def test_its_own_errors_are_raised() -> None:
    def body(comm: Communicator) -> list[BaseException | None]:
        aggregators = [(Raises(), False), (Raises(), True), (NoGenerator(), False)]
        return [error_of(comm, aggregator, fed) for aggregator, fed in aggregators]

    found = as_threads(2, body)
    for errors in list(zip(*found, strict=True))[:2]:
        assert any(isinstance(error, ZeroDivisionError) for error in errors)
        for error in errors:  # a peer's error may arrive first
            assert isinstance(error, (ZeroDivisionError, TransportError))
            assert "a defect of its own" in str(error)
    for *_, error in found:
        assert isinstance(error, ConfigError)
        assert "must be a generator, with a yield" in str(error)
