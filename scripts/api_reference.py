"""Write docs/reference/api.md from the docstrings of the package's public names.

python scripts/api_reference.py            # write it
python scripts/api_reference.py --check    # exit code 1 if it is not current
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gradwire as gw
from gradwire.aggregators import Aggregator
from gradwire.lang import Codec

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "api.md"
BEGINNING = """\
# API

After this page you can call every public name of the package, and know what it returns and raises.

`import gradwire as gw` has all of them. `make docs` writes this page from the docstrings, and
`make docs-check` checks that it is current.
"""
WIDTH = 100
# A docstring's sections; what stands in them is a list of names and what they mean.
SECTIONS = ("Args", "Options", "Attributes", "Returns", "Raises", "Yields")
GROUPS = {Codec: "Codecs", Aggregator: "Aggregators", Exception: "Errors"}


def page() -> str:
    """The whole page."""
    public = {name: getattr(gw, name) for name in sorted(gw.__all__, key=str.lower)}
    groups: dict[str, list[str]] = {
        title: [] for title in ("Functions", "Handles and options", *GROUPS.values())
    }
    for name, value in public.items():
        groups[_group(value)].append(name)
    parts = [BEGINNING, _contents(groups)]
    for title, names in groups.items():
        if names:
            parts.append(f"## {title}\n")
        parts += [entry(name, public[name]) for name in names]
    return "\n".join(parts)


def _group(value: Any) -> str:
    if not isinstance(value, type):
        return "Functions"
    return next((t for base, t in GROUPS.items() if issubclass(value, base)), "Handles and options")


def _contents(groups: dict[str, list[str]]) -> str:
    rows = [
        f"| {title} | {' '.join(f'[{name}](#{name.lower()})' for name in names)} |"
        for title, names in groups.items()
        if names
    ]
    return "\n".join(["| | |", "| --- | --- |", *rows, ""])


def entry(name: str, value: Any) -> str:
    """A name's heading, signature and docstring, and those of its methods."""
    file = Path(inspect.getsourcefile(value) or "").resolve().relative_to(ROOT)
    text = f"### {name}\n\n```text\n{signature(name, value)}\n```\n\nDefined in `{file}`.\n\n"
    text += markdown(value)
    if not isinstance(value, type):
        return text
    for method, found in methods(value):
        text += f"\n#### {name}.{method}\n\n"
        if not isinstance(found, property):
            text += f"```text\n{signature(method, found)}\n```\n\n"
        text += markdown(found)
    return text


def methods(made: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with a docstring; none of a class whose base has an entry."""
    bases = [base for base in inspect.getmro(made) if base.__module__.startswith("gradwire")]
    if any(base.__name__ in gw.__all__ for base in bases[1:]):
        return
    known: set[str] = set()
    for base in bases:
        for name, value in vars(base).items():
            shown = isinstance(value, property) or inspect.isfunction(value)
            if shown and name not in known and not name.startswith("_") and inspect.getdoc(value):
                known.add(name)
                yield name, value


def signature(name: str, value: Any) -> str:
    """One line, or a line for each argument."""
    try:
        found = inspect.signature(value)
    except ValueError:
        return name
    returns = _annotation(found.return_annotation)
    end = f") -> {returns}" if returns and not isinstance(value, type) else ")"
    parts: list[str] = []
    for p in found.parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        parts.append(_parameter(p))
    line = f"{name}({', '.join(parts)}{end}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + end


def _parameter(p: inspect.Parameter) -> str:
    star = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
    note = _annotation(p.annotation)
    text = f"{star}{p.name}" + (f": {note}" if note else "")
    if p.default is p.empty:
        return text
    # An object without a name stands for: nothing given.
    return f"{text} = {'...' if repr(p.default).startswith('<') else repr(p.default)}"


def _annotation(note: Any) -> str:
    if note is inspect.Parameter.empty:
        return ""
    return note if isinstance(note, str) else getattr(note, "__name__", str(note))


def markdown(value: Any) -> str:
    """A docstring: its paragraphs, its sections as lists, what is indented as code."""
    text = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):
        text = ""  # the one that dataclasses make
    lines: list[str] = []
    section = False
    for line in text.splitlines():
        title = line.removesuffix(":")
        if line.endswith(":") and title in SECTIONS:
            section = True
            lines += ["", f"**{title}**", ""]
        elif section and (line.startswith(" ") or not line):
            lines.append(_item(line))
        else:
            section = False
            lines.append(line)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).strip()) + "\n"


def _item(line: str) -> str:
    """A line of a section: "    name, name: meaning", what continues it, or plain text."""
    bare = line.removeprefix("    ")
    named = re.match(r"([\w*]+(?:, [\w*]+)*): (.*)", bare)
    if named:
        names = ", ".join(f"`{name}`" for name in named[1].split(", "))
        return f"- {names}: {named[2]}"
    return f"  {bare.strip()}" if bare.startswith(" ") else bare


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    made = page()
    if parser.parse_args().check:
        current = PAGE.exists() and PAGE.read_text("utf-8") == made
        if not current:
            print(f"{PAGE.name} is not what the docstrings say: run make docs", file=sys.stderr)
        return 0 if current else 1
    PAGE.write_text(made, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
