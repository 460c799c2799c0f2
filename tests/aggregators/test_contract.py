"""Aggregators and the rounds that drive them. One that breaks the contract, on one rank or on all,
ends in an error on all ranks, with the aggregator, the parameter and the round."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
import torch

from averaging import Parameters, Shape, averaged, drawn, sent_bytes, started
from gradwire import QSGD, ConfigError, TransportError
from gradwire.aggregators import (
    Aggregator,
    Attached,
    Averages,
    Compressed,
    Context,
    Dense,
    ErrorFeedback,
    Steps,
)
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.transport import Hub
from products import exhaustive
from ranks import as_threads, caught


@dataclass(frozen=True)
class Twice(Aggregator):
    """The average of the first half, then of the second: three rounds, no state."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        halves = [c.gradient.numel() // 2 for c in contexts]
        pairs = list(zip(contexts, halves, strict=True))
        yield [AllReduce(c.gradient[:half].clone(), of=c) for c, half in pairs]
        first = yield [AllReduce(c.gradient[:half].clone(), of=c) for c, half in pairs]
        second = yield [AllReduce(c.gradient[half:].clone(), of=c) for c, half in pairs]
        return [torch.cat(parts) for parts in zip(first, second, strict=True)]


@dataclass(frozen=True)
class Silent(Aggregator):
    """Sends nothing: the average is zero."""

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        yield from ()
        return [torch.zeros_like(c.gradient) for c in contexts]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_rounds_of_all_lengths_share_collectives(world_size: int) -> None:
    shapes: list[Shape] = [(500,)] * 4
    data = [drawn(shapes, rank, 0) for rank in range(world_size)]

    def body(comm: Communicator) -> tuple[list[torch.Tensor], int]:
        mine = Parameters(comm, shapes, [Dense(), Twice(), Silent(), Twice()])
        return mine.average(data[comm.rank]), len(mine.outcomes[0])

    for found, rounds in as_threads(world_size, body):
        if world_size == 1:
            assert rounds == 0  # with one rank, gradients are averages
            assert all(map(torch.equal, found, data[0]))
            continue
        assert rounds == 3  # the longest has three; shorter ones share the first ones' messages
        for i in (0, 1, 3):
            torch.testing.assert_close(found[i], torch.stack([rank[i] for rank in data]).mean(0))
        assert not found[2].any()


def test_nothing_to_send_ends_at_once() -> None:
    assert sent_bytes(2, [(5,)], Silent()) == [[]]


def test_error_feedback_converges_where_two_bits_alone_do_not() -> None:
    """With error feedback, the mean of many averages of one gradient is that gradient."""
    data = [drawn([(1000,)], rank, 0) for rank in range(2)]
    two_bits = Compressed(QSGD(bits=2, block=1000, scale="max", rounding="nearest"))
    expected, off = (data[0][0] + data[1][0]) / 2, []
    for aggregator in (two_bits, ErrorFeedback(two_bits)):
        found = averaged([(1000,)], aggregator, [data] * 100)[0]
        off.append((sum(averages[0] for averages, _ in found) / 100 - expected).norm())
    assert off[1] < 0.1 * off[0]


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_dense_averages_in_its_dtype(dtype: torch.dtype | None) -> None:
    data = [drawn([(300,)], rank, 0) for rank in range(3)]
    expected = torch.stack([mine[0] for mine in data]).mean(0)
    tolerance = 1e-6 if dtype is None else 2 * torch.finfo(dtype).eps
    found = averaged([(300,)], Dense(dtype), [data])[0][0][0][0]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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


@dataclass(frozen=True)
class Odd(Aggregator):
    """Two rounds; `how` is the deviation of rank 1 in round `at`."""

    how: str
    at: int

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        zeros = not any(c.gradient.any() for c in contexts)
        for number in range(2):
            odd = contexts[0].rank == 1 and number == self.at
            if odd and self.how == "fewer":
                break
            if odd and self.how == "illegal":
                yield [AllReduce(c.gradient.view(1, -1), of=c) for c in contexts]
            elif odd and (self.how == "raises" or (self.how, zeros) == ("zeros", True)):
                raise ConfigError(*REFUSES)
            elif odd and self.how == "verb":
                yield [Broadcast(c.gradient, of=c) for c in contexts]
            elif odd and self.how == "sizes":
                yield [AllReduce(c.gradient[:7], of=c) for c in contexts]
            else:
                yield [AllReduce(c.gradient, of=c) for c in contexts]
        return [c.gradient for c in contexts]


