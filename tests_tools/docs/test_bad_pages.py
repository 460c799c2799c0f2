"""Each rule of the docs check finds what it is for, on a page that breaks it."""

from __future__ import annotations

from pathlib import Path

import blocks
import pytest
import rules
from pages import Page, Section, figures


def page(tmp_path: Path, text: str) -> Page:
    file = tmp_path / "page.md"
    file.write_text(text, "utf-8")
    return Page.read(file)


GOOD = """\
# A page

After this page you can do it. [Here](#here), [there](other.md#there-too), ![it](picture.svg).

## Here

It takes 3.5 ms (`gradwire bench kernels --codec qsgd`), or 2x with `make test`, of 1 GB/s.

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
RULES = [rules.links, rules.commands, rules.figures_without_command, rules.beginning]


def test_a_good_page_passes(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# Other\n\n## There, `too`\n", "utf-8")
    (tmp_path / "picture.svg").touch()
    good = page(tmp_path, GOOD)
    assert [wrong for rule in RULES for wrong in rule(good)] == []


def test_bad_links(tmp_path: Path) -> None:
    for text, says in (
        ("[x](gone.md)", "no such file"),
        ("![x](gone.svg)", "no such file"),
        ("[x](#gone)", "no such heading"),
        ("# Page\n\n[x](page.md#pages)", "no such heading"),
        ("```\n# Gone\n```\n\n[x](#gone)", "no such heading"),
    ):
        (wrong,) = rules.links(page(tmp_path, text))
        assert says in wrong


def test_included_code_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("one\ntwo\n", "utf-8")
    for file, first, last, wrong in (
        ("code.py", "one", "two", []),
        ("code.py", "two", "one", ["'one'"]),
        ("code.py", "one", "six", ["'six'"]),
        ("gone.py", "one", "two", ["'one'", "'two'"]),
    ):
        text = f"```{{literalinclude}} {file}\n:start-at: {first}\n:end-at: {last}\n```\n"
        found = list(rules.includes(page(tmp_path, text)))
        assert [said.split(" has no ")[1] for said in found] == wrong


def test_a_stale_path_in_a_source(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('"""docs/architecture.md and docs/nowhere.md."""\n', "utf-8")
    (wrong,) = rules.paths(source)
    assert "docs/nowhere.md" in wrong


BAD_COMMANDS = [
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


def test_bad_commands(tmp_path: Path) -> None:
    faults = []
    for command, says in BAD_COMMANDS:
        for form in ("`{}`", "```\n$ {}\n```", "```bash\n{}  # a remark\n```"):
            found = list(rules.commands(page(tmp_path, form.format(command))))
            if len(found) != 1 or says not in found[0]:
                faults.append(f"{command} as {form!r}: {found}")
    assert faults == []


def test_a_command_over_two_lines(tmp_path: Path) -> None:
    text = (
        "```\ngradwire bench kernels \\\n    --nothing\n```\n\nand `gradwire bench\nkernels --no`"
    )
    assert len(list(rules.commands(page(tmp_path, text)))) == 2


def test_a_figure_without_a_command(tmp_path: Path) -> None:
    """A command in another section does not count, nor does a file that is not there."""
    text = "# One\n\n`make test`\n\n## Two\n\nIt takes 3 ms (`src/gradwire/nothing.py`).\n"
    (wrong,) = rules.figures_without_command(page(tmp_path, text))
    assert "3 ms" in wrong


def test_what_is_a_figure() -> None:
    for text, found in (
        ("takes 0.18 to 0.19 s", ["0.18 to 0.19 s"]),
        ("| 5.7 ms | 3 % |", ["5.7 ms", "3 %"]),
        ("1.2 times as fast, 2x, 20 GB/s", ["1.2 times", "2x", "20 GB/s"]),
        ("a network of 1gbit,1ms and 10 Gbit/s", []),
        ("`3 ms` of 4 ranks, 25 M values, 4 x 32, version 2.13, CGX 4.2", []),
        ("```\n3 ms\n```", []),
    ):
        assert figures(Section("", 1, text)) == found


def test_a_page_that_does_not_say_what_for(tmp_path: Path) -> None:
    assert len(list(rules.beginning(page(tmp_path, "# A page\n\nText.")))) == 1


@pytest.mark.multiprocess
def test_blocks_continue_on_two_ranks(tmp_path: Path) -> None:
    text = (
        "```python helper.py\nfound = 3\n```\n"
        # gloo's mesh may still connect on one rank when the other has it: hence the barrier
        "```python\nimport torch.distributed as dist\n\n"
        "dist.init_process_group('gloo')\ndist.barrier()\n```\n"
        "```python ranks=1\nalone = True\n```\n"
        "```python\nfrom helper import found\n\nrank = found * dist.get_rank()\n```\n"
        "```python new\nrank = 7\n```\n"
    )
    (said,) = blocks.run([page(tmp_path, text)], names)
    assert said == [[(0, True), (7, False)], [(3, False), (7, False)]]


def names(rank: int, found: dict[str, object]) -> tuple[object, bool]:
    return found["rank"], "alone" in found


@pytest.mark.multiprocess
def test_blocks_that_fail_are_told_with_page_and_line(tmp_path: Path) -> None:
    for text, says in (
        ("```python\nx = 1\n```\n\n```python\nassert x == 2\n```", "AssertionError"),
        ("```python\nx = 1\n```\n\n```python new\nprint(x)\n```", "NameError"),
        ("```python fails=ValueError\nx = 1\n```", "does not raise"),
        ("```python x.py\nimport gone\n```", "ModuleNotFoundError"),
    ):
        with pytest.raises(AssertionError, match=rf"page\.md:\d+: the block .*{says}"):
            blocks.run([page(tmp_path, text)])
