"""All runs give the results and send the bytes stored in runs.txt (see runs.py)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from golden import runs
from golden.runs import CASES, Case
from products import EXHAUSTIVE
from ranks import WORLD_SIZES


def compare(found: dict[str, str]) -> None:
    known = runs.stored()
    changed = [(known.get(name, "(no such line)"), text) for name, text in found.items()
               if known.get(name) != text]  # fmt: skip
    assert not changed, f"{len(changed)} of {len(found)} runs changed, the first: " + "".join(
        f"\n  was {was}\n  is  {text}" for was, text in changed[:5]
    )


@pytest.fixture(scope="module", autouse=True)
def _updated(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--update-golden"):
        runs.record()


SAMPLE = runs.sampled(CASES)
EACH = [pytest.param(n, marks=[EXHAUSTIVE] if n in (4, 8) else []) for n in WORLD_SIZES]


def of(ranks: int, cases: Sequence[Case]) -> list[Case]:
    return [case for case in cases if case.ranks == ranks]


@pytest.mark.parametrize("ranks", EACH)
def test_collectives(ranks: int, pytestconfig: pytest.Config) -> None:
    compare(runs.lines(of(ranks, CASES if pytestconfig.getoption("--exhaustive") else SAMPLE)))


@pytest.mark.parametrize("ranks", [3, *(pytest.param(n, marks=EXHAUSTIVE) for n in (1, 4))])
def test_collectives_in_order(ranks: int, pytestconfig: pytest.Config) -> None:
    """Over links that only preserve the order of messages: the same lines."""
    cases = of(ranks, CASES if pytestconfig.getoption("--exhaustive") else SAMPLE)
    compare(runs.lines(cases, in_order=True))


def test_results_do_not_depend_on_execution_options(pytestconfig: pytest.Config) -> None:
    """Each codec with one of them in turn."""
    exhaustive = pytestconfig.getoption("--exhaustive")
    ways = ("sra", "ring")[: 1 + exhaustive]
    some = [c for c in of(2, CASES) if c.segments == 1 and c.way in ways]
    every: list[dict[str, object]] = [{"target": "eager"}, {"threads": 3}, {"batched": False}]
    for turn, options in enumerate(every):
        compare(runs.lines(some if exhaustive else some[turn::3], **options))


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_training() -> None:
    from golden import training_runs  # imports FSDP

    compare(training_runs.lines())


def test_the_file_has_every_case() -> None:
    training = {name for name in runs.stored() if name.startswith(("attach ", "backend "))}
    assert set(runs.stored()) - training == {case.name for case in CASES}
    assert len(training) == 8
    assert {(c.way, c.ranks) for c in SAMPLE} == {(c.way, c.ranks) for c in CASES}
    assert {(c.codec, c.segments) for c in SAMPLE} == {(c.codec, c.segments) for c in CASES}
