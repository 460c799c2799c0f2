"""Fills the tables of results in README and docs, from the rows in bench/results/.

    python scripts/results_in_docs.py           # writes the pages
    python scripts/results_in_docs.py --check   # exit code 1 if a page is not as the rows say

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
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = (
    "README.md", "docs/how-to/choosing.md", "docs/how-to/fsdp2.md", "docs/reference/benchmarks.md",
)  # fmt: skip
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


def main(arguments: list[str]) -> int:
    old = []
    for page in PAGES:
        text = (ROOT / page).read_text("utf-8")
        new = filled(text)
        if new != text:
            old.append(page)
            if "--check" not in arguments:
                (ROOT / page).write_text(new, "utf-8")
    if old:
        print("\n".join(old))
    return 1 if old and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
