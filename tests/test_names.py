"""What `import gradwire` offers: every method at the top, and nothing imported until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradwire
from gradwire import codecs
from gradwire.aggregators import registry


def test_every_listed_name_is_there_and_every_method_is_listed() -> None:
    listed, offered = set(gradwire.__all__), set(dir(gradwire))
    absent = {name for name in listed if getattr(gradwire, name, None) is None}
    assert not absent
    assert listed <= offered
    made = {made for made, _ in codecs.REGISTRY.values()} | set(registry.REGISTRY.values())
    assert {method.__name__ for method in made} <= listed
    assert all(getattr(gradwire, method.__name__) is method for method in made)


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
