"""Aggregators in the simulator: their rounds are those of a run, and what they compute takes time.

A run is on threads, whose ranks share memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from averaging import Parameters, drawn
from gradwire.aggregators import Compressed, ErrorFeedback, registry
from gradwire.codecs import QSGD
from gradwire.collectives import Part
from gradwire.engine import Communicator
from gradwire.lang import layout
from gradwire_tools.sim import Curves, Net, Scenario, predict
from gradwire_tools.sim.buckets import STEADY
from gradwire_tools.sim.rank import Overheads
from machines import GBIT, IDENTITY, priced, scenario
from ranks import as_threads

SHAPES = ((48, 40), (40,), (33, 64), (7,), (128, 16))
METHODS = {name: registry.get(name) for name in registry.REGISTRY} | {
    "by all_gather": Compressed(QSGD(), "all_gather"),
    "as one": Compressed(QSGD(), scope="model"),
    "dgc later": registry.get("dgc:warmup=9"),
    "by layer": registry.get("topkc:scope=layer"),
    "auto": registry.get("artopk:leader=auto:density=0.05"),
}


def costs(one: Scenario, *stages: float, **given: Any) -> Curves:
    """Free kernels; an aggregator's stages take these seconds per value, for each of two ranks a
    tenth more."""
    codecs = {of: (0.0, 0.0, 0.0) for of in one.priced if not hasattr(of, "aggregate")}
    known = priced({**codecs, IDENTITY: (0.0, 0.0, 0.0)}, **given)
    of_stage = [(0.0, 0.8 * value, 0.1 * value) for value in stages] or [(0.0, 0.0, 0.0)]
    others = {of.recorded(): of_stage for of in one.priced if hasattr(of, "aggregate")}
    return Curves("a test", 1, known.codecs, known.engine, known.link, others)


def shown(rounds: Sequence[Sequence[Part]]) -> list[Any]:
    """What collectives do, without the names of tensors."""
    return [
        [
            (part.operation, part.options, [str(s).removeprefix(s.name) for s in part.specs])
            for part in of_round
        ]
        for of_round in rounds
    ]


@pytest.mark.parametrize("method", METHODS)
def test_rounds_and_bytes_are_those_of_a_run(method: str) -> None:
    """Whose step is one after any warm-up, and one in which another rank leads."""
    aggregator, ranks = METHODS[method], 3
    one = Scenario(ranks, GBIT, aggregator, SHAPES, per_node=ranks)
    wrapped = [p.aggregator for p in one.plan.parameters]
    matrices = [i for i in reversed(range(5)) if len(SHAPES[i]) > 1]
    scopes = [[i for i in reversed(range(5)) if i not in matrices], matrices]
    if aggregator.scope != "model":
        scopes = [[*reversed(range(5))]]

    def body(comm: Communicator) -> tuple[list[Any], int]:
        mine = Parameters(comm, SHAPES, wrapped)
        for member in mine.members:
            member.step = STEADY
        mine.average(drawn(SHAPES, comm.rank, 0), scopes)
        programs = [program for program, _ in mine.owner.scopes[0].values()]
        sent = sum(of.wire_bytes for outcomes in mine.outcomes for of in outcomes)
        return [shown([one.parts for one in program.rounds]) for program in programs], sent

    rounds, sent = as_threads(ranks, body)[0]
    assert [shown(scope.rounds) for scope in one.scopes] == rounds
    parts = [part for scope in one.scopes for part in scope.parts]
    varies = [layout(s.codec, s.dtype).data_dependent for part in parts for s in part.specs]
    assert any(varies) == ("dgc" in method)
    found = predict(one, costs(one))["wire_bytes"]
    assert found == pytest.approx(sent, rel=0.1 if any(varies) else 0, abs=0)


LOW = "powersgd:rank=8"  # of a square matrix, two all-reduces of equal size
SQUARE = ((512, 512),)


def test_rounds_follow_each_other_with_computing_between() -> None:
    """By hand: each round takes what an average of its values takes."""
    one = scenario(2, SQUARE, codec=registry.get(LOW), segments=1)
    thin = scenario(2, str(8 * 512), codec=IDENTITY, segments=1)
    alone, both = (predict(of, costs(one)) for of in (thin, one))
    assert both["seconds"] == pytest.approx(2 * alone["seconds"])
    assert both["wire_bytes"] == 2 * alone["wire_bytes"]
    assert both["limit_seconds"] == pytest.approx(2 * alone["limit_seconds"])
    assert (both["messages"], both["buckets"]) == (2 * alone["messages"], 1)
    stages, task = (3e-8, 5e-8, 7e-8), Overheads(task=1e-3)
    slow = predict(one, costs(one, *stages))
    computing = sum(stages) * 512 * 512
    assert slow["seconds"] == pytest.approx(both["seconds"] + computing)
    assert slow["compute_seconds"] == pytest.approx(computing)
    woken = predict(one, costs(one, *stages, engine=task))
    idle = predict(one, costs(one, engine=task))
    assert woken["seconds"] == pytest.approx(idle["seconds"] + computing + 3e-3)


def test_backward_waits_for_what_is_computed_before_the_first_round() -> None:
    one = scenario(2, SQUARE * 8, codec=registry.get(LOW), net=Net("none"), backward=1.0)
    assert len(one.scopes) == 2
    early, late = (predict(one, costs(one, *of))["seconds"] for of in ((1e-7,), (0.0, 1e-7)))
    assert early == pytest.approx(1.0 + 8 * 512 * 512 * 1e-7)
    # What follows a round is hidden, but for that of the last scope.
    last = sum(p.numel for p in one.scopes[-1].members)
    assert late == pytest.approx(1.0 + last * 1e-7)


def test_aggregators_over_the_model_wait_for_all_of_it() -> None:
    one = scenario(4, "resnet50", codec=registry.get("topkc"))
    *others, whole = one.scopes
    assert [of.computing for of in others if of.computing] == []
    assert {type(p.aggregator) for p in whole.computing} == {ErrorFeedback}
    assert (len(whole.members), len(whole.rounds), whole.ready) == (54, 2, 25_557_032)


def test_one_node_stands_for_all_in_rounds_of_several_algorithms() -> None:
    """An all_gather of one chunk beside an all-reduce of many."""
    method = Compressed(QSGD(), "all_gather")
    rows = []
    for exact in (True, False):
        one = scenario(8, ((1024, 960), (1024 * 8,)), codec=method, exact=exact)
        rows.append(predict(one, costs(one)))
    assert len(one.scopes[0].rounds[0]) == 2
    exact, by_one = rows
    assert (exact.pop("exact"), by_one.pop("exact")) == (True, False)
    assert by_one == pytest.approx(exact)
