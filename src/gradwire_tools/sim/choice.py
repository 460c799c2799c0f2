"""Which setting averages a model's gradients soonest: found by simulating each on measured costs.

A *setting* is a codec or an aggregator for matrices of `least` values or more (or bf16, or none),
an algorithm with its segments, and how many bytes of buckets travel together. Settings are ranked
by `gradwire_tools.sim.predict`; the formulas of gradwire_tools.sim.costs explain a single gradient.

    1. every codec with every algorithm in which it is defined
    2. of each codec, the best few algorithms: in coordinated rounds, then with other segments, then
       coalescing, then `least`

The default algorithm, and then every other default, is left only for what saves `_WORTH`: less
cannot be predicted.

A codec loses values, and bf16 loses some: so each must save more than `MARGIN` beside all that is
more exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from gradwire import algorithms
from gradwire.aggregators import Aggregator, registry
from gradwire.codecs import Cast, Identity
from gradwire.collectives import Options
from gradwire.decide.auto import worth
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire_tools.sim import Curves, Net, Scenario, predict
from gradwire_tools.sim.models import Shapes

FULL, HALF = Identity(), Cast("bf16")
SEGMENTS = (1, 2, 4, 8, 16, 32)
COALESCED = (0, 1 << 20, 1 << 22, 25 << 20, 1 << 40)  # the last: all buckets together
LEAST = (1 << 12, 1 << 14, 1 << 16, 1 << 18)
_KEPT = 2  # algorithms of each codec that are refined
_WORTH = 0.1


@dataclass(frozen=True)
class Situation:
    """Where a model is trained.

    Attributes:
        shapes: of the parameters, in the module's order.
        ranks, per_node, cores, backward: see gradwire_tools.sim.Scenario.
        net: between nodes.
        curves: of this machine.
        coalesces: whether buckets may travel together.
    """

    shapes: Shapes
    ranks: int
    net: Net
    curves: Curves
    per_node: int = 1
    cores: float = math.inf
    backward: float = 0.0
    coalesces: bool = True

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ConfigError(f"{self.ranks} ranks: one rank sends nothing; give 2 or more")
        if self.per_node < 1 or self.ranks % self.per_node:
            raise ConfigError(
                f"per_node={self.per_node}: give a number that divides the {self.ranks} ranks"
            )


@dataclass(frozen=True)
class Setting:
    """How gradients are averaged.

    Attributes:
        codec: a codec or an aggregator, of matrices of `least` values or more; all else is sent
            uncompressed.
        options: algorithm and segments.
        coalesce_bytes: as of `gradwire.attach`.
    """

    codec: Codec | Aggregator
    options: Options
    coalesce_bytes: int = 0
    least: int = 0

    def __str__(self) -> str:
        """Without what is as usual."""
        of, held = self.options, self.coalesce_bytes
        parts = [f"{name(self.codec)} by {of.algorithm}"]
        parts += ["coordinated"] if of.coordinated else []
        parts += [f"{of.segments} segments"] if of.segments is not None else []
        together = "one bucket" if held == COALESCED[-1] else f"buckets of {held} bytes"
        parts += [together] if held else []
        parts += [f"matrices from {self.least} values"] if self.least else []
        return ", ".join(parts)


@dataclass(frozen=True)
class Ranked:
    """A setting and what it is expected to take.

    Attributes:
        seconds: from the start of backward until the last average is there.
        wire_bytes: sent by a rank.
        limit_seconds: of the link alone; None where nothing limits it.
    """

    setting: Setting
    seconds: float
    wire_bytes: int
    limit_seconds: float | None


@dataclass(frozen=True)
class Choice:
    """What is best.

    Attributes:
        best: the setting to use.
        of_codec: the best setting of each codec, the fastest first.
        every: all settings that were simulated, the fastest first.
    """

    best: Ranked
    of_codec: tuple[Ranked, ...]
    every: tuple[Ranked, ...]

    @property
    def compresses(self) -> bool:
        """Whether a codec pays beside bf16."""
        return self.best.setting.codec not in (FULL, HALF)

    def of(self, codec: Codec | Aggregator) -> Ranked:
        """The best setting of a codec or an aggregator."""
        return next(one for one in self.of_codec if one.setting.codec == codec)

    @property
    def uncompressed(self) -> Ranked:
        """The best with none or bf16."""
        return min(self.of(FULL), self.of(HALF), key=lambda one: one.seconds)

    @property
    def verdict(self) -> str:
        """One sentence: what to use, what it is expected to take, and what that gains."""
        base, best = self.uncompressed, self.best
        taken = f"{best.setting} is expected to take {_text(best.seconds)}"
        if self.compresses:
            times = base.seconds / best.seconds
            return f"{taken}, {times:.3g} times faster than {base.setting}, {_text(base.seconds)}"
        coded = [one for one in self.of_codec if one.setting.codec not in (FULL, HALF)]
        reason = ""
        if coded:
            reason = f"; the best codec, {coded[0].setting}, {_text(coded[0].seconds)}"
        return f"{name(best.setting.codec)} is best: {taken}{reason}"


def choose(
    where: Situation,
    codecs: Sequence[Codec | Aggregator],
    progress: Callable[..., None] = lambda *_: None,
) -> Choice:
    """The best setting; none and bf16 are always considered.

    Args:
        codecs: from the most exact to the least; see `worth`.
        progress: is told of each setting before it is simulated; what it raises ends the search.

    Raises:
        ConfigError: one rank, or a codec without curves.
    """
    found: dict[Setting, Ranked] = {}
    wanted = list(dict.fromkeys([FULL, HALF, *codecs]))

    def ranked(setting: Setting) -> Ranked:
        if setting not in found:
            progress(f"simulating {setting}; codec", 1 + wanted.index(setting.codec), len(wanted))
            found[setting] = simulate(where, setting)
        return found[setting]

    of_codec = []
    for codec in wanted:
        first = [ranked(setting) for setting in plain(codec, where)]
        refined = []
        for start in sorted(first, key=_weighed)[:_KEPT]:
            best = start
            for alternatives in (_coordinated, _segments, _coalesced, _selective):
                others = [ranked(s) for s in alternatives(best.setting, where)]
                other = min(others, key=_seconds, default=best)
                if other.seconds < (1 - _WORTH) * best.seconds:
                    best = other
            refined.append(best)
        of_codec.append(min(refined, key=_weighed))
    every = sorted(found.values(), key=_seconds)
    best = of_codec[worth([one.seconds for one in of_codec])]
    return Choice(best, tuple(sorted(of_codec, key=_seconds)), tuple(every))


def simulate(where: Situation, setting: Setting) -> Ranked:
    """What one setting is expected to take."""
    row = predict(scenario(where, setting), where.curves)
    return Ranked(setting, row["seconds"], row["wire_bytes"], row["limit_seconds"])


def scenario(where: Situation, setting: Setting) -> Scenario:
    """What is simulated. Raises ConfigError as it does."""
    return Scenario(
        ranks=where.ranks, net=where.net, codec=setting.codec, model=where.shapes,
        options=setting.options, per_node=where.per_node, cores=where.cores,
        backward=where.backward, coalesce_bytes=setting.coalesce_bytes, least=setting.least,
    )  # fmt: skip


def _seconds(one: Ranked) -> float:
    return one.seconds


def _weighed(one: Ranked) -> float:
    """Seconds, in favour of the default algorithm."""
    default = one.setting.options.algorithm == Options().algorithm
    return one.seconds * (1 - _WORTH if default else 1)


def plain(codec: Codec | Aggregator, where: Situation) -> list[Setting]:
    """The codec or aggregator in every algorithm that has it.

    Raises:
        ConfigError: none has.
    """
    found, why = [], ""
    for name in algorithms.REGISTRY:
        if name == "hierarchical" and where.per_node in (1, where.ranks):
            continue  # there is one level
        setting = Setting(codec, Options(algorithm=name))
        try:
            scenario(where, setting)
        except ConfigError as error:  # not defined in this algorithm
            why = why or str(error)
            continue
        found.append(setting)
    if not found:
        raise ConfigError(f"{codec} is defined in no algorithm: {why}")
    return found


def _coordinated(setting: Setting, where: Situation) -> Iterable[Setting]:
    if setting.options.algorithm not in ("sra", "parameter_server"):
        return []
    return [replace(setting, options=replace(setting.options, coordinated=True))]


def _segments(setting: Setting, where: Situation) -> Iterable[Setting]:
    return [replace(setting, options=replace(setting.options, segments=n)) for n in SEGMENTS]


def _coalesced(setting: Setting, where: Situation) -> Iterable[Setting]:
    if not where.coalesces:
        return []
    return [replace(setting, coalesce_bytes=nbytes) for nbytes in COALESCED]


def _selective(setting: Setting, where: Situation) -> Iterable[Setting]:
    if setting.codec == FULL or isinstance(setting.codec, Aggregator):
        return []  # an aggregator leaves what it does not shrink
    sizes = {math.prod(shape) for shape in where.shapes if len(shape) > 1}
    # One of each that compresses other parameters.
    least = {min(s for s in sizes if s >= n): n for n in LEAST if max(sizes, default=0) >= n}
    return [replace(setting, least=n) for n in least.values() if n > min(sizes)]


def name(codec: Codec | Aggregator) -> str:
    """A codec or an aggregator as users write it, "none" for full precision; or as it prints itself
    where it has no name."""
    if codec == FULL:
        return "none"
    try:
        return registry.text(registry.get(codec), bits=True)
    except ConfigError:
        return str(codec)


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
