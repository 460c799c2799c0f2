"""Shared memory between processes of one node: collectives and failures."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import uuid
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire import QSGD, Codec, TransportError
from gradwire.codecs import HardThreshold, Identity, TernGrad, ThreeLC, TopK
from gradwire.collectives import Item, Options, prepare
from gradwire.engine import Communicator
from gradwire.lang import layout, rng
from gradwire.partition import Spec
from gradwire.transport import (
    Mixed,
    TorchP2P,
    Transport,
    shm_handshake,
    shm_library,
    shm_store,
)
from leftovers import until
from ranks import as_processes, on
from rooms.collectives import placement

SIZES = [0, 1, 127, 129, 1024, 5000, 150_003]  # the last: payloads of many rings
CODECS: list[Codec] = [
    *(Identity(), QSGD(), TopK(density=0.05), HardThreshold(threshold=2.5, density=0.2)),
]
MORE: list[Codec] = [
    *(QSGD(bits=8, block=16), TernGrad(), ThreeLC(sparsity=1.5), QSGD(rounding="stochastic")),
]


def reduce_everything(
    transport: Transport, codecs: Sequence[Codec] = CODECS
) -> tuple[list[bytes], bool]:
    """Results and residuals of every codec, two steps in flight; whether bytes are right."""
    comm = Communicator(transport)
    found: list[torch.Tensor] = []
    accounted = True
    for number, codec in enumerate(codecs):
        generator = torch.Generator().manual_seed(100 * number + comm.rank)
        specs = [
            Spec(f"p{i}", n, torch.float32, codec, rotation=i, feedback=True)
            for i, n in enumerate(SIZES)
        ]
        keys = [rng.parameter_keys(0, f"p{i}", comm.rank) for i in range(len(SIZES))]
        collective = prepare(comm.calls, specs, Options(segments=3))
        futures = []
        for step in range(2):
            tensors = [torch.randn(n, generator=generator) for n in SIZES]
            residuals = [torch.zeros(n) for n in SIZES]
            items = [Item(t, k, step, r) for t, k, r in zip(tensors, keys, residuals, strict=True)]
            futures.append(collective.start(items))
            found += tensors + residuals
        sent = [f.result().wire_bytes for f in futures]
        if layout(codec).data_dependent:
            program = collective.prepared[0][0].program
            most = sum(program.nbytes[b] for b in program.graph.sent())
            accounted &= all(0 < nbytes < most for nbytes in sent)
        else:
            accounted &= sent == [collective.prepared[0][0].wire_bytes] * 2
    comm.close()
    return [t.numpy().tobytes() for t in found], accounted


def each_layout(test: Any) -> Any:
    test = on(3, (["aaa", "aab"], CODECS))(test)
    for layouts in (["aaa", "aab"], ["abab"], ["aa", "ab"], ["aaaa"]):
        test = on(len(layouts[0]), (layouts, [*CODECS, *MORE]), exhaustive=True)(test)
    return test


@each_layout
def test_collectives_are_those_over_gloo(
    rank: int, layouts: list[str], codecs: Sequence[Codec]
) -> None:
    """Laws 1 and 5, and results that do not depend on the transport: shared memory on one node, and
    both transports on several nodes; each letter is a node."""
    expected, _ = reduce_everything(TorchP2P(dist.new_group()), codecs)
    for machines in layouts:
        transport = Mixed(dist.new_group(), machine=machines[rank])
        found, accounted = reduce_everything(transport, codecs)
        here = {p for p, m in enumerate(machines) if m == machines[rank] and p != rank}
        assert found == expected
        assert accounted
        assert set(transport.reached) == here
        if len(here) == len(machines) - 1:
            assert transport.name == "shm"
        else:
            assert transport.name == ("shm+torch_p2p" if here else "torch_p2p")


def failure(transport: Mixed, peer: int) -> tuple[int | None, str]:
    """Whom the error of a receive from `peer` blames, and what it says."""
    pending = transport.irecv(torch.zeros(1, dtype=torch.uint8), peer, 0)
    with pytest.raises(TransportError) as caught:
        pending.wait()
    return caught.value.peer, str(caught.value)


def wait_for_the_hung(rank: int) -> tuple[int | None, str]:
    """Rank 2 stops; rank 1 waits for it, and rank 0 for rank 1, which fails first."""
    group = dist.new_group(timeout=timedelta(seconds=100 if rank == 0 else 2))
    transport = Mixed(group)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    peer, text = failure(transport, rank + 1)
    if peer is not None:
        transport.fail(peer)
    return peer, text


def test_who_waits_for_a_hung_peer_is_not_blamed() -> None:
    reports = as_processes(3, wait_for_the_hung, expect_death=(2,), deadline=60)
    assert [peer for peer, _ in reports[:2]] == [2, 2], reports


def held() -> tuple[list[str], list[str]]:
    """This process's shared memory: mapped regions, and open descriptors."""
    with open("/proc/self/maps") as file:
        maps = [line for line in file if "memfd:gradwire" in line]
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return maps, [link for link in links if "gradwire" in link or "pidfd" in link]


