"""Run the commands of pages, as their readers would, but small.

A command of gradwire runs in this process, one of Python in a forked one (`forked.py`), and so does
each rank: those of torchrun, whose own parser reads its options, and those of emulated machines,
which are on loopback here. Every option that a page shows is given. Sizes are made small by rules
that know no command: by option, and by constant of a module.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from pages import ROOT, Command, Page
from torch.distributed.run import parse_args

import command_line
import forked
from gradwire.lang.native import isa
from gradwire.planner import Rules, kernel_costs, links, make_plan
from gradwire_tools import demo, lab
from gradwire_tools.bench import tasks, workers
from gradwire_tools.bench.network import probe, world
from gradwire_tools.cli.program import app

# Of commands: what ends in a second or two as it is.
AS_SHOWN = (
    "codec list", "codec show", "codec cache", "lab run", "plan show", "plan diff", "report",
)  # fmt: skip
TINY = {"layers": 1, "width": 32, "heads": 2, "context": 16, "validation_sequences": 4}  # a GPT
# Of options: values in place of those that are shown ...
SMALL = {
    "--ranks": "2", "--nodes": "2", "--numel": "4096", "--steps": "2", "--seeds": "0",
    "--per-node": "1", "--replicas": "2",
    "--model": "64x32,32", "--compute": "0.001", "--target-at": "1",
    "--isa": (isa.supported() or isa.LEVELS)[0].name,
}  # fmt: skip
# ... and those that are given where the page shows none, to commands that have a default.
GIVEN = {
    **{name: [SMALL[name]] for name in ("--ranks", "--numel", "--steps", "--model", "--isa")},
    "--quick": [None], "--turns": ["1"], "--seconds": ["0.1"], "--bytes": ["16384"],
    "--nets": ["none"], "--models": ["none"], "--codec": ["fp16"], "--output": ["new"],
    "--task-option": [f"{name}={value}" for name, value in TINY.items()],
}  # fmt: skip
NEVER_ADDED = ("--ranks", "--model")  # where they have no default: they ask for something else
# Options of which a command takes one; of two that it has, the last is given.
EITHER = (
    *(("--model", "--numel"), ("--methods", "--codec"), ("--nets", "--net")),
    ("--codec", "--sharded"),
)
# What stands for a value; and what the name of a command in a text leaves out.
WORDS = {"COMMAND": "doctor", "CMD": "python train.py", "NAME": "qsgd", "DIR": "made"}
WORDS |= {"HOST": "127.0.0.1", "HOST:29500": "127.0.0.1:29500"}
LEFT_OUT = {"codec show": ["qsgd"], "lab run": ["--", "python", "train.py"]}

MOST_SECONDS = 90.0  # of ranks; else they hang
FEW_STEPS = "for step in range(3)"  # of programs

# Of modules: constants that no option sets, in this process and in ranks.
FEW = {"c": (1, 1), "eager": (1, 1)}
CONSTANTS: dict[str, dict[str, Any]] = {
    "gradwire.planner.kernel_costs": {
        "VALUES": (1 << 8, 1 << 10), "PAYLOADS": (1, 3), "_ARRAY": 1 << 14, "_TURNS": 1
    },
    "gradwire_tools.bench.micro.curves": {
        "_SIDES": (8, 16), "_VALUES": 1 << 10, "_ROUNDS": 10, "_STREAM": 2, "_TURNS": 1
    },
    "gradwire_tools.bench.interleaved": {"TURNS": FEW, "QUICK_TURNS": FEW},
    "gradwire_tools.bench.network.probe": {"_SEND_BYTES": (1 << 10, 1 << 12)},
    "gradwire_tools.bench.network.surroundings": {"_SECONDS": 0.1},
    "gradwire_tools.bench.network.transports": {"_STREAM_BYTES": 1 << 18, "_TURN_S": 0.001},
    "gradwire_tools.bench.micro.kernels": {"COLD": 1 << 20},
    "gradwire_tools.bench.micro.aggregators": {"_COLD": 1 << 20, "_QUICK_RANKS": (2,)},
    "gradwire_tools.bench.paper.planner_grid": {"TURNS": 1, "FINALISTS": 1, "_LARGE": 1 << 15},
    "gradwire_tools.predict.planning": {"measure_links": partial(links.measure_links, seconds=0.1)},
    "gradwire_tools.demo": {
        "_CONFIG": replace(
            demo._CONFIG, nodes=2, steps=4, evaluate_every=2, task_options=TINY
        )
    },
    "gradwire_tools.bench.tasks": {"get": partial(tasks.get, **TINY)},
}  # fmt: skip


def constants() -> Iterator[tuple[Any, str, Any]]:
    """Of modules: the names of what is made small, with their values."""
    for name, values in CONSTANTS.items():
        module = importlib.import_module(name)
        yield from ((module, *pair) for pair in values.items())
    for module in (kernel_costs, probe):  # what is measured is not kept in the user's cache
        yield module, "cache", SimpleNamespace(folder=lambda: Path.cwd().parent)


def make_small() -> None:
    """Of this process: for good."""
    for module, name, value in constants():
        setattr(module, name, value)
    sys.path.append(str(ROOT / "examples"))


@dataclass(frozen=True)
class Ran:
    """A command that has run: its exit code, and what it printed."""

    code: int
    out: str


class Folder:
    """Where the commands of a page run, one after the other, with the files that they read: results
    and examples of the repository, plans of a small model, and the page's own programs.

    Args:
        whole: programs train for all of their steps, else for three.
    """

    def __init__(self, path: Path, page: Page, whole: bool) -> None:
        self.path, self.page, self.whole = path, page, whole
        (path / "bench").symlink_to(ROOT / "bench")
        (path / "examples").mkdir()
        for example in (ROOT / "examples").glob("*.py"):
            self._write(f"examples/{example.name}", example.read_text("utf-8"))
        (path / "rows.jsonl").symlink_to(ROOT / "bench" / "results" / "train-gpt.jsonl")
        named = [*torch.nn.Linear(64, 32).named_parameters()]
        for name in ("a.json", "plan.json", "shapes.json", "FILE"):
            make_plan(iter(named), Rules(), 2).save(path / name)
        make_plan(iter(named), Rules().changed(codec="bf16"), 2).save(path / "b.json")

    def run(self, command: Command) -> Ran:
        """Run a command of the page, whose blocks before it are files now."""
        for block in self.page.blocks:
            if block.kind == "python" and block.line < command.line:
                for word in block.words:
                    if word.endswith(".py"):
                        self._write(word, block.text)
        first, *words = made_small(command)
        for word in words:
            if word.endswith(".py") and not (self.path / word).exists():
                self._write(word, program(self.page, command.line))
        if first == "gradwire":
            with mock.patch.dict(os.environ):
                if words[:2] == ["codec", "cache"]:  # what it clears is not the user's
                    os.environ["GRADWIRE_CACHE"] = str(self.path / "cache")
                ran = command_line.run(*words)
            return Ran(ran.code, ran.out + ran.err)
        if first == "torchrun":
            options, argv = launched(words)
            count = int(options.nnodes.split(":")[-1]) * int(options.nproc_per_node)
            return self._ranks(argv, min(count, 3))
        assert first == "python", f"no rule says how {first} runs"
        return self._ranks(words, 1, alone=True)

    def _write(self, name: str, text: str) -> None:
        short = text if self.whole else re.sub(r"for step in range\(\d+\)", FEW_STEPS, text)
        (self.path / name).write_text(short, "utf-8")

    def _ranks(self, argv: list[str], count: int, alone: bool = False) -> Ran:
        file = self.path / "printed"
        with file.open("wb") as out, forked.Loopback(count) as machines:
            for rank, variables in enumerate(machines.torchrun_env()):
                environment = {**os.environ, **({} if alone else variables)}
                machines.spawn(rank, ["python", *argv], environment, self.path, out, out)
            until = time.monotonic() + MOST_SECONDS
            for rank in machines.ranks:
                rank.ended.wait(max(0.0, until - time.monotonic()))
            codes = [rank.poll() for rank in machines.ranks]
        code = 124 if None in codes else max(abs(code or 0) for code in codes)
        return Ran(code, file.read_text("utf-8"))


@contextmanager
def run_here(folder: Path) -> Iterator[None]:
    """Within, commands run in this process, in this folder, and are small."""
    loopback = lambda nodes, net=None, latency_by=None: forked.Loopback(nodes)  # noqa: E731
    with ExitStack() as stack:
        for holder, name, value in (
            (workers, "lab", SimpleNamespace(Lab=loopback)),
            (importlib.import_module("gradwire_tools.lab.run"), "Lab", loopback),
            (world, "available", lambda: None),
            (lab, "available", lambda: None),
            (forked, "prepare", make_small),
            (sys, "path", [*sys.path]),
            *((module, name, getattr(module, name)) for module, name, _ in constants()),
        ):
            stack.enter_context(mock.patch.object(holder, name, value))
        before = Path.cwd()
        stack.callback(os.chdir, before)
        os.chdir(folder)
        make_small()
        yield


def program(page: Page, line: int) -> str:
    """The page's Python before a line, from where a program begins; the quickstart's, if none."""
    text = ""
    for block in page.blocks:
        if block.kind == "python" and block.line < line:
            text = block.text if "new" in block.words else text + block.text
    return text or program(Page.read(ROOT / "docs" / "quickstart.md"), 10**6)


def made_small(command: Command) -> list[str]:
    """The words with which a command runs."""
    first, *words = (part for word in command.words for part in WORDS.get(word, word).split())
    if first == "gradwire":
        words = small(words)
    elif first == "torchrun" and (argv := launched(words)[1])[0] == "-m":
        words = [*words[: len(words) - len(argv) + 2], *small(argv[2:], joins=True)]
    return [first, *words]


def launched(words: list[str]) -> tuple[Any, list[str]]:
    """The options of torchrun, and the arguments of `python` on each of its ranks."""
    given = parse_args(words)
    program = [given.training_script, *given.training_script_args]
    if given.no_python:
        assert program[0] == "gradwire", program
    return given, ["-m", *program] if given.no_python or given.module else program


def small(words: list[str], joins: bool = False) -> list[str]:
    """The words of a command of gradwire, with what makes it end in seconds.

    Args:
        joins: torchrun has started its ranks.
    """
    command, path = _command_of(words)
    if words == path.split():
        words = [*words, *LEFT_OUT.get(path, [])]
    has = {name: p.default for p in command.params for name in p.opts if name.startswith("--")}
    shown = {word for word in words if word in has}
    listing = path == "doctor" and "--ranks" not in shown and not joins  # what there is
    if path in ("", *AS_SHOWN) or listing:
        return words
    found = [SMALL.get(before, word) for before, word in itertools.pairwise(["", *words])]
    for name, values in GIVEN.items():
        others = {one for pair in EITHER if name in pair for one in pair if one != name}
        later = {pair[1] for pair in EITHER if name == pair[0]}
        asks = name in NEVER_ADDED and (joins or has.get(name) is None)
        if name not in has or name in shown or others & shown or later & has.keys() or asks:
            continue
        if name == "--output":
            values = [f"new {path}"]
        found += [part for value in values for part in (name, value) if part is not None]
    return found


def _command_of(words: list[str]) -> tuple[Any, str]:
    """The command that words name, and its name."""
    found: Any = command_line.built(app)
    path: list[str] = []
    for word in words:
        if word not in getattr(found, "commands", ()):
            break
        found = found.commands[word]
        path.append(word)
    return found, " ".join(path)
