"""A network that changes during a run: phases, each with a network and the point where it begins.

    by: share                          # of the run; or step, or second
    phases:
      - {from: 0, net: "1gbit,1ms"}
      - {from: 0.5, net: "100mbit,20ms"}

Vocabulary: *unit*, what `from` counts: "step" (training steps), "second", or "share" (0 to 1, of
the run's steps, or of its seconds where there are no steps). A network that stays is a schedule of
one phase.

`SHIPPED` has the two of AR-Topk (section 3-E, of 50 epochs), and forms of both that a lab on two
cores can carry. `c1` is low and high latency (1, 50 ms) and high and low rate (25, 1 Gbit/s) by
quarters of the run; the paper's last phase is two epochs longer. The paper names no values for the
"moderate" phases of its second schedule: `c2` takes the geometric means of low and high, 5 Gbit/s
and 7 ms; it changes after epochs 12, 20, 28 and 36 of 50.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.errors import ConfigError, of_file, use_one_of
from gradwire_tools.lab.network import Network

UNITS = ("step", "second", "share")
_NAME = re.compile(r"[\w.-]+")
_WRITTEN = re.compile(r"([\w.-]+)\((\w+): (.*)\)")
_KEYS = {"name", "by", "phases"}
_SUFFIXES = (".yaml", ".yml")


@dataclass(frozen=True)
class Phase:
    """A network, and the step, second or share of the run from which it holds."""

    start: float
    net: Network


@dataclass(frozen=True)
class Schedule:
    """Phases in order. `parse` makes one from text, `str` is the inverse.

    Attributes:
        name: in rows; of a network that stays, its RATE,LATENCY.
        unit: of the phases' starts.
        phases: the first starts at 0, and each later than the one before.

    Raises:
        ConfigError: phases that break this; the message names the phase.
    """

    name: str
    unit: str
    phases: tuple[Phase, ...]

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise self._bad(f"by is {self.unit!r}: {use_one_of(self.unit, UNITS)}")
        if not self.phases:
            raise self._bad("it has no phases: give one or more")
        if self.phases[0].start != 0:
            raise self._bad(f"phase 1 starts at {self.phases[0].start:g}: the first starts at 0")
        for number, (before, phase) in enumerate(itertools.pairwise(self.phases), 2):
            if not before.start < phase.start < math.inf:
                raise self._bad(
                    f"phase {number} starts at {phase.start:g}: give a finite number above "
                    f"{before.start:g}, where phase {number - 1} starts"
                )
            if self.unit == "share" and phase.start >= 1:
                raise self._bad(f"phase {number} starts at {phase.start:g}: give a share below 1")
            if self.unit == "step" and phase.start != int(phase.start):
                raise self._bad(f"phase {number} starts at {phase.start:g}: steps are whole")
        unshaped = next((i for i, one in enumerate(self.phases, 1) if not one.net.shaped), None)
        if unshaped is not None and len(self.phases) > 1:
            raise self._bad(f"phase {unshaped} has the network none, which cannot change")

    @classmethod
    def fixed(cls, net: Network) -> Schedule:
        """A network that stays."""
        return cls(str(net), "second", (Phase(0.0, net),))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read a name of `SHIPPED`, a path that ends with .yaml, a network, or what `str` writes.

        Raises:
            ConfigError: it is none of these; or a file that cannot be read, or says something
                else, with the phase at fault.
        """
        text = text.strip()
        if text.endswith(_SUFFIXES):
            return _read(Path(text))
        written = _WRITTEN.fullmatch(text)
        if written is not None:
            name, unit, phases = written.groups()
            parts = [part.partition(" ") for part in phases.split("; ")]
            told = [{"from": _number(start), "net": net} for start, _, net in parts]
            return _made(text, name, unit, told)
        if text in SHIPPED:
            return SHIPPED[text]
        try:
            return cls.fixed(Network.parse(text))
        except ConfigError as error:
            known = ", ".join(SHIPPED)
            raise ConfigError(f"{error}, or a schedule: {known} or FILE.yaml") from None

    @property
    def changes(self) -> bool:
        return len(self.phases) > 1

    @property
    def first(self) -> Network:
        return self.phases[0].net

    @property
    def delays(self) -> bool:
        """Whether a phase has latency."""
        return any(phase.net.latency_ns for phase in self.phases)

    def at(self, step: int, steps: int, seconds: float) -> Network:
        """The network that holds when `step` of `steps` steps are done, in `seconds` seconds."""
        now = {"step": step, "second": seconds, "share": step / max(1, steps)}[self.unit]
        return next(phase.net for phase in reversed(self.phases) if phase.start <= now)

    def in_seconds(self, length: float | None) -> Schedule:
        """The same by seconds, for a run of `length` seconds whose steps are not known.

        Raises:
            ConfigError: it goes by step; or by share, and the length is not given.
        """
        if not self.changes or self.unit == "second":
            return self
        if self.unit == "step":
            raise self._bad("it goes by step, and a command tells no steps: write it by second")
        if length is None:
            raise self._bad("it goes by share of a run: give the run's length in seconds, --length")
        phases = tuple(Phase(phase.start * length, phase.net) for phase in self.phases)
        return Schedule(self.name, "second", phases)

    def __str__(self) -> str:
        if not self.changes:
            return str(self.first)
        return self.name if SHIPPED.get(self.name) == self else self.spelled()

    def spelled(self) -> str:
        """All phases, as `parse` reads them: "c1(share: 0 25gbit,1ms; 0.25 1gbit,1ms; ...)"."""
        phases = "; ".join(f"{phase.start:.12g} {phase.net}" for phase in self.phases)
        return f"{self.name}({self.unit}: {phases})"

    def _bad(self, why: str) -> ConfigError:
        return ConfigError(f"schedule {self.name}: {why}")


