"""Who reads only the README can attach to DDP and FSDP2 models, and save and load a checkpoint.

Its blocks run on two ranks, as test_docs.py runs those of other pages; here is also looked at what
they did.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from typing import Any

import blocks
import pytest
import torch
from pages import ROOT, Page

README = Page.read(ROOT / "README.md")
CODE = {
    section.title: "".join(block.text for block in section.blocks) for section in README.sections
}
PROGRAMS = ["ddp", "fsdp2"]


CALLS = {
    "Attach to a DDP model": ["import gradwire as gw", "DistributedDataParallel(", "attach("],
    "Attach to an FSDP2 model": ["import gradwire as gw", "fully_shard(", "attach("],
    "Save and load a checkpoint": ["full_state_dict(", "torch.save(", "load_state_dict("],
}


def test_the_readme_shows_how_to() -> None:
    missing = [(title, call) for title, calls in CALLS.items() for call in calls
               if call not in CODE[title]]  # fmt: skip
    assert missing == []


def test_the_options_it_names_fit_its_model() -> None:
    named = ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert (
        "Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 64))"
        in (CODE["Attach to a DDP model"])
    )
    given = re.findall(r'(?:exclude=\[|codecs=\{)"([^"]+)"', README.path.read_text("utf-8"))
    assert len(given) == 2
    assert [pattern for pattern in given if not fnmatch.filter(named, pattern)] == []


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


@pytest.mark.multiprocess
def test_its_programs_train_and_load_their_checkpoints() -> None:
    (ranks,) = blocks.run([README], what_was_done)
    for programs in ranks:
        for name, found in zip(PROGRAMS, programs, strict=True):
            assert found["sharded"] == (name == "fsdp2")
            assert found["steps"] == 10
            assert found["ratio"] > 4
            assert torch.tensor(found["loss"]).isfinite()
            assert found["saved"] == ["gradwire", "model", "optimizer"]
            assert not found["wrong"], "of these the rank has not its own shards of what was saved"
    first, second = (programs[0]["weights"] for programs in ranks)
    assert first == second, "replicas differ after the checkpoint is loaded"
