"""The methods that `bench train --sharded` compares: ways for FSDP2 to send weights and gradients.

    fsdp-fp32                    torch's collectives, 32 bits
    fsdp-bf16                    torch's collectives, weights and gradients cast to bf16 to be sent
    fsdp-mixed                   torch's collectives, fp32 weights and fp16 gradients (THESIS 5.6)
    gradwire:w=CODEC:g=CODEC     gw.attach(model, CODEC of g, weights=CODEC of w)
    qsdp:w=BITS:g=BITS           the same with RandomShift for weights and QSGD for gradients
    qsdp:w=BITSdiff:g=BITS       weights as differences: keep="reference"
    qsdp:w=BITS:g=BITS:learned   both in LearnedLevels, learned after the steps `LEARN_AT`
    truncate:w=RATIO:g=RATIO     the first 1/RATIO of fp32 values, by torch; for timing only

What follows `w=...` or `g=...` is an option of that codec (`w=randomshift:bits=5:block=512`), but
for `keep` and `error_feedback`, which are options of `gradwire.attach`.

All methods have one mixed-precision policy, `POLICY`: FSDP2 computes with fp32 weights and reduces
fp32 gradients. Methods differ in what is sent alone. FSDP2's own policy for bf16 would change what
is computed, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from gradwire.aggregators import Compressed, registry
from gradwire.errors import ConfigError, use_one_of
from gradwire.planner.weights import KEEP, WeightRules, in_blocks

POLICY = "param fp32, reduce fp32"  # of every method, as rows have it


@dataclass(frozen=True)
class ShardedMethod:
    """A method by name.

    Attributes:
        ours: whether gradwire sends, or torch.
        weights, gradients: what they are sent in: a codec's text, None for uncompressed by FSDP2
            (weights) or gradwire (gradients); of torch's methods "fp32", "fp16" or "bf16".
        options: further arguments of `gradwire.attach`.
        learned: whether levels are learned in training.
        ratios: of `truncate`, of weights and of gradients: how much less is sent.
    """

    name: str
    ours: bool
    weights: str | None
    gradients: str | None
    options: dict[str, Any] = field(default_factory=dict)
    learned: bool = False
    ratios: tuple[float, float] | None = None

    watches = False  # the network, while it trains

    @property
    def timing_only(self) -> bool:
        """Whether it only shows what a step can cost: it does not train the model."""
        return self.ratios is not None

    def check(self) -> None:
        """Whether it can be attached, told before anything is launched.

        Raises:
            ConfigError: gradwire does not know a codec or an option, or it is not for this use.
        """
        if not self.ours:
            return
        try:
            WeightRules.of(self.weights, self.options.get("keep"))
            if self.weights is None and "keep" in self.options:
                raise ConfigError("keep is for weights in a codec: give w=CODEC, too")
            if self.gradients is not None:
                made = registry.get(in_blocks(self.gradients))
                if not isinstance(made, Compressed):
                    raise ConfigError(f"g={self.gradients}: FSDP2 scatters through a single codec")
            of = [text.split(":")[0] for text in (self.weights, self.gradients) if text]
            if self.learned and "learnedlevels" not in of:
                raise ConfigError("learned is for a codec with levels: w= or g=learnedlevels")
        except ConfigError as error:
            raise ConfigError(f"method {self.name!r}: {error}") from error


NAMED: dict[str, ShardedMethod] = {
    method.name: method
    for method in (
        ShardedMethod("fsdp-fp32", False, "fp32", "fp32"),
        ShardedMethod("fsdp-bf16", False, "bf16", "bf16"),
        ShardedMethod("fsdp-mixed", False, "fp32", "fp16"),
    )
}
# Without --methods; and those of --quick.
COMPARED = (
    *NAMED, "gradwire:w=bf16:g=bf16", "qsdp:w=8:g=8", "qsdp:w=6:g=4", "qsdp:w=4diff:g=4",
)  # fmt: skip
COMPARED_QUICKLY = ("fsdp-fp32", "fsdp-bf16", "qsdp:w=8:g=8")

_FORMS = (
    *("gradwire:w=CODEC:g=CODEC", "qsdp:w=BITS[diff]:g=BITS[:learned]"),
    "truncate:w=RATIO:g=RATIO",
)
KNOWN = (*NAMED, *_FORMS)
_OPTIONS: dict[str, dict[str, Any]] = {
    "keep": {name: name for name in KEEP},
    "error_feedback": {"true": True, "false": False},
}
_QSDP = {"w": "randomshift", "g": "qsgd"}
_LEARNED = {"w": "learnedlevels", "g": "learnedlevels:rounding=stochastic"}
LEARN_AT = (50, 200)  # steps after which levels are learned


def knows(text: str) -> bool:
    """Whether `text` names a method of `--sharded`, with valid options or not."""
    return (
        text in NAMED
        or re.match(r"\s*(qsdp\s*(:|$)|truncate\s*:\s*[wg]=|gradwire\s*:\s*[wg]=)", text)
        is not None
    )


def parse(text: str) -> ShardedMethod:
    """The method that `text` names.

    Raises:
        ConfigError: there is none; the message lists the known ones.
    """
    if text in NAMED:
        return NAMED[text]
    if not knows(text):
        known = use_one_of(text, KNOWN)
        raise ConfigError(f"unknown method {text!r} with --sharded: {known}")
    kind, *parts = (part.strip() for part in text.split(":"))
    if kind == "truncate":
        return ShardedMethod(text, False, "fp32", "fp32", ratios=_ratios(text, parts))
    learned = "learned" in parts
    codecs, options = _sorted(text, [part for part in parts if part != "learned"])
    of_bits = _LEARNED if learned else _QSDP
    if kind == "qsdp":
        if set(codecs) != {"w", "g"}:
            raise ConfigError(f"method {text!r}: write qsdp:w=BITS:g=BITS")
        for of, value in codecs.items():
            bits, colon, rest = value.partition(":")
            found = re.fullmatch(r"(\d+)(diff)?" if of == "w" else r"(\d+)()", bits)
            if found is None:
                raise ConfigError(f"method {text!r}: {of}={bits} is no number of bits")
            codecs[of] = f"{of_bits[of]}:bits={found[1]}{colon}{rest}"
            if found[2] and options.setdefault("keep", "reference") != "reference":
                raise ConfigError(f"method {text!r}: differences of weights need keep=reference")
    return ShardedMethod(text, True, codecs.get("w"), codecs.get("g"), options, learned)


def _ratios(text: str, parts: list[str]) -> tuple[float, float]:
    """(of weights, of gradients), as `truncate` has them."""
    ratio = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(rf"w={ratio}:g={ratio}", ":".join(parts))
    if found is None or min(map(float, found.groups())) < 1:
        raise ConfigError(
            f"method {text!r}: write truncate:w=RATIO:g=RATIO, with numbers of 1 or more"
        )
    return float(found[1]), float(found[2])


def _sorted(text: str, parts: list[str]) -> tuple[dict[str, str], dict[str, Any]]:
    """(codecs' texts of w and g, options of `attach`)."""
    codecs: dict[str, str] = {}
    options: dict[str, Any] = {}
    codec = None  # whose options follow
    for part in parts:
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or not value:
            raise ConfigError(f"method {text!r}: expected OPTION=VALUE, found {part!r}")
        if name in codecs or name in options:
            raise ConfigError(f"method {text!r}: {name!r} is given twice")
        if name in ("w", "g"):
            codec, codecs[name] = name, value
        elif name in _OPTIONS:
            if value not in _OPTIONS[name]:
                raise ConfigError(f"method {text!r}: {name} is one of {', '.join(_OPTIONS[name])}")
            options[name] = _OPTIONS[name][value]
        elif codec is None:
            raise ConfigError(f"method {text!r}: {part!r} comes before w= and g=")
        else:
            codecs[codec] += f":{part}"
    return codecs, options
