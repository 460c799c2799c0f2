"""Shared memory between processes of one node: collectives and failures."""

from __future__ import annotations

import logging
import multiprocessing as mp
import os
import signal
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gradwire import QSGD, Codec, Identity, TernGrad, TransportError
from gradwire.codecs import HardThreshold, ThreeLC, TopK
from gradwire.collectives import Item, Options, prepare
from gradwire.engine import Communicator
from gradwire.lang import layout, rng
from gradwire.partition import Spec
from gradwire.transport import (
    Mixed,
    TorchP2P,
    Transport,
    shm_library,
    shm_sockets,
    shm_store,
)
from leftovers import until
from products import EXHAUSTIVE
from ranks import all_pass, as_processes
from rooms.collectives import placement

pytestmark = pytest.mark.multiprocess

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


Report = tuple[bool, bool, str, set[int]]


def compare(rank: int, layouts: list[str], codecs: Sequence[Codec]) -> list[Report]:
    """Per layout: whether results equal gloo's, and bytes the formula; the transport per rank."""
    expected, _ = reduce_everything(TorchP2P(dist.new_group()), codecs)
    reports = []
    for machines in layouts:
        transport = Mixed(dist.new_group(), machine=machines[rank])
        found, accounted = reduce_everything(transport, codecs)
        reports.append((found == expected, accounted, transport.name, set(transport.reached)))
    return reports


def lend(rank: int) -> list[tuple[bool, bool, int, int]]:
    """With stores; with one that is soon full on rank 1; with none there: whether results are
    gloo's, and bytes as reckoned; bytes lent, and how many peers lend."""
    expected, _ = reduce_everything(TorchP2P(dist.new_group()))
    reports = []
    for room in (None, 1 << 20, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(placement, "BORROWED_BYTES", 1 << 16)
            if rank == 1 and room is not None:
                patch.setattr(shm_store, "room", lambda *_, room=room: room)
            transport = Mixed(dist.new_group())
            lenders = len(transport.lenders)
            found, accounted = reduce_everything(transport)
        reports.append((found == expected, accounted, transport.lent_bytes, lenders))
    return reports


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


OBSTACLES = {
    "off": "switched off by GRADWIRE_SHM=0",
    "unreachable": "Connection refused",
    "no memory": "Cannot allocate memory",
}


def fall_back(rank: int) -> list[tuple[str, bool, list[str]]]:
    """Per obstacle on rank 1: the transport, whether it works, and the log."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    reports = []
    for obstacle in OBSTACLES:
        group = dist.new_group()
        with pytest.MonkeyPatch.context() as patch:
            shm_library.load.cache_clear()
            if rank == 1 and obstacle == "off":
                patch.setenv("GRADWIRE_SHM", "0")
            if rank == 1 and obstacle == "unreachable":
                patch.setattr(shm_sockets, "_address", lambda _: f"\0elsewhere-{uuid.uuid4()}")
            if rank == 1 and obstacle == "no memory":
                patch.setattr(os, "memfd_create", _no_memory)
            transport = Mixed(group)
        _, accounted = reduce_everything(transport, CODECS[:2])
        reports.append((transport.name, accounted, [*said]))
        said.clear()
    return reports


def _no_memory(*_: object) -> int:
    raise OSError(12, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("layouts", "codecs"),
    [
        (["aaa", "aab"], CODECS),
        *(
            pytest.param(layouts, [*CODECS, *MORE], marks=EXHAUSTIVE)
            for layouts in (["aaa", "aab"], ["abab"], ["aa", "ab"], ["aaaa"])
        ),
    ],
)
def test_collectives_are_those_over_gloo(layouts: list[str], codecs: list[Codec]) -> None:
    """Laws 1 and 5, and results that do not depend on the transport: shared memory on one node, and
    both transports on several nodes; each letter is a node. On three ranks also what cannot be lent
    is copied, and who cannot share falls back and says so once."""
    more = [lend, fall_back] if codecs is CODECS else []
    how = partial(compare, layouts=layouts, codecs=codecs)
    compared, *rest = all_pass(len(layouts[0]), [how, *more])
    for rank, by_layout in enumerate(compared):
        for machines, (same, accounted, name, reached) in zip(layouts, by_layout, strict=True):
            here = {p for p, m in enumerate(machines) if m == machines[rank] and p != rank}
            assert same
            assert accounted
            assert reached == here
            if len(here) == len(machines) - 1:
                assert name == "shm"
            else:
                assert name == ("shm+torch_p2p" if here else "torch_p2p")
    for rank, (ample, full, none) in enumerate(rest[0] if rest else ()):
        for same, accounted, _, _ in (ample, full, none):
            assert same
            assert accounted
        assert ample[2:] == (max(ample[2], 1), 2)
        assert full[3] == 2
        assert (full[2] < ample[2]) == (rank == 1)
        assert (none[2] == 0) == (rank == 1)
        assert none[3] == (2 if rank == 1 else 1)
    expected = ["shm+torch_p2p", "torch_p2p", "shm+torch_p2p"]
    for rank, reports in enumerate(rest[1] if rest else ()):
        for reason, (name, accounted, said) in zip(OBSTACLES.values(), reports, strict=True):
            assert accounted
            assert name == expected[rank]
            told = [text for text in said if "not shared memory" in text]
            assert len(told) == 1, said
            assert rank != 1 or reason in told[0]
