"""Imports run one way: a package may use those before it, and none after it (DESIGN.md)."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "gradwire"

ORDER = [
    "errors",
    "lang",
    "codecs",
    "control",
    "transport",
    "engine",
    "algorithms",
    "partition",
    "groups",
    "collectives",
    "sim",
    "aggregators",
    "planner",
    "controllers",
    "integrations",
]
# Beside the line: used only by the command line (and by each other as listed).
MIDDLE = {
    "transport",
    "partition",
    "control",
    "engine",
    "collectives",
    "aggregators",
    "groups",
    "sim",
} | {"integrations"}
BESIDE = {
    "lab": {"errors", "lang", "lab"},
    "sim": {*ORDER, "sim"}
    - {"transport", "groups", "aggregators", "planner", "controllers", "integrations"},
    "bench": {*ORDER, "lab", "bench", "sim", "__init__"},
    "wheel": {"errors", "lang", "codecs", "transport", "wheel"},
    "cli": {*ORDER, "lab", "bench", "sim", "cli", "doctor", "wheel", "__init__"},
    "doctor": {*ORDER, "lab", "bench", "doctor", "__init__"},
    "__init__": set(ORDER),
    "__main__": {"cli"},
}


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            module = node.module or ""
            names = [module]
            if module == "gradwire":
                names = [f"gradwire.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "gradwire":
                known = len(parts) > 1 and (
                    (SOURCE / parts[1]).is_dir() or (SOURCE / f"{parts[1]}.py").exists()
                )
                found.add(parts[1] if known else "__init__")
    return found


@pytest.mark.parametrize(
    "path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE))
)
def test_imports_run_one_way(path: Path) -> None:
    mine = room(path)
    allowed = BESIDE[mine] if mine in BESIDE else set(ORDER[: ORDER.index(mine) + 1])
    assert imported_rooms(path) <= allowed, f"{mine} may import {sorted(allowed)}"


def test_every_room_has_its_place() -> None:
    rooms = {room(p) for p in SOURCE.rglob("*.py")}
    assert rooms <= {*ORDER, *BESIDE}


def test_a_class_name_has_one_meaning() -> None:
    """No class in the rooms of MIDDLE shares its name with another class."""
    found: dict[str, list[Path]] = {}
    for path in SOURCE.rglob("*.py"):
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.ClassDef) and not statement.name.startswith("_"):
                found.setdefault(statement.name, []).append(path)
    twice = {
        name: [str(path.relative_to(SOURCE)) for path in paths]
        for name, paths in found.items()
        if len(paths) > 1 and any(room(path) in MIDDLE for path in paths)
    }
    assert not twice


def test_files_of_tests_have_different_names() -> None:
    """pytest imports each by its name alone."""
    names = Counter(path.name for path in Path(__file__).parent.rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
