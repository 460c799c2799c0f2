"""Which codecs are defined in which algorithms: all in all, but for those named here.

Every algorithm but all_gather encodes sums, and adds own values to decoded payloads. Two codecs do
not stand that, whatever error feedback does. And one of them does not stand error feedback.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gradwire.codecs import TBQ, RandomK
from gradwire.errors import ConfigError
from gradwire.lang import Codec


@dataclass(frozen=True)
class _Exception:
    applies: Callable[[Codec], bool]
    algorithms: tuple[str, ...]
    reason: str


_EXCEPTIONS = (
    _Exception(
        lambda codec: isinstance(codec, RandomK) and codec.scale > 1,
        ("all_gather",),
        "it scales what it sends, but a rank that adds its own values to received ones does not "
        "scale them, so the average would be biased; or give it unbiased=False and error feedback",
    ),
    _Exception(
        lambda codec: isinstance(codec, TBQ),
        ("sra", "parameter_server", "all_gather"),
        "a payload holds at most one threshold a value, and would have to carry the sum of several "
        "ranks",
    ),
)


def check_defined(algorithm: str, codec: Codec) -> None:
    """Whether an all-reduce through `algorithm` gives the average, or sum, that `codec` promises.

    Raises:
        ConfigError: if not; the message says why, and which algorithms do.
    """
    for exception in _EXCEPTIONS:
        if exception.applies(codec) and algorithm not in exception.algorithms:
            allowed = " or ".join(repr(name) for name in exception.algorithms)
            raise ConfigError(
                f"{codec} is not defined in the algorithm {algorithm!r}: {exception.reason}. "
                f"Use algorithm {allowed}"
            )


def check_feedback(codec: Codec) -> None:
    """Whether error feedback makes up for what `codec` does not send, in any collective.

    Raises:
        ConfigError: if not; the message says why, and what to use.
    """
    if isinstance(codec, RandomK) and codec.scale > 1:
        raise ConfigError(
            f"{codec} is not defined with error feedback: it sends {codec.scale:g} times what it "
            f"picks, so the residual is {1 - codec.scale:g} times that, and grows from step to "
            "step. Use unbiased=False with error feedback, or unbiased=True without"
        )
