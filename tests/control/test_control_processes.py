"""Ranks as processes over a TCPStore: a host that ends or stops, exits, fork."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from control_ranks import Ears, channels

from ends import forked, forkserver
from gradwire.control import Channel
from gradwire.control import channel as control_channel
from gradwire.control import connection as control_connection
from gradwire.control.connection import Connection
from gradwire.errors import TransportError
from leftovers import until
from loopback import without_lookups
from products import EXHAUSTIVE
from ranks import caught

pytestmark = pytest.mark.multiprocess


def ranks_store(port: int) -> dist.Store:
    server = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    return dist.PrefixStore("group/", server)


def served() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Started:
    """A process that runs `body(pipe, *args)`."""

    def __init__(self, context: Any, errors: Path, body: Callable[..., None], *args: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.errors = errors
        self.process = context.Process(target=_run, args=(errors, body, theirs, *args))
        self.process.start()

    def ends(self) -> str:
        """Its standard error, once it has ended with exit code 0."""
        self.process.join(90)
        errors = without_lookups(self.errors.read_text())
        assert self.process.exitcode == 0, errors
        return errors


def _run(errors: Path, body: Callable[..., None], pipe: Pipe, *args: Any) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    body(pipe, *args)


@contextmanager
def started(context: Any, folder: Path, *bodies: partial[None]) -> Iterator[list[Started]]:
    """A process per body. Those that are spawned end with their interpreter, as scripts do."""
    every: list[Started] = []
    try:
        for number, body in enumerate(bodies):
            every.append(Started(context, folder / str(number), body.func, *body.args))
        yield every
    finally:
        for one in every:
            one.process.kill()


def leaves_by_its_exit(pipe: Pipe, rank: int, port: int) -> None:
    ears = Ears()
    member = Channel().join(ranks_store(port), rank, 3, 60.0, ears)
    member.exchange("e", b"").result(60)
    member.exchange("never", b"")
    pipe.send("ready")
    pipe.recv()
    if rank < 2:
        member.tell({"raised": "RuntimeError in backward at step 12"})
    if rank == 0:
        sys.exit()
    if rank == 1:
        threading.Thread(target=partial(time.sleep, 0.3)).start()  # its exit waits for this thread
    if rank == 2:  # it leaves by the last line
        assert until(lambda: len(ears.heard_from) == 2)
        pipe.send([notice for _, notice in ears.heard_from])


@EXHAUSTIVE
def test_an_exit_while_waiting_is_clean_and_silent_and_what_was_told_last_is_heard(
    tmp_path: Path,
) -> None:
    server = served()
    bodies = [partial(leaves_by_its_exit, rank, server.port) for rank in range(3)]
    with started(get_context("spawn"), tmp_path, *bodies) as ranks:
        assert [rank.pipe.recv() for rank in ranks] == ["ready"] * 3
        for rank in ranks:
            rank.pipe.send("go on")
        assert ranks[2].pipe.recv() == [{"raised": "RuntimeError in backward at step 12"}] * 2
        assert [rank.ends() for rank in ranks] == ["", "", ""]


def hosts(pipe: Pipe) -> None:
    server = served()
    pipe.send(server.port)
    pipe.recv()


def waits_for_an_answer(pipe: Pipe) -> None:
    member = Channel().join(ranks_store(pipe.recv()), 0, 2, 30.0, Ears())
    member.first("k", b"")
    member.timeout = 1.0
    pipe.send("ready")
    pipe.recv()
    pipe.send(str(member.exchange("f", b"").exception(60)))


@EXHAUSTIVE
def test_a_host_that_stops_is_no_hang(tmp_path: Path) -> None:
    bodies = partial(hosts), partial(waits_for_an_answer)
    with started(get_context("spawn"), tmp_path, *bodies) as (host, rank):
        rank.pipe.send(host.pipe.recv())
        assert rank.pipe.recv() == "ready"
        os.kill(host.process.pid, signal.SIGSTOP)
        rank.pipe.send("go on")
        assert "the group's store does not answer" in rank.pipe.recv()
        assert rank.ends() == ""  # its thread is stuck in the store


class Deaf:
    heard = tick = lambda *_: None


def training_script(pipe: Pipe, rank: int) -> None:
    control_channel._HEARD_S = 3.0  # of a machine that is slow
    port = 0 if rank == 0 else pipe.recv()
    wait = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, wait, wait_for_workers=rank != 0)
    if rank == 0:
        pipe.send(store.port)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    channel = Channel()
    default = dist.distributed_c10d._get_default_store()
    member = channel.join(default, rank, 2, 60.0, Deaf())
    dist.barrier()
    if rank == 0:
        pipe.recv()
    agreed = member.agree("a", "the plan", [])
    if rank == 1:
        pipe.send("asked")
    agreed.result(60)
    if rank == 0:
        channel.close()
        os._exit(0)
    pipe.recv()
    member.tell({"end": rank})
    member.leave({})


def test_the_end_of_a_training_script(tmp_path: Path) -> None:
    """Rank 0 hosts the store, comes last to the agreement, and exits at once; no rank destroys the
    group."""
    bodies = [partial(training_script, rank) for rank in range(2)]
    with started(forkserver(), tmp_path, *bodies) as (first, second):
        second.pipe.send(first.pipe.recv())
        assert second.pipe.recv() == "asked"
        for rank in (first, second):
            rank.pipe.send("go on")
            # torch may add its own stack trace, for an operation in flight.
            assert "gradwire:" not in rank.ends()


def test_the_server_ends(caplog: pytest.LogCaptureFixture) -> None:
    """It is not kept alive. Pending futures fail, with one log entry; ranks that wait for nothing
    log nothing."""
    server = served()
    port = server.port
    with channels(2) as made:
        members = [made[r].join(ranks_store(port), r, 2, 60.0, Ears()) for r in range(2)]
        hosted = made[0].join(dist.PrefixStore("a/", server), 0, 1, 60.0, Ears())
        for future in [member.exchange("e", b"") for member in (*members, hosted)]:
            future.result(60)
        pending = [members[0].exchange("f", b""), members[0].agree("a", "plan", [])]
        assert until(lambda: len(members[0].part.open) == 2)
        del server
        for future in pending:
            error = future.exception(60)
            assert isinstance(error, TransportError)
            assert str(error).startswith(f"rank 0: the store at 127.0.0.1:{port} is lost")
        again = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        # The address is the former server's; the connection is not.
        assert made[0].join(again, 0, 1, 60.0, Ears()).exchange("e", b"").result(60) == [b""]
        members[1].tell({"into": "the void"})
        members[1].leave({})
    assert len(caplog.records) == 1


def test_another_server_at_the_address_is_not_taken_for_the_one_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanwhile = []  # whether it counts as broken, until it is known which server answers

    def asked(store: Any) -> bytes:
        meanwhile.append(connection.is_broken)
        return which_server(store)

    which_server = control_connection._server
    monkeypatch.setattr(control_connection, "_server", asked)
    first = served()
    port = first.port
    connection = Connection(first, lambda: None)
    connection.connect()
    connection.check()
    del first
    second = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(ConnectionError):
        connection.check()
    assert connection.is_broken
    assert meanwhile == [False, True]
    connection._close("the test has ended")
    del second


def test_a_server_that_lets_go_of_a_silent_socket_is_still_there() -> None:
    store = served()
    connection = Connection(store, lambda: None)
    connection.connect()
    assert connection._watch is not None
    connection._watch.shutdown(socket.SHUT_RD)
    assert connection.is_broken
    connection.check()
    assert not connection.is_broken
    connection._close("the test has ended")


def test_a_fork_is_refused() -> None:
    store = dist.HashStore()
    with channels(1) as (channel,):
        member = channel.join(store, 0, 1, 60.0, Ears())
        assert member.exchange("e", b"").result(60) == [b""]

        def uses() -> list[str]:
            said = [
                str(caught(use))
                for use in (
                    partial(channel.join, store, 0, 1, 60.0, Ears()),
                    partial(member.exchange, "f", b""),
                    partial(member.agree, "a", "plan", []),
                    partial(member.first, "k", b""),
                )
            ]
            member.tell({})
            member.leave({})
            channel.close()
            return said

        said = forked(uses)
        assert len(said) == 4
        assert all("spawn" in sentence for sentence in said)
        assert member.exchange("f", b"").result(60) == [b""]  # the parent goes on
