"""Registers the backend "gradwire" with torch.distributed.

`import torch` calls `autoload` through the entry point group `torch.backends`. That happens in the
middle of other imports, possibly gradwire's own, so nothing of gradwire is imported before a
process group is made.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = "gradwire"


def autoload() -> None:
    """Register the backend once; no effect if torch was built without distributed."""
    import torch.distributed as dist

    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _make, extended_api=True, devices=["cpu", "cuda"])


def _make(options: Any, backend_options: object) -> dist.ProcessGroup:
    from gradwire.integrations.backend import make

    return make(options, backend_options)
