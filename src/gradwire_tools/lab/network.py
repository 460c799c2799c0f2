"""The network that the lab emulates: a rate and a one-way latency, as a frozen value.

Vocabulary: *rate*, the bits per second that a node may send, and that it may receive; *latency*,
the time from one node to another, half a round trip. `none` is this machine's loopback, with no
limit and no added latency.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from decimal import Decimal

from gradwire.errors import ConfigError

_RATES = {"gbit": 10**9, "mbit": 10**6, "kbit": 10**3, "bit": 1}
_LATENCIES_NS = {"s": 10**9, "ms": 10**6, "us": 10**3}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]+)")

# Outside these bounds the kernel's shaper or the delay line is not accurate.
_RATE_BOUNDS = (64 * 10**3, 100 * 10**9)
_LATENCY_MAX_NS = 10 * 10**9


@dataclass(frozen=True)
class Network:
    """The properties of each node's link. `parse` builds one from text; `str` is the inverse.

    Attributes:
        rate_bits_per_s: rate of a node's egress and, separately, of its ingress; `inf` for `none`.
        latency_s: one-way latency in seconds between any two nodes.
    """

    rate_bits_per_s: float = math.inf
    latency_s: float = 0.0

    @classmethod
    def parse(cls, text: str, emulated: bool = True) -> Network:
        """Read `"1gbit,1ms"`, `"200mbit,0.5ms"`, `"10gbit"` (no added latency) or `"none"`.

        Args:
            emulated: False for a network that is only simulated: any rate, any latency.

        Raises:
            ConfigError: a unit is unknown, a part is missing, or the lab cannot emulate a value.
        """
        parts = [part.strip() for part in text.strip().lower().split(",")]
        if parts == ["none"]:
            return cls()
        if len(parts) > 2:
            raise _bad(text, f"it has {len(parts)} parts")
        rate = _quantity(text, "rate", parts[0], _RATES)
        latency_ns = _quantity(text, "latency", parts[1], _LATENCIES_NS) if parts[1:] else 0
        low, high = _RATE_BOUNDS
        if not emulated and rate == 0:
            raise _bad(text, "its rate is zero")
        if emulated and not low <= rate <= high:
            bounds = f"{_spell(low, _RATES)} to {_spell(high, _RATES)}"
            raise _bad(text, f"the lab emulates rates from {bounds}")
        if emulated and latency_ns > _LATENCY_MAX_NS:
            raise _bad(text, f"the lab emulates latencies up to {_LATENCY_MAX_NS // 10**9}s")
        return cls(float(rate), latency_ns / 10**9)

    @property
    def shaped(self) -> bool:
        """Whether this network needs namespaces; False for `none`."""
        return math.isfinite(self.rate_bits_per_s)

    @property
    def latency_ns(self) -> int:
        """The one-way latency in whole nanoseconds."""
        return round(self.latency_s * 10**9)

    def __str__(self) -> str:
        if not self.shaped:
            return "none"
        rate = _spell(round(self.rate_bits_per_s), _RATES)
        return f"{rate},{_spell(self.latency_ns, _LATENCIES_NS)}"


def _quantity(text: str, name: str, part: str, units: dict[str, int]) -> int:
    """`part` ("1.5gbit") in the smallest unit: bits per second or nanoseconds."""
    match = _QUANTITY.fullmatch(part)
    if match is None:
        raise _bad(text, f"its {name} {part!r} is not a number with a unit")
    number, unit = match.groups()
    if unit not in units:
        raise _bad(text, f"the {name}'s unit {unit!r} is not one of {', '.join(units)}")
    return round(Decimal(number) * units[unit])


def _spell(value: int, units: dict[str, int]) -> str:
    """`value` in the largest unit that keeps it at least one, without trailing zeros."""
    if value == 0:
        return "0ms"
    unit = next((name for name, size in units.items() if value >= size), list(units)[-1])
    return f"{(Decimal(value) / units[unit]).normalize():f}{unit}"


def _bad(text: str, why: str) -> ConfigError:
    return ConfigError(
        f"network {text!r}: {why}; write RATE,LATENCY as in '1gbit,1ms' or '200mbit,500us' "
        "(bit, kbit, mbit, gbit; us, ms, s), or 'none'"
    )
