"""How a collective runs."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire import algorithms
from gradwire.errors import ConfigError
from gradwire.lang.kernels import TARGETS


@dataclass(frozen=True)
class Options:
    """How a collective runs; the same on every rank, but for `target` and `threads`.

    Attributes:
        algorithm: a name of `gradwire.algorithms.REGISTRY`.
        segments: pipeline units a chunk; None chooses by size.
        checksum: whether messages carry one.
        target: which kernels ("auto", "c", "eager"); all make the same bytes.
        threads: of a kernel; None takes torch's number.

    Raises:
        ConfigError: an unknown algorithm or target, a number below one.
    """

    algorithm: str = "sra"
    segments: int | None = None
    checksum: bool = True
    target: str = "auto"
    threads: int | None = None

    def __post_init__(self) -> None:
        algorithms.get(self.algorithm)
        if self.target not in TARGETS:
            raise ConfigError(f"target {self.target!r}; known: {', '.join(TARGETS)}")
        for name, value in (("segments", self.segments), ("threads", self.threads)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: a whole number, at least 1, or None to let gradwire choose"
                )

    def __str__(self) -> str:
        return f"algorithm {self.algorithm}, segments {self.segments}, checksum {self.checksum}"
