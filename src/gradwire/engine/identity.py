"""Message identity, which is the same on every rank whatever the timing; and its tag.

A message is identified by its process group, the owner that issued the scope, the number of the
scope's ticket in the owner's order, the round within the ticket, the layout of the round, and its
slot: its number among the messages between its two ranks, which both ends compute from the graph.
Within a process group, a transport gets 30 bits of that:

    a scope of a handle    1 | range 11 | ticket 4 | round 2 | slot 12
    a single collective    0 | stream 1 | layout 10 | ticket 4 | slot 14

At most `MOST_WINDOW` tickets of an owner are in flight, and each end posts their messages in order.
So both ends post two messages with the same tag in the same order, and a transport that delivers
the messages of one tag in order never confuses them. It is therefore safe that ticket and round
numbers wrap around.

A mistake of the user may make two ranks issue different rounds in one place, and gloo aborts the
process where the sizes of a send and its receive differ. So different layouts have different tags.
A handle's layout has a *tag range*, which ranks claim when they agree on the layout. Single
collectives may have any number of layouts: their tags carry a digest, and a layout whose digest
collides with another's is agreed on again (gradwire.collectives.collective).
"""

from __future__ import annotations

from gradwire.errors import ConfigError

_RANGES, _TICKETS, _ROUNDS, _SLOTS = 11, 4, 2, 12
_STREAMS, _LAYOUTS, _CALL_SLOTS = 1, 10, 14

LAYOUTS = 1 << _LAYOUTS  # distinct layouts in the tags of a stream of single collectives
RANGES = 1 << _RANGES  # tag ranges for the handles of a process group; the last is reserved
MOST_WINDOW = 1 << _TICKETS
TAGS = 1 << 30


def scope_tag(tags: int, ticket: int, number: int, slot: int) -> int:
    """The tag of a message in round `number` of a handle's ticket; `tags`: the layout's tag range.

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
            f"a collective has more than {1 << bits} messages between two ranks: use fewer segments"
        )
