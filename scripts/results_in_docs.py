"""Fills the tables of results in docs, and draws the maps of gains, from the rows in
bench/results/.

    python scripts/results_in_docs.py           # writes the pages and pictures
    python scripts/results_in_docs.py --check   # exit code 1 if one is not as the rows say

A table stands between two comments, of which the first has the arguments of results_table.py:

    <!-- results_table.py bench/results/train-gpt.jsonl --gains -->
    <!-- end of results_table.py -->
"""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import shlex
import sys
import tempfile
from pathlib import Path

from gradwire_tools import report

ROOT = Path(__file__).parents[1]
PAGES = ("docs/laboratory/benchmarks.md", "docs/laboratory/policies.md")
# (rows, which of their lines); the captions in README have the same commands
PICTURES = {
    "docs/pictures/gains-gpt.svg": ("bench/results/train-gpt.jsonl", ""),
    "docs/pictures/gains-image.svg": ("bench/results/train-image.jsonl", ""),
    "docs/pictures/time-to-accuracy.svg": (
        "bench/results/train-gpt.jsonl",
        '(?=.*"net": "300mbit)(?=.*"method": "(torch|qsgd))',
    ),
}
PLACE = re.compile(
    r"(<!-- results_table\.py (.*?) -->\n).*?(<!-- end of results_table\.py -->)", re.DOTALL
)


def filled(text: str) -> str:
    """A page's text with the tables that the rows give now."""
    return PLACE.sub(lambda place: f"{place[1]}\n{_table(place[2])}\n\n{place[3]}", text)


def _table(arguments: str) -> str:
    print_table = runpy.run_path(str(ROOT / "scripts" / "results_table.py"))["main"]
    words = shlex.split(arguments)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if print_table([str(ROOT / w) if w.endswith(".jsonl") else w for w in words]):
            raise SystemExit(f"results_table.py {arguments}: no table")
    return printed.getvalue().strip()


def drawn(rows: str, kept: str) -> str:
    """What `gradwire report ROWS --svg` writes, of the lines that have `kept`."""
    lines = (ROOT / rows).read_text("utf-8").splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        chosen, picture = Path(folder) / "rows.jsonl", Path(folder) / "picture.svg"
        chosen.write_text("".join(line for line in lines if re.search(kept, line)), "utf-8")
        report.picture([chosen], picture)
        return picture.read_text("utf-8")


def _same(new: str, old: str) -> bool:
    """Whether texts are equal, but for the last digits of places in a picture: how numpy rounds
    depends on the CPU."""
    numbers = re.compile(r"(-?\d+\.\d{3,})")
    pairs = list(zip(numbers.split(new), numbers.split(old), strict=False))
    if len(numbers.findall(new)) != len(numbers.findall(old)):
        return False
    words, places = pairs[::2], pairs[1::2]
    return all(a == b for a, b in words) and all(abs(float(a) - float(b)) < 0.01 for a, b in places)


def main(arguments: list[str]) -> int:
    made = {page: filled((ROOT / page).read_text("utf-8")) for page in PAGES}
    made |= {picture: drawn(*rows) for picture, rows in PICTURES.items()}
    old = []
    for name, new in made.items():
        file = ROOT / name
        if not file.exists() or not _same(new, file.read_text("utf-8")):
            old.append(name)
            if "--check" not in arguments:
                file.write_text(new, "utf-8")
    if old:
        print("\n".join(old))
    return 1 if old and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
