"""What a byte of each bucket counts: by priority, by spans, and where nothing can be told."""

from __future__ import annotations

from rooms.decide import MOST, priorities, together


def test_the_last_bucket_counts_most() -> None:
    assert priorities([["c", "b"], ["a"]]) == {"c": 1.0, "b": 1.0, "a": 2.0}


def test_neighbouring_buckets_are_taken_together() -> None:
    wanted = dict.fromkeys("abcd")
    assert together([["d", "x"], ["y"], ["c", "b"], ["a"]], wanted) == [["d"], ["c", "b"], ["a"]]
    many = [[str(number)] for number in range(100)]
    found = together(many, dict.fromkeys(map(str, range(100))))
    assert len(found) == MOST
    assert [name for names in found for name in names] == [str(number) for number in range(100)]
    assert max(map(len, found)) - min(map(len, found)) <= 1
    assert together([["x"]], wanted) == []
