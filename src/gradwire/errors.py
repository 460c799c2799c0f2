"""The errors that gradwire raises. Each message says what was wrong, where, and what to do."""

from __future__ import annotations


class GradwireError(Exception):
    """The root of every error that gradwire raises on purpose."""


class ConfigError(GradwireError, ValueError):
    """The user can mend this: an unknown codec, a bad option, ranks that disagree on a plan."""


class CodecError(GradwireError):
    """A payload cannot be what the plan says it is: foreign, truncated or corrupted."""


class TransportError(GradwireError):
    """A peer or a link failed.

    Attributes:
        peer: the rank (within the process group) held responsible, or None if unknown.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
