"""What `gw.attach(model, "auto")` may be told, and how rank 0 plans from what was measured.

The planner's ranking (gradwire_tools.sim.choice) comes from simulation. A training step has more in
it: so the best setting of each codec that is expected to be nearly as fast as the best is tried in
training itself (integrations/automatic.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from gradwire import codecs as codec_table
from gradwire.aggregators import Dense, registry
from gradwire.codecs import checks
from gradwire.codecs.text import parse
from gradwire.collectives import Options
from gradwire.controllers import Policy
from gradwire.errors import ConfigError
from gradwire.integrations.choices import policy_of
from gradwire.integrations.replan import Replan
from gradwire.lang import Codec
from gradwire.planner import Plan, kernel_costs
from gradwire.planner.links import MOST_SECONDS, Links
from gradwire_tools.sim import Curves, Net, curves
from gradwire_tools.sim.choice import (
    FULL,
    HALF,
    Choice,
    Ranked,
    Setting,
    Situation,
    choose,
    described,
    name,
)
from gradwire_tools.sim.curves import Curve, Software
from gradwire_tools.sim.rank import Overheads

# Of the engine, on a machine that has not been measured (`gradwire probe` measures it).
_ENGINE = Overheads(start=4e-4, task=4e-5, post=1e-5, check=4e-6, check_byte=2e-11)
_REPLAN = Replan()


@dataclass(frozen=True)
class Auto:
    """How automatic mode decides.

    Args:
        codecs: what may be used beside none and bf16, from the most exact to the least.
        methods: further methods by name, as `attach` takes them ("powersgd:rank=8"), from the most
            exact to the least. They are always tried, since nothing predicts what they take.
        policy: chooses bits per parameter once a codec is in use: a policy, its name, or None.
        replan: when the policy decides.
        seconds: in which links are measured, at attach; 600 at most.
        trial: passes of each setting in each of two turns, beyond two that are not timed. 0: none
            is tried, the planner decides.
        close: settings are tried that are expected to take at most so many times the best's time,
            the best without compression, and the best's codec with default options.
        watch: passes between two looks at links and passes. 0: what was decided stays.
        changed: the share by which latency, bandwidth or a pass must have changed, in two looks one
            after the other, for a new plan.
        share: of time and bandwidth that watching the links may take.

    Raises:
        ConfigError: an argument of a wrong type, a number out of range, or an unknown codec or
            policy.
    """

    codecs: Sequence[str] = ("qsgd:bits=4",)
    methods: Sequence[str] = ()
    policy: Policy | str | None = "lgreco"
    replan: Replan = _REPLAN
    seconds: float = 3.0
    trial: int = 8
    close: float = 1.3
    watch: int = 50
    changed: float = 0.2
    share: float = 0.01

    def __post_init__(self) -> None:
        for option, example in (("codecs", "qsgd:bits=4"), ("methods", "powersgd:rank=8")):
            given = getattr(self, option)
            several = isinstance(given, Sequence) and not isinstance(given, str)
            if not several or not all(isinstance(one, str) for one in given):
                raise ConfigError(
                    f'Auto: {option}={given!r:.60}: give several names, as in ("{example}",)'
                )
            object.__setattr__(self, option, tuple(given))
        for method in self.methods:
            registry.get(method)
        if self.policy is not None and policy_of(self.policy).budget is not None:
            raise ConfigError(
                f"gw.Auto: policy={self.policy!r:.60}: its budget is the codec that is chosen: "
                "leave the policy's budget out"
            )
        if not isinstance(self.replan, Replan):
            raise ConfigError(
                f"Auto: replan={self.replan!r:.60}: give gw.Replan(...), or leave it out"
            )
        if self.replan.mixed:
            raise ConfigError(
                'Auto: replan has mixed=True, which needs error feedback, and "auto" keeps none: '
                "leave it out, or give attach a codec, a policy and error_feedback"
            )
        for option in ("trial", "watch"):
            checks.integer(self, option, 0)
        if self.methods and not self.trial:
            raise ConfigError(
                f"Auto: methods={self.methods!r:.60} would have to be tried, and trial=0, as of "
                'plan="measured", tries nothing: leave one out'
            )
        checks.number(self, "seconds", above=0, most=MOST_SECONDS)
        for option, above in (("close", 1), ("changed", 0)):
            checks.number(self, option, above=above)
        checks.number(self, "share", above=0, most=1)
        _ = self.known_codecs

    @property
    def known_codecs(self) -> list[Codec]:
        """The codecs themselves."""
        found = []
        for text in self.codecs:
            codec, options = parse(text)
            found.append(codec_table.get(codec, **options))
        return found


@dataclass(frozen=True)
class WantedSetting:
    """A setting as ranks tell each other.

    Attributes:
        method: as `attach` takes it; "none" for full precision.
        coalesce_bytes: as of `attach`; None: as the user gave it.
        exclude: parameters that are sent uncompressed.
        rank: how exact: 0 for full precision, and so on.
        seconds: expected.
    """

    method: str
    algorithm: str = "sra"
    segments: int | None = None
    coordinated: bool = False
    coalesce_bytes: int | None = None
    exclude: tuple[str, ...] = ()
    rank: int = 0
    seconds: float | None = None

    @classmethod
    def read(cls, told: Mapping[str, Any]) -> WantedSetting:
        """From JSON."""
        return cls(**{**told, "exclude": tuple(told["exclude"])})

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @property
    def compresses(self) -> bool:
        """Whether it has a codec of few bits."""
        return self.rank > HALF_PRECISION.rank

    def options(self, given: Options) -> Options:
        """The user's options, in this algorithm."""
        return replace(
            given.through(self.algorithm), segments=self.segments, coordinated=self.coordinated
        )

    def __str__(self) -> str:
        how = described(self.algorithm, self.coordinated, self.segments, self.coalesce_bytes)
        small = f", {len(self.exclude)} small uncompressed" if self.exclude else ""
        return f"{self.method} by {how}{small}"


