"""Policies and families as text.

policy    lgreco, kmeans:clusters=4, bayes:trials=500, accordion:eta=0.2, accordion-lgreco; a budget
          stands last, since it has options of its own: lgreco:bins=1000:budget=qsgd:bits=4
family    by its reference: qsgd:bits=4:block=128, topk:density=0.01, powersgd:rank=4; of topk
          also how its densities are spaced: topk:density=0.01:per_decade=10
"""

from __future__ import annotations

import dataclasses

from gradwire.codecs.text import parse
from gradwire.controllers.accordion import Accordion, AccordionLGreco
from gradwire.controllers.bayes import Bayes
from gradwire.controllers.families import Bits, Density, Family, Rank
from gradwire.controllers.kmeans import KMeans
from gradwire.controllers.lgreco import LGreco
from gradwire.controllers.linear import Linear
from gradwire.controllers.policy import Policy, Uniform
from gradwire.errors import ConfigError, use_one_of

REGISTRY: dict[str, type[Policy]] = {
    made.name: made for made in (Uniform, Linear, KMeans, Bayes, LGreco, Accordion, AccordionLGreco)
}
_ACCORDION = ("eta", "share")  # levels by name, and memory, are no options of a text

# method -> (its family, options that a text may have)
REFERENCES: dict[str, tuple[type[Family], tuple[str, ...]]] = {
    "qsgd": (Bits, ("bits", "block")),
    "topk": (Density, ("density", "per_decade")),
    "powersgd": (Rank, ("rank",)),
}


def get(text: str) -> Policy:
    """The policy that a text names.

    Raises:
        ConfigError: an unknown name or option, or a bad value; the message lists what is known.
    """
    text, _, budget = text.partition(":budget=")
    name, options = parse(text)
    if name not in REGISTRY:
        raise ConfigError(f"unknown policy {name!r}: {use_one_of(name, REGISTRY)}")
    made = REGISTRY[name]
    accordion = issubclass(made, Accordion | AccordionLGreco)
    known = tuple(one.name for one in dataclasses.fields(made) if not one.kw_only)
    if accordion:
        known = _ACCORDION
    for option in options:
        if option not in known:
            raise ConfigError(
                f"policy {name!r} has no option {option!r}: {use_one_of(option, known)}"
            )
    of = budget.strip() or None
    if made is AccordionLGreco:
        return AccordionLGreco(Accordion(**options), budget=of)  # type: ignore[arg-type]
    return made(**options, budget=of)


def family(reference: str) -> Family:
    """The choices around a reference: what the uniform plan gives every layer.

    Raises:
        ConfigError: an unknown method or option, or a bad value; the message lists what is known.
    """
    name, options = parse(reference)
    if name not in REFERENCES:
        raise ConfigError(f"reference {reference!r}: {use_one_of(name, REFERENCES)}")
    made, known = REFERENCES[name]
    unknown = next((option for option in options if option not in known), None)
    if unknown is not None:
        meant = use_one_of(unknown, known)
        raise ConfigError(f"reference {reference!r}: {name} has no option {unknown!r}: {meant}")
    try:
        return made(**options)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"reference {reference!r}: {error}") from None
