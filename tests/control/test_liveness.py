"""Whether another process on this machine still runs, and which ranks are told of."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch.distributed as dist
from control_ranks import Ears, channels

from gradwire.control import liveness
from gradwire.control.keys import Journal
from gradwire.control.liveness import has_ended
from leftovers import until


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


def test_ranks_of_this_machine_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    number, started = own = liveness.own()
    gone = number, started - 1
    here = liveness.machine()
    store = dist.HashStore()
    with channels(1) as (channel,):
        mine = channel.join(store, 0, 4, 60.0, Ears())
        assert until(lambda: mine.part.settled)
        assert mine.ended() == {}
        for rank, process, where in ((1, own, here), (2, gone, "another"), (3, gone, here)):
            with pytest.MonkeyPatch.context() as monkey:
                monkey.setattr(liveness, "own", lambda told=process: told)
                monkey.setattr(liveness, "machine", lambda told=where: told)
                other = channel.join(store, rank, 4, 60.0, Ears())
                assert until(lambda other=other: other.part.settled)
        assert mine.part.dead() == []
        assert mine.ended() == {3: []}
        assert mine.part.dead() == [3]
        processes = mine.part.space.below(f"processes/{here}")
        Journal(processes, 60.0).append(b"nonsense")
        assert mine.ended() == {3: []}
    assert [record.args[1] for record in caplog.records] == [b"nonsense"]
