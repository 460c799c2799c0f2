"""What a user reads of an error: one traceback, of this call, and the numbers in the whole job."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from functools import partial
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire.engine import Communicator
from gradwire.errors import ConfigError, TransportError, in_global_ranks
from gradwire.transport.torch_p2p import TorchP2P, _Work
from ranks import as_threads, caught, raises
from rooms.backend import from_environment

JOB = 4
GROUPS: list[Sequence[int] | None] = [
    None,  # the job's own numbers
    *(ranks for size in range(1, JOB + 1) for ranks in permutations(range(JOB), size)),
]


def lines(error: BaseException | None) -> list[str]:
    assert error is not None
    return traceback.format_exception(error)


class Broken:
    """A work of gloo's whose peer has died."""

    def wait(self, timeout: Any) -> None:
        raise RuntimeError("[pair.cc:537] Read error: Connection reset by peer. This is typically")


def test_no_cause_is_shown_that_the_text_has(tmp_path: Path) -> None:
    model, damaged = torch.nn.Linear(4, 4), tmp_path / "damaged"
    damaged.write_text("{")
    group: Any = SimpleNamespace(
        error=None, rank=0, timeout=1.0, waiting={}, _group=lambda: group,
        explain=lambda *what: TorchP2P.explain(group, *what),
    )  # fmt: skip
    for call, told in (
        (partial(gw.attach, model, plan=tmp_path / "none"), "there is no file"),
        (partial(gw.attach, model, plan=damaged), "Expecting property name"),
        (partial(gw.attach, model, weights="fp9"), "unknown codec"),
        (partial(gw.attach, model, weights="randomshift:bits=9"), "bits=9"),
        (partial(from_environment, {"GRADWIRE_CODEC": "qsgd:bits=9"}), "bits=9"),
        (partial(gw.attach(model).load, tmp_path), "has no checkpoint"),
        (_Work(group, Broken(), torch.zeros(1), 1, "receive from").wait, "reset by peer"),  # type: ignore[arg-type]
    ):
        error = raises(gw.GradwireError, call, told)
        assert "The above exception" not in "".join(lines(error)), told


def test_an_error_that_is_raised_again_does_not_grow() -> None:
    def body(comm: Communicator) -> list[int]:
        comm.end(gw.TransportError("rank 0: rank 1 has died"))
        call = partial(gw.all_reduce, torch.zeros(3), group=comm)
        return [len(lines(caught(call))) for _ in range(12)]

    # Where it arose first, on this thread or on one that prepares the call, is a matter of chance.
    (lengths,) = as_threads(1, body)
    assert max(lengths) < 20, lengths


@pytest.mark.parametrize("kind", [ValueError, gw.ConfigError])
def test_a_users_own_error_keeps_where_it_arose(kind: type[Exception]) -> None:
    def fails() -> None:
        raise kind("no")

    def body(comm: Communicator) -> str:
        error = caught(fails)
        assert error is not None
        comm.end(error)
        return "".join(lines(caught(comm.check)))

    assert ("in fails" in as_threads(1, body)[0]) == (kind is ValueError)


def members(group: Sequence[int] | None) -> list[int]:
    return list(range(JOB)) if group is None else list(group)


@pytest.mark.parametrize("first", GROUPS, ids=repr)
def test_an_error_names_the_same_rank_in_every_group_that_it_passes(
    first: Sequence[int] | None,
) -> None:
    for number, rank in enumerate(members(first)):
        raised = TransportError(f"receive from rank {number} failed", peer=number)
        raised = in_global_ranks(raised, first)
        for second in GROUPS:
            passed = in_global_ranks(raised, second)
            assert str(passed) == f"receive from rank {rank} failed"
            of = members(second)
            assert passed.peer == (of.index(rank) if rank in of else None), second
            assert in_global_ranks(passed, first).peer == number
        assert raised.peer == number


def test_an_error_without_a_peer_is_renamed_once() -> None:
    error = ConfigError("ranks 0 and 1 disagree")
    for group in (None, [2, 3], [1, 0]):
        error = in_global_ranks(error, group)
        assert str(error) == "ranks 0 and 1 disagree"
    assert str(in_global_ranks(ConfigError("rank 1 has 'a'"), [2, 3])) == "rank 3 has 'a'"
