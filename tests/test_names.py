"""What `import gradwire` offers: every method at the top, and nothing imported until it is used."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

import gradwire
from gradwire import aggregators, codecs
from gradwire.aggregators import registry
from gradwire.lang import Codec, ops
from rooms.handles import handle as handles


def test_names_are_few_and_there_and_methods_are_where_errors_say() -> None:
    listed, offered = set(gradwire.__all__), set(dir(gradwire))
    absent = {name for name in listed if getattr(gradwire, name, None) is None}
    assert not absent
    assert listed <= offered
    assert len(offered) <= 35
    made = {made for made, _ in codecs.REGISTRY.values()} | set(registry.REGISTRY.values())
    for method in made:
        name, within = method.__name__, codecs if issubclass(method, Codec) else aggregators
        assert getattr(within, name) is method
        if name in offered:
            assert getattr(gradwire, name) is method
        else:
            with pytest.raises(gradwire.ConfigError, match=rf"write gw\.\w+\.{name}"):
                getattr(gradwire, name)


def test_a_star_imports_codecs_and_operators_alone() -> None:
    found: dict[str, dict[str, object]] = {"codecs": {}, "lang.ops": {}}
    for module, names in found.items():
        exec(f"from gradwire.{module} import *", names)
        del names["__builtins__"]
    classes = {made.__name__ for made, _ in codecs.REGISTRY.values()}
    others = {"REGISTRY", "Codec", "get", "listing", "name_of", "options"}
    assert {*found["codecs"]} == classes | others
    rooms = {f"gradwire.lang.{name}" for name in ("ops", "matrices", "selections")}
    operators = {n for n, f in vars(ops).items() if getattr(f, "__module__", "") in rooms}
    assert {*found["lang.ops"]} == {n for n in operators if not n.startswith("_")}


def test_what_has_gone_says_what_to_write() -> None:
    gone = {
        "AdaComp", "Cast", "DGC", "ErrorFeedback", "Float8", "GlobalTopK", "GradDrop",
        "HardThreshold", "Identity", "LGreco", "LearnedLevels", "LowRank", "MSTopK", "OneBit",
        "Probe", "Radial", "RandomK", "RandomShift", "Rotated", "Saturating", "TBQ", "TernGrad",
        "ThreeLC", "SparseLoCo", "Triggers", "load_state_dict", "state_dict",
    }  # fmt: skip
    for name in gone:
        with pytest.raises(
            gradwire.ConfigError, match=f"gw.{name} is elsewhere now: write "
        ) as found:
            exec(f"from gradwire import {name}")
        exec(str(found.value).split("write ")[1], {"gw": gradwire})


def test_a_handle_says_what_to_write() -> None:
    handle = gradwire.attach(torch.nn.Linear(2, 2))
    assert len([name for name in dir(handle) if not name.startswith("_")]) <= 17
    for name, write in handles.RENAMED.items():
        with pytest.raises(
            gradwire.ConfigError, match=re.escape(f"handle.{name} is no more: write {write}")
        ):
            getattr(handle, name)
        if "path" not in write:
            exec(write, {"handle": handle})
    assert not hasattr(handle, "nothing")


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'nothing'"):
        _ = gradwire.nothing


def test_subpackages_are_there_without_an_import_of_their_own() -> None:
    """Although torch, which they import, loads a part of gradwire as its plug-in."""
    code = (
        "import gradwire; print(gradwire.codecs.get('qsgd').bits, hasattr(gradwire, 'nothing'))\n"
        "import torch; print('gradwire' in torch.distributed.Backend.backend_list)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4 False\nTrue\n"
