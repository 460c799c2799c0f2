"""Random programs give the same bits as their serial execution.

GRADWIRE_STRESS=N multiplies steps and seeds, for long runs: `pytest --exhaustive --timeout=0`.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch

from averaging import averaged
from products import EXHAUSTIVE, exhaustive
from stress import worlds
from stress.programs import TIMES, WAYS, Call, Program, Scope
from stress.running import Chained, difference, strayed

STEPS = 3 * TIMES

THREADS = [*product((0,), (3, 5), ["threads"]), (2, 3, "fifo")]
MORE = [*product(range(4 * TIMES), (2, 3, 5), ["threads"]), (2, 2, "fifo")]
PROCESSES = [*product(range(3, 3 + TIMES), (3, 2), ("shm", "gloo"))]


@pytest.mark.parametrize(
    ("seed", "ranks", "way"),
    [
        *THREADS,
        *exhaustive(*(case for case in MORE if case not in THREADS)),
        *(
            pytest.param(*case, marks=[pytest.mark.multiprocess] + [EXHAUSTIVE] * (i > 0))
            for i, case in enumerate(PROCESSES)
        ),
    ],
)
def test_concurrent_programs_equal_their_serial_execution(seed: int, ranks: int, way: str) -> None:
    """Also over links without tags ("fifo"): one order of all owners' scopes."""
    program = Program.of(seed, ranks)
    expected = worlds.by_threads(program, STEPS, serial=True)
    if way in ("threads", "fifo"):
        found = worlds.by_threads(program, STEPS, fifo=way == "fifo")
    else:
        found = worlds.by_processes(program, STEPS, way == "shm")
    assert strayed(program, expected) is None
    assert difference(program, found, expected) is None
    assert strayed(program, found) is None


# ---- the stress itself


def test_an_order_keeps_streams_and_waiting_calls_in_order() -> None:
    program, orders = Program.of(5, 3), set()
    for number in range(60):
        step = program.step(number)
        for rank in range(3):
            indices = program.order(rank, number)
            assert sorted(indices) == list(range(len(step.actions)))
            orders.add((number, tuple(indices)))
            actions = [(i, step.actions[i]) for i in indices]
            waiting = [i for i, a in actions if isinstance(a, Call) and a.waits]
            assert waiting == sorted(waiting)
            streams: dict[object, list[int]] = {}
            for i, a in actions:
                owner = (a.owner if isinstance(a, Scope) else -1) if step.free else 0
                streams.setdefault((a.group, owner), []).append(i)
            assert all(stream == sorted(stream) for stream in streams.values())
    assert len(orders) > 120  # of 180


def test_programs_have_all_that_the_stress_is_about() -> None:
    programs = [Program.of(seed, 3) for seed in range(20)]
    assert {len(p.owners) for p in programs} == {2, 3, 4}
    assert {owner.window for p in programs for owner in p.owners} == {1, 2}
    assert {len(ranks) for p in programs for ranks in p.groups} == {2, 3}
    steps = [p.step(number) for p in programs for number in range(30)]
    assert {(step.free, step.lingers) for step in steps} == {
        (free, lingers) for free in (True, False) for lingers in (True, False)
    }
    scopes = [a for step in steps for a in step.actions if isinstance(a, Scope)]
    assert {scope.bucket for scope in scopes} == set(range(8))
    calls = [a for step in steps for a in step.actions if isinstance(a, Call)]
    assert {call.kind for call in calls} == {"all_reduce", "reduce_scatter", "all_gather"}
    assert {call.waits for call in calls} == {True, False}
    parameters = [q for p in programs for bucket in p.layout(0, 0) for q in bucket]
    assert {len(q.rounds) for q in parameters} == {1, 2, 3}
    assert {way for q in parameters for _, _, way in q.rounds} == set(WAYS)
    assert {q.feedback for q in parameters} == {True, False}


def test_a_serial_execution_is_the_average() -> None:
    """Compared with torch's averages: with Identity, every round has only fp32's error."""
    rounds = tuple((numel, "identity", "all_reduce") for numel in (700, 1000, 200))
    data = [[torch.randn(1000)] for _ in range(3)]
    found = averaged([(1000,)], Chained(rounds), [data])
    mean = torch.stack([gradient for (gradient,) in data]).mean(0)
    torch.testing.assert_close(found[0][0][0][0], mean)


def test_what_differs_is_found_and_named() -> None:
    program = Program.of(6, 2)
    expected = worlds.by_threads(program, 3, serial=True)
    assert strayed(program, expected) is None
    key = sorted(expected[1])[4]
    changed = [dict(rank) for rank in expected]
    changed[1][key] = "0" + changed[1][key]
    text = difference(program, changed, expected)
    assert text is not None
    assert f"step {key[0]}, {program.step(key[0]).actions[key[1]]}: rank 1 has 0" in text
    del changed[1][key]
    assert difference(program, changed, expected) is not None
    shared = next(k for k in sorted(expected[0]) if k in expected[1] and not scattered(program, k))
    changed = [dict(rank) for rank in expected]
    changed[0][shared] = "0" + changed[0][shared]
    assert "replicas differ" in (strayed(program, changed) or "")


def scattered(program: Program, key: tuple[int, int]) -> bool:
    action = program.step(key[0]).actions[key[1]]
    return isinstance(action, Call) and action.kind == "reduce_scatter"
