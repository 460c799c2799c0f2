"""Windows that end faster than ranks decide: ranks take the same ones, and keep few."""

from __future__ import annotations

import random

from gradwire.integrations.windows import Windows


class Rank:
    """A rank whose windows end, and whose rounds go on, one step at a time."""

    def __init__(self) -> None:
        self.windows: Windows[int] = Windows()
        self.taken: list[int] = []
        self.told: int | None = None
        self.knows = False
        self.ended = 0

    def end(self) -> None:
        number = self.ended = self.ended + 1
        found = self.windows.end(number, lambda: number)
        if found is not None:
            self.taken.append(found)

    def tell(self) -> None:
        self.told = self.windows.ask()

    def finish(self) -> None:
        self.told, self.knows = None, False
        following = self.windows.following()
        if following is not None:
            self.taken.append(following)


def test_ranks_decide_on_the_same_windows_in_any_order_of_events() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        ranks = [Rank() for _ in range(3)]
        rounds = [0, 0, 0]  # that have ended
        told: list[list[int]] = []  # by round
        for _ in range(300):
            at = draw.randrange(3)
            one = ranks[at]
            # passes end on all ranks before any begins the next but one
            if draw.random() < 0.5 and one.ended <= min(rank.ended for rank in ranks):
                one.end()
            elif len(one.taken) > rounds[at]:
                of = told[rounds[at]] if len(told) > rounds[at] else []
                if one.told is None:
                    one.tell()
                    assert one.told is not None
                    if not of:
                        told.append(of)
                    of.append(one.told)
                elif len(of) == 3 and not one.knows:
                    one.windows.know(max(of))
                    one.knows = True
                elif one.knows:
                    one.finish()
                    rounds[at] += 1
            assert one.knows is False or len(one.windows._kept) <= 1
        least = min(len(rank.taken) for rank in ranks)
        assert least > 3
        assert all(rank.taken[:least] == ranks[0].taken[:least] for rank in ranks)


def test_no_window_waits_while_another_is_decided_on() -> None:
    windows: Windows[int] = Windows()
    assert windows.end(1, lambda: 1) == 1
    for number in range(2, 100):
        assert windows.end(number, lambda: 1 // 0) is None, "its averages are not even copied"
    assert windows.ask() == 100
    windows.know(101)
    assert windows.end(100, lambda: 100) is None
    assert windows.end(101, lambda: 101) is None
    assert windows.end(102, lambda: 1 // 0) is None, "one waits"
    assert windows.following() == 101
    assert windows.end(103, lambda: 1 // 0) is None
    windows.ask()
    windows.know(104)
    assert windows.following() is None
    assert windows.end(104, lambda: 104) == 104
