"""What a call that users can mend says."""

from __future__ import annotations

from collections.abc import Callable

from gradwire import ConfigError
from ranks import caught


def refusal(call: Callable[[], object]) -> str:
    """The text of the ConfigError that `call` must raise."""
    error = caught(call)
    assert isinstance(error, ConfigError), error
    return str(error)
