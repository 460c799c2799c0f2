"""README and docs are true: what `make docs-check` runs. rules.py and blocks.py say what holds.

Who reads only the README can attach to DDP and FSDP2 models, and save and load a checkpoint.
"""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import blocks
import pytest
import rules
import torch
import yaml
from pages import ROOT, Page

import gradwire
from gradwire_tools.report import pages
from products import EXHAUSTIVE

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
INTERNALS = ROOT / "docs" / "internals"
OTHERS = [ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
FOR_USERS = [*OTHERS, *(path for path in PAGES if INTERNALS not in path.parents)]
SOURCES = [
    path
    for folder in ("src", "tests", "tests_tools", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".c", ".h") and path.parent != Path(__file__).parent
]
RULES = [
    (rules.links, [*OTHERS, *PAGES]),
    (rules.includes, PAGES),
    (rules.paths, [*SOURCES, ROOT / "Makefile", ROOT / "hatch_build.py"]),
    (rules.commands, [*OTHERS, *PAGES]),
    (rules.figures_without_command, FOR_USERS),
    (rules.beginning, PAGES[1:]),
]


@pytest.mark.parametrize(("rule", "files"), RULES, ids=lambda one: getattr(one, "__name__", ""))
def test_a_rule_holds(rule: Callable[[Page], Iterator[str]], files: list[Path]) -> None:
    found = [wrong for path in files for wrong in rule(Page.read(path))]
    assert [wrong.replace(f"{ROOT}/", "") for wrong in found] == []


def test_tables_of_results_are_what_the_rows_say() -> None:
    assert pages.main(["--check"], ROOT) == 0, "run python -m gradwire_tools.report.pages"


def test_the_citation_is_of_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert (cited["version"], cited["license"]) == (gradwire.__version__, "Apache-2.0")


PROGRAMS = [path for path in PAGES[1:] if any(b.kind == "python" for b in Page.read(path).blocks)]


# gloo's mesh may still connect on one rank when the other has it: hence the barrier.
CONTINUED = """
```python helper.py
found = 3
```
```python
import torch.distributed as dist

dist.init_process_group('gloo')
dist.barrier()
```
```python ranks=1
alone = True
```
```python
from helper import found

rank = found * dist.get_rank()
assert (rank, 'alone' in globals()) == ((0, True), (3, False))[dist.get_rank()]
```
```python new
import torch.distributed as dist

assert not {'rank', 'alone'} & globals().keys() and not dist.is_initialized()
```
"""


@pytest.mark.multiprocess
def test_blocks_run() -> None:
    """And a page's blocks continue on two ranks."""
    pages = [Page.read(path) for path in PROGRAMS]
    blocks.run([*pages, Page(Path("page.md"), CONTINUED)], slow=False)


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks_run_without_other_pages(path: Path) -> None:
    blocks.run([Page.read(path)])


README = Page.read(ROOT / "README.md")
CODE = {
    section.title: "".join(block.text for block in section.blocks) for section in README.sections
}


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
        for name, found in zip(["ddp", "fsdp2"], programs, strict=True):
            assert found["sharded"] == (name == "fsdp2")
            assert found["steps"] == 10
            assert found["ratio"] > 4
            assert torch.tensor(found["loss"]).isfinite()
            assert found["saved"] == ["gradwire", "model", "optimizer"]
            assert not found["wrong"], "of these the rank has not its own shards of what was saved"
    first, second = (programs[0]["weights"] for programs in ranks)
    assert first == second, "replicas differ after the checkpoint is loaded"
