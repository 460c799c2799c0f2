"""The errors that gradwire raises. Each message says what was wrong, where, and what to do."""

from __future__ import annotations


class GradwireError(Exception):
    """The base class of all gradwire errors."""


class ConfigError(GradwireError, ValueError):
    """The user can fix this: an unknown codec, a bad option, ranks that disagree on a plan."""


class CodecError(GradwireError):
    """A payload is not what the plan says: foreign, truncated or corrupted."""


class TransportError(GradwireError):
    """A peer or a link failed.

    Attributes:
        peer: the rank (within the process group) held responsible, or None if unknown.
    """

    def __init__(self, message: str, peer: int | None = None) -> None:
        super().__init__(message)
        self.peer = peer
