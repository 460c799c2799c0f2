"""The house: how large each room is, what it may import, and what one scope enters.

HOUSE is the one place for these numbers. They only go down: a room that grows fails, and one that
has shrunk asks for its number to be lowered. A feature that needs more says what it removes.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from averaging import Parameters, drawn
from ends import ends
from gradwire import QSGD
from gradwire.aggregators import Compressed
from gradwire.engine import Communicator
from ranks import as_threads

ROOT = Path(__file__).parents[1]
SLACK = 100  # lines that a room may lose before its number has to follow

# room: lines at most, classes at most, files that import each other in a circle at most, and the
# rooms that it may import, all of which stand above it; `..x` is every room from the first to x.
# `tools/` is src/gradwire_tools. A file that stands alone counts as a room.
HOUSE: dict[str, tuple[int, int, int, str]] = {
    "errors":         (  157,  4,  0, ""),
    "waiting":        (   48,  0,  0, "errors"),
    "lang":           (10908, 73,  0, "errors"),
    "codecs":         ( 1671, 22,  0, "errors lang"),
    "control":        ( 1616,  9,  0, "errors"),
    "transport":      ( 1962, 28,  0, "errors lang"),
    "engine":         ( 3434, 39,  6, "errors control transport"),
    "algorithms":     ( 1826, 12,  0, "errors engine"),
    "partition":      (  285,  2,  0, "errors lang codecs engine"),
    "groups":         (  143,  0,  0, "errors transport engine"),
    "collectives":    ( 2916, 26,  0, "..groups"),
    "tools/__init__": (    4,  0,  0, ""),
    "aggregators":    ( 3550, 31,  0, "errors lang codecs engine algorithms partition collectives"),
    "planner":        ( 1760, 10,  3, "..aggregators"),
    "controllers":    ( 2557, 27,  0, "errors lang codecs aggregators planner"),
    "decide":         ( 1462, 20,  0, "..controllers"),
    "state":          (  876,  6,  0, "..controllers"),
    "handles":        ( 7751, 55,  8, "..state"),
    "backend":        ( 1192,  6,  2, "..handles"),
    "trainers":       ( 1031, 11,  0, "..handles"),
    "flexible":       (  552,  5,  0, "..handles"),
    "outer_loop":     ( 1524,  8,  0, "..handles"),
    "wheel":          (   27,  0,  0, "lang codecs transport"),
    "__init__":       (  142,  0,  0, "..outer_loop"),
    "tools/sim":      ( 3593, 42,  0, "..__init__"),
    "tools/lab":      ( 1579,  8,  0, "errors lang"),
    "tools/bench":    ( 9529, 55,  0, "..__init__ tools/sim tools/lab"),
    "tools/predict":  (  878,  6,  0, "..__init__ tools/sim tools/lab tools/bench"),
    "tools/report":   ( 3243, 11,  0, "errors tools/bench tools/predict"),
    "tools/demo":     (  114,  0,  0, "tools/lab tools/bench tools/report"),
    "tools/doctor":   (   82,  0,  0, "..__init__ tools/lab"),
    "tools/cli":      ( 1741,  2,  0, "..tools/doctor"),
    "__main__":       (    5,  0,  0, "tools/cli"),
}  # fmt: skip

# Of one steady scope of three parameters, two ranks as threads on loopback, without the threads of
# the control channel; and the modules of both packages behind `import gradwire; gw.attach`.
CLASSES, FILES, LOADED = 25, 26, 203

# A family of choices, and a node of the language: users type the first.
ALIKE = {"Rank"}


@cache
def modules() -> dict[str, Path]:
    """Every module of both packages by its full name."""
    found = {}
    for package in ("gradwire", "gradwire_tools"):
        for path in sorted((ROOT / "src" / package).rglob("*.py")):
            parts = path.relative_to(ROOT / "src").with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = path
    return found


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(module: str) -> str:
    package, *inside = module.split(".")
    prefix = "" if package == "gradwire" else "tools/"
    return prefix + (inside[0] if inside else "__init__")


def imported(path: Path) -> Iterator[str]:
    """The modules of both packages that a file imports, inside of functions too."""
    for node in ast.walk(parsed(path)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name:
                if name in modules():
                    yield name
                    break
                name = name.rpartition(".")[0]


@cache
def imports() -> dict[str, set[str]]:
    return {module: {*imported(path)} - {module} for module, path in modules().items()}


def reached(module: str) -> set[str]:
    found: set[str] = set()
    waiting = [module]
    while waiting:
        new = imports()[waiting.pop()] - found
        found |= new
        waiting += new
    return found


@cache
def measured() -> dict[str, tuple[int, int, int]]:
    """Lines, classes and files in circles of every room."""
    lines: Counter[str] = Counter()
    classes: Counter[str] = Counter()
    circles: Counter[str] = Counter()
    for module, path in modules().items():
        here = room(module)
        lines[here] += path.read_text().count("\n")
        classes[here] += sum(isinstance(node, ast.ClassDef) for node in ast.walk(parsed(path)))
        circles[here] += module in reached(module)
    return {here: (lines[here], classes[here], circles[here]) for here in lines}


def allowed(here: str) -> set[str]:
    order, found = list(HOUSE), {here}
    for name in HOUSE[here][-1].split():
        last = name.removeprefix("..")
        found |= {*order[: order.index(last) + 1]} if name != last else {last}
    return found


def test_every_room_has_a_line_and_no_line_is_left_over() -> None:
    assert HOUSE.keys() == measured().keys()


@pytest.mark.parametrize("here", HOUSE)
def test_a_room_only_shrinks(here: str) -> None:
    *most, _ = HOUSE[here]
    found = measured()[here]
    for kind, now, bound in zip(("lines", "classes", "files in circles"), found, most, strict=True):
        assert now <= bound, f"{here} has {now} {kind}, at most {bound} are allowed"
    assert most[0] - found[0] <= SLACK, f"{here} has shrunk: lower its lines to {found[0]}"
    assert most[1:] == list(found[1:]), f"{here} has shrunk: lower classes and circles to {found}"


def test_rooms_import_what_the_table_allows() -> None:
    """And so `gradwire` imports nothing of `gradwire_tools`; `python -m gradwire` alone starts the
    command line."""
    order = list(HOUSE)
    for place, here in enumerate(order):
        assert allowed(here) <= {*order[: place + 1]}, f"{here}: only what stands above it"
    faults = [
        f"{module} imports {other}"
        for module, others in imports().items()
        for other in others
        if room(other) not in allowed(room(module))
    ]
    assert not faults, "\n".join(faults)


def test_what_one_steady_scope_enters() -> None:
    """In a process of its own, whose threads start under the profile hook."""
    (end,) = ends(1, entered, backend=None)
    calls, classes = end.value
    files = {file for _, file in calls}
    assert (len(classes), len(files)) <= (CLASSES, FILES), (classes, files)
    assert (len(classes), len(files)) == (CLASSES, FILES), "fewer: lower CLASSES and FILES"
    page = (ROOT / "docs" / "internals" / "architecture.md").read_text()
    told = page.partition("```text path\n")[2].partition("```")[0].splitlines()
    path = [tuple(line.split()[:2]) for line in told]
    assert len(path) > 15
    assert [calls.index(place) for place in path] == sorted(calls.index(place) for place in path)


def entered(_: int) -> tuple[list[tuple[str, str]], set[str]]:
    """(calls with their files, in the order of the first; classes)."""
    calls: dict[tuple[str, str], None] = {}
    classes: set[str] = set()
    on = threading.Event()
    scope = threading.Barrier(2)

    def hook(frame: FrameType, event: str, argument: Any) -> None:
        _, inside, file = frame.f_code.co_filename.rpartition("/gradwire/")
        if event != "call" or not on.is_set() or not inside or file.startswith("control/"):
            return
        name, me = frame.f_code.co_name, frame.f_locals.get("self")
        if me is not None and type(me).__module__.startswith("gradwire"):
            classes.add(f"{type(me).__module__}.{type(me).__qualname__}")
            name = f"{type(me).__name__}.{name}"
        calls.setdefault((name, file))

    def body(comm: Communicator) -> None:
        shapes = [(256, 128), (128,), (64, 64)]
        parameters = Parameters(comm, shapes, Compressed(QSGD(bits=4)))
        for step in range(4):
            if step == 3:
                scope.wait()
                on.set()
                scope.wait()
            parameters.average(drawn(shapes, comm.rank, step))

    threading.setprofile(hook)
    as_threads(2, body)
    return list(calls), classes


def test_what_attach_loads() -> None:
    script = "import sys, torch.distributed, gradwire; gradwire.attach; print(*sys.modules)"
    said = subprocess.check_output([sys.executable, "-c", script], text=True)
    packages = ("gradwire", "gradwire_tools")
    found = sorted(name for name in said.split() if name.split(".")[0] in packages)
    assert len(found) <= LOADED, found
    assert len(found) == LOADED, f"lower LOADED to {len(found)}"


def test_tests_name_rooms_not_insides() -> None:
    """Those below by what their pages export, and by tests/rooms."""
    closed = ("engine", "collectives", "decide", "state", "handles", "backend", "flexible")
    faults = []
    for path in files_of_tests():
        if path.parent == ROOT / "tests" / "rooms":
            continue
        for name in imported(path):
            _, here, *inside = [*name.split("."), ""]
            if here in closed and any(inside):
                faults.append(f"{path.relative_to(ROOT)} imports {name}: take it from rooms.{here}")
    assert not faults, "\n".join(faults)


def files_of_tests() -> list[Path]:
    return sorted(path for top in ("tests", "tests_tools") for path in (ROOT / top).rglob("*.py"))


def test_the_library_is_tested_without_the_tools() -> None:
    """But for the lab, which is a network."""
    faults = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in files_of_tests()
        if path.is_relative_to(ROOT / "tests")
        for name in imported(path)
        if name.startswith("gradwire_tools") and room(name) != "tools/lab"
    ]
    assert not faults, "\n".join(faults)


def test_trainers_are_imported_on_use() -> None:
    """Their packages by the room trainers alone, and that by nothing but `gw.NAME`."""
    packages = {"lightning", "pytorch_lightning", "accelerate", "transformers", "ray", "keras"}
    packages |= {"tensorflow"}
    inside = "gradwire.trainers"
    faults = []
    for module, path in modules().items():
        if module.startswith(inside):
            continue
        if module != "gradwire":
            faults += [f"{path} imports {n}" for n in imports()[module] if n.startswith(inside)]
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            faults += [f"{path} imports {name}" for name in names if name.split(".")[0] in packages]
    assert not faults, "\n".join(faults)


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for module, path in modules().items():
        for statement in parsed(path).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                found.setdefault(statement.name, []).append(module)
    twice = {name: where for name, where in found.items() if len(where) > 1 and name not in ALIKE}
    assert not twice


def test_files_of_tests_have_different_names() -> None:
    """pytest imports each by its name alone."""
    names = Counter(path.name for path in files_of_tests() if path.name.startswith("test_"))
    assert [name for name, count in names.items() if count > 1] == []
