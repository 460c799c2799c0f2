"""All runs give the results and send the bytes stored in runs.txt (see runs.py)."""

from __future__ import annotations

import pytest

from golden import runs
from golden.runs import CASES, Case
from products import EXHAUSTIVE, one_in
from ranks import WORLD_SIZES


@pytest.fixture
def cases(pytestconfig: pytest.Config, ranks: int) -> list[Case]:
    """The cases of this run: all with --exhaustive, else a sample."""
    chosen = CASES if pytestconfig.getoption("--exhaustive") else runs.sampled(CASES)
    return [case for case in chosen if case.ranks == ranks]


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


@pytest.mark.parametrize("ranks", one_in(2, WORLD_SIZES))
def test_collectives(cases: list[Case]) -> None:
    compare(runs.lines(cases))


@pytest.mark.parametrize("ranks", one_in(3, WORLD_SIZES))
def test_collectives_in_order(cases: list[Case]) -> None:
    """Over links that only preserve the order of messages: the same lines."""
    compare(runs.lines(cases, in_order=True))


@pytest.mark.parametrize("options", [{"target": "eager"}, {"threads": 3}, {"batched": False}],
                         ids=lambda options: next(iter(options)))  # fmt: skip
def test_results_do_not_depend_on_execution_options(options: dict[str, object]) -> None:
    some = [case for case in CASES if case.ranks == 2 and case.segments == 1]
    compare(runs.lines([case for case in some if case.way in ("sra", "ring")], **options))


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_training() -> None:
    from golden import trained  # imports FSDP

    compare(trained.lines())


def test_the_file_has_every_case() -> None:
    training = {name for name in runs.stored() if name.startswith(("attach ", "backend "))}
    assert set(runs.stored()) - training == {case.name for case in CASES}
    assert len(training) == 8
    kept = {(case.way, case.ranks) for case in runs.sampled(CASES)}
    assert kept == {(case.way, case.ranks) for case in CASES}
