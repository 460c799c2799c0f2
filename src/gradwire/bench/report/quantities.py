"""How the report and the tables of the terminal write quantities: few digits, a unit."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from gradwire.errors import ConfigError
from gradwire.lab import Network

DASH = "–"
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_TIMES = (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6))


def seconds(value: float | None) -> str:
    """ "1.23 s", "45.6 ms", "7.8 µs"."""
    if value is None:
        return DASH
    for unit, scale in _TIMES:
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value * 1e6)} µs" if value else "0 s"


def time_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit for an axis of these seconds, and how many seconds it is."""
    most = max(values, default=1.0)
    return next(((unit, scale) for unit, scale in _TIMES if most >= scale), _TIMES[-1])


def size(value: float | None) -> str:
    """Bytes in decimal units, as network rates are."""
    if value is None:
        return DASH
    for scale, unit in _SIZES:
        if value >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def size_unit(values: Iterable[float]) -> tuple[str, float]:
    """The unit for an axis of these bytes, and how many bytes it is."""
    most = max(values, default=1.0)
    return next(((unit, scale) for scale, unit in _SIZES if most >= scale), ("B", 1.0))


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


def faster(mine: float, baseline: float) -> str:
    """Of a time: "2.50 times faster" than the baseline's, "1.60 times slower", "as fast"."""
    if not mine or not baseline or f"{mine / baseline:.2f}" == "1.00":
        return "as fast"
    word, ratio = ("faster", baseline / mine) if mine < baseline else ("slower", mine / baseline)
    return f"{digits(ratio)} times {word}"


def than(compared: str, baseline: str) -> str:
    """What `faster` says, and of what: "2.50 times faster than X", "as fast as X"."""
    return f"{compared} {'as' if compared == 'as fast' else 'than'} {baseline}"


def plural(count: int, word: str) -> str:
    """ "1 seed", "3 seeds"."""
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
