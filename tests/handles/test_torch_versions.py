"""What differs between versions of torch stands in one table, which is right about this torch."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

import gradwire
from rooms.backend import Group
from rooms.handles import torch_versions

SOURCE = Path(gradwire.__file__).parent


def test_this_torch_has_the_operations_of_its_version() -> None:
    expected = dict.fromkeys(torch_versions.OPERATIONS, True)
    expected |= {n: torch.__version__ >= since for n, since in torch_versions.ADDED.items()}
    assert {name: hasattr(dist.ProcessGroup, name) for name in expected} == expected


def test_a_group_inherits_no_operation_of_torch() -> None:
    """What gives a `Work` must not be inherited (backend.py); a newer torch may have more."""
    given = {
        name
        for name in dir(dist.ProcessGroup)
        if re.search(r"\) -> [\w.:]*Work\b", getattr(dist.ProcessGroup, name).__doc__ or "")
    }
    assert {"allreduce", "broadcast", "send", "_allgather_base"} <= given
    # Of a coalescing manager, and of backends that change their size (2.15): not of these groups.
    aside = {"_end_coalescing", "reconfigure"}
    assert given - set(vars(Group)) <= aside


def test_groups_of_parameters_under_both_names() -> None:
    record = object()
    for state in (
        SimpleNamespace(_fsdp_param_groups=[record]),
        SimpleNamespace(_fsdp_param_group=record),
    ):
        assert torch_versions.parameter_groups_of(state) == [record]
    for state in (SimpleNamespace(_fsdp_param_groups=[]), SimpleNamespace(_fsdp_param_group=None)):
        assert torch_versions.parameter_groups_of(state) == []


def root_of(node: ast.expr) -> str:
    """`dist` of `dist.ProcessGroup.send`."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def asks_for_a_version(node: ast.AST) -> bool:
    """A comparison with `torch.__version__`, or `hasattr` and a three-part `getattr` on torch."""
    if isinstance(node, ast.Compare):
        return any(
            isinstance(part, ast.Attribute)
            and part.attr == "__version__"
            and root_of(part) == "torch"
            for part in ast.walk(node)
        )
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
        optional = node.func.id == "hasattr" or (node.func.id == "getattr" and len(node.args) == 3)
        return optional and root_of(node.args[0]) in ("torch", "dist", "c10d")
    return False


def test_no_other_file_asks_which_torch_it_runs_with() -> None:
    found = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(map(asks_for_a_version, ast.walk(ast.parse(path.read_text()))))
    }
    assert found == {"handles/torch_versions.py"}
