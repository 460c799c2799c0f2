"""When `Flexible` acts (ARTOPK 3-E): the changes of gain and network that it answers."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.codecs import checks


@dataclass(frozen=True)
class Triggers:
    """What makes `Flexible` act, and how often it looks.

    Args:
        gain: a change of the compression gain by this share measures the candidates again.
        link: a change of the highest latency or the lowest bandwidth by this share searches again.
        check: training steps between two looks.
        rest: training steps between two measurements of the candidates, at least; the paper has
            none, but a young model's gain changes by 10 % all the time.
        share: of time and bandwidth, that watching the links may take.

    Raises:
        ConfigError: a number out of range.
    """

    gain: float = 0.1
    link: float = 0.3
    check: int = 10
    rest: int = 100
    share: float = 0.01

    def __post_init__(self) -> None:
        for name in ("gain", "link", "share"):
            checks.number(self, name, above=0)
        for name, least in (("check", 1), ("rest", 0)):
            checks.integer(self, name, least)
