"""The scheduler core alone: random graphs, rounds and timings, driven by its events."""

from __future__ import annotations

import random

from gradwire.algorithms import REGISTRY
from gradwire.engine import Graph
from rooms.engine import Action, Core, Do, Place, Run


class Collective(Run):
    def __init__(self, place: Place, number: int) -> None:
        super().__init__(place)
        self.round = number


class Driver:
    """Performs actions in any order that a real driver could."""

    def __init__(self, core: Core, draw: random.Random) -> None:
        self.core = core
        self.draw = draw
        self.open: list[tuple[str, Run, int]] = []  # events that may happen next
        self.log: list[tuple[str, int, int]] = []  # (what, ticket, round)
        self.held: set[Collective] = set()
        self.done: dict[Run, set[int]] = {}
        self.results: list[Collective] = []

    def perform(self, actions: list[Action]) -> None:
        for do, run, tasks in actions:
            if do is Do.START:
                self.held.add(run)
                self.done[run] = set()
                self.open.append(("started", run, -1))
            elif do is Do.POST:
                self.open += [("done", run, task) for task in tasks]
            elif do is Do.KERNEL:
                self.check_ready(run, tasks[0])
                self.open.append(("done", run, tasks[0]))
            elif do is Do.SEND:
                self.check_ready(run, tasks[0])
                self.open.append(("posted", run, tasks[0]))
            elif do is Do.FREE:
                self.held.remove(run)
            else:
                self.results.append(run)
            if do in (Do.START, Do.FREE, Do.RESULT):
                self.log.append((do.value, run.place.number, run.round))

    def check_ready(self, run: Run, task: int) -> None:
        graph = run.graph
        needs = {graph.writer[b] for b in graph.reads[task]} | set(graph.after[task])
        assert needs <= self.done[run], f"{graph.describe(task)} before what it needs"

    def step(self) -> None:
        name, run, task = self.open.pop(self.draw.randrange(len(self.open)))
        if name == "started":
            self.perform(self.core.started(run))
            return
        if name != "posted":
            self.done[run].add(task)
        self.perform(getattr(self.core, name)(run, task))
        if name == "posted":
            self.open.append(("sent", run, task))


def test_any_timing_keeps_the_owners_order() -> None:
    for window in (1, 2, 3):
        for seed in range(20):
            keeps_order(window, seed)


def keeps_order(window: int, seed: int) -> None:
    """Tickets of 1 to 3 rounds, of 1 or 2 collectives each: all are admitted and returned in order,
    `window` at a time."""
    draw = random.Random(seed)
    core = Core(window)
    driver = Driver(core, draw)
    ranks, rank = 3, draw.randrange(3)
    graphs = [
        REGISTRY[name].build(rank, ranks, [[16] * REGISTRY[name].chunks(ranks)] * 2)
        for name in ("sra", "ring", "tree", "all_gather")
    ] + [Graph(())]
    places: list[Place] = []
    rounds = [draw.randint(1, 3) for _ in range(10)]
    under_way: dict[Place, list[Collective]] = {}
    begun: list[tuple[int, int]] = []  # ticket and round of every collective
    next_round = dict.fromkeys(range(10), 0)

    def begin(place: Place) -> None:
        number = next_round[place.number]
        next_round[place.number] += 1
        collectives = draw.choice((1, 2))
        under_way[place] = []
        for _ in range(collectives):
            core.expect(place)
        for _ in range(collectives):
            begun.append((place.number, number))
            run = Collective(place, number)
            under_way[place].append(run)
            driver.perform(core.begin(run, draw.choice(graphs)))

    while len(places) < len(rounds) or driver.open:
        if len(places) < len(rounds) and (not driver.open or draw.random() < 0.1):
            places.append(core.issue(Place()))
            begin(places[-1])
        else:
            driver.step()
        admitted = [p.number for p in core.outstanding if p.admitted]
        assert admitted == list(range(core.returned, core.returned + len(admitted)))
        assert len(admitted) <= window
        assert {run.place.number for run in driver.held} <= set(admitted)
        for place, runs in list(under_way.items()):
            if all(run in driver.results for run in runs) and not place.closed:
                if next_round[place.number] < rounds[place.number]:
                    begin(place)
                else:
                    driver.perform(core.close(place))
                    del under_way[place]
    assert core.returned == len(rounds)
    assert not driver.held
    results = [(run.place.number, run.round) for run in driver.results]
    assert sorted(results) == sorted(begun)
    assert set(begun) == {(t, r) for t, n in enumerate(rounds) for r in range(n)}


def test_a_result_does_not_wait_for_sends_but_a_place_does() -> None:
    core = Core(1)
    graph = Graph(("m",))
    buffer = graph.buffer("m", 0, 0, 0)
    graph.encode(0, [buffer])
    send = graph.send(0, buffer, 1)
    first, second = core.issue(Place()), core.issue(Place())
    for place in (first, second):
        core.expect(place)
    run = Run(first)
    started = core.begin(run, graph)
    assert [a.do for a in started] == [Do.START]
    assert core.begin(Run(second), graph) == []
    core.close(first)
    core.started(run)
    core.done(run, 0)
    assert [a.do for a in core.posted(run, send)] == [Do.RESULT]
    assert core.returned == 0
    assert [a.do for a in core.sent(run, send)] == [Do.FREE, Do.START]
    assert core.returned == 1


def test_a_result_that_waits_for_sends_comes_with_the_last() -> None:
    core = Core(1, until_sent=True)
    graph = Graph(("m",))
    buffer = graph.buffer("m", 0, 0, 0)
    graph.encode(0, [buffer])
    sends = [graph.send(0, buffer, peer) for peer in (1, 2)]
    place = core.issue(Place())
    core.expect(place)
    run = Run(place)
    core.begin(run, graph)
    core.started(run)
    core.done(run, 0)
    assert core.posted(run, sends[0]) == []
    assert core.sent(run, sends[0]) == []
    assert core.posted(run, sends[1]) == []
    assert [a.do for a in core.sent(run, sends[1])] == [Do.FREE, Do.RESULT]


def test_a_cancelled_round_gives_its_place_back() -> None:
    core = Core(1)
    first, second = core.issue(Place()), core.issue(Place())
    core.expect(first)
    core.expect(second)
    core.close(first)
    assert [a.do for a in core.begin(Run(second), Graph(()))] == []
    assert [a.do for a in core.release(first)] == [Do.START]
