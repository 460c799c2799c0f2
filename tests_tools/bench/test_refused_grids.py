"""What the commands of recordings and of the papers' grids refuse, each with its complaint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import refused, refused_by_command

from gradwire_tools.bench.adapt import record
from gradwire_tools.bench.adapt.recording import Recording
from gradwire_tools.bench.paper import ablation, adapt, error, planner_grid

CONFIGURATIONS: list[tuple[dict[str, Any], str]] = [
    ({"policies": ("x",)}, "unknown policy 'x'"),
    ({"policies": ("accordion:eta=0.2",)}, "its levels are given: write accordion"),
    ({"references": ("fp16",)}, "reference 'fp16': use one of qsgd, topk, powersgd"),
    ({"references": ("qsgd:scale=l2",)}, "qsgd has no option 'scale': use one of bits"),
    ({"references": ("qsgd:bits=9",)}, "reference 'qsgd:bits=9': Bits: choices"),
    ({"references": ("powersgd:rank=a",)}, "reference 'powersgd:rank=a'"),
    ({"references": ("qsgd",), "families": ("mixed",)}, "have none"),
    ({"families": ("x",)}, "--families x: use one of bits, topk, rank, mixed"),
    ({"models": ("x",)}, "neither a model nor a size"),
    ({"sigmas": (-1.0,)}, "--sigmas -1.0"),
    ({"alpha": 0.0}, "--alpha 0.0"),
    ({"seed": -1}, "--seed -1"),
    ({"metrics": ("x",)}, "metric='x'"),
    ({"blocks": (0,)}, "block"),
]
RECORDINGS: list[tuple[dict[str, Any], str]] = [
    ({"task": "poem"}, "unknown task 'poem'"),
    ({"at": ()}, "--at"),
    ({"at": (-1,)}, "--at -1"),
    ({"at": (0, 1)}, "the point after 0 is 2 or later, not 1"),
    ({"at": (3, 0)}, "not 0"),
    ({"steps": 0}, "--steps 0"),
    ({"ranks": 0}, "--ranks 0"),
    ({"ranks": 1 << 40}, "--ranks"),
    ({"steps": 1 << 40, "at": (0,)}, "do not fit"),
    ({"seed": -1}, "--seed -1"),
    ({"seed": 2**63}, r"seeds are below 2\^63"),
]
METHODS = [
    ("no-such-thing", "unknown codec or aggregator"),
    ("torch-powersgd", "unknown codec or aggregator"),
    ("qsgd:bits=99", "bits"),
    ("qsgd:bitten=4", "bitten"),
    ("qsgd:algorithm=pigeon", "pigeon"),
    ("qsgd:error_feedback=2", "error_feedback"),
    ("topk:density=0", "density"),
]


def test_configurations_of_adapt() -> None:
    refused(lambda given: adapt.Config(**given), CONFIGURATIONS)


def test_bad_arguments_of_record_leave_no_folder(tmp_path: Path) -> None:
    def make(arguments: dict[str, Any]) -> None:
        given = {"task": "gpt", "at": (0, 3), "steps": 2, "ranks": 2, **arguments}
        small = {"layers": 1, "width": 16, "heads": 2} if given["task"] == "gpt" else None
        list(record.run(tmp_path / "made", task_options=small, **given))

    refused(make, RECORDINGS)
    assert not (tmp_path / "made").exists()


def test_methods_points_and_folders(
    recorded: tuple[Path, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, alone = recorded[0], tmp_path / "alone"
    alone.mkdir()
    made = Recording(alone, "gpt", {}, 0, 1, (0,), 1, (("a", (40, 30)),), {})
    made.save(0, 0, [torch.ones(made.numel)])
    made.write()
    named = [(text, f"(?=.*method {text!r}).*{told}") for text, told in METHODS]
    refused(
        lambda given: list(error.run(*given)),
        [
            *((([folder], ["qsgd", text]), told) for text, told in named),
            (([folder], None, None, [7]), r"--at 7: .* has the points 0, 3"),
            ((), "gradwire bench record"),
            (([tmp_path / "nowhere"],), "gradwire bench record"),
            (([alone],), "1 rank"),
        ],
    )

    def copied(made: Path, **_: object) -> list[None]:
        shutil.copytree(folder, made, dirs_exist_ok=True)
        return []

    monkeypatch.setattr(record, "run", copied)
    one = adapt.Config(at=(1,))
    refused(
        lambda given: list(adapt.run(*given)),
        [
            (([folder], one), rf"^--at 1: {folder} has the points 0, 3"),
            (((), one, True), r"^--at 1: the quick recording has the points \d"),
        ],
    )


def test_grids() -> None:
    refused(
        lambda given: list(planner_grid.run(**given)),
        [({"nets": ["none"], "sizes": [3]}, "bytes of fp32"), ({"ranks": 1}, "one rank")],
    )
    refused(
        lambda given: list(ablation.run(**given, lab=False)),
        [
            ({"compute": 0.0}, "seconds above 0"),
            ({"turns": 0}, "--turns 0: give 1 to 1000"),
        ],
    )
    refused_by_command(
        ["bench", "grid", "--net", "none"],
        [
            (["--grid", "bytes"], "--grid bytes: use one of bits, low, learned, blocks, fake"),
            (["--nodes", "1"], "one node sends nothing"),
            (["--steps", "0"], "train 1 step or more"),
            (["--seeds", ""], "--seeds is empty"),
            (["--task-option", "layers"], "write NAME=VALUE"),
            (["--resume"], "give its --json FILE"),
        ],
    )