REFUSES = ["this aggregator refuses"]
HOWS = ["fewer", "illegal", "raises", "zeros", "verb", "sizes"]


def ends(how: str, at: int, ranks: int) -> list[tuple[BaseException | None, float]]:
    """Per rank, its error and after how many seconds it came."""

    def body(comm: Communicator) -> tuple[BaseException | None, float]:
        members = [
            Attached(f"p{i}", (50,), Odd(how, at), rng.parameter_keys(0, f"p{i}", comm.rank))
            for i in range(2)
        ]
        owner = comm.owner("a module")
        begun = time.monotonic()
        for _ in range(2):  # rank 1, with fewer rounds, continues with the next scope
            gradients = [torch.ones(50) for _ in members]
            error = caught(lambda given=gradients: started(owner, members, given).result(110))
            if error is not None:
                break
        return error, time.monotonic() - begun

    return as_threads(ranks, body, Hub(ranks, timeout=60), timeout=120)


@pytest.mark.parametrize("ranks", [3, *exhaustive(2)])
def test_every_rank_ends_in_an_error_that_says_where(ranks: int) -> None:
    """And not since messages are missing, which is a TransportError."""

    def faults_of(given: tuple[str, int]) -> list[str]:
        how, at = given
        words = [*{"illegal": [], "raises": REFUSES, "zeros": REFUSES}.get(how, ["rank 1"])]
        words += [] if how in ("raises", "zeros") else ["Odd(", *([f"round {at}"] if at else [])]
        return [
            f"{how} in round {at}: rank {rank} gets {error!r}"
            for rank, (error, _) in enumerate(ends(how, at, ranks))
            if (how, at, rank) != ("fewer", 0, 1)  # it waits for no peer
            and not (
                isinstance(error, ConfigError)
                and all(word in str(error) for word in words)
                and (how in ("raises", "zeros") or "p0" in str(error) or "2 tensors" in str(error))
            )
        ]

    cases = list(product(HOWS, [0, 1]))
    with ThreadPoolExecutor(len(cases)) as pool:  # they wait most of the time
        faults = [fault for of in pool.map(faults_of, cases) for fault in of]
    assert not faults, faults


@pytest.mark.timing
def test_errors_come_within_seconds() -> None:
    """Usually a tenth of one; transports wait for 60."""
    for how, at in product(HOWS, [0, 1]):
        for rank, (_, seconds) in enumerate(ends(how, at, 2)):
            assert (how, at, rank) == ("fewer", 0, 1) or seconds < 5, (how, at, rank)


@dataclass(frozen=True)
class ByValue(Aggregator):
    """Sends what is not zero, which the contract forbids; or, every third step, one value less."""

    varies: bool = False

    def variant(self, step: int, world_size: int) -> int:
        return int(self.varies and step % 3 == 2)

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        for c in contexts:
            sent = c.gradient if self.varies else c.gradient[c.gradient.bool()]
            yield AllReduce(sent[: len(sent) - self.variant(c.step, c.world_size)], of=c)
        return [c.gradient for c in contexts]


def test_what_is_asked_depends_on_the_variant_alone() -> None:
    def body(comm: Communicator, varies: bool) -> list[BaseException | None]:
        keys = rng.parameter_keys(0, "w", comm.rank)
        member, owner = Attached("w", (9,), ByValue(varies), keys), comm.owner("a module")
        found = []
        for _ in range(7):
            found.append(caught(lambda: started(owner, [member], [torch.ones(9)]).result(30)))
        assert not varies or len(owner.scopes[0]) == 2
        return found

    assert as_threads(2, lambda comm: body(comm, True)) == [[None] * 7] * 2
    for errors in as_threads(2, lambda comm: body(comm, False)):
        assert (
            "ByValue(varies=False), parameter w, round 0: it asks for all_reduce(avg) of 9 x"
            in str(errors[0])
        )
        assert "but on zeros for all_reduce(avg) of 0 x" in str(errors[0])
        assert "None" not in str(errors[0])