def _read(file: Path) -> Schedule:
    """The schedule of a YAML file, named after it unless it says otherwise."""
    # Imported here since the supervisor imports this package without site-packages (client.py).
    try:
        import yaml
    except ImportError as error:
        raise ConfigError(
            f'schedule {file} needs PyYAML, which is not installed: pip install "gradwire[cli]"'
        ) from error
    try:
        told = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"schedule {file}: cannot be read ({of_file(error)})") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"schedule {file}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(told, dict) or not {"by", "phases"} <= told.keys() <= _KEYS:
        raise ConfigError(f"schedule {file}: write the keys by and phases, and name if you like")
    name = told.get("name", file.stem)
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigError(
            f"schedule {file}: its name is {name!r}: use letters, digits, '.', '_' and '-'"
        )
    if name in SHIPPED:
        raise ConfigError(f"schedule {file}: {name} is a name of gradwire's own: give another name")
    return _made(str(file), name, told["by"], told["phases"])


def _made(where: str, name: str, unit: Any, told: Any) -> Schedule:
    """The schedule of plain values; `where` names it in messages."""
    if not isinstance(told, list):
        raise ConfigError(f"schedule {where}: phases is not a list")
    phases = []
    for number, one in enumerate(told, 1):
        at = f"schedule {where}, phase {number}"
        if not isinstance(one, dict) or one.keys() != {"from", "net"}:
            raise ConfigError(f"{at}: write from and net, as {{from: 0, net: '1gbit,1ms'}}")
        start = one["from"]
        if isinstance(start, bool) or not isinstance(start, int | float):
            raise ConfigError(f"{at}: from is {start!r}: give a number")
        if not isinstance(one["net"], str):
            raise ConfigError(f"{at}: net is {one['net']!r}: give a text as '1gbit,1ms'")
        try:
            phases.append(Phase(float(start), Network.parse(one["net"])))
        except ConfigError as error:
            raise ConfigError(f"{at}: {error}") from None
    return Schedule(name, unit, tuple(phases))


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


_TEXTS = """
    c1(share: 0 25gbit,1ms; 0.25 1gbit,1ms; 0.5 1gbit,50ms; 0.75 25gbit,50ms)
    c2(share: 0 25gbit,1ms; 0.24 5gbit,7ms; 0.4 1gbit,50ms; 0.56 5gbit,7ms; 0.72 25gbit,1ms)
    c1-small(share: 0 1gbit,1ms; 0.25 100mbit,1ms; 0.5 100mbit,20ms; 0.75 1gbit,20ms)
    c2-small(share: 0 1gbit,1ms; 0.24 300mbit,4.5ms; 0.4 100mbit,20ms; 0.56 300mbit,4.5ms; \
0.72 1gbit,1ms)
"""
SHIPPED = {made.name: made for made in map(Schedule.parse, _TEXTS.strip().splitlines())}
