"""Whether this run of the tests is of the whole product, or of a sample of it."""

from __future__ import annotations

import os


def whole() -> bool:
    return os.environ.get("GRADWIRE_TEST_ALL", "0") not in ("", "0")
