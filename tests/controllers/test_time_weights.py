"""Weights of bytes from measured spans."""

from __future__ import annotations

import numpy as np
import pytest

from gradwire.controllers import time_weights
from gradwire.errors import ConfigError


def test_coefficients_are_found_again() -> None:
    draw = np.random.default_rng(0)
    sent = draw.uniform(1e5, 1e6, (200, 4))
    truth = np.array([1.0, 3.0, 0.0, 4.0])
    spans = 0.01 + 1e-9 * sent @ truth + draw.normal(0, 1e-6, 200)
    found = time_weights(sent, spans)
    assert found == pytest.approx([0.5, 1.5, 0.01, 2.0], rel=0.02)


def test_none_is_below_zero() -> None:
    sent = np.random.default_rng(1).uniform(0, 1, (50, 3))
    found = time_weights(sent, sent @ np.array([1.0, -5.0, 1.0]))
    assert (found > 0).all()
    assert found[1] == 0.01
    assert time_weights(sent, -sent.sum(1)).tolist() == [1, 1, 1]
    sent[:, 1] = sent[:, 0] / 2 + sent[:, 1] / 10  # the others are fitted again without the second
    found = time_weights(sent, sent @ np.array([1.0, -0.4, 1.0]))
    assert found[0] == pytest.approx(0.8 * found[2], rel=0.03)


def test_samples_that_say_nothing() -> None:
    for sent, spans, said in (
        (np.ones((5, 2)), [1.0] * 4, "a span per sample"),
        (np.ones(5), [1.0] * 5, "a span per sample"),
        (np.full((5, 2), np.nan), [1.0] * 5, "not finite"),
        (np.ones((5, 2)), [1.0] * 5, "do not tell 2 buckets apart"),
        (np.eye(2), [1.0] * 2, "do not tell"),
    ):
        with pytest.raises(ConfigError, match=said):
            time_weights(sent, spans)
