"""The site of these pages: `make docs` builds it into build/docs, with warnings as errors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import gradwire

project = "gradwire"
author = "The gradwire developers"
copyright = f"{author}; licence Apache-2.0"
release = version = gradwire.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
myst_heading_anchors = 4  # as GitHub makes them; links of pages use them
smartquotes = False  # "payload" is what to write
highlight_language = "none"  # of blocks without an info string
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = f"gradwire {version}"
html_copy_source = False
html_use_index = False  # the API page has all names
html_domain_indices = False
html_static_path = ["static"]
html_css_files = ["site.css"]

# Docstrings are Markdown with sections. autodoc takes reStructuredText.
SECTIONS = ("Args", "Options", "Attributes", "Returns", "Raises", "Yields")


def inline(text: str) -> str:
    """Backticks as code, names of pages as links, everything else as it is written."""

    def plain(part: str) -> str:
        part = re.sub(r"([\\*|]|_(?!\w))", r"\\\1", part)
        return re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", part)

    parts = re.split(r"(`[^`]+`)", text)
    return "".join(f"`{part}`\\ " if at % 2 else plain(part) for at, part in enumerate(parts))


def paragraphs(text: str) -> Iterator[str]:
    """Prose, lists and code outside of sections."""
    for block in text.split("\n\n"):
        if block.startswith("    "):
            yield ".. code-block:: python\n\n" + block
        else:
            yield re.sub(r"(?<=\n)(?=- )", "\n", inline(block))


def section(title: str, text: str) -> str:
    """A list of what stands in it: names and their meaning, or text."""
    text = re.sub(r"^    ", "", inline(text), flags=re.M)
    names = r"[\w*\\]+(?:, [\w*\\]+)*"
    text = re.sub(rf"^({names},)\n +", r"\1 ", text, flags=re.M)  # names over two lines
    if re.match(rf"{names}: ", text):
        text = re.sub(r"^    ", "  ", text, flags=re.M)
        text = re.sub(rf"^({names}): ", r"- **\1**: ", text, flags=re.M)
    return f":{title}:\n" + re.sub(r"^(?=.)", "   ", text, flags=re.M)


def restructured(text: str) -> str:
    pattern = rf"^({'|'.join(SECTIONS)}):\n((?:(?: +.*)?\n)*)"
    parts = re.split(pattern, text.strip() + "\n", flags=re.M)
    found = [*paragraphs(parts[0].strip("\n"))]
    for title, listed, more in zip(parts[1::3], parts[2::3], parts[3::3], strict=True):
        found += [section(title, listed.rstrip()), *paragraphs(more.strip("\n"))]
    return "\n\n".join(filter(None, found))


def rewrite(app: Any, what: str, name: str, value: Any, options: Any, lines: list[str]) -> None:
    made_by_dataclass = what == "class" and lines and lines[0].startswith(f"{value.__name__}(")
    lines[:] = [] if made_by_dataclass else restructured("\n".join(lines)).splitlines()


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", rewrite)
