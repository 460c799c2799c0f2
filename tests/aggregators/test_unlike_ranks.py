"""Aggregators that behave differently on one rank: every rank gets an error soon."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from gradwire import ConfigError, Options
from gradwire.aggregators import Aggregator, Attached, Context, Rounds, Steps
from gradwire.collectives import AllReduce, Broadcast
from gradwire.engine import Communicator, Outcome
from gradwire.lang import rng
from products import every_pair
from ranks import as_threads

BOUND_S = 5.0  # transports wait for 10


@dataclass(frozen=True)
class Odd(Aggregator):
    """Two rounds; `how` is the deviation of rank 1 in round `at`."""

    how: str
    at: int

    def aggregate(self, contexts: Sequence[Context]) -> Steps:
        for number in range(2):
            odd = contexts[0].rank == 1 and number == self.at
            if odd and self.how == "fewer":
                break
            if odd and self.how == "illegal":
                yield [AllReduce(c.gradient.view(1, -1), of=c) for c in contexts]
            elif odd and self.how == "raises":
                raise ConfigError("this aggregator refuses")
            elif odd and self.how == "verb":
                yield [Broadcast(c.gradient, of=c) for c in contexts]
            elif odd and self.how == "sizes":
                yield [AllReduce(c.gradient[:7], of=c) for c in contexts]
            else:
                yield [AllReduce(c.gradient, of=c) for c in contexts]
        return [c.gradient for c in contexts]


HOWS = ["fewer", "illegal", "raises", "verb", "sizes"]


@pytest.mark.parametrize(("how", "at", "ranks"), every_pair(HOWS, [0, 1], [2, 3]))
def test_every_rank_ends_in_an_error_that_says_where(how: str, at: int, ranks: int) -> None:
    def body(comm: Communicator) -> tuple[BaseException | None, float]:
        members = [
            Attached(f"p{i}", (50,), Odd(how, at), rng.parameter_keys(0, f"p{i}", comm.rank))
            for i in range(2)
        ]
        ended = threading.Event()
        errors: list[BaseException | None] = []

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            errors.append(error)
            ended.set()

        owner = comm.owner("a module")
        begun = time.monotonic()
        for _ in range(2):  # rank 1, with fewer rounds, continues with the next scope
            ended.clear()
            gradients = [torch.randn(50) for _ in members]
            try:
                Rounds(owner, members, gradients, Options(), done).start()
            except ConfigError as error:
                return error, time.monotonic() - begun
            assert ended.wait(9), "hangs"
            if errors[-1] is not None:
                break
        return errors[-1], time.monotonic() - begun

    for rank, (error, seconds) in enumerate(as_threads(ranks, body)):
        if (how, at, rank) == ("fewer", 0, 1):
            continue  # it waits for no peer
        assert isinstance(error, ConfigError), error
        assert seconds < BOUND_S
        text = str(error)
        assert "rank 1" in text or how in ("illegal", "raises"), text
        if how != "raises":
            assert "p0" in text or "2 tensors" in text, text
            assert f"round {at}" in text or at == 0, text
            assert "Odd(" in text, text