def is_named() -> bool:
    """Whether a socket stays; a handshake of another process may be in progress."""
    return not until(lambda: "@gradwire-" not in Path("/proc/net/unix").read_text())


def end_and_crash(rank: int) -> Any:
    """Memory held in use, in a forked child, after an orderly end; then both ranks crash."""
    transport = Mixed()
    dist.barrier()
    in_use, named = held(), is_named()
    dist.barrier()
    child = mp.get_context("fork").Process(target=_look, args=(queue := mp.SimpleQueue(),))
    child.start()
    in_child = queue.get()
    child.join()
    transport.close()
    dist.barrier()
    after = held()
    again = Mixed()
    pending = again.irecv(torch.zeros(100, dtype=torch.uint8), 1 - rank, 0)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(TransportError):
        pending.wait()
    return in_use, named, in_child, after, held()[0]  # and ends without closing


def _look(queue: Any) -> None:
    queue.put(held()[0])


def test_nothing_is_left_after_an_end_or_a_crash() -> None:
    """Only the process itself holds the memory, which has no name."""
    before = set(os.listdir("/dev/shm"))
    report = as_processes(2, end_and_crash, expect_death=(1,))[0]
    (maps, open_ones), named, in_child, after, at_the_crash = report
    assert len(maps) == 4  # segments and stores, ours and the peer's
    ours = ["/memfd:gradwire-store (deleted)", "anon_inode:[pidfd]"]
    assert sorted(open_ones) == ours  # the store's is there for peers of later groups
    assert not named
    assert in_child == []
    assert after == ([], [])
    assert len(at_the_crash) == 4
    assert not [n for n in set(os.listdir("/dev/shm")) - before if "gradwire" in n]
    assert not is_named()


# What keeps rank 1 from sharing its memory, and what it says, once; or from lending more than that.
OBSTACLES = {
    "off": "switched off by GRADWIRE_SHM=0",
    "unreachable": "Connection refused",
    "no memory": "Cannot allocate memory",
}
ROOM = {"ample": None, "full": 1 << 20, "none": 0}


@on(3)
def test_who_cannot_share_or_lend_falls_back(rank: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    expected, _ = reduce_everything(TorchP2P(dist.new_group()))
    lent, lenders = {}, []
    for case in (*OBSTACLES, *ROOM):
        group = dist.new_group()
        with pytest.MonkeyPatch.context() as patch:
            shm_library.load.cache_clear()
            patch.setattr(placement, "BORROWED_BYTES", 1 << 16)
            if rank == 1 and case == "off":
                patch.setenv("GRADWIRE_SHM", "0")
            if rank == 1 and case == "unreachable":
                patch.setattr(shm_handshake, "_address", lambda _: f"\0elsewhere-{uuid.uuid4()}")
            if rank == 1 and case == "no memory":
                patch.setattr(os, "memfd_create", _no_memory)
            if rank == 1 and ROOM.get(case) is not None:
                patch.setattr(shm_store, "room", lambda *_, room=ROOM[case]: room)
            transport = Mixed(group)
            named, lender = transport.name, len(transport.lenders)
            found, accounted = reduce_everything(transport)
        assert found == expected
        assert accounted
        if case in OBSTACLES:
            assert named == ("torch_p2p" if rank == 1 else "shm+torch_p2p")
            (told,) = [text for text in said if "not shared memory" in text]
            assert rank != 1 or OBSTACLES[case] in told
        else:
            lent[case] = transport.lent_bytes
            lenders.append(lender)
        said.clear()
    assert lent["ample"] > 0
    assert (lent["full"] < lent["ample"]) == (lent["none"] == 0) == (rank == 1)
    assert lenders == [2, 2, 2 if rank == 1 else 1]


def _no_memory(*_: object) -> int:
    raise OSError(12, "Cannot allocate memory")
