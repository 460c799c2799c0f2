"""Ranks whose calls look alike but differ: every rank gets an error, and none a wrong number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.engine import Communicator
from gradwire.errors import CodecError, ConfigError
from gradwire.lang import Codec, Payload, Value
from gradwire.lang.ops import concat
from ranks import as_threads, caught


def doubling(by: float) -> Codec:
    """A codec whose code differs between ranks under one name: an old file on one of them."""

    @dataclass(frozen=True)
    class Stale(Codec):
        def encode(self, g: Value) -> Payload:
            return concat(value=g * 0.5)

        def decode(self, value: Value) -> Value:
            return value * by

    return Stale()


def test_a_codec_that_is_another_elsewhere_is_named() -> None:
    codecs = [doubling(2.0 if rank else 3.0) for rank in range(3)]
    assert len(set(map(str, codecs))) == 1

    def reduce(comm: Communicator) -> BaseException | None:
        tensor = torch.randn(300)
        return caught(lambda: gw.all_reduce(tensor, codecs[comm.rank], group=comm))

    for error in as_threads(3, reduce):
        assert isinstance(error, ConfigError)
        assert "Stale(): program" in str(error)


@pytest.mark.parametrize("codec", ["randomk", "rotated", "qsgd"])
def test_a_call_that_differs_is_refused(codec: str) -> None:
    alike = {"op": "avg", "seed": 0, "step": 7}
    for differs in ({"seed": 1}, {"step": 8}):

        def reduce(comm: Communicator, differs: dict[str, Any] = differs) -> BaseException | None:
            gw.all_reduce(torch.randn(3000), codec, group=comm, **alike)  # agreed by both
            mine = alike | (differs if comm.rank == 1 else {})
            return caught(lambda: gw.all_reduce(torch.randn(3000), codec, group=comm, **mine))

        errors = as_threads(2, reduce)
        assert any(isinstance(error, CodecError) for error in errors)
        assert all(error is not None for error in errors)
        assert any("seed or step differs" in str(error) for error in errors), differs
