"""How the report and the tables of the terminal write quantities: few digits, a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from gradwire.errors import ConfigError
from gradwire_tools.lab import Network

DASH = "–"
TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))
RATES = (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3))
SIZES = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1.0))
_SHARES = ("of_limit", "orthogonal_share")


def seconds(value: float | None) -> str:
    """ "1.23 s", "45.6 ms", "7.8 µs"."""
    if value is None:
        return DASH
    if value == 0:
        return "0 s"
    unit, scale = unit_of(TIMES, abs(value))
    return f"{digits(value / scale)} {unit}"


def bandwidth(value: float) -> str:
    """ "297 Mbit/s"."""
    unit, scale = unit_of(RATES, value)
    return f"{digits(value / scale)} {unit}"


def size(value: float | None) -> str:
    """Bytes in decimal units, as network rates are."""
    if value is None:
        return DASH
    unit, scale = unit_of(SIZES, value)
    return f"{value:.0f} B" if unit == "B" else f"{digits(value / scale)} {unit}"


def unit_of(units: Sequence[tuple[str, float]], most: float) -> tuple[str, float]:
    """The name of the largest unit that is not above `most`, and how much it is."""
    return next((one for one in units if most >= one[1]), units[-1])


def spelled(key: str, value: object) -> str:
    """What stands under a key of a row, in the unit that the key's name says."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return network(value) if key == "net" else value
    assert isinstance(value, int | float)
    if key.endswith(("seconds", "time_to_target")):
        return seconds(value)
    if key.endswith("bytes"):
        return size(value)
    if key in _SHARES:
        return percent_of(value)
    if key.endswith(("loss", "metric")):
        return digits(value, 4)
    return f"{value:,}" if isinstance(value, int) else digits(value)


def reach(values: Sequence[float], form: Callable[[float], str], unknown: str = DASH) -> str:
    """ "1.00 s to 2.00 s" of the least and the greatest of two values or more."""
    return f"{form(min(values))} to {form(max(values))}" if len(values) > 1 else unknown


def digits(value: float | None, count: int = 3) -> str:
    """`value` with `count` significant digits, without an exponent where that stays short."""
    if value is None:
        return DASH
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if -4 <= magnitude < 7:
        return f"{value:.{max(0, count - 1 - magnitude)}f}"
    return f"{value:.{count - 1}e}"


def short(value: float) -> str:
    """`value` for a tick: without trailing zeros; "2.5k", "16M" from a thousand on, "1e-4" below a
    thousandth."""
    for scale, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    if 0 < abs(value) < 1e-3:
        mantissa, _, power = f"{value:e}".partition("e")
        return f"{float(mantissa):.3g}e{int(power)}"
    return f"{value:.3g}"


def network(net: str) -> str:
    """ "300 Mbit/s, 1 ms latency" of "300mbit,1ms"; loopback of "none"."""
    if net == "none":
        return "loopback, no network emulated"
    found = re.fullmatch(r"([\d.]+)([kmg]?)bit,([\d.]+)(us|ms|s)", net)
    if found is None:
        return net
    rate, prefix, latency, unit = found.groups()
    prefix, unit = prefix.upper().replace("K", "k"), unit.replace("u", "µ")
    return f"{rate} {prefix}bit/s, {latency} {unit} latency"


def rate(net: str) -> float:
    """The bits per second of a network; infinite for loopback, and where it is not known."""
    try:
        return Network.parse(net, emulated=False).rate_bits_per_s
    except ConfigError:
        return math.inf


def percent_of(share: float | None) -> str:
    """ "12 %" of 0.12."""
    return DASH if share is None else f"{digits(100 * share, 2)} %"


def percent(ratio: float) -> str:
    """ "+0.12 %" of 1.0012."""
    text = f"{(ratio - 1) * 100:+.2f} %"
    return "0.00 %" if text[1:] == "0.00 %" else text


def faster(mine: float, baseline: float, count: int = 3) -> str:
    """Of a time: "2.50 times faster" than the baseline's, "1.60 times slower", "as fast"; with
    `count` significant digits."""
    if not mine or not baseline:
        return "as fast"
    word, ratio = ("faster", baseline / mine) if mine < baseline else ("slower", mine / baseline)
    if float(digits(ratio, count)) == 1:
        return "as fast"
    return f"{digits(ratio, count)} times {word}"


def times(ratio: float) -> str:
    """How many times faster, in a column whose heading or caption says than what: "2.41×"."""
    return f"{digits(ratio)}×"


def than(compared: str, baseline: str) -> str:
    """What `faster` says, and of what: "2.50 times faster than X", "as fast as X"."""
    return f"{compared} {'as' if compared == 'as fast' else 'than'} {baseline}"


def plural(count: int, word: str, end: str = "s") -> str:
    """ "1 seed", "3 seeds"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}{end}"
