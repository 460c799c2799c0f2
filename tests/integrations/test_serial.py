"""Background work of a handle, one after the other."""

from __future__ import annotations

from rooms.engine import Workers
from rooms.integrations import Serial


def test_what_fails_does_not_stop_what_follows() -> None:
    serial, done = Serial(Workers()), []

    def fails() -> None:
        done.append("fails")
        raise SystemExit

    serial.submit(fails)
    serial.submit(lambda: done.append("follows"))
    serial.wait()
    assert done == ["fails", "follows"]
