"""An undocumented property of gloo on which packed messages depend: it delivers a message into a
longer receive, whichever is posted first. A torch without it fails here."""

from __future__ import annotations

import random
import time

import torch

from gradwire.transport import TorchP2P
from gradwire.transport.protocol import Pending

SIZES = [48, 64, 1000, 4096, 65_536, 1_000_000, 3_000_000]
TAGS = range(8)


def test_gloo_delivers_a_message_into_a_longer_receive(rank: int) -> None:
    """Both ranks send many messages of many tags at once, into receives of up to twice the size."""
    transport, peer = TorchP2P(), 1 - rank
    both, own = random.Random(7), random.Random(rank)
    for turn in range(8):
        sizes = [both.choice(SIZES) for _ in TAGS]
        room = [size + both.choice([0, 16, size]) for size in sizes]
        received = [torch.full((numel,), 255, dtype=torch.uint8) for numel in room]
        sends: list[Pending] = []
        receives: list[Pending] = []
        posts = [(what, tag) for what in ("send", "receive") for tag in TAGS]
        if turn % 2:
            own.shuffle(posts)
        for number, (what, tag) in enumerate(posts):
            if number == len(TAGS):
                time.sleep(own.choice([0.0, 0.05]))  # messages arrive before their receives
            if what == "send":
                message = torch.full((sizes[tag],), (turn + tag + rank) % 251, dtype=torch.uint8)
                sends.append(transport.isend(message, peer, tag))
            else:
                receives.append(transport.irecv(received[tag], peer, tag))
        for pending in receives + sends:
            pending.wait()
        for tag, data in enumerate(received):
            assert (data[: sizes[tag]] == (turn + tag + peer) % 251).all()
            assert (data[sizes[tag] :] == 255).all()