HALF_PRECISION = WantedSetting("bf16", rank=1)


def plan(
    auto: Auto,
    known: Curves,
    named: Sequence[tuple[str, tuple[int, ...]]],
    links: Links,
    machines: Sequence[int],
    backward: float,
    coalesces: bool,
    check: Callable[[], None] = lambda: None,
) -> tuple[list[WantedSetting], str]:
    """(the settings worth trying, the best first, with the best one without compression, the best
    one's codec with default options, and `auto.methods`; the planner's verdict).

    Args:
        known: as of `costs`.
        named: as of `sent`.
        machines: of each rank.
        backward: seconds of a pass without communication.
        coalesces: whether buckets may travel together.
        check: see gradwire_tools.sim.choice.choose.
    """
    codecs = auto.known_codecs
    where = situation(links, known, machines, tuple(shape for _, shape in named), backward)
    choice = choose(replace(where, coalesces=coalesces), codecs, check)
    exact = [FULL, HALF, *codecs]
    hopeful = [
        one
        for one in choice.of_codec
        if one.seconds <= auto.close * choice.best.seconds
        or one in (choice.best, choice.uncompressed)
    ]
    hopeful.sort(key=lambda one: (one != choice.best, one.seconds))
    plain = Setting(choice.best.setting.codec, Options())  # what is left for something better, too
    hopeful += [one for one in choice.every if one.setting == plain and one not in hopeful]
    wanted = [_wanted(one, named, exact) for one in hopeful]
    further = [WantedSetting(m, rank=len(exact) + n) for n, m in enumerate(auto.methods)]
    return wanted + further, _line(choice, links)


def sent(plan: Plan, uncompressed: Plan) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of parameters as the planner is told of them: matrices are what a codec would
    compress, vectors what is uncompressed in any case. What has a codec of its own is left out.

    Args:
        uncompressed: the plan with no codec, but those of its own.
    """
    found: list[tuple[str, tuple[int, ...]]] = []
    for p, without in zip(plan.parameters, uncompressed.parameters, strict=True):
        if p.inner != without.inner:
            found.append((p.name, p.shape if len(p.shape) > 1 else (1, p.numel)))
        elif isinstance(p.inner, Dense):
            found.append((p.name, (p.numel,)))
    return found


def costs(auto: Auto) -> Curves:
    """The costs of the codecs on this machine. Those that the user's cache does not have are
    measured, some seconds for each, and kept there."""
    threads = torch.get_num_threads()
    every, mine = kernel_costs.file(threads), kernel_costs.file(threads, "kernels")
    known = Curves(kernel_costs.processor(), threads, {}, _ENGINE, Software(memory=4e9))
    found: dict[str, dict[str, Curve]] = {}
    for file in (mine, every):  # the latter with the engine's costs, of `gradwire probe`
        if file.exists():
            known = curves.load(file)
            found |= known.codecs
    missing = [c for c in [FULL, HALF, *auto.known_codecs] if str(c) not in found]
    if missing:
        found |= {str(c): kernel_costs.kernel_curves(c, threads) for c in missing}
        replace(known, codecs=found).save(mine)
    return replace(known, codecs=found)


def situation(
    links: Links,
    known: Curves,
    machines: Sequence[int],
    shapes: tuple[tuple[int, ...], ...],
    backward: float,
) -> Situation:
    """The links as the simulator knows them: what software takes is in `links` already."""
    ranks, count = len(machines), len(set(machines))
    per_node = ranks // count if ranks % count == 0 else 1
    software = replace(known.link, goodput=1.0, shared=0.98)
    if per_node == ranks:
        net = Net("this machine")
        software = replace(software, memory=1 / max(links.typical_beta, 1e-12))
        software = replace(software, overhead=links.typical_alpha, stack=0.0)
        cores = float(len(os.sched_getaffinity(0)))
    else:
        latency = max(links.worst_alpha - software.overhead, 0.0)
        net = Net("measured links", 8 / max(links.worst_beta, 1e-12), latency)
        cores = math.inf
    given = replace(known, link=software)
    return Situation(shapes, ranks, net, given, per_node, cores, backward)


def _wanted(
    one: Ranked,
    named: Sequence[tuple[str, tuple[int, ...]]],
    exact: Sequence[Codec],
) -> WantedSetting:
    setting: Setting = one.setting
    small = tuple(n for n, s in named if len(s) > 1 and math.prod(s) < setting.least)
    return WantedSetting(
        name(setting.codec), setting.options.algorithm,
        setting.options.segments, setting.options.coordinated,
        setting.coalesce_bytes, () if setting.codec == FULL else small,
        exact.index(setting.codec), one.seconds,
    )  # fmt: skip


def _line(choice: Choice, links: Links) -> str:
    rate = 8e-6 / max(links.worst_beta, 1e-15)
    return f"{choice.verdict} (links: {links.worst_alpha * 1e3:.3g} ms, {rate:.4g} Mbit/s at worst)"
