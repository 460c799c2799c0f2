"""What `import gradwire` offers: every method at the top, and nothing imported until it is used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import gradwire
from gradwire import codecs
from gradwire.aggregators import registry


@pytest.mark.parametrize("name", gradwire.__all__)
def test_every_listed_name_is_there(name: str) -> None:
    assert getattr(gradwire, name) is not None
    assert name in dir(gradwire)


def test_every_method_is_at_the_top() -> None:
    made = {made for made, _ in codecs.REGISTRY.values()} | set(registry.REGISTRY.values())
    for method in made:
        assert method.__name__ in gradwire.__all__
        assert getattr(gradwire, method.__name__) is method


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'nothing'"):
        _ = gradwire.nothing


def test_subpackages_are_there_without_an_import_of_their_own() -> None:
    code = "import gradwire; print(gradwire.codecs.get('qsgd').bits, hasattr(gradwire, 'nothing'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "4 False\n"


def test_importing_it_imports_nothing_else_and_is_silent() -> None:
    code = (
        "import sys, gradwire\n"
        "print(*(m for m in sys.modules if m.split('.')[0] in ('gradwire', 'torch', 'numpy')))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-W", "error", "-c", code],
        env={"PYTHONPATH": str(next(iter(gradwire.__path__)) + "/..")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["gradwire"], "")
