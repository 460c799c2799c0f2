"""Options of the whole test suite: which cases run, with which kernels, on which worker."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from loopback import own_loopback


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="Write tests/golden/ anew, do not compare.",
    )
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="Run every case, with kernels compiled as users get them: what `make test-all` does.",
    )
    parser.addoption(
        "--timing",
        action="store_true",
        help="Run the tests whose subject is time, and no others: what `make soak` does.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment of the tests.

    Waiting OpenMP threads release their cores. Kernels compile with -O0 in a quarter of the time,
    since no flag changes a bit (law 6); exhaustive runs, golden payloads and prebuilt libraries use
    the users' flags.

    torch looks up the name of 127.0.0.1 whenever it connects to a store. A name server that does
    not answer costs 5 seconds or more by default, too long for tests of timeouts.
    """
    if hasattr(config, "workerinput"):  # a worker of xdist
        own_loopback()
    gc.set_threshold(200_000, 20, 20)  # thousands of cases stay live: saves a tenth of the time
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read where torch is loaded, later
    if not config.getoption("exhaustive"):
        os.environ.setdefault("GRADWIRE_KERNEL_FLAGS", "-O0")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Let torch use one thread: tensors are small, and more threads only contend for the cores."""
    import torch  # not before OMP_WAIT_POLICY is set

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what was not asked for, group tests that must share an xdist worker, and order them.

    The lab needs the cores for itself, and some of its tests check for leftovers of others, so they
    form one group. Tests that start processes form a group per file, since they share expensive
    fixtures. The longest tests start first.
    """
    wanted = [item for item in items if _is_wanted(item, config)]
    config.hook.pytest_deselected(items=[i for i in items if not _is_wanted(i, config)])
    items[:] = wanted
    for item in items:
        if _start(item) or item.path.parent.name == "multiprocess":
            item.add_marker(pytest.mark.multiprocess)
        if item.get_closest_marker("lab") or item.path.parent.name == "lab":
            item.add_marker(pytest.mark.xdist_group("lab"))
        elif item.get_closest_marker("multiprocess"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
    place: dict[Any, int] = {}
    for item in items:
        place.setdefault(item.path, len(place))
        place.setdefault((item.path, _start(item)), len(place))
    items.sort(key=lambda item: (_turn(item), place[item.path], place[item.path, _start(item)]))


def _is_wanted(item: pytest.Item, config: pytest.Config) -> bool:
    if config.getoption("timing"):
        return item.get_closest_marker("timing") is not None
    if item.get_closest_marker("timing"):
        return False
    return config.getoption("exhaustive") or not item.get_closest_marker("exhaustive")


def _start(item: pytest.Item) -> Any:
    """Alike for tests that share processes, which so come one after another."""
    return str(item.callspec.params.get("rank", "")) if hasattr(item, "callspec") else ""


def _turn(item: pytest.Item) -> int:
    group = item.get_closest_marker("xdist_group")
    return 2 if group is None else int(group.args != ("lab",))


@pytest.hookimpl(trylast=True)  # after xdist
def pytest_collection_finish(session: pytest.Session) -> None:
    """Let garbage collections look at what tests make, not at all modules; and fail where groups
    have no effect: xdist 3.8 finds them by names that pytest 9.2 hides."""
    gc.freeze()
    if session.config.getoption("loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") and "@" not in item.nodeid:
                raise pytest.UsageError(
                    f"this pytest-xdist does not keep groups of tests together ({item.nodeid}); "
                    "install the versions of constraints.txt"
                )


# ---- tests that every rank runs (tests/ranks.py)


@cache
def _crew() -> Any:
    from ranks import Crew  # not before OMP_WAIT_POLICY is set

    return Crew()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition._fixtureinfo.argnames[:1] == ("rank",):
        from ranks import on, rows_of

        own = [mark for mark in metafunc.definition.own_markers if mark.name == "on"]
        of_file = list(metafunc.definition.iter_markers("on")) or [on(2).mark]
        marks = own[::-1] or of_file  # decorators from the first on
        metafunc.parametrize(*rows_of(metafunc.function, marks))


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    if next(iter(given), None) != "rank":
        return None
    _crew().run(given.pop("rank"), pyfuncitem.function, **given)
    return True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if _crew.cache_info().currsize and (nextitem is None or nextitem.path != item.path):
        _crew().close()
