"""The costs of kernels and of the engine on a machine, in a file, measured or written by hand.

    {"machine": "...", "threads": 1,
     "codecs": {"QSGD(bits=4, ...)": {"encode": [CALL, VALUE, PAYLOAD], ...}, ...},
     "aggregators": {"powersgd(rank=2), error feedback": [[CALL, VALUE, RANK], ...], ...},
     "engine": {"start": ..., "task": ..., "post": ..., "check": ..., "check_byte": ...},
     "link": {"goodput": ..., "shared": ..., "settling": ..., "overhead": ..., "stack": ...,
              "message": ..., "memory": ...}}

A kernel call takes CALL + values * (VALUE + payloads * PAYLOAD) seconds, where payloads is the
number of payloads that a merge sums. Before each of its rounds and after the last, an aggregator
computes CALL + values * (VALUE + ranks * RANK) seconds for each parameter. `engine` and `link` hold
the fields of `Overheads` and `Software`; the defaults cost no time. `gradwire sim --curves FILE`
measures this machine if FILE does not exist.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gradwire.aggregators import Aggregator
from gradwire.codecs import Identity
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.lang.exact import Exact
from gradwire.planner.kernel_costs import Curve
from gradwire_tools.sim.fabric import Software
from gradwire_tools.sim.rank import Overheads

__all__ = ["Curve", "Curves", "Software", "load"]


@dataclass(frozen=True)
class Curves:
    """The costs of one machine.

    Attributes:
        machine: a description.
        threads: threads per kernel.
        codecs: repr(codec) -> form -> its curve.
        engine, link: costs of messages.
        aggregators: aggregator.recorded() -> its curves.
    """

    machine: str
    threads: int
    codecs: dict[str, dict[str, Curve]]
    engine: Overheads = field(default_factory=Overheads)
    link: Software = field(default_factory=Software)
    aggregators: dict[str, list[Curve]] = field(default_factory=dict)

    def seconds(self, codec: Codec, form: str, values: float, payloads: int) -> float:
        """The seconds of one kernel call; what is copied takes what Identity takes.

        Raises:
            ConfigError: the codec or the form was not measured.
        """
        codec = Identity() if isinstance(codec, Exact) else codec
        try:
            call, value, payload = self.codecs[repr(codec)][form]
        except KeyError:
            raise ConfigError(
                f"no curve for {form} of {codec}; known codecs: {', '.join(self.codecs)}; measure "
                "again without --curves, or add the curve to the file"
            ) from None
        return call + values * (value + payloads * payload)

    def of_aggregator(self, aggregator: Aggregator) -> list[Curve]:
        """Its curves, as in the file.

        Raises:
            ConfigError: it was not measured.
        """
        if aggregator.recorded() not in self.aggregators:
            known = ", ".join(self.aggregators) or "none"
            raise ConfigError(
                f"no curves for {aggregator}; known aggregators: {known}; measure again without "
                "--curves, or add the curves to the file"
            )
        return self.aggregators[aggregator.recorded()]

    def save(self, file: Path) -> None:
        """Write the file."""
        data = asdict(self)
        if math.isinf(self.link.memory):
            del data["link"]["memory"]
        file.write_text(json.dumps(data, indent=1) + "\n")


def load(file: Path) -> Curves:
    """Read the file.

    Raises:
        ConfigError: the file does not exist, is not a file of curves, or has a negative number.
    """
    try:
        data = json.loads(file.read_text())
        if not isinstance(data, dict):
            raise ValueError(f"a JSON object is needed, with codecs, not {type(data).__name__}")
        codecs = {
            codec: {form: _curve(numbers) for form, numbers in forms.items()}
            for codec, forms in data["codecs"].items()
        }
        return Curves(
            machine=str(data.get("machine", "unknown")),
            threads=int(data.get("threads", 1)),
            codecs=codecs,
            engine=Overheads(**_seconds(data.get("engine", {}))),
            link=_software(data.get("link", {})),
            aggregators={
                name: [*map(_curve, stages)] for name, stages in data.get("aggregators", {}).items()
            },
        )
    except OSError as error:
        raise ConfigError(f"--curves {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it has no key {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"--curves {file}: not a file of curves ({reason}); "
            "docs/laboratory/simulator.md shows one"
        ) from None


def _curve(numbers: Any) -> Curve:
    call, value, payload = (float(number) for number in numbers)
    if not all(math.isfinite(n) and n >= 0 for n in (call, value, payload)):
        raise ValueError(f"{numbers}: give three numbers, none negative")
    return call, value, payload


def _software(named: dict[str, Any]) -> Software:
    software = Software(**_seconds(named))
    if not (0 < software.goodput <= 1 and 0 < software.shared <= 1 and software.memory):
        raise ValueError(
            f"{named}: goodput and shared must be above 0 and at most 1, and memory above 0"
        )
    return software


def _seconds(named: dict[str, Any]) -> dict[str, float]:
    for name, number in named.items():
        if not (isinstance(number, int | float) and number >= 0):
            raise ValueError(f"{name}={number!r} must be a number, 0 or more")
    return {name: float(number) for name, number in named.items()}
