"""Every command that a page for users shows runs, and prints what the page says."""

from __future__ import annotations

import ast
import doctest
import itertools
import re
from functools import cache
from pathlib import Path

import commands
import pytest
from pages import ROOT, Command, Page

PAGES = [
    ROOT / "README.md",
    *(
        path
        for folder in ("", "tutorials", "how-to", "reference")
        for path in sorted((ROOT / "docs" / folder).glob("*.md"))
    ),
]
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

# How commands begin that no small value makes fit for this test: the test that runs them, and why.
# The first that fits counts.
ELSEWHERE = {
    "pip install": (
        "tests/packaging/test_wheel.py::test_a_wheel_has_no_kernels_unless_asked",
        "it changes the environment; the test builds what it installs",
    ),
    'GRADWIRE_BUILD="qsgd:bits=4 shm" pip wheel': (
        "tests/packaging/test_wheel.py::test_a_wheel_names_the_platform_of_its_kernels",
        "it needs a package index",
    ),
    "make wheel": (
        "tests/packaging/test_wheel.py::test_make_wheel_asks_for_all_kernels",
        "all kernels take minutes",
    ),
    "make demo": (
        "tests_tools/docs/test_commands.py::test_commands_run",
        "it installs, and runs gradwire demo: that runs here",
    ),
    "make docs": (
        "tests_tools/docs/test_site.py::test_the_site_builds_without_warnings",
        "it installs Sphinx",
    ),
    "make gpu-check": (
        "tests/gpu/test_gpu.py::test_the_script_finds_nothing_wrong_on_the_cpu",
        "it needs a GPU",
    ),
    "make test-trainers": (
        "tests_tools/docs/test_docs.py::test_blocks_run_without_other_pages",
        "its packages take minutes to import",
    ),
    "make test": ("tests/test_suite.py::test_what_passes_alone_is_flaky_and_what_fails_again_fails",
                  "this test is part of it"),
    "pytest tests/golden --update-golden": (
        "tests/golden/test_golden.py::test_payloads",
        "it changes the repository",
    ),
    "python digits.py": (
        "tests_tools/docs/test_docs.py::test_blocks_run_without_other_pages",
        "Lightning takes minutes to import",
    ),
    "torchrun --nproc-per-node 8 examples/torchtitan_trainer.py": (
        "tests/trainers/test_torchtitan.py::test_checkpoints_of_torchtitan_have_all_ranks",
        "torchtitan is not installed by make test",
    ),
    "gradwire --install-completion": (
        "tests_tools/cli/test_program.py::test_version_and_completion",
        "it changes the files of the user's shell",
    ),
    "gradwire bench kernels --device cuda": (
        "tests_tools/bench/test_micro.py::test_events_time_a_gpu",
        "it needs a GPU",
    ),
    "GRADWIRE_CC=aarch64-linux-gnu-gcc": (
        "tests/lang/test_neon.py::test_neon_gives_the_same_bytes",
        "it needs a cross compiler",
    ),
}  # fmt: skip


def elsewhere(command: Command) -> str | None:
    """How a command begins that another test runs."""
    return next((start for start in ELSEWHERE if command.text.startswith(start)), None)


@cache
def to_run() -> dict[Path, list[Command]]:
    """The commands of each page that run here: but for those that a page before shows, or this one
    with other networks or numbers of machines, unless the page shows what it prints."""
    found: dict[Path, list[Command]] = {}
    known: set[tuple[str, ...]] = set()
    for path in PAGES:
        found[path] = []
        for command in Page.read(path).commands:
            if elsewhere(command) is None:
                words = commands.made_small(command)
                alike = ("" if before in ("--nodes", "--net") and word != "none" else word
                         for before, word in itertools.pairwise(["", *words]))  # fmt: skip
                key = tuple(sorted(alike))
                if command.output is not None or key not in known:
                    found[path].append(command)
                known.add(key)
    return found


def wrong(ran: commands.Ran, command: Command) -> str | None:
    """What is wrong with a command that has run."""
    expected = None if command.output is None else "".join(command.output)
    told = re.search(r"^[\w.]+Error: ", expected or "", re.MULTILINE) is not None
    if (ran.code != 0) is not told:
        return f"it ends with code {ran.code}:\n{ran.out[-2000:]}"
    # torch 2.9 says the first; others warn where a name is not looked up in time; kernels are
    # compiled where the machine is new.
    said = r"^(?:\[(?:Gloo\]|W\d+ )|gradwire: compiling kernels ).*\n"
    out = re.sub(said, "", ran.out, flags=re.MULTILINE)
    if expected is not None and not doctest.OutputChecker().check_output(expected, out, LIKE):
        return f"it prints\n{out}--- but the page says\n{expected}"
    return None


def faults(page: Page, chosen: list[Command], folder: Path, whole: bool) -> list[str]:
    """What is wrong with these commands of a page, run in an empty folder; and, if programs train
    for all of their steps, with a block that has no language and no command: it is printed."""
    found, printed = [], ""
    with commands.run_here(folder):
        where = commands.Folder(folder, page, whole)
        for command in chosen:
            try:
                ran = where.run(command)
            except Exception as error:
                ran = commands.Ran(1, f"{type(error).__name__}: {error}")
            printed += ran.out
            if said := wrong(ran, command):
                found.append(f"{page.path}:{command.line}: `{command.text}`: {said}")
    lines = {line.strip() for line in printed.splitlines()}
    shown = {command.line for command in page.commands}
    for block in page.blocks if whole else ():
        texts = block.text.splitlines()
        if not block.kind and shown.isdisjoint(range(block.line, block.line + len(texts))):
            missing = [text for text in map(str.strip, texts) if text not in lines]
            found += [f"{page.path}:{block.line}: not printed: {text}" for text in missing]
    return found


@pytest.mark.multiprocess
@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_run(path: Path, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if chosen := to_run()[path]:
        whole = pytestconfig.getoption("exhaustive") or any(c.output is not None for c in chosen)
        assert faults(Page.read(path), chosen, tmp_path, whole) == []


def test_what_runs_elsewhere_is_shown_and_is_run() -> None:
    shown = {elsewhere(command) for path in PAGES for command in Page.read(path).commands}
    assert shown - {None} == ELSEWHERE.keys()
    for test, _ in ELSEWHERE.values():
        file, _, name = test.partition("::")
        tree = ast.parse((ROOT / file).read_text("utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


def test_a_command_that_fails_is_told_with_page_and_line(tmp_path: Path) -> None:
    for at, (text, line, says) in enumerate(
        (
            ("Text\nand `gradwire codec show nothing`.", 2, "ends with code 2"),
            ("```\n\ngradwire report FILE\n```", 3, "ends with code 2"),
            (
                "```console\n$ gradwire --version\ngradwire 99\n```",
                2,
                "but the page says\ngradwire 99",
            ),
            ("```console\n$ gradwire --version\nAnError: it fails\n```", 2, "ends with code 0"),
            ("`gradwire --version`\n\n```\n99\n```", 4, "not printed: 99"),
            ("`make everything`", 1, "no rule says how make runs"),
        )
    ):
        page, folder = Page(Path("page.md"), text), tmp_path / str(at)
        folder.mkdir()
        (said,) = faults(page, page.commands, folder, whole=True)
        assert said.startswith(f"page.md:{line}: ")
        assert says in said
