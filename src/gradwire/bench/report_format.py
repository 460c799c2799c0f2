"""How the report writes quantities: few digits, a unit, the same everywhere."""

from __future__ import annotations

import math

from gradwire.bench.report import Cell

_DASH = "–"
_SIZES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(value: float | None) -> str:
    """ "1.23 s", "45.6 ms", "7.8 µs"."""
    if value is None:
        return _DASH
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(value) >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value * 1e6)} µs" if value else "0 s"


def size(value: float | None) -> str:
    """Bytes in decimal units, as network rates are."""
    if value is None:
        return _DASH
    for scale, unit in _SIZES:
        if value >= scale:
            return f"{digits(value / scale)} {unit}"
    return f"{value:.0f} B"


def digits(value: float | None, count: int = 3) -> str:
    """`value` with `count` significant digits, without an exponent where that stays short."""
    if value is None:
        return _DASH
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    magnitude = math.floor(math.log10(abs(value)))
    if -4 <= magnitude < 7:
        return f"{value:.{max(0, count - 1 - magnitude)}f}"
    return f"{value:.{count - 1}e}"


def number(text: str, verdict: str = "") -> Cell:
    """A cell that is aligned as a number."""
    return Cell(text, number=True, verdict=verdict)


def times(value: float | None, good_below: float | None = None) -> Cell:
    """A ratio as "0.43×"; judged if a bound is given."""
    if value is None:
        return number(_DASH)
    verdict = ""
    if good_below is not None:
        verdict = "good" if value < good_below else "bad"
    return number(f"{value:.2f}×", verdict)
