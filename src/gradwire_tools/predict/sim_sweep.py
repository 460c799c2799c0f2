"""The swept parameter of `gradwire sim`, as the command line gives it: `--sweep NAME=VALUE,...`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gradwire.codecs.text import value as value_of
from gradwire.errors import ConfigError
from gradwire_tools.bench.network.world import several
from gradwire_tools.lab import Network
from gradwire_tools.sim import Net

_MOST_RANKS = 1 << 16


@dataclass(frozen=True)
class Point:
    """One point of a sweep; `name` is None where nothing is swept."""

    name: str | None = None
    value: str = ""

    @property
    def keys(self) -> dict[str, Any]:
        """The keys of its rows."""
        return {} if self.name is None else {"sweep": self.name, "value": value_of(self.value)}

    def number(self, name: str, given: Any, whole: bool = False) -> Any:
        """The swept number if `name` is swept, else the given one.

        Raises:
            ConfigError: the value is no number, or not a whole one.
        """
        if name != self.name:
            return given
        try:
            return int(self.value) if whole else float(self.value)
        except ValueError:
            kind = "a whole number" if whole else "a number"
            raise ConfigError(f"--sweep {name}: {self.value!r} is not {kind}") from None

    def ranks(self, given: int) -> int:
        """The number of ranks.

        Raises:
            ConfigError: as `number`, or it is out of range.
        """
        ranks = int(self.number("ranks", given, whole=True))
        several(ranks, f"--sweep ranks={self.value}" if self.name == "ranks" else "")
        if ranks > _MOST_RANKS:
            raise ConfigError(f"ranks={ranks}: {_MOST_RANKS} at most")
        return ranks

    def net(self, text: str) -> Net:
        """The network, with the swept rate or latency.

        Raises:
            ConfigError: `text` is no network, or has no rate or latency to sweep.
        """
        network = Network.parse(text, emulated=False)
        if self.name in ("rate", "latency"):
            if not network.shaped:
                raise ConfigError(
                    f"--sweep {self.name}=...: needs a network, as in --net 1gbit,1ms"
                )
            rate, latency = str(network).split(",")
            both = f"{self.value},{latency}" if self.name == "rate" else f"{rate},{self.value}"
            network = Network.parse(both, emulated=False)
        return Net(str(network), network.rate_bits_per_s, network.latency_s)


def points(text: str | None) -> list[Point]:
    """The points of a sweep; one without a name if there is none.

    Raises:
        ConfigError: `text` is not NAME=VALUE,VALUE...
    """
    if text is None:
        return [Point()]
    name, equals, values = text.partition("=")
    chosen = [value.strip() for value in values.split(",") if value.strip()]
    if not equals or not name.strip() or not chosen:
        raise ConfigError(f"--sweep {text!r}: expected NAME=VALUE,VALUE..., as in ranks=2,4,8")
    return [Point(name.strip(), value) for value in chosen]


def place(row: dict[str, Any]) -> float | None:
    """Where a row of `gradwire sim` stands along its sweep; None where that is no number."""
    if row.get("sweep") in ("rate", "latency"):
        network = Network.parse(row["net"], emulated=False)
        return network.rate_bits_per_s if row["sweep"] == "rate" else network.latency_s
    value = row.get("value")
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
