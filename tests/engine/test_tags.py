"""Tags: messages that may be in flight together between two ranks have different tags."""

from __future__ import annotations

import random

from gradwire.engine import Communicator
from gradwire.transport import Hub
from ranks import refuses
from rooms.engine import LAYOUTS, MOST_WINDOW, RANGES, TAGS, TagRanges, call_tag, scope_tag


def test_messages_within_the_windows_have_tags_of_their_own() -> None:
    """At any ticket numbers: each owner has a window of tickets, in up to four rounds."""
    draw = random.Random(0)
    for _ in range(20):
        tags: list[int] = []
        for layout in draw.sample(range(RANGES - 1), 5):
            first = draw.randrange(1 << 40)
            tags += [
                scope_tag(layout, first + ticket, number, slot)
                for ticket in range(MOST_WINDOW)
                for number in range(4)
                for slot in (0, 1, 2, 77, (1 << 12) - 1)
            ]
        for stream in (0, 1):
            first = draw.randrange(1 << 40)
            tags += [
                call_tag(stream, layout, first + ticket, slot)
                for layout in draw.sample(range(LAYOUTS), 4)
                for ticket in range(MOST_WINDOW)
                for slot in (0, 1, 2, (1 << 14) - 1)
            ]
        assert len(set(tags)) == len(tags)
        assert min(tags) >= 0
        assert max(tags) < TAGS
    # The same call on two ranks: what differs is the layout alone.
    assert len({call_tag(0, layout, 5, 3) for layout in range(LAYOUTS)}) == LAYOUTS
    # The last range is left to transports.
    assert scope_tag(RANGES - 2, MOST_WINDOW - 1, 3, (1 << 12) - 1) < TAGS - (1 << 17)
    refuses("fewer segments", lambda: scope_tag(0, 0, 0, 1 << 12))
    refuses("fewer segments", lambda: call_tag(0, 0, 0, 1 << 14))


def test_ranges_are_claimed_alike_whatever_the_order() -> None:
    """Three ranks meet five layouts, each in another order."""
    store: dict[str, bytes] = {}
    owner = Communicator(Hub(1).transport(0)).owner("a test")
    layouts = ["a", "b", "c", "d", "e"]
    found = []
    for seed in range(3):
        ranges = TagRanges(store.setdefault)
        order = random.Random(seed).sample(layouts, 5)
        claimed = {layout: ranges.claim(owner, layout) for layout in order}
        found.append([claimed[layout] for layout in layouts])
    assert found[0] == found[1] == found[2]
    assert len(set(found[0])) == 5


def test_a_range_is_used_again_once_its_owner_is_over() -> None:
    comm = Communicator(Hub(1).transport(0))
    ranges = TagRanges(lambda key, value: value)
    first, second = comm.owner("one"), comm.owner("another")
    for i in range(RANGES - 1):
        ranges.claim(first, str(i))
    refuses("detach", lambda: ranges.claim(second, "a"))
    first.closed = True
    assert 0 <= ranges.claim(second, "a") < RANGES - 1


def test_a_place_in_use_is_left_out_on_all_ranks() -> None:
    """Two ranks: the first has dropped the program before, and the second is about to."""
    store: dict[str, bytes] = {}
    owner = Communicator(Hub(1).transport(0)).owner("a test")
    first, second = TagRanges(store.setdefault), TagRanges(store.setdefault)
    for i in range(RANGES - 1):
        owner.held[str(i)] = int(i != 1)  # programs
        assert first.claim(owner, str(i)) == second.claim(owner, str(i)) == i
    assert first.claim(owner, "new") == 1, "place 0 is in use"
    owner.held["1"] = 1
    assert second.claim(owner, "new") == 1
    owner.held["new"] = 1
    refuses("comes back", lambda: first.claim(owner, "1"))
