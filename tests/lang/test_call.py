"""The distances between the payloads of a sum."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire import ConfigError
from gradwire.lang.call import Call


@pytest.mark.parametrize(
    ("distances", "stride"), [(None, 0), ([], 0), ([0], 0), ([0, 48, 96], 48), ([0, -16, -32], -16)]
)
def test_equal_distances_have_a_stride(distances: list[int] | None, stride: int) -> None:
    given = None if distances is None else np.array(distances, dtype="i8")
    payloads = len(distances or ())
    assert Call(payloads + 1, distances=given).stride == stride


@pytest.mark.parametrize("distances", [[0, 48, 95], [0, 48, 48], [0, 0, 1]])
def test_unequal_distances_have_no_stride(distances: list[int]) -> None:
    with pytest.raises(ConfigError, match="equally spaced"):
        _ = Call(4, distances=np.array(distances, dtype="i8")).stride


def test_origins_follow_the_distances() -> None:
    call = Call(3, rank=-1, distances=np.array([0, 48, 96, 7, 9, 2, 1], dtype="i8"))
    assert call.stride == 48
    assert call.origins.tolist() == [7, 9, 2]
