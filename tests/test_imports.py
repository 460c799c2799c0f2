"""Imports run one way: a package may use those before it, and none after it (DESIGN.md)."""

from __future__ import annotations

import ast
from collections import Counter
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "gradwire"
FILES = sorted(SOURCE.rglob("*.py"))

ORDER = [
    "errors",
    "waiting",
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
    "integrations",
}
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def room(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(parsed(path)):
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


def test_imports_run_one_way() -> None:
    faults = []
    for path in FILES:
        mine = room(path)
        if mine not in (*ORDER, *BESIDE):
            faults.append(f"{path}: {mine} has no place in ORDER or BESIDE")
            continue
        allowed = BESIDE[mine] if mine in BESIDE else set(ORDER[: ORDER.index(mine) + 1])
        if wrong := imported_rooms(path) - allowed:
            faults.append(f"{path} imports {sorted(wrong)}; {mine} may import {sorted(allowed)}")
    assert not faults, "\n".join(faults)


def test_trainers_are_imported_on_use() -> None:
    """Their packages by integrations/trainers alone, and that by nothing but `gw.NAME`."""
    packages = {"lightning", "pytorch_lightning", "accelerate", "transformers", "ray", "keras"}
    packages |= {"tensorflow"}
    home = SOURCE / "integrations" / "trainers"
    faults = []
    for path in FILES:
        if home in path.parents:
            continue
        for node in ast.walk(parsed(path)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                inside = name.startswith("gradwire.integrations.trainers")
                if name.split(".")[0] in packages or (inside and room(path) != "__init__"):
                    faults.append(f"{path} imports {name}")
    assert not faults, "\n".join(faults)


def test_a_class_name_has_one_meaning() -> None:
    """No class in the rooms of MIDDLE shares its name with another class."""
    found: dict[str, list[Path]] = {}
    for path in FILES:
        for statement in parsed(path).body:
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
