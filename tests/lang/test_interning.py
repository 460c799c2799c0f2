"""Identical nodes are one object, whichever threads make them."""

from __future__ import annotations

import multiprocessing as mp
import threading
import weakref
from typing import Any

import pytest

from gradwire.lang import ir


def test_threads_that_make_the_same_node_get_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread begins when the first has found no node, and has not made it yet."""
    made: list[ir.Node] = []
    second_has_stopped = threading.Event()  # it waits for the lock, or has its node

    def second() -> None:
        made.append(ir.const(0.12345))
        second_has_stopped.set()

    thread = threading.Thread(target=second, daemon=True)

    class Table(weakref.WeakValueDictionary[Any, ir.Node]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            if threading.current_thread() is not thread and not thread.ident:
                thread.start()
                assert second_has_stopped.wait(60)  # ends a hang
            return found

    class Lock:
        inner = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is thread:
                second_has_stopped.set()
            self.inner.acquire()

        def __exit__(self, *_: object) -> None:
            self.inner.release()

    monkeypatch.setattr(ir, "_interned", Table())
    monkeypatch.setattr(ir, "_interning", Lock())
    first = ir.const(0.12345)
    thread.join(60)
    assert made == [first]


def test_a_process_that_is_forked_while_a_thread_makes_a_node_makes_its_own() -> None:
    held, goes_on = threading.Event(), threading.Event()

    def other() -> None:
        with ir._interning:
            held.set()
            goes_on.wait(60)

    thread = threading.Thread(target=other)
    thread.start()
    assert held.wait(60)
    child = mp.get_context("fork").Process(target=ir.const, args=(0.54321,))
    child.start()
    goes_on.set()
    child.join(60)
    thread.join()
    child.kill()
    assert child.exitcode == 0
