"""Registers the backend "gradwire" with torch.distributed.

`import torch` calls `autoload` through the entry point group `torch.backends`. An error there would
break every `import torch` on this machine. So this file imports nothing that can fail (of gradwire,
only the `__init__` files of its packages), `autoload` never raises, and the backend itself is
imported when the first process group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "gradwire"


def autoload() -> None:
    """Register the backend once; no effect if torch was built without distributed.

    Never raises: a failure ends in one RuntimeWarning that gives the reason.
    """
    try:
        import torch.distributed as dist

        if dist.is_available() and NAME not in dist.Backend.backend_list:
            dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])
    except Exception as error:
        _warn(
            f"gradwire could not register its backend with torch.distributed: "
            f"{type(error).__name__}: {error}. `import torch` goes on; "
            f'init_process_group("{NAME}") does not work in this process, gradwire.attach does'
        )


def _warn(text: str) -> None:
    """A RuntimeWarning; where filters make warnings errors (-W error), the same text on stderr."""
    import sys
    import warnings

    try:
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    except RuntimeWarning:
        print(f"RuntimeWarning: {text}", file=sys.stderr)


def _make(options: Any, backend_options: object) -> dist.ProcessGroup:
    from gradwire.backend.group import make

    return make(options, backend_options)
