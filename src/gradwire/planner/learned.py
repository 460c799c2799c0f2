"""Learned levels: what a plan's "learnedlevels" codecs quantise to, by parameter (THESIS 5.6.2).

They are kept beside the plan's codecs, not in them: a saved state and an update name codecs as the
user did, and levels that were learned outlive an update that leaves the codec as it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gradwire.aggregators import Aggregator, Compressed, ErrorFeedback
from gradwire.codecs import LearnedLevels
from gradwire.errors import ConfigError
from gradwire.lang import Codec

if TYPE_CHECKING:
    from gradwire.planner.plan import ParameterPlan

ByName = Mapping[str, tuple[float, ...]]
KINDS = ("gradients", "weights")


@dataclass(frozen=True)
class Learned:
    """Levels by parameter; equal on all ranks.

    Attributes:
        gradients, weights: of the codecs of each.
    """

    gradients: ByName = field(default_factory=dict)
    weights: ByName = field(default_factory=dict)

    def aggregator(self, p: ParameterPlan) -> Aggregator:
        """What averages a parameter's gradient, with its levels."""
        codec = learns(p.codec)
        if codec is None or p.name not in self.gradients:
            return p.aggregator
        inner = Compressed(_with(codec, self.gradients[p.name]))
        return ErrorFeedback(inner) if isinstance(p.aggregator, ErrorFeedback) else inner

    def weight(self, p: ParameterPlan) -> Codec | None:
        """The codec in which a parameter is gathered, with its levels."""
        codec = learns(p.weight)
        if codec is None or p.name not in self.weights:
            return p.weight
        return _with(codec, self.weights[p.name])

    def changed(self, new: Learned) -> Learned:
        """These levels, those of `new` in place of older ones."""
        return Learned({**self.gradients, **new.gradients}, {**self.weights, **new.weights})

    def lines(self) -> list[str]:
        """What ranks compare."""
        return [
            f"levels of {name}, {kind}: {levels}"
            for kind in KINDS
            for name, levels in sorted(getattr(self, kind).items())
        ]

    def state(self) -> dict[str, dict[str, list[float]]]:
        """To be saved."""
        return {
            kind: {name: list(levels) for name, levels in getattr(self, kind).items()}
            for kind in KINDS
        }

    @classmethod
    def of(cls, saved: Any) -> Learned:
        """From what `state` gave; None gives none.

        Raises:
            ConfigError: it is something else.
        """
        if saved is None:
            return cls()
        try:
            found = [
                {str(name): tuple(map(float, levels)) for name, levels in saved[kind].items()}
                for kind in KINDS
            ]
        except (TypeError, ValueError, KeyError, AttributeError):
            raise ConfigError(
                f"load_state_dict: the state has {saved!r:.60} for 'levels': it is not a result of "
                "Handle.state_dict"
            ) from None
        return cls(*found)


def learns(codec: Codec | None) -> LearnedLevels | None:
    """The codec if its levels are to be learned: the user gave none."""
    return codec if isinstance(codec, LearnedLevels) and codec.levels is None else None


def _with(codec: LearnedLevels, levels: tuple[float, ...]) -> LearnedLevels:
    """The codec with these levels, if it can have them: an update may have changed its bits or its
    rounding since they were learned."""
    try:
        return replace(codec, levels=levels)
    except ConfigError:
        return codec
