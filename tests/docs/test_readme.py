"""Who reads only the README can attach to DDP and FSDP2 models, and save and load a checkpoint.

Its blocks run on two ranks, as test_docs.py runs those of other pages; here is also looked at what
they did.
"""

from __future__ import annotations

import hashlib
from typing import Any

import blocks
import pytest
import torch
from pages import ROOT, Page

README = Page.read(ROOT / "README.md")
CODE = {
    section.title: "".join(block.text for block in Page(README.path, section.text).blocks)
    for section in README.sections
}
PROGRAMS = ["ddp", "fsdp2"]


@pytest.mark.parametrize(
    ("title", "calls"),
    [
        ("Attach to a DDP model", ["import gradwire as gw", "DistributedDataParallel(", "attach("]),
        ("Attach to an FSDP2 model", ["import gradwire as gw", "fully_shard(", "attach("]),
        ("Save and load a checkpoint", ["full_state_dict(", "torch.save(", "load_state_dict("]),
    ],
)
def test_the_readme_shows_how_to(title: str, calls: list[str]) -> None:
    assert [call for call in calls if call not in CODE[title]] == []


def what_was_done(rank: int, names: dict[str, Any]) -> dict[str, Any]:
    """Of one of the README's programs, at its end."""
    parameters = [
        p.to_local() if hasattr(p, "to_local") else p for p in names["model"].parameters()
    ]
    wrong = None
    if "mesh" in names:  # every rank must have its own shards of what was saved
        whole = {name: p.full_tensor() for name, p in names["model"].named_parameters()}
        saved = torch.load("fsdp2.pt")["model"]
        wrong = [name for name in whole if not torch.equal(whole[name], saved[name])]
    bits = b"".join(p.detach().numpy().tobytes() for p in parameters)
    return {
        "sharded": "mesh" in names,
        "weights": hashlib.sha256(bits).hexdigest(),
        "loss": float(names["loss"]),
        "ratio": names["handle"].stats()["ratio"],
        "steps": names["handle"].stats()["steps"],
        "saved": sorted(names["state"]),
        "wrong": wrong,
    }


@pytest.fixture(scope="module")
def done() -> list[dict[str, dict[str, Any]]]:
    """By rank: what each program did."""
    ranks = blocks.run(README, what_was_done)
    return [dict(zip(PROGRAMS, programs, strict=True)) for programs in ranks]


@pytest.mark.multiprocess
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_trains_with_compressed_gradients(done: list[Any], program: str) -> None:
    for programs in done:
        found = programs[program]
        assert found["sharded"] == (program == "fsdp2")
        assert found["steps"] == 10
        assert found["ratio"] > 4
        assert torch.tensor(found["loss"]).isfinite()


@pytest.mark.multiprocess
def test_replicas_agree_after_the_checkpoint_is_loaded(done: list[Any]) -> None:
    first, second = (programs["ddp"] for programs in done)
    assert first["weights"] == second["weights"]
    assert first["saved"] == second["saved"] == ["gradwire", "model", "optimizer"]


@pytest.mark.multiprocess
def test_every_shard_of_the_checkpoint_is_loaded(done: list[Any]) -> None:
    for programs in done:
        assert programs["fsdp2"]["saved"] == ["gradwire", "model", "optimizer"]
        assert programs["fsdp2"]["wrong"] == []
