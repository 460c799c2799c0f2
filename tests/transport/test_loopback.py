"""The loopback transport fulfils the protocol."""

from __future__ import annotations

import pytest
import torch

from gradwire.errors import TransportError
from gradwire.transport import Hub


def test_messages_match_by_peer_and_tag() -> None:
    hub = Hub(2)
    a, b = hub.transport(0), hub.transport(1)
    first, second = torch.zeros(4, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
    waits = [b.irecv(second, 0, tag=2), b.irecv(first, 0, tag=1)]
    a.isend(torch.full((4,), 1, dtype=torch.uint8), 1, tag=1).wait()
    a.isend(torch.full((4,), 2, dtype=torch.uint8), 1, tag=2).wait()
    for pending in waits:
        pending.wait()
    assert first.tolist() == [1] * 4
    assert second.tolist() == [2] * 4


def test_silence_ends_in_an_error_that_names_the_peer() -> None:
    transport = Hub(2, timeout=0.1).transport(0)
    with pytest.raises(TransportError, match="rank 1") as caught:
        transport.irecv(torch.zeros(1, dtype=torch.uint8), 1, 0).wait()
    assert caught.value.peer == 1


def test_a_dead_peer_ends_every_wait_at_once() -> None:
    hub = Hub(3, timeout=60)
    pending = hub.transport(0).irecv(torch.zeros(1, dtype=torch.uint8), 1, 0)
    hub.kill(2)
    with pytest.raises(TransportError) as caught:
        pending.wait()
    assert caught.value.peer == 2


def test_what_came_before_a_death_still_arrives() -> None:
    hub = Hub(2)
    data = torch.zeros(1, dtype=torch.uint8)
    hub.transport(1).isend(torch.ones(1, dtype=torch.uint8), 0, 0).wait()
    hub.kill(1)
    hub.transport(0).irecv(data, 1, 0).wait()
    assert data.item() == 1


def test_a_shorter_message_fills_the_beginning_a_longer_one_is_an_error() -> None:
    hub = Hub(2)
    data = torch.zeros(4, dtype=torch.uint8)
    for numel in (3, 5):
        hub.transport(1).isend(torch.ones(numel, dtype=torch.uint8), 0, 0)
    hub.transport(0).irecv(data, 1, 0).wait()
    assert data.tolist() == [1, 1, 1, 0]
    with pytest.raises(TransportError, match="5 bytes"):
        hub.transport(0).irecv(data, 1, 0).wait()
