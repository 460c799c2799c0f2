"""gradwire without the packages of trainers."""

from __future__ import annotations

import sys

import pytest

import gradwire as gw

TRAINERS = {
    "lightning": ["lightning", "lightning.pytorch", "pytorch_lightning"],
    "accelerate": ["accelerate"],
    "keras": ["keras"],
    "ray": ["ray", "ray.train"],
    "transformers": ["transformers"],
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"gradwire.integrations.trainers.{name}", raising=False)
    for package in TRAINERS[name]:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf'pip install "gradwire\[{name}\]"'):
        getattr(gw, name)


def test_no_name_of_the_package_needs_them() -> None:
    assert not set(TRAINERS) & {*gw.__all__, *dir(gw)}
