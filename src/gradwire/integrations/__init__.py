"""Where gradwire meets trainers."""

from gradwire.integrations.attach import Handle, attach

__all__ = ["Handle", "attach"]
