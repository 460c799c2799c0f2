"""Ranks as processes over a TCPStore: a host that dies, exits, fork."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from control_ranks import Ears, channels, until

from ends import forkserver
from gradwire.control import Channel
from gradwire.control import channel as control_channel
from gradwire.control import host as control_host
from gradwire.control.host import Gone, Host
from gradwire.errors import ConfigError
from loopback import without_lookups
from products import EXHAUSTIVE

pytestmark = pytest.mark.multiprocess

PRELUDE = """
import json, os, sys, time, threading, logging
import torch.distributed as dist
from datetime import timedelta
from gradwire.control import Channel

class Ears:
    def __init__(self):
        self.heard_from = []
    def heard(self, sender, notice):
        self.heard_from.append(notice)
    def tick(self):
        pass

def say(what):
    print(json.dumps(what), flush=True)

rank, world_size, port = map(int, sys.argv[1:])
if port == 0:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    say(server.port)
    input()
    sys.exit()
store = dist.PrefixStore("group/", dist.TCPStore(
    "127.0.0.1", port, is_master=False, wait_for_workers=False,
))
ears = Ears()
channel = Channel()
"""


class Rank:
    """A process that runs a script after the prelude."""

    def __init__(self, script: str, rank: int = 0, world_size: int = 1, port: int = 0) -> None:
        arguments = [sys.executable, "-c", PRELUDE + script, str(rank), str(world_size), str(port)]
        self.process = subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def hears(self) -> Any:
        """The next line of its output."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        return json.loads(line)

    def tell(self) -> None:
        """Let it continue from `input()`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ends(self) -> str:
        """Its standard error, once it has ended with exit code 0."""
        _, errors = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, errors
        return without_lookups(errors)


@contextmanager
def ranks(script: str, world_size: int, port: int = 0) -> Iterator[tuple[Rank, list[Rank]]]:
    """A process per rank; and, unless a store's `port` is given, one that hosts the store."""
    started = []
    try:
        if port == 0:
            started.append(Rank(""))
            port = started[0].hears()
        started += [Rank(script, rank, world_size, port) for rank in range(world_size)]
        yield started[0], started[-world_size:]
    finally:
        for rank in started:
            rank.process.kill()
            rank.process.wait()
            for pipe in (rank.process.stdin, rank.process.stdout, rank.process.stderr):
                if pipe is not None:
                    pipe.close()


@EXHAUSTIVE
def test_the_host_is_killed() -> None:
    """Pending futures fail, with one log entry; ranks that wait for nothing log nothing."""
    script = """
logging.basicConfig(format="%(message)s")
member = channel.join(store, rank, world_size, 60.0, ears)
member.exchange("e", b"").result(60)
pending = [member.exchange("f", b""), member.agree("a", "plan", [])] if rank == 0 else []
say("ready")
for future in pending:
    say(f"{type(future.exception(60)).__name__}: {future.exception()}")
input()
member.tell({"into": "the void"})
member.leave({})
"""
    with ranks(script, 2) as (host, started):
        assert [rank.hears() for rank in started] == ["ready"] * 2
        host.process.send_signal(signal.SIGKILL)
        for _ in range(2):
            sentence = started[0].hears()
            assert sentence.startswith("TransportError: rank 0: the store at 127.0.0.1:")
            assert "is lost" in sentence
        for rank in started:
            rank.tell()
        errors = [rank.ends() for rank in started]
        # torch may add its own stack trace, for an operation in flight.
        assert errors[0].count("gradwire: the store at 127.0.0.1:") == 1
        assert "gradwire" not in errors[1]


@EXHAUSTIVE
def test_an_exit_while_waiting_is_clean_and_silent_and_what_was_told_last_is_heard() -> None:
    script = """
member = channel.join(store, rank, world_size, 60.0, ears)
member.exchange("e", b"").result(60)
pending = member.exchange("never", b"")
say("ready")
input()
if rank < 2:
    member.tell({"raised": "RuntimeError in backward at step 12"})
if rank == 0:
    sys.exit()
if rank == 1:
    threading.Thread(target=lambda: time.sleep(0.3)).start()  # its exit waits for this thread
if rank == 2:  # it leaves by the last line
    while len(ears.heard_from) < 2:
        time.sleep(0.01)
    say(ears.heard_from)
"""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with ranks(script, 3, server.port) as (_, started):
        assert [rank.hears() for rank in started] == ["ready"] * 3
        for rank in started:
            rank.tell()
        assert started[2].hears() == [{"raised": "RuntimeError in backward at step 12"}] * 2
        assert [rank.ends() for rank in started] == ["", "", ""]


