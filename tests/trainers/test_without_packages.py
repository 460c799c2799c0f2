"""gradwire without the packages of trainers."""

from __future__ import annotations

import sys

import pytest
import torch

import gradwire as gw
from rooms.trainers import stand_in

TRAINERS = {
    "lightning": ["lightning", "lightning.pytorch", "pytorch_lightning"],
    "accelerate": ["accelerate"],
    "keras": ["keras"],
    "ray": ["ray", "ray.train"],
    "transformers": ["transformers"],
}


@pytest.mark.parametrize("name", TRAINERS)
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"gradwire.trainers.{name}", raising=False)
    for package in TRAINERS[name]:
        monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    with pytest.raises(ImportError, match=rf'pip install "gradwire\[{name}\]"'):
        getattr(gw, name)


def test_completion_shows_them_and_no_import_of_all_names_needs_them() -> None:
    assert set(TRAINERS) <= {*dir(gw)}
    assert not set(TRAINERS) & {*gw.__all__}


def test_a_stand_in_holds_no_memory_and_has_the_strides_of_a_bucket() -> None:
    like = {"one": ((1, 1), torch.float32), "all": ((30, 20), torch.float32)}
    model = stand_in(like, torch.device("cpu"))
    one, every = (model.get_parameter(name) for name in like)
    assert one.stride() == (1, 1)  # else DDP warns
    assert every.untyped_storage().nbytes() == 4
