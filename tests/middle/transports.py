"""Between machines and within one: over gloo, and in shared memory."""

from __future__ import annotations

import pytest

from ranks import on
from stress.worlds import of_transport


def over_both(ranks: int) -> list[pytest.MarkDecorator]:
    """Marks: so many ranks over each transport; `make test`: in shared memory."""
    return [
        on(ranks, environment=of_transport(True)),
        on(ranks, environment=of_transport(False), exhaustive=True),
    ]
