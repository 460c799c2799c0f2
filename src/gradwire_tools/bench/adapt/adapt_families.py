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
from gradwire.errors import ConfigError, use_one_of

REFERENCES = ("qsgd:bits=4", "topk:density=0.01", "powersgd:rank=4")

_SHAPE = (4096, 4096)  # of a matrix that every method shrinks


@dataclass(frozen=True)
class Compared:
    """A family, as rows name it.

    Attributes:
        name, reference: in rows.
        family: of choices.
        accordion: of families with one kind of method Accordion's levels, the reference and what
            sends less: a bit less, or half the density or rank.
        around: choices for LGreco around both (THESIS 4.6.3: half the high level's to twice the low
            one's); its reference is the low level.
    """

    name: str
    reference: str
    family: Family
    accordion: tuple[Aggregator, Aggregator] | None = None
    around: Family | None = None


def compared(
    references: Sequence[str], families: Sequence[str] | None, blocks: tuple[int, ...]
) -> tuple[Compared, ...]:
    """The families of these references; of the names `families` only.

    Raises:
        ConfigError: an unknown method, option or family, a bad value, or no family is left.
    """
    unknown = next((name for name in families or () if name not in FAMILIES), None)
    if unknown is not None:
        raise ConfigError(f"--families {unknown}: {use_one_of(unknown, FAMILIES)}")
    made = {text: registry.family(text) for text in references}
    made = {k: replace(f, blocks=blocks) if isinstance(f, Bits) else f for k, f in made.items()}
    found = [_with_levels(text, own) for text, own in made.items()]
    if len(references) > 1:
        for text, own in made.items():
            others = tuple(other for other in made.values() if other != own)
            found.append(Compared(Mixture.name, text, Mixture((own, *others))))
    kept = tuple(one for one in found if families is None or one.name in families)
    if not kept:
        raise ConfigError(
            f"--families {','.join(families or ())}: --references {','.join(references)} have none"
        )
    return kept


def _with_levels(text: str, family: Family) -> Compared:
    high: Family
    around = family
    if isinstance(family, Bits):
        bits = max(2, family.bits - 1)
        high, around = replace(family, bits=bits), replace(family, least=max(2, bits // 2))
    elif isinstance(family, Density):
        half = family.density / 2
        high = replace(family, density=half)
        if family.per_decade is None:
            around = replace(family, least=half / 10, step=half / 10)
    else:
        assert isinstance(family, Rank), family
        rank = max(1, family.rank // 2)
        high, around = replace(family, rank=rank), replace(family, least=max(1, rank // 2))
    levels = family.reference(_SHAPE), high.reference(_SHAPE)
    return Compared(family.name, text, family, levels, around)
