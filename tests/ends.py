"""Ranks as processes, some of which may fail: how and when each of them ends."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from ranks import forkserver


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        value: what its body returned.
        error: the type of the error that it raised; "died": its process ended before that; "hangs":
            it had not ended at the deadline.
        text: the error's text; for a rank that hangs, its main thread's stack.
        peer: the rank that a TransportError blames.
        at: time.monotonic() when it returned or raised, the same clock on all ranks.
    """

    value: Any = None
    error: str | None = None
    text: str = ""
    peer: int | None = None
    at: float = 0.0

    def __str__(self) -> str:
        return f"{self.error}: {self.text}" if self.error else f"returned {self.value!r}"


def finished(found: Sequence[End]) -> None:
    """Assert that every rank returned."""
    assert all(end.error is None for end in found), "\n".join(
        f"rank {rank}: {end}" for rank, end in enumerate(found)
    )


def raised(error: BaseException) -> End:
    """The end of a rank that raises."""
    peer = getattr(error, "peer", None)
    return End(None, type(error).__name__, str(error), peer, time.monotonic())


def ends(
    world_size: int,
    body: Callable[..., Any],
    *args: Any,
    timeout: float = 15.0,
    deadline: float = 60.0,
    backend: str = "gloo",
    environment: Mapping[str, str] | None = None,
) -> list[End]:
    """Run `body(rank, *args)` in `world_size` processes; returns how they ended, in rank order.

    This process hosts the store, as the launcher does under torchrun.

    Args:
        timeout: seconds, of the process group.
        deadline: seconds after which a rank hangs.
        environment: added to that of the processes.
    """
    context = forkserver()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(environment or {}),
    }
    found: dict[int, End] = {}
    with tempfile.TemporaryDirectory() as stacks:
        started = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            where = (rank, world_size, timeout, deadline, backend, given, stacks)
            process = context.Process(target=_process, args=(sender, where, body, args))
            process.start()
            sender.close()
            started.append((process, receiver))
        end = time.monotonic() + deadline
        waiting: dict[Connection, int] = {r: rank for rank, (_, r) in enumerate(started)}
        while waiting and (left := end - time.monotonic()) > 0:
            for receiver in wait(list(waiting), left):
                rank = waiting.pop(receiver)
                try:
                    found[rank] = receiver.recv()
                except EOFError:
                    found[rank] = End(None, "died", "its process ended", None, time.monotonic())
        for rank in waiting.values():
            stack = ""
            with contextlib.suppress(FileNotFoundError), open(f"{stacks}/{rank}") as file:
                stack = "\n" + file.read().split("Thread ")[-1]  # the main one
            found[rank] = End(None, "hangs", stack, None, end)
        for process, _ in started:
            process.kill()
            process.join()
    return [found[rank] for rank in range(world_size)]


def _process(  # type: ignore[no-untyped-def]
    sender, where, body, args
):
    rank, world_size, timeout, deadline, backend, environment, stacks = where
    torch.set_num_threads(1)
    os.environ.clear()
    os.environ.update(environment)
    with open(f"{stacks}/{rank}", "w") as file:
        faulthandler.dump_traceback_later(max(deadline - 2, 1), file=file)
        try:
            dist.init_process_group(
                backend, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout)
            )
            end = End(body(rank, *args), at=time.monotonic())
        except BaseException as error:
            end = raised(error)
        sender.send(end)
        time.sleep(deadline)  # the others may still need this one
        os._exit(0)  # a broken gloo group does not always let its process end
