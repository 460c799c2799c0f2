"""The stored dtype fp8 against its 256 numbers, enumerated in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from codec_calls import call, same
from gradwire.codecs import Codec
from gradwire.lang.ops import concat, fp8

# of the codes 0 to 0x7E, in their order; the 16 exponents have 8 numbers each
NUMBERS = np.array([math.ldexp(c % 8 + 8 * (c > 7), max(c // 8, 1) - 10) for c in range(127)])
NAN = 0x7F


@dataclass(frozen=True)
class Stored(Codec):
    """Values in fp8, unscaled."""

    def encode(self, g: Any) -> Any:
        return concat(value=fp8(g))

    def decode(self, value: Any) -> Any:
        return value


def borders() -> torch.Tensor:
    """The numbers and the middles between them, with the floats next to these, of both signs."""
    middles = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    at = torch.from_numpy(np.concatenate([NUMBERS, middles, [464.0, 480.0]])).float()
    infinity = torch.tensor(math.inf)
    near = torch.cat([at, at.nextafter(infinity), at.nextafter(-infinity)])
    return torch.cat([near, -near])


def rounded(values: torch.Tensor) -> torch.Tensor:
    """The codes of the nearest numbers; of two that are as near, the even one."""
    x = values.double().numpy()
    low = np.searchsorted(NUMBERS, np.abs(x), side="right").clip(1) - 1
    high = np.minimum(low + 1, 126)
    below, above = np.abs(x) - NUMBERS[low], NUMBERS[high] - np.abs(x)
    codes = np.where((below < above) | ((below == above) & (low % 2 == 0)), low, high)
    codes = np.where(np.isfinite(x), codes | np.signbit(x) << 7, NAN)
    return torch.from_numpy(codes.astype("u1"))


def test_a_cast_rounds_to_the_nearest_number() -> None:
    every_bf16 = torch.arange(-(2**15), 2**15).short().view(torch.bfloat16).float()
    values = torch.cat([every_bf16, borders()])
    for target in ("eager", "c"):
        assert torch.equal(call(Stored(), "encode", values, target=target).payload, rounded(values))


def test_every_code_is_its_number() -> None:
    codes = torch.arange(256).to(torch.uint8)
    positive = torch.from_numpy(np.append(NUMBERS, math.nan)).float()
    for target in ("eager", "c"):
        decoded = call(Stored(), "decode", torch.ones(256), payload=codes, target=target).values
        assert same(decoded, torch.cat([positive, -positive])), target
