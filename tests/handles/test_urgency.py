"""The order in which cross-barrier training sends scopes."""

from __future__ import annotations

from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from crossed import inputs, wrapped

import gradwire as gw
from ranks import on
from rooms.decide import Pass, Passes, Use
from rooms.handles import Urgency
from training import everywhere, flat, mlp, same_everywhere

pytestmark = pytest.mark.multiprocess


@on(2)
def test_first_layers_go_first_once_ranks_have_agreed(rank: int) -> None:
    net = mlp(20, 40, 40, 40, 40, 40, 20)
    model, optimizer = wrapped(net, ""), torch.optim.SGD(net.parameters(), lr=0.1)
    handle = gw.attach(model, optimizer=optimizer, cross_barrier=True,
                       options=gw.Options(coalesce_bytes=0))  # fmt: skip
    urgency, buckets, sent = handle._reductions._crossing.urgency, handle._reductions, []
    start, orders = buckets._start, []

    def started(shares: Any) -> None:
        sent.append(shares[0].bucket)
        start(shares)

    # As if one scope had ended as backward did on rank 0, and none on rank 1.
    def note() -> None:
        urgency._seen = [(1 - rank, len(sent))]

    with mock.patch.multiple(buckets, _start=started), mock.patch.object(urgency, "note", note):
        for step in range(24):
            model(inputs(step)).square().mean().backward()
            optimizer.step()
            orders.append([*sent])
            sent.clear()
            buckets.runner.wait()
    plain = [*range(len(orders[-1]))]
    ordered = plain[:3] + plain[:2:-1]
    assert orders.count(ordered) >= 6
    assert all(one in (plain, ordered) for one in orders[2:])
    assert everywhere(orders) == [orders] * 2
    assert everywhere(urgency.eager) == [urgency.eager] * 2
    assert same_everywhere(flat(model))


@pytest.mark.parametrize(("after", "kept"), [(0.9, 5), (1.1, None)])
def test_the_order_stays_if_the_slowest_rank_is_faster(after: float, kept: int | None) -> None:
    urgency = Urgency(window=2)
    for ended in (1, 3, 2):
        urgency.begin()
        assert urgency.order([[number] for number in range(9)], True)[-1] == [8]
        urgency.ended = ended
        urgency.note()
    script = urgency.script("it")
    command = next(script)
    with suppress(StopIteration):
        while True:
            if isinstance(command, Passes):
                seconds = 1.0 if urgency.eager is None else after
                answer: Any = [Pass(n, 0, seconds) for n in range(command.count)]
            elif isinstance(command, Use):
                command.then()
                answer = None
            elif command.key.endswith("gains"):
                answer = [command.value, [0.8, 0.2]]
            else:
                answer = [[3, [9]], command.value]
            command = script.send(answer)
    assert urgency.eager == kept
    urgency.begin()
    numbers = [one[0] for one in urgency.order([[number] for number in range(9)], True)]
    assert numbers == ([*range(5), 8, 7, 6, 5] if kept else [*range(9)])
