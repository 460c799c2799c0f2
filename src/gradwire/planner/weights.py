"""Rules for the weights of FSDP2 modules: the codec in which each parameter is gathered.

The first match wins (THESIS 5.6: norms and biases are gathered in full precision):
  1. a name pattern of a mapping -> a codec, or None for uncompressed;
  2. parameters of fewer than two dimensions, and those of fewer than `SMALL` values, are gathered
     uncompressed;
  3. all others use the default, which a mapping has not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradwire import codecs
from gradwire.codecs.text import parse
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import Codec, layout
from gradwire.lang.ir import Scope
from gradwire.planner.rules import check_patterns, matches

SMALL = 4096
BLOCK = 1024  # of sharded modules' codecs: blocks of some 16,000 lose accuracy (THESIS 5.6.1)
_OF_GRADIENTS = codecs.OneBit, codecs.TBQ, codecs.Saturating  # signs, and what is not scaled
_QSGD = {"metadata": "fp32", "rounding": "stochastic"}  # of weights, unless given
KEEP = ("none", "payload", "redraw", "reference")

M = TypeVar("M")
Given = str | Codec | None
Weights = Given | Mapping[str, Given]  # how a user says in which codecs weights are gathered


@dataclass(frozen=True)
class WeightRules:
    """How weights are gathered, by parameter name.

    Attributes:
        default: of rule 3; None: uncompressed.
        overrides: (pattern, codec) of rule 1.
        keep: what a rank keeps of the weights that it gathered for forward: "none", nothing, and
            backward gathers the same payloads again; "payload", the payloads of all ranks, so that
            backward gathers nothing; "redraw", nothing, and backward encodes anew (THESIS Alg.
            C.1); "reference", the decoded weights, so that later versions are sent as differences.
            None: "payload" where there is memory for it, else "none".
    """

    default: Codec | None = None
    overrides: tuple[tuple[str, Codec | None], ...] = ()
    keep: str | None = None

    @classmethod
    def of(cls, weights: object, keep: str | None) -> WeightRules:
        """From the arguments of `attach`; raises ConfigError for one of a wrong type or value."""
        if keep is not None and keep not in KEEP:
            raise ConfigError(f"keep={keep!r}: {use_one_of(keep, KEEP)}")
        if not isinstance(weights, Mapping):
            return cls(weight_codec("weights", weights), (), keep)
        for pattern in weights:
            if not isinstance(pattern, str):
                raise ConfigError(f"weights: {pattern!r} is no name pattern: give a string")
        of = {p: weight_codec(f"weights[{p!r}]", given) for p, given in weights.items()}
        return cls(None, tuple(of.items()), keep)

    def changed(self, codecs: Mapping[str, Codec | None]) -> WeightRules:
        """These rules, preceded by a codec for each of these patterns; a known one gets another."""
        kept = [pair for pair in self.overrides if pair[0] not in codecs]
        return replace(self, overrides=(*codecs.items(), *kept))

    def check(self, names: Iterable[tuple[str, ...]]) -> None:
        """Raise ConfigError unless every pattern matches a parameter; `names` has the names of
        each."""
        check_patterns("weights", (pattern for pattern, _ in self.overrides), list(names))

    def choose(self, names: tuple[str, ...], dimensions: int, numel: int) -> Codec | None:
        """The codec of a parameter; None: uncompressed.

        Args:
            names: all names of the parameter; several if it is tied. One must match.
        """
        for pattern, codec in self.overrides:
            if matches(names, pattern):
                return codec
        return None if dimensions < 2 or numel < SMALL else self.default


def weight_codec(argument: str, given: object) -> Codec | None:
    """The codec that a user names for weights; None: uncompressed. By default "qsgd" has fp32
    metadata, since a block of weights may lie far from zero, and stochastic rounding, since ranks
    do not have the random numbers with which "dithered" decodes.

    Raises:
        ConfigError: it is no codec, or none for weights: those must all arrive, with their size,
            and ranks decode them without the encoder's random numbers.
    """
    if given is None or given == "none":
        return None
    if not isinstance(given, str | Codec):
        raise ConfigError(f"{argument}={given!r:.60}: give a codec by name, a Codec, or None")
    advice = 'use "randomshift:bits=8", "qsgd:bits=8", "fp8" or "bf16"'
    if str(given).lower() in codecs.ELSEWHERE:  # of gradients
        raise ConfigError(f"{argument}={given!r:.60}: unknown codec: {advice}")
    try:
        codec = codecs.get(_with_defaults(in_blocks(given), _QSGD))
        what = layout(codec)
    except ConfigError as error:
        raise ConfigError(f"{argument}={given!r:.60}: {error}; {advice}") from None
    each = any(f.scope is Scope.ELEMENT for f in what.fields)  # something of each value
    if isinstance(codec, _OF_GRADIENTS):
        why = f"is for gradients, and loses the size of a weight; {advice}"
    elif what.variable or any(f.shape is not None for f in what.fields) or not each:
        why = f"sends a part of the values: weights must all arrive; {advice}"
    elif what.redraws:
        why = (
            "decodes with the encoder's random numbers, which ranks do not have of weights; "
            f"{advice}, or rounding=stochastic or nearest"
        )
    else:
        return codec
    raise ConfigError(f"{argument}: {codec} {why}")


def in_blocks(method: M, given: Iterable[str] = ()) -> M | str:
    """A codec as a user names it, in blocks of `BLOCK` values if it has small ones by default and
    neither its text nor the keywords `given` say how large."""
    return _with_defaults(method, {"block": BLOCK}, given)


def all_in_blocks(given: Mapping[str, Any], options: Iterable[str] = ()) -> dict[str, Any]:
    """Arguments of `attach`: `codec` and `codecs`, if they are there, as `in_blocks` has them."""
    found = dict(given)
    if "codec" in found:
        found["codec"] = in_blocks(found["codec"], options)
    if isinstance(found.get("codecs"), Mapping):
        found["codecs"] = {pattern: in_blocks(m) for pattern, m in found["codecs"].items()}
    return found


def _with_defaults(method: M, defaults: Mapping[str, object], given: Iterable[str] = ()) -> M | str:
    """The text of "qsgd" with other defaults, of options that neither it nor `given` names."""
    if not isinstance(method, str):
        return method
    name, options = parse(method)
    missing = [o for o in defaults if name == "qsgd" and o not in options and o not in given]
    return ":".join([method, *(f"{option}={defaults[option]}" for option in missing)])
