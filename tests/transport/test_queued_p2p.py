"""A process group's messages as a link, over groups that only record their calls.

tests/multiprocess/test_in_order_processes.py has real ones, over gloo.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradwire import TransportError, groups
from gradwire.transport.link import Posting
from gradwire.transport.queued_p2p import QueuedP2P
from gradwire.transport.torch_p2p import timeout_of
from ranks import raises

CPU = torch.device("cpu")


class Work:
    def __init__(self, log: list[Any], name: str, error: bool = False) -> None:
        self.log, self.name, self.error = log, name, error

    def wait(self, *timeout: timedelta) -> None:
        self.log.append(("wait", self.name, *timeout))
        if self.error:
            raise RuntimeError("NCCL communicator was aborted")


class Group:
    """Like one over NCCL if it `coalesces`, else like one over gloo."""

    def __init__(
        self, coalesces: bool, size: int = 3, failing: str = "", device: str = "cpu"
    ) -> None:
        self.log: list[Any] = []
        self.supports_coalescing = coalesces
        self.failing, self.device = failing, device
        self._size = size

    def name(self) -> str:
        return "nccl" if self.supports_coalescing else "gloo"

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return self._size

    def _get_backend(self, device: torch.device) -> Group:
        if device.type != self.device:
            raise RuntimeError("no backend for that device")
        return self

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        return Work(self.log, f"broadcast from {root}")

    def _start_coalescing(self, device: torch.device) -> None:
        self.log.append("start")

    def _end_coalescing(self, device: torch.device) -> Work:
        self.log.append("end")
        return Work(self.log, "batch", self.failing == "batch")

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._take("send", peer, tag)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> Any:
        return self._take("recv", peer, tag)

    def _take(self, what: str, peer: int, tag: int) -> Any:
        self.log.append((what, peer, tag))
        if what == self.failing:
            raise RuntimeError("NCCL error: unhandled system error")
        return None if self.supports_coalescing else Work(self.log, f"{what} {peer}")


class Host:
    timeout = 7.0

    def __init__(self) -> None:
        self.waiting: dict[Any, float] = {}
        self.failed: list[int] = []

    def explain(self, peer: int, what: str, error: RuntimeError) -> TransportError:
        return TransportError(f"{what} rank {peer} failed ({error})", peer=peer)

    def fail(self, peer: int) -> None:
        self.failed.append(peer)


def batch() -> list[Posting]:
    memory = torch.zeros(4, dtype=torch.uint8)
    return [Posting(memory, 1, False), Posting(memory, 2, True), Posting(memory, 1, True)]


def made(group: Group) -> QueuedP2P:
    link = QueuedP2P(group, CPU, Host())  # type: ignore[arg-type]
    group.log.clear()
    return link


def test_a_batch_over_nccl_is_one_group_and_only_the_stream_waits() -> None:
    group = Group(coalesces=True)
    link = made(group)
    pending = link.post(batch())
    assert group.log == ["start", ("send", 1, 0), ("recv", 2, 0), ("recv", 1, 0), "end"]
    group.log.clear()
    pending.wait()
    assert group.log == [("wait", "batch")]  # with a timeout the host would wait
    assert not link.host.waiting


def test_a_batch_over_gloo_waits_for_each_in_time() -> None:
    group = Group(coalesces=False)
    pending = made(group).post(batch())
    tags = {step[2] for step in group.log}
    assert [step[:2] for step in group.log] == [("send", 1), ("recv", 2), ("recv", 1)]
    assert len(tags) == 1  # it might as well have none
    group.log.clear()
    pending.wait()
    limit = timedelta(seconds=7)
    assert group.log == [("wait", name, limit) for name in ("send 1", "recv 2", "recv 1")]


def test_all_ranks_meet_before_the_first_batch() -> None:
    for size in (1, 2):
        group = Group(coalesces=True, size=size)
        QueuedP2P(group, CPU, Host())  # type: ignore[arg-type]
        assert group.log == ([("wait", "broadcast from 0")] if size > 1 else [])


@pytest.mark.parametrize("coalesces", [True, False])
def test_a_batch_that_cannot_be_posted_names_the_peer_and_ends_its_group(coalesces: bool) -> None:
    """Otherwise NCCL would wait forever for the rest of the batch."""
    for failing, peer in (("send", 1), ("recv", 2)):
        group = Group(coalesces, failing=failing)
        link = made(group)
        error = raises(TransportError, partial(link.post, batch()), "exchange with rank")
        assert error.peer == peer
        assert (group.log[-1] == "end") == coalesces


def test_a_wait_that_fails_is_explained_by_the_host() -> None:
    group = Group(coalesces=True, failing="batch")
    link = made(group)
    pending = link.post(batch())
    assert raises(TransportError, pending.wait, "aborted").peer == 1
    assert not link.host.waiting
    link.fail(2)
    assert link.host.failed == [2]  # type: ignore[attr-defined]


def test_nccl_is_taken_where_it_carries_the_device() -> None:
    of_cuda = [Group(nccl, device="cuda") for nccl in (True, False)]
    cuda = torch.device("cuda", 0)
    assert [groups.keeps_order(group, cuda) for group in of_cuda] == [True, False]  # type: ignore[arg-type]
    assert not groups.keeps_order(of_cuda[0], CPU)  # type: ignore[arg-type]


def test_the_timeout_is_that_of_the_backend_for_the_cpu_or_else_of_another() -> None:
    seconds = {"cuda": 7, "cpu": 5}
    for kinds in (["cuda"], ["cuda", "cpu"]):
        group: Any = SimpleNamespace(
            _device_types=[torch.device(kind) for kind in kinds],
            _get_backend=lambda device: SimpleNamespace(
                options=SimpleNamespace(_timeout=timedelta(seconds=seconds[device.type]))
            ),
        )
        assert timeout_of(group) == seconds[kinds[-1]]


def test_a_broken_group_ends_the_waits_that_block() -> None:
    """Those of gloo, by a wait that times out; the stream waits for NCCL's, not the host."""
    group = Group(coalesces=False)
    made(group).interrupt()
    (what, peer, tag), wait = group.log
    assert (what, peer) == ("recv", 1)
    assert wait == ("wait", "recv 1", timedelta(milliseconds=1))
    made(group).post(batch())
    assert tag not in {step[2] for step in group.log}  # nobody sends it
    group = Group(coalesces=True)
    made(group).interrupt()
    assert not group.log
