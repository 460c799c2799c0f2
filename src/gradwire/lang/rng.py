"""Counter-based random numbers: a hash of (key, index, stream), the same on every target.

Vocabulary
    parameter key  64 bits from (user seed, parameter name, rank), computed once. Shared keys use
                   rank -1, so they are the same on all ranks
    step key       64 bits from (parameter key, step, phase), stored in a kernel's row
    origin         which payload of a step: a number of the rank that encoded it, and of its role in
                   the algorithm. Where decoding needs the encoder's random numbers, the origin's
                   key takes the place of the step key, and any rank can compute it
    stream         identifies a `random()` call of a codec; has two 32-bit words from the step key

A value costs three 32-bit multiplications, five shifts and exclusive-ors, and two additions. There
is no state, so results do not depend on threads, targets or how a parameter is cut. All arithmetic
wraps modulo 2^32 or 2^64; torch computes it in masked int64.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

MASK32 = 0xFFFFFFFF
MASK64 = 0xFFFFFFFFFFFFFFFF
GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: its multiples never repeat modulo 2^64


_MIX_SHIFTS = (30, 27, 31)
_MIX_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
# As numpy scalars, made once.
_GOLDEN = np.uint64(GOLDEN)
_SHIFTS = [np.uint64(n) for n in _MIX_SHIFTS]
_FACTORS = [np.uint64(n) for n in _MIX_FACTORS]


def mix64(x: int) -> int:
    """A bijection of 64-bit integers in which every input bit affects every output bit."""
    x &= MASK64
    x = ((x ^ (x >> _MIX_SHIFTS[0])) * _MIX_FACTORS[0]) & MASK64
    x = ((x ^ (x >> _MIX_SHIFTS[1])) * _MIX_FACTORS[1]) & MASK64
    return x ^ (x >> _MIX_SHIFTS[2])


def parameter_key(seed: int, name: str, rank: int) -> int:
    """The 64-bit key of a parameter on a rank."""
    text = f"{seed}/{rank}/{name}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Keys:
    """A parameter's keys on a rank: for its own random numbers, and for those all ranks share."""

    own: int
    shared: int


def parameter_keys(seed: int, name: str, rank: int) -> Keys:
    """Both keys of a parameter on a rank."""
    return Keys(parameter_key(seed, name, rank), parameter_key(seed, name, -1))


def step_keys(keys: np.ndarray, step: int | np.ndarray, phase: int | np.ndarray) -> np.ndarray:
    """The step keys of many parameters: uint64[..., n] from uint64[..., n].

    `step` is one number or int64[n]; `phase` separates uses within a step (the first encoding, the
    encoding after the reduction), one number or an array that broadcasts with the keys.
    """
    x: np.ndarray = np.asarray(keys, dtype=np.uint64) + np.asarray(step).astype(np.uint64) * _GOLDEN
    _mix_in_place(x)
    x = x + np.atleast_1d(phase).astype(np.uint64) * _GOLDEN
    _mix_in_place(x)
    return x


def origin_keys(shared: np.ndarray, origin: int | np.ndarray) -> np.ndarray:
    """The keys of payloads: uint64[n] from their rows' shared step keys and their origins.

    An origin's key has the bits of the two words of the stream of that number.
    """
    steps = (np.atleast_1d(origin).astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x: np.ndarray = np.asarray(shared, dtype=np.uint64) + steps
    _mix_in_place(x)
    return x


def _mix_in_place(x: np.ndarray) -> None:
    """mix64 of each entry."""
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]


def stream_words(key: int, stream: int) -> tuple[int, int]:
    """The two 32-bit words of a stream."""
    word = mix64(key + (stream + 1) * GOLDEN)
    return word & MASK32, word >> 32


def uniform(key: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """fp32 in [0, 1), in steps of 2^-24, for every index (int64, any shape)."""
    low, high = stream_words(key, stream)
    x = ((index + low) * 0x9E3779B1) & MASK32
    x = x ^ (x >> 16)
    x = ((x ^ high) * 0x7FEB352D) & MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & MASK32
    return (x >> 8).to(torch.float32) * 2.0**-24
