"""Whether another process on this machine still runs, and which ranks are told of."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist

from gradwire.control import liveness
from gradwire.control.journal import Journal
from gradwire.control.liveness import Processes, has_ended
from gradwire.control.namespace import Namespace


def test_this_process_is_there() -> None:
    number, started = liveness.own()
    assert number
    assert not has_ended(number, started)
    assert has_ended(number, started - 1), "its number was given again"
    assert not has_ended(0, started - 1), "it does not tell"


def test_a_process_is_over_once_it_has_ended_and_before_it_is_waited_for() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    there = child.pid, liveness._state(child.pid)[1]
    assert not has_ended(*there)
    child.kill()
    while liveness._state(child.pid)[0] not in "ZX":
        pass
    assert has_ended(*there)
    child.wait()
    assert has_ended(*there)
    assert child.stdin is not None
    child.stdin.close()


def test_ranks_of_this_machine_are_told_of() -> None:
    space, garbled = Namespace(dist.HashStore(), "processes/"), []
    number, started = own = liveness.own()
    gone = number, started - 1
    here = liveness.machine()
    for rank, process, where in ((1, own, here), (2, gone, "another"), (3, gone, here)):
        with pytest.MonkeyPatch.context() as monkey:
            monkey.setattr(liveness, "own", lambda told=process: told)
            monkey.setattr(liveness, "machine", lambda told=where: told)
            Processes(space, rank, 60.0, garbled.append)
    mine = Processes(space, 0, 60.0, garbled.append)
    assert mine.ended() == []
    mine.read()
    assert mine.ended() == [3]
    Journal(space.below(here), 60.0).append(b"nonsense")
    mine.read()
    assert (mine.ended(), len(garbled)) == ([3], 1)
