"""Aggregators by name, beside codecs: "powersgd:rank=4", "qsgd:bits=2", an object, or None."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from contextlib import suppress
from typing import Any

from gradwire import codecs
from gradwire.aggregators.artopk import ARTopK
from gradwire.aggregators.compressed import Compressed
from gradwire.aggregators.deepgradient import DeepGradientCompression
from gradwire.aggregators.dense import Dense
from gradwire.aggregators.globaltopk import GlobalTopK
from gradwire.aggregators.lwtopk import LWTopK
from gradwire.aggregators.powersgd import PowerSGD
from gradwire.aggregators.protocol import Aggregator
from gradwire.aggregators.radial import Radial
from gradwire.aggregators.sparseloco import SparseLoCo
from gradwire.aggregators.thc import THC
from gradwire.aggregators.topkc import TopKC
from gradwire.codecs.text import merged, parse, spelled
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import Codec
from gradwire.lang.codec import check_codec, code_lines

REGISTRY: dict[str, type[Aggregator]] = {
    "powersgd": PowerSGD,
    "artopk": ARTopK,
    "topkc": TopKC,
    "thc": THC,
    "lwtopk": LWTopK,
    "globaltopk": GlobalTopK,
    "sparseloco": SparseLoCo,
    "radial": Radial,
    "dgc": DeepGradientCompression,  # of the same name: the codec inside it
}

# Of names that `attach` takes besides, and of other libraries.
_MEANT = {"none": "none", "auto": "auto", **codecs.ELSEWHERE}

# Of all codecs and aggregators.
OPTIONS = frozenset(f.name for made in REGISTRY.values() for f in dataclasses.fields(made)) | {
    *codecs.OPTIONS, "algorithm", "scope"
}  # fmt: skip

Method = str | Codec | Aggregator | None  # how a user says that gradients are averaged


def get(method: Any, **options: Any) -> Aggregator:
    """The aggregator that a user means: of a codec, one compressed all-reduce; of None, dense.

    Args:
        method: a `Method`: a name of a codec or of `REGISTRY`, alone or with options
            ("topk:density=0.05", "qsgd:bits=4:block=64"); a Codec; an Aggregator; or None. A
            codec's name takes `algorithm` and `scope` of `Compressed`, too; "radial" takes its
            codec's options ("radial:codec=qsgd:bits=4").
        options: with a name.

    Raises:
        ConfigError: an unknown name or option, or a bad value; the message lists what is known.
    """
    if method is None or isinstance(method, (Codec, Aggregator)):
        if options:
            what = "codec=None" if method is None else repr(method)
            raise ConfigError(
                f"options {', '.join(options)} go with a codec's name, not with {what}"
            )
        if isinstance(method, Aggregator):
            return method
        return Dense() if method is None else Compressed(method)
    if not isinstance(method, str):
        check_codec(
            method, otherwise=f"one of the names {', '.join({**codecs.REGISTRY, **REGISTRY})}"
        )
    if method == "none":
        return get(None, **options)
    name, parsed = parse(method)
    options = merged(method, parsed, options)
    if name not in REGISTRY:
        if name not in codecs.REGISTRY:
            meant = use_one_of(name, {**codecs.REGISTRY, **REGISTRY}, _MEANT)
            raise ConfigError(f"unknown codec or aggregator {name!r}: {meant}")
        own = _own_options(options)
        return Compressed(codecs.get(name, **options), **own)
    made = REGISTRY[name]
    if made is Radial and isinstance(options.get("codec", "bf16"), str):
        return Radial(codecs.get(str(options.pop("codec", "bf16")), **options))
    _check(made, name, options)
    return made(**options)


def changed(aggregator: Aggregator, options: dict[str, Any]) -> Aggregator:
    """The same with other options.

    Raises:
        ConfigError: it has no such option, or a bad value.
    """
    if isinstance(aggregator, Compressed | Radial):
        codec, options = aggregator.codec, dict(options)
        own = _own_options(options) if isinstance(aggregator, Compressed) else {}
        settled = codecs.options(codec)
        for option in options:
            if option not in settled:
                raise ConfigError(
                    f"{codec} has no option {option!r}: {use_one_of(option, settled)}"
                )
        codec = dataclasses.replace(codec, **options)  # type: ignore[type-var]
        return dataclasses.replace(aggregator, codec=codec, **own)
    _check(type(aggregator), str(aggregator), options)
    return dataclasses.replace(aggregator, **options)


def text(aggregator: Aggregator, bits: bool = False) -> str:
    """The text that `get` takes for an aggregator without error feedback: what differs from its
    defaults; with `bits` those and ranks, too, for people.

    Raises:
        ConfigError: a class that is not registered, or an option that has no text.
    """
    found = _spelled(aggregator, ("bits", "rank") if bits else ())
    with suppress(ConfigError):
        if found and get(found) == aggregator:
            return found
    raise ConfigError(f"{aggregator} has no text: a plan in a file has registered codecs alone")


def _spelled(aggregator: Aggregator, always: Collection[str] | None = None) -> str:
    """An aggregator as users write it, see `codecs.spelled`; "" if it is not registered."""
    if aggregator == Dense():
        return "none"
    if isinstance(aggregator, Compressed):
        name = codecs.spelled(aggregator.codec, always)
        return name and spelled(name, aggregator, (), settled=("codec",))
    name = next((name for name, made in REGISTRY.items() if type(aggregator) is made), "")
    return name and spelled(name, aggregator, always)


Aggregator.__str__ = lambda one: _spelled(one) or repr(one)  # type: ignore[method-assign, arg-type]


def _own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options of `Compressed` itself out of a codec's."""
    return {name: options.pop(name) for name in ("algorithm", "scope") if name in options}


def listing() -> list[dict[str, Any]]:
    """A row for every aggregator with the keys of `codecs.listing`: codec (its name), operators
    (none: its code is not traced), lines (of `aggregate`), options (defaults)."""
    return [
        {
            "codec": name,
            "operators": [],
            "lines": code_lines(made.aggregate),
            "options": {n: str(o) if isinstance(o, Codec) else o for n, o in vars(made()).items()},
        }
        for name, made in REGISTRY.items()
    ]


def _check(made: type[Aggregator], name: str, options: dict[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(made)]
    for option in options:
        if option not in known:
            raise ConfigError(f"{name!r} has no option {option!r}: {use_one_of(option, known)}")
