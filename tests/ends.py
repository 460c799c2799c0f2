"""Ranks as processes, some of which may fail: how and when each of them ends."""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE = 10.0  # seconds for the other processes, once one has failed that should not


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        value: what its body returned.
        error: the type of the error that it raised; "died": its process ended before that; "hangs":
            it had not ended at the deadline.
        text: the error's text.
        peer: the rank that a TransportError blames.
        at: time.monotonic() when it returned or raised, the same clock on all ranks.
        stack: of the error; of a rank that hangs, of all its threads.
    """

    value: Any = None
    error: str | None = None
    text: str = ""
    peer: int | None = None
    at: float = 0.0
    stack: str = ""

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else f"returned {self.value!r}"


def raised(error: BaseException) -> End:
    """The end of a rank that raises."""
    peer = getattr(error, "peer", None)
    stack = "".join(traceback.format_exception(error))
    return End(None, type(error).__name__, str(error), peer, time.monotonic(), stack)


def ended(body: Callable[[], Any]) -> End:
    """How `body` ends."""
    try:
        return End(body(), at=time.monotonic())
    except BaseException as error:
        return raised(error)


def report(begun: float, found: Sequence[End]) -> str:
    """How and when every rank ended, in chronological order; last the ranks that still run."""
    lines = ["Every rank, in the order of time:"]
    turns = sorted(range(len(found)), key=lambda r: (found[r].error == "hangs", found[r].at))
    for rank, end in ((rank, found[rank]) for rank in turns):
        how = {None: "returned", "hangs": "still runs"}.get(end.error, "failed")
        lines.append(f"{end.at - begun:+.3f} s: rank {rank} {how}")
        lines += [text for text in [(end.stack or end.text).rstrip()] if text]
    return "\n".join(lines)


def finished(found: Sequence[End]) -> None:
    """Assert that every rank returned."""
    assert all(end.error is None for end in found), report(min(e.at for e in found), found)


def forkserver() -> Any:
    """A context that forks processes from a server, which has imported what takes long.

    torch imports its compiler when the first DDP module is made; a rank imports its test's module,
    and so pytest. GRADWIRE_TEST_IMPORTS names more, by commas.
    """
    context = mp.get_context("forkserver")
    ours = ("gradwire.handles.attach", "gradwire.backend.group", "gradwire.backend.register")
    slow = (
        "pytest",
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
    )
    more = filter(None, os.environ.get("GRADWIRE_TEST_IMPORTS", "").split(","))
    context.set_forkserver_preload([*slow, *ours, *more])
    return context


class Processes:
    """The ranks of a process group, forked from a server; they run one body after another.

    This process hosts the store, as the launcher does under torchrun.

    Args:
        timeout: seconds, of the process group.
        backend: of the process group; None: no group, and no store.
        environment: added to that of the processes.
    """

    def __init__(
        self,
        world_size: int,
        timeout: float = 15.0,
        backend: str | None = "gloo",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        context, given = forkserver(), {**os.environ, **(environment or {})}
        if backend is not None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            given |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port)}
            given["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        self._stacks = tempfile.TemporaryDirectory()
        self._started: list[tuple[Any, Connection]] = []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            where = (rank, world_size, timeout, backend, given, f"{self._stacks.name}/{rank}")
            process = context.Process(target=_process, args=(theirs, where))
            process.start()
            theirs.close()
            self._started.append((process, ours))

    def run(
        self,
        body: Callable[..., Any],
        *args: Any,
        deadline: float = 60.0,
        unawaited: Collection[int] = (),
        grace: float | None = None,
    ) -> list[End]:
        """Run `body(rank, *args)` on all ranks; returns how they ended, in rank order.

        Args:
            deadline: seconds after which a rank hangs.
            unawaited: ranks that may never end.
            grace: seconds after which a rank hangs once an awaited one has failed; None: as
                `deadline`.
        """
        for _, ours in self._started:
            ours.send((body, args))
        found: dict[int, End] = {}
        last = time.monotonic() + deadline
        waiting = {ours: rank for rank, (_, ours) in enumerate(self._started)}
        while waiting.keys() - {self._started[rank][1] for rank in unawaited}:
            ready = wait(list(waiting), max(last - time.monotonic(), 0))
            for ours in ready:
                assert isinstance(ours, Connection)
                rank = waiting.pop(ours)
                found[rank] = _end_of(self._started[rank][0], ours)
                if grace is not None and found[rank].error and rank not in unawaited:
                    last = min(last, time.monotonic() + grace)
            if not ready:
                break
        for rank in waiting.values():
            stack = _stacks(self._started[rank][0].pid, Path(self._stacks.name, str(rank)))
            found[rank] = End(None, "hangs", stack, None, time.monotonic(), stack)
        return [found[rank] for rank in range(len(self._started))]

    def close(self) -> None:
        for process, _ in self._started:
            process.kill()
            process.join()
        self._stacks.cleanup()


def ends(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 15.0,
    backend: str | None = "gloo",
    environment: Mapping[str, str] | None = None,
    **how: Any,
) -> list[End]:
    """How processes of their own end; see `Processes`, and its `run` for `how`."""
    processes = Processes(world_size, timeout, backend, environment)
    try:
        return processes.run(body, *args, **how)
    finally:
        processes.close()


def forked(body: Callable[[], Any]) -> Any:
    """What `body` returns, for JSON, in a forked child of this process."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(there, json.dumps(body()).encode())
        finally:
            os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said)


def _end_of(process: Any, ours: Connection) -> End:
    try:
        end: End = ours.recv()
    except EOFError:
        process.join()
        said = f"its process ended with exit code {process.exitcode}, without a report"
        end = End(None, "died", said, None, time.monotonic())
    return end


def _stacks(pid: int, file: Path) -> str:
    """The stacks of a process's threads, the main one last; nothing if it is stopped."""
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + 1
    while not (text := file.read_text() if file.exists() else "") and time.monotonic() < until:
        time.sleep(0.02)
    return text


def _process(theirs: Connection, where: tuple[Any, ...]) -> None:
    rank, world_size, timeout, backend, environment, stacks = where
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)

    def run() -> Any:
        try:
            body, args = theirs.recv()
        except EOFError:
            os._exit(0)  # the tests have ended
        if backend is None or joined:
            gc.collect()  # what the body before has left
        else:
            gc.freeze()  # a collection looks only at what bodies make
            joined.append(backend)
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
        return body(rank, *args)

    joined: list[str] = []
    with open(stacks, "w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        while True:  # until it is killed: others may still need this process
            end = ended(run)
            try:
                theirs.send(end)
            except Exception as error:  # the value cannot be pickled
                theirs.send(raised(error))
