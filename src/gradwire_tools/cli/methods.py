"""A codec or an aggregator on one screen: what it is, its options, its size and its bias."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import torch

from gradwire import codecs
from gradwire.aggregators import Aggregator, Compressed
from gradwire.aggregators import registry as aggregators
from gradwire.lang import Codec, layout

_SIDE = 1024  # rows and columns of the gradient whose size is told
_WIDTH = 79


def described(name: str) -> str:
    """The text; raises ConfigError for an unknown name or option."""
    method = aggregators.get(name)
    made: Codec | Aggregator = method.codec if isinstance(method, Compressed) else method
    plain = aggregators.get(name.split(":")[0])
    usual = plain.codec if isinstance(plain, Compressed) else plain
    options = codecs.options(made) if isinstance(made, Codec) else _fields(made)
    what, where = _origin(made)
    about, entries = _documented(made)
    kind = "codec" if isinstance(made, Codec) else "aggregator"
    lines = [f"{name}: {kind}", "", *textwrap.wrap(what, _WIDTH), *textwrap.wrap(about, _WIDTH)]
    lines += ["", "options:" if options else "options: none"]
    for names, meaning in entries:
        given = [_option(one, options[one], getattr(usual, one)) for one in names if one in options]
        if given:
            text = f"{', '.join(given)}: {meaning}"
            lines += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent=" " * 6)
    values = f"of a gradient of {_SIDE} x {_SIDE} fp32 values"
    lines += ["", f"bits per value: {_bits(made):.3g} {values}", f"bias: {_bias(made)}"]
    lines += [f"paper: {where}"] if where else []
    if isinstance(made, Codec):
        lines.append("stages of its compilation: --ir, --c, --triton")
    return "\n".join(lines)


def _fields(made: Any) -> dict[str, Any]:
    return {f.name: getattr(made, f.name) for f in dataclasses.fields(made)}


def _option(name: str, value: object, default: object) -> str:
    return f"{name}={value}" if value == default else f"{name}={value} (default {default})"


def _origin(made: object) -> tuple[str, str]:
    """From the first line of its file: what it is, and the section of a paper or ""."""
    first = (inspect.getdoc(sys.modules[type(made).__module__]) or "").split("\n\n")[0]
    found = re.search(r" \(([^()]*(?:THESIS|[A-Z]{3}|20\d\d)[^()]*)\)", first)
    if found is None:
        return first, ""
    return first.replace(found[0], ""), " ".join(found[1].split())


def _documented(made: object) -> tuple[str, list[tuple[list[str], str]]]:
    """From its docstring: the first paragraph, and per entry of its options: names, meaning."""
    paragraphs = (inspect.getdoc(type(made)) or "").split("\n\n")
    told = next((p for p in paragraphs if re.match(r"(Options|Args):\n", p)), "")
    return " ".join(paragraphs[0].split()), list(_entries(told))


def _entries(told: str) -> Iterator[tuple[list[str], str]]:
    for entry in re.split(r"\n    (?=\w[\w, ]*: )", told)[1:]:
        names, meaning = " ".join(entry.split()).split(": ", 1)
        yield names.split(", "), re.sub("; see (below|the module)", "", meaning)


def _bits(made: Codec | Aggregator) -> float:
    if isinstance(made, Codec):
        return 8 * layout(made).expected_nbytes(_SIDE * _SIDE) / _SIDE**2
    return 8 * made.payload_bytes((_SIDE, _SIDE), torch.float32) / _SIDE**2


def _bias(made: Codec | Aggregator) -> str:
    if isinstance(made, Aggregator):
        if made.needs_feedback or made.own_feedback:
            return "biased, and so always with error feedback"
        return "as said above; error feedback is optional"
    said = "biased: give error_feedback=True" if made.biased else "unbiased"
    return said if made.contracts else f"{said}; residuals may grow without bound"
