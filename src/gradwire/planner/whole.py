"""Files that are whole or not there, also where several ranks write one at the same time."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Write `text` beside `path`, under a name that no other writer has, and rename it."""
    new = Path(f"{os.fspath(path)}.{secrets.token_hex(8)}")
    try:
        new.write_text(text, "utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
