"""Fills the tables of results in README and docs, and draws their figures, from bench/results/.

    python -m gradwire_tools.report.pages           # in a clone: writes the pages and pictures
    python -m gradwire_tools.report.pages --check   # exit code 1 if one is not as the rows say

A table stands between two comments, of which the first has the command that prints it:

    <!-- gradwire report bench/results/train-gpt.jsonl --gains --table -->
    <!-- end of gradwire report -->
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from gradwire_tools.report import page, tables
from gradwire_tools.report.rows import Row, read

# (rows, how the networks and the methods of those that are drawn begin)
PICTURES = {
    "gains-gpt": ("headline-gpt", "", ("",)),
    "gains-image": ("headline-image", "", ("",)),
    "hsdp": ("train-hsdp", "", ("",)),
    "time-to-accuracy": ("headline-gpt", "300mbit", ("torch-fp", "fp16", "qsgd")),
}
_PLACE = re.compile(
    r"(<!-- gradwire report (.*?) --table -->\n).*?(<!-- end of gradwire report -->)", re.DOTALL
)
# How numpy rounds the places in a picture depends on the CPU.
_NUMBER = re.compile(r"(-?\d+\.\d{3,})")


def filled(text: str, root: Path) -> str:
    """A page's text with the tables that the rows give now."""

    def made(place: re.Match[str]) -> str:
        words = place[2].split()
        kinds = [word.removeprefix("--") for word in words if word.startswith("--")]
        files = [root / word for word in words if not word.startswith("--")]
        return f"{place[1]}\n{tables.table(files, kinds)}\n\n{place[3]}"

    return _PLACE.sub(made, text)


def main(arguments: Sequence[str], root: Path) -> int:
    made = {}
    for file in (root / "README.md", *sorted(root.glob("docs/**/*.md"))):
        made[file] = filled(file.read_text("utf-8"), root)
    for name, (results, net, methods) in PICTURES.items():
        rows: list[Row] = read(root / "bench" / "results" / f"{results}.jsonl")
        kept = [r for r in rows if r["net"].startswith(net) and r["method"].startswith(methods)]
        made[root / "docs" / "pictures" / f"{name}.svg"] = page.drawn(kept)
    old = [file for file, new in made.items() if not _same(new, file.read_text("utf-8"))]
    for file in old:
        print(file.relative_to(root))
        if "--check" not in arguments:
            file.write_text(made[file], "utf-8")
    return 1 if old and "--check" in arguments else 0


def _same(new: str, old: str) -> bool:
    parts = itertools.zip_longest(_NUMBER.split(new), _NUMBER.split(old), fillvalue="")
    return all(
        abs(float(a) - float(b)) < 0.01 if at % 2 and a and b else a == b
        for at, (a, b) in enumerate(parts)
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path.cwd()))
