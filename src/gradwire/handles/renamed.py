"""What arguments and names of earlier versions are called now."""

from __future__ import annotations

from collections.abc import Iterable

from gradwire.errors import ConfigError

# argument -> what to write
ARGUMENTS = {
    "algorithm": 'options=gw.Options(algorithm="ring")',
    "seed": "options=gw.Options(seed=1)",
    "coalesce_bytes": "options=gw.Options(coalesce_bytes=0)",
    "keep": 'options=gw.Options(keep="reference")',
    "replan": 'policy=gw.Replan("lgreco", every=500)',
    "auto": "gw.Auto(...) in place of the codec",
}
# attribute of a handle -> what to write
ATTRIBUTES = {
    "load_checkpoint": "handle.load(path)",
    "summary": "str(handle)",
    "adaptation": "handle.history()",
    "automatic": "handle.history()",
    "attached": "handle.plan, and remember the call of detach",
}


def check_renamed(call: str, keywords: Iterable[str]) -> None:
    """Raise ConfigError for a keyword that a call has no longer."""
    for name in ARGUMENTS.keys() & set(keywords):
        raise ConfigError(f"{call}: {name} is given otherwise now: write {ARGUMENTS[name]}")
