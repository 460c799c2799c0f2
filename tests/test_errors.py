"""Errors that pass from one process group to another keep the numbers in the whole job."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

import pytest

from gradwire.errors import ConfigError, TransportError, in_global_ranks

JOB = 4
GROUPS: list[Sequence[int] | None] = [
    None,  # the job's own numbers
    *(ranks for size in range(1, JOB + 1) for ranks in permutations(range(JOB), size)),
]


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
