"""The families that `gradwire bench adapt` compares, from the references that the user names.

A reference is a text such as "qsgd:bits=4:block=128", "topk:density=0.01" or "powersgd:rank=4". It
stands for its own family and, with the others, for a mixed one in which it is the reference, so
that both have the same budget.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gradwire.aggregators import Aggregator
from gradwire.controllers import FAMILIES, Bits, Density, Family, Mixture, Rank, registry
from gradwire.errors import ConfigError

REFERENCES = ("qsgd:bits=4", "topk:density=0.01", "powersgd:rank=4")

_SHAPE = (4096, 4096)  # of a matrix that every method shrinks


@dataclass(frozen=True)
class TwoLevels:
    """Accordion's levels, and choices for LGreco around both (THESIS 4.6.3: half the high level's
    to twice the low one's).

    Attributes:
        low: the reference.
        high: what sends less: a bit less, or half the density or rank.
        family: of choices; its reference is the low level.
    """

    low: Aggregator
    high: Aggregator
    family: Family


@dataclass(frozen=True)
class Compared:
    """A family, as rows name it.

    Attributes:
        name, reference: in rows.
        family: of choices.
        accordion: of families with one kind of method; else None.
    """

    name: str
    reference: str
    family: Family
    accordion: TwoLevels | None


def compared(
    references: Sequence[str], families: Sequence[str] | None, blocks: tuple[int, ...]
) -> tuple[Compared, ...]:
    """The families of these references; of the names `families` only.

    Raises:
        ConfigError: an unknown method, option or family, a bad value, or no family is left.
    """
    unknown = next((name for name in families or () if name not in FAMILIES), None)
    if unknown is not None:
        raise ConfigError(f"--families {unknown}: use {', '.join(FAMILIES)}")
    made = [(text, _family(text, blocks)) for text in references]
    found = [Compared(own.name, text, own, _levels(own)) for text, own in made]
    if len(made) > 1:
        for text, own in made:
            others = tuple(other for _, other in made if other != own)
            mixture = Mixture((own, *others))
            found.append(Compared(mixture.name, text, mixture, None))
    kept = tuple(one for one in found if families is None or one.name in families)
    if not kept:
        raise ConfigError(
            f"--families {','.join(families or ())}: --references {','.join(references)} have none"
        )
    return kept


def _family(text: str, blocks: tuple[int, ...]) -> Family:
    family = registry.family(text)
    return replace(family, blocks=blocks) if isinstance(family, Bits) else family


def _levels(family: Family) -> TwoLevels:
    low = family.reference(_SHAPE)
    if isinstance(family, Bits):
        high = max(2, family.bits - 1)
        wide: Family = replace(family, least=max(2, high // 2))
        return TwoLevels(low, replace(family, bits=high).reference(_SHAPE), wide)
    if isinstance(family, Density):
        half = family.density / 2
        wide = family
        if family.per_decade is None:
            wide = replace(family, least=half / 10, step=half / 10)
        return TwoLevels(low, replace(family, density=half).reference(_SHAPE), wide)
    assert isinstance(family, Rank), family
    high = max(1, family.rank // 2)
    wide = replace(family, least=max(1, high // 2))
    return TwoLevels(low, replace(family, rank=high).reference(_SHAPE), wide)
