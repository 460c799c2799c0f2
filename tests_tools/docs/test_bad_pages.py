"""Each rule of the docs check finds what it is for, on a page that breaks it."""

from __future__ import annotations

import itertools
import operator
import os
import sys
from pathlib import Path
from unittest import mock

import blocks
import pytest
import rules
from pages import Page

GOOD = """\
# A page

After this page you can do it. [Here](#here), [there](other.md#there-too), ![it](picture.svg).

## Here

It takes 3.5 ms (`gradwire bench kernels --codec qsgd`), or 2x with `make test`, of 1 GB/s.

| any | other |
| --- | --- |
| `gradwire codec show NAME --ir \\| --c` | `gradwire sim --ranks 4 --net 10gbit,50us` |

```
$ gradwire lab run --nodes 2 -- python train.py --any   # a remark
GRADWIRE_CC=gcc gradwire doctor
gradwire codec list --json - | head -1
gradwire COMMAND --help
pip install "gradwire[cli,report]"
torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nnodes 1 examples/ddp.py
torchrun --nnodes 2 --node-rank 0 --master-addr HOST train.py
```
"""
INCLUDED = "```{{literalinclude}} {}.py\n:start-at: {}\n:end-at: {}\n```\n"
# rule, page, what each complaint says
PAGES = [
    *((rule, GOOD, []) for rule in (rules.links, rules.commands, rules.beginning)),
    (rules.figures_without_command, GOOD, []),
    (rules.links, "[x](gone.md)", ["no such file"]),
    (rules.links, "![x](gone.svg)", ["no such file"]),
    (rules.links, "[x](#gone)", ["no such heading"]),
    (rules.links, "# Page\n\n[x](page.md#pages)", ["no such heading"]),
    (rules.links, "```\n# Gone\n```\n\n[x](#gone)", ["no such heading"]),
    (rules.includes, INCLUDED.format("code", "one", "two"), []),
    (rules.includes, INCLUDED.format("code", "two", "one"), ["has no 'one'"]),
    (rules.includes, INCLUDED.format("code", "one", "six"), ["has no 'six'"]),
    (rules.includes, INCLUDED.format("gone", "one", "two"), ["has no 'one'", "has no 'two'"]),
    (rules.paths, '"""docs/how-to/ddp.md and docs/nowhere.md."""\n', ["docs/nowhere.md"]),
    (rules.commands, "```\ngradwire bench kernels \\\n    --nothing\n```\n", ["--nothing"]),
    (rules.commands, "and `gradwire bench\nkernels --no`", ["--no"]),
    # A command in another section does not count, nor does a file that is not there.
    (rules.figures_without_command, "# One\n`make test`\n## Two\nIt takes 3 ms (`src/no.py`).",
     ["3 ms"]),
    (rules.beginning, "# A page\n\nText.", ["does not say"]),
]  # fmt: skip
COMMANDS = [
    ("gradwire nothing --quick", "no command"),
    ("gradwire bench kernels --nothing", "--nothing"),
    ("gradwire bench kernels qsgd", "no such argument"),
    ("gradwire codec show qsgd --ir | --cc", "--cc"),
    ("gradwire bench collectives --ranks", "requires an argument"),
    ("GRADWIRE_CC=gcc gradwire codec list --nothing", "--nothing"),
    ("python -m gradwire_tools.cli doctor --nothing", "--nothing"),
    ("make nothing", "no target"),
    ('pip install "gradwire[cli,nothing]"', "no extra nothing"),
    ("pip install gradwire[cli]", 'quote the extra: "gradwire[cli]"'),
    ("torchrun --nproc-per-node 2 examples/nothing.py", "no such file"),
    ("torchrun --nnodes 2 --rdzv-endpoint HOST:29500 train.py", "it hangs"),
    ("torchrun --nnodes=2 --master-addr HOST train.py", "it hangs"),
]
FORMS = ("`{}`", "```\n$ {}\n```", "```bash\n{}  # a remark\n```")


def test_each_rule_finds_what_it_is_for(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## There, `too`\n", "utf-8")
    (tmp_path / "picture.svg").touch()
    (tmp_path / "code.py").write_text("one\ntwo\n", "utf-8")
    file, faults = tmp_path / "page.md", []
    bad = [(rules.commands, form.format(c), [says]) for c, says in COMMANDS for form in FORMS]
    for rule, text, expected in (*PAGES, *bad):
        file.write_text(text, "utf-8")
        found = list(rule(Page.read(file)))
        if len(found) != len(expected) or not all(map(operator.contains, found, expected)):
            faults.append(f"{text!r}: {found}")
    assert faults == []


def test_what_is_a_figure() -> None:
    for text, found in (
        ("takes 0.18 to 0.19 s", ["0.18 to 0.19 s"]),
        ("| 5.7 ms | 3 % |\n| --- | --- |", ["5.7 ms", "3 %"]),
        ("1.2 times as fast, 2x, 20 GB/s", ["1.2 times", "2x", "20 GB/s"]),
        ("a network of 1gbit,1ms and 10 Gbit/s", []),
        ("`3 ms` of 4 ranks, 25 M values, 4 x 32, version 2.13, CGX 4.2", []),
        ("```\n3 ms\n```", []),
    ):
        assert Page(Path(), text).figures == found


def test_blocks_that_fail_are_told_with_page_and_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, as rank 0."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [""])
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text, line, says in (
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```", 6, "AssertionError"),
        ("```python\nx = 1\n```\n\n```python new\nprint(x)\n```", 6, "NameError"),
        ("```python fails=ValueError\nx = 1\n```", 2, "does not raise"),
        ("```python x.py\nimport gone\n```", 2, "ModuleNotFoundError"),
    ):
        given = Page(Path("page.md"), text).blocks
        told = pytest.raises(AssertionError, match=rf"page\.md:{line}: the block .*{says}")
        with told, mock.patch.dict(os.environ):
            blocks._page(0, "page.md", tmp_path, given, itertools.repeat(0), None)