class Deaf:
    heard = tick = lambda *_: None


def training_script(rank: int, pipe: Connection, errors: Path) -> None:
    """Until its last line; what it writes to standard error is in the file `errors`."""
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
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
    context, paths = forkserver(), [tmp_path / str(rank) for rank in range(2)]
    (first, theirs), (second, others) = context.Pipe(), context.Pipe()
    processes = [
        context.Process(target=training_script, args=(rank, pipe, path))
        for rank, (pipe, path) in enumerate(zip((theirs, others), paths, strict=True))
    ]
    for process in processes:
        process.start()
    try:
        second.send(first.recv())
        assert second.recv() == "asked"
        for pipe, process in zip((first, second), processes, strict=True):
            pipe.send("go on")
            process.join(90)
        errors = [path.read_text() for path in paths]
        assert [process.exitcode for process in processes] == [0, 0], errors
    finally:
        for process in processes:
            process.kill()
    # torch may add its own stack trace, for an operation in flight.
    assert not any("gradwire:" in text for text in errors), errors


@EXHAUSTIVE
def test_a_host_that_stops_is_no_hang() -> None:
    with ranks(
        """
member = channel.join(store, 0, 2, 30.0, ears)
member.first("k", b"")
member.timeout = 1.0
say("ready")
input()
say(str(member.exchange("f", b"").exception(60)))
""",
        1,
    ) as (host, started):
        assert started[0].hears() == "ready"
        host.process.send_signal(signal.SIGSTOP)
        started[0].tell()
        assert "the group's store does not answer" in started[0].hears()
        assert started[0].ends() == ""  # its thread is stuck in the store


def test_the_server_is_not_kept_alive() -> None:
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = server.port
    with channels(1) as (channel,):
        member = channel.join(dist.PrefixStore("a/", server), 0, 2, 60.0, Ears())
        until(lambda: member.settled)
        del server
        pending = member.exchange("e", b"")
        assert "is lost" in str(pending.exception(60))
        again = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        # The address is the former server's; the connection is not.
        assert channel.join(again, 0, 1, 60.0, Ears()).exchange("e", b"").result(60) == [b""]


def test_another_server_at_the_address_is_not_taken_for_the_one_that_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    meanwhile = []  # whether it counts as broken, until it is known which server answers

    def asked(store: Any) -> bytes:
        meanwhile.append(host.is_broken)
        return which_server(store)

    which_server = control_host._server
    monkeypatch.setattr(control_host, "_server", asked)
    first = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = first.port
    host = Host(first)
    kept = host.connect()
    host.check()
    del first
    second = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    with pytest.raises(Gone):
        host.check()
    assert host.is_broken
    assert meanwhile == [False, True]
    host.close()
    del kept, second


def test_a_server_that_lets_go_of_a_silent_socket_is_still_there() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    host = Host(store)
    host.connect()
    assert host._watch is not None
    host._watch.shutdown(socket.SHUT_RD)
    assert host.is_broken
    host.check()
    assert not host.is_broken
    host.close()


def test_a_fork_is_refused() -> None:
    store = dist.HashStore()
    with channels(1) as (channel,):
        member = channel.join(store, 0, 1, 60.0, Ears())
        assert member.exchange("e", b"").result(60) == [b""]
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            said = []
            for use in (
                lambda: channel.join(store, 0, 1, 60.0, Ears()),
                lambda: member.exchange("f", b""),
                lambda: member.agree("a", "plan", []),
                lambda: member.first("k", b""),
            ):
                try:
                    use()
                    said.append("nothing")
                except ConfigError as error:
                    said.append(str(error))
            member.tell({})
            member.leave({})
            channel.close()
            os.write(writer, json.dumps(said).encode())
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as pipe:
            said = json.loads(pipe.read())
        assert os.waitpid(child, 0)[1] == 0
        assert len(said) == 4
        assert all("spawn" in sentence for sentence in said)
        assert member.exchange("f", b"").result(60) == [b""]  # the parent goes on
