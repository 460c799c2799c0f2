"""The codecs, one per file, by their names; `registry` has the list."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

from gradwire.codecs import registry
from gradwire.codecs.registry import *  # noqa: F403
from gradwire.codecs.text import merged, parse
from gradwire.codecs.text import spelled as _spelled
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang.codec import Codec as Codec
from gradwire.lang.codec import check_codec, source_lines
from gradwire.lang.forms import derive

# name -> (class, options fixed by the name)
REGISTRY = registry._REGISTRY

if not TYPE_CHECKING:  # type checkers read no list that is computed
    __all__ = ["REGISTRY", "Codec", "get", "listing", "name_of", "options"]
    __all__ += list({made.__name__: made for made, _ in REGISTRY.values()})

# What other libraries call a codec, for an error.
ELSEWHERE = {
    "int8": "qsgd:bits=8", "8bit": "qsgd:bits=8", "int4": "qsgd:bits=4", "4bit": "qsgd:bits=4",
    "float32": "identity", "fp32": "identity", "float16": "fp16", "half": "fp16",
    "bfloat16": "bf16", "float8": "fp8", "sign": "onebit", "signsgd": "onebit", "1bit": "onebit",
    "3lc": "threelc",
}  # fmt: skip

# The names of gradwire.aggregators.registry, which imports this package: named here for an error.
_OTHERS = ("powersgd", "artopk", "topkc", "thc", "lwtopk", "globaltopk", "sparseloco", "radial")


def get(codec: str | Codec, /, **options: Any) -> Codec:
    """Make a codec from its name and options; a Codec is returned unchanged.

    Args:
        codec: a name, alone or with options ("qsgd:bits=4", see `codecs.text`), or a Codec.
        options: further options of a name.

    Raises:
        ConfigError: an unknown name or option, or a bad value; the message lists the known ones.
    """
    if isinstance(codec, Codec):
        if options:
            raise ConfigError(
                f"options {', '.join(options)} go with a codec's name, not with {codec!r}"
            )
        return codec
    given: object = codec
    if not isinstance(given, str):
        check_codec(given, otherwise=f"one of the names {', '.join(REGISTRY)}")
    name, parsed = parse(codec)
    options = merged(codec, parsed, options)
    if name in _OTHERS:
        raise ConfigError(f"{name} is an aggregator: it needs gw.attach or gw.register")
    if name == "none":
        raise ConfigError(
            '"none" is no codec but its absence: leave it out here, or give "identity", which '
            "loses nothing"
        )
    if name not in REGISTRY:
        raise ConfigError(f"unknown codec {name!r}: {use_one_of(name, REGISTRY, ELSEWHERE)}")
    made, settled = REGISTRY[name]
    known = [option for option in _fields(made) if option not in settled]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"codec {name!r} has no option {option!r}: {use_one_of(option, known)}"
            )
    factory: Callable[..., Codec] = made
    return factory(**settled, **options)


def name_of(codec: Codec) -> str:
    """The registered name of a codec, or its class name if it is not registered."""
    for name, (made, settled) in REGISTRY.items():
        if type(codec) is made and all(getattr(codec, k) == v for k, v in settled.items()):
            return name
    return type(codec).__name__


def options(codec: Codec) -> dict[str, Any]:
    """A codec's options and their values, without those fixed by its name."""
    name = name_of(codec)
    settled = REGISTRY[name][1] if name in REGISTRY else {}
    return {k: getattr(codec, k) for k in _fields(type(codec)) if k not in settled}


def spelled(codec: Codec, always: Collection[str] | None = None) -> str:
    """A codec as users write it: its name, its first option (or those of `always`), and those that
    are not its defaults, "qsgd:bits=2:scale=max"; "" if it is not registered."""
    name = name_of(codec)
    return _spelled(name, codec, always, REGISTRY[name][1]) if name in REGISTRY else ""


Codec.__str__ = lambda codec: spelled(codec) or repr(codec)  # type: ignore[method-assign, arg-type]


def listing() -> list[dict[str, Any]]:
    """One row per codec: codec, operators (names), lines (of code), options (defaults)."""
    rows = []
    for name in REGISTRY:
        codec = get(name)
        operators = list(derive(codec, "fp32").operators)
        row = {"codec": name, "operators": operators, "lines": source_lines(codec)}
        rows.append({**row, "options": options(codec)})
    return rows


def _fields(made: type[Codec]) -> list[str]:
    return [f.name for f in dataclasses.fields(made)]  # type: ignore[arg-type]


# Of all codecs.
OPTIONS = frozenset(option for made, _ in REGISTRY.values() for option in _fields(made))
