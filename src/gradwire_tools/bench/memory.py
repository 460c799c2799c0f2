"""Whether what is to be measured fits into this machine's memory, asked before it is allocated."""

from __future__ import annotations

import os

from gradwire.errors import ConfigError


def check(option: str, nbytes: int) -> None:
    """Pass if so many bytes fit.

    Args:
        option: what takes them, such as "--numel 5".

    Raises:
        ConfigError: they do not; the message tells both numbers.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if nbytes > memory:
        raise ConfigError(
            f"{option}: this takes up to {nbytes / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB"
        )
