"""Whether another process on this machine still runs."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from gradwire.engine import liveness
from gradwire.engine.liveness import Process
from gradwire.engine.topology import RankInfo, Topology


def test_this_process_is_there() -> None:
    own = Process.own()
    assert own.number
    assert not own.has_ended(own.space)


def test_a_process_is_over_once_it_has_ended_and_before_it_is_waited_for() -> None:
    own = Process.own()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _, started = liveness._state(child.pid)
    there = Process(own.space, child.pid, started)
    assert not there.has_ended(own.space)
    child.kill()
    while liveness._state(child.pid)[0] not in "ZX":
        pass
    assert there.has_ended(own.space)
    child.wait()
    assert there.has_ended(own.space)
    assert child.stdin is not None
    child.stdin.close()


def test_a_number_that_was_given_again_is_another_process() -> None:
    own = Process.own()
    assert replace(own, started=own.started - 1).has_ended(own.space)


def test_nothing_is_known_of_other_machines_and_of_those_that_do_not_tell() -> None:
    own = Process.own()
    gone = replace(own, started=own.started - 1)
    assert not gone.has_ended(bytes(32))
    assert not replace(gone, number=0).has_ended(own.space)


def test_a_group_names_the_rank_whose_process_has_ended() -> None:
    mine = RankInfo.here(False)
    gone = replace(mine, process=replace(mine.process, started=mine.process.started - 1))
    far = replace(gone, process=replace(gone.process, space=bytes(32)))
    packed = [RankInfo.unpack(facts.pack()) for facts in (mine, far, gone)]
    assert packed == [mine, far, gone]
    assert Topology.of(0, packed).ended_peer() == 2
    assert Topology.of(0, packed[:2]).ended_peer() is None
    assert Topology(0, 3).ended_peer() is None
