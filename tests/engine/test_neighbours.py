"""Whether another process of this machine is there."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from gradwire.engine import neighbours
from gradwire.engine.neighbours import Process
from gradwire.engine.topology import Facts, Topology


def test_this_process_is_there() -> None:
    own = Process.own()
    assert own.number
    assert not own.is_over(own.space)


def test_a_process_is_over_once_it_has_ended_and_before_it_is_waited_for() -> None:
    own = Process.own()
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    _, started = neighbours._state(child.pid)
    there = Process(own.space, child.pid, started)
    assert not there.is_over(own.space)
    child.kill()
    while neighbours._state(child.pid)[0] not in "ZX":
        pass
    assert there.is_over(own.space)
    child.wait()
    assert there.is_over(own.space)
    assert child.stdin is not None
    child.stdin.close()


def test_a_number_that_was_given_again_is_another_process() -> None:
    own = Process.own()
    assert replace(own, started=own.started - 1).is_over(own.space)


def test_nothing_is_known_of_other_machines_and_of_those_that_do_not_tell() -> None:
    own = Process.own()
    gone = replace(own, started=own.started - 1)
    assert not gone.is_over(bytes(32))
    assert not replace(gone, number=0).is_over(own.space)


def test_a_group_names_the_rank_whose_process_has_ended() -> None:
    mine = Facts.here(False)
    gone = replace(mine, process=replace(mine.process, started=mine.process.started - 1))
    far = replace(gone, process=replace(gone.process, space=bytes(32)))
    packed = [Facts.unpack(facts.pack()) for facts in (mine, far, gone)]
    assert packed == [mine, far, gone]
    assert Topology.of(0, packed).over() == 2
    assert Topology.of(0, packed[:2]).over() is None
    assert Topology(0, 3).over() is None
