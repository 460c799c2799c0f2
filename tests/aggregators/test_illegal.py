"""An aggregator that breaks the contract ends in an error on all ranks, with the aggregator, the
parameter and the round; the group stays usable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, drawn
from gradwire import ConfigError, TransportError
from gradwire.aggregators import Aggregator, Averages, Context, Dense, ErrorFeedback, Steps
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from gradwire.engine import Communicator
from products import one_in
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


def ends(ranks: int, aggregator: Aggregator, fed: bool) -> list[BaseException | None]:
    """The first scope's error on each rank. Another handle's scope then succeeds."""

    def body(comm: Communicator) -> BaseException | None:
        mine = Parameters(comm, SHAPES, ErrorFeedback(aggregator) if fed else aggregator)
        error = caught(lambda: mine.average(drawn(SHAPES, comm.rank, 0)))
        for average in Parameters(comm, SHAPES, Dense()).average([torch.ones(s) for s in SHAPES]):
            assert torch.equal(average, torch.ones_like(average))
        return error

    return as_threads(ranks, body)


BAD = [*({"yields": how} for how in YIELDS), *({"returns": how} for how in RETURNS)]


@pytest.mark.parametrize(
    ("bad", "ranks", "at", "fed"), one_in(7, product(BAD, [2, 3], [0, 1], [0, 1]))
)
def test_the_error_names_aggregator_and_round(
    bad: dict[str, str], ranks: int, at: int, fed: int
) -> None:
    (kind, how), = bad.items()  # fmt: skip
    text = (YIELDS if kind == "yields" else RETURNS)[how][1]
    for error in ends(ranks, Bad(**bad, at=at), bool(fed)):
        with pytest.raises(ConfigError, match=text):
            raise error or AssertionError("no error")
        assert "Bad(" in str(error)
        assert f"round {at}" in str(error)
        assert "parameter " in str(error)


@pytest.mark.parametrize("fed", [False, True])
def test_its_own_errors_are_raised(fed: bool) -> None:
    errors = ends(2, Raises(), fed)
    assert any(isinstance(error, ZeroDivisionError) for error in errors)
    for error in errors:  # a peer's error may arrive first
        assert isinstance(error, (ZeroDivisionError, TransportError))
        assert "a defect of its own" in str(error)
    for error in ends(2, NoGenerator(), fed):
        assert isinstance(error, ConfigError)
        assert "must be a generator, with a yield" in str(error)
