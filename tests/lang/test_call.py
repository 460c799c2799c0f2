"""The distances between the payloads of a sum."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire import ConfigError
from gradwire.lang.call import Call


def test_equal_distances_have_a_stride() -> None:
    for given, stride in (([], 0), ([0], 0), ([0, 48, 96], 48), ([0, -16, -32], -16)):
        assert Call(len(given) + 1, distances=np.array(given, dtype="i8")).stride == stride
    assert Call(1, distances=None).stride == 0
    for given in ([0, 48, 95], [0, 48, 48], [0, 0, 1]):
        with pytest.raises(ConfigError, match="equally spaced"):
            _ = Call(4, distances=np.array(given, dtype="i8")).stride


def test_origins_follow_the_distances() -> None:
    call = Call(3, rank=-1, distances=np.array([0, 48, 96, 7, 9, 2, 1], dtype="i8"))
    assert call.stride == 48
    assert call.origins.tolist() == [7, 9, 2]
