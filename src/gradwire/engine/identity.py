"""Identity: what a message belongs to, the same on every rank whatever the timing; and its tag.

A message is identified by its process group, the owner that issued the scope, the number of the
scope's ticket in the owner's order, the round within the ticket, the layout of what travels, and
its slot: its number among the messages between its two ranks, which both ends compute from the
graph. A transport gets 30 bits of that, of one process group:

    a scope of a handle    1 | range 11 | ticket 4 | round 2 | slot 12
    a single collective    0 | stream 1 | layout 10 | ticket 4 | slot 14

At most `MOST_WINDOW` tickets of an owner are under way, and on each end their rounds post messages
in order. So two messages between the same ranks that have one tag are posted in the same order on
both ends, and a transport that delivers the messages of one tag in order never confuses them. What
differs modulo a ticket's or a round's bits is therefore no danger.

By a user's mistake two ranks may issue unlike rounds in one place, and gloo aborts the process
where the sizes of a send and its receive differ. So tags tell layouts apart: an owner's layout has
a *range* of tags that ranks claim for it when they agree on it; layouts of single collectives,
which may be any number, are told apart by digest, and one that has another's place is agreed on
again (gradwire.collectives.collective).
"""

from __future__ import annotations

from gradwire.errors import ConfigError

_RANGES, _TICKETS, _ROUNDS, _SLOTS = 11, 4, 2, 12
_STREAMS, _LAYOUTS, _CALL_SLOTS = 1, 10, 14

LAYOUTS = 1 << _LAYOUTS  # that a stream of single collectives tells apart
RANGES = 1 << _RANGES  # that the handles of a process group have at a time; the last is reserved
MOST_WINDOW = 1 << _TICKETS
TAGS = 1 << 30


def scope_tag(tags: int, ticket: int, number: int, slot: int) -> int:
    """The tag of a message of round `number` of a handle's ticket, whose layout has range `tags`.

    Raises:
        ConfigError: more messages between two ranks than there are slots.
    """
    _check(slot, _SLOTS)
    tag = 1 << _RANGES | tags
    tag = tag << _TICKETS | ticket % (1 << _TICKETS)
    tag = tag << _ROUNDS | number % (1 << _ROUNDS)
    return tag << _SLOTS | slot


def call_tag(stream: int, digest: int, ticket: int, slot: int) -> int:
    """The tag of a message of a single collective.

    Raises:
        ConfigError: as `scope_tag`.
    """
    _check(slot, _CALL_SLOTS)
    tag = stream << _LAYOUTS | digest % LAYOUTS
    tag = tag << _TICKETS | ticket % (1 << _TICKETS)
    return tag << _CALL_SLOTS | slot


def _check(slot: int, bits: int) -> None:
    if slot >> bits:
        raise ConfigError(
            f"a collective of more than {1 << bits} messages between two ranks: use fewer segments"
        )
