"""Aggregators that behave differently on one rank: every rank gets an error soon."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from averaging import started
from gradwire import ConfigError
from gradwire.aggregators import Aggregator, Attached, Context, Steps
from gradwire.collectives import AllReduce, Broadcast
from gradwire.engine import Communicator
from gradwire.lang import rng
from gradwire.transport import Hub
from products import exhaustive
from ranks import as_threads, caught


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
