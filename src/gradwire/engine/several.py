"""Agreements over several process groups, one after the other.

A rank that fails in one group does not come to the next, where ranks that share no group with the
cause wait for it: so a failure breaks all groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from gradwire.control import Ranks
from gradwire.engine.communicator import Communicator
from gradwire.errors import TransportError


@contextmanager
def failing_together(comms: Sequence[Communicator]) -> Iterator[None]:
    """Within it a TransportError breaks all of these groups."""
    try:
        yield
    except TransportError as error:
        for comm in comms:
            comm.fail(error)
        raise


def ranks_of(
    comms: Sequence[Communicator],
    key: str | Sequence[str] = "",
    check: Callable[[], None] = lambda: None,
    breaks: bool = True,
) -> Ranks:
    """All ranks of these groups.

    Args:
        key: of what they tell, the same on all ranks; or one for each group.
        check: called while this rank waits; what it raises ends the wait. Where a group breaks, a
            wait in it ends by itself.
        breaks: whether a TransportError, of a peer that did not come for example, breaks all of the
            groups: what all ranks call at one place. Else it ends the wait alone.
    """

    def fail_all(error: TransportError) -> None:
        for comm in comms if breaks else ():
            comm.fail(error)

    return Ranks([comm.member for comm in comms], key, check, fail_all)


def agree_over(comms: Sequence[Communicator], what: str, description: Sequence[str]) -> None:
    """Verify that all ranks of all groups hold the same description; see `Ranks.agree`."""
    ranks_of(comms).agree("agreement", what, description).result()
