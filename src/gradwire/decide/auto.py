"""Automatic mode: `gw.attach(model, "auto")` tries settings in training, and uses the best.

    1. gradients are sent in 16 bits
    2. after a few passes, each candidate is in force for some passes, twice; the slowest rank's
       median pass counts. A candidate must save `MARGIN` beside all that are more exact
    3. a policy may then choose bits per parameter (decide/policy.py)
    4. once two looks have seen passes at another pace, again from 2

If a step fails, what was decided before stays, and one line says so.
"""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, replace
from functools import partial
from typing import Any, Protocol

from gradwire import codecs as codec_table
from gradwire.aggregators import registry
from gradwire.codecs import checks
from gradwire.codecs.text import parse
from gradwire.controllers import Policy
from gradwire.controllers.replan import Replan
from gradwire.controllers.targets import decides_of
from gradwire.decide.policy import Adaptation, Subject
from gradwire.decide.scripts import Pass, Passes, Script, Tell, Use, nothing, tried
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.planner import Plan, Rules

log = logging.getLogger("gradwire")

MARGIN = 0.05  # of the time: what a less exact candidate must save
EXACT = ("none", "bf16")  # the candidates without compression
LOOKS = 2  # in succession that must see a change
_FIRST = 4  # passes before the first trial; DDP rebuilds its buckets after the first
_TURNS = 2
_REMEMBERED, _FEWEST = 20, 5  # passes, and those that make a median


@dataclass(frozen=True)
class Auto:
    """How automatic mode decides.

    Args:
        codecs: what may be used beside none and bf16, from the most exact to the least.
        methods: further methods by name, as `attach` takes them ("powersgd:rank=8"), from the most
            exact to the least.
        policy: chooses bits per parameter once a codec is in use: a policy or its name, gw.Replan,
            which says when it decides, too, or None.
        trial: passes of each candidate in each of two turns, beyond two that are not timed.
        watch: passes between two looks at their pace. 0: what was decided stays.
        changed: the share by which a pass must have changed, in two looks one after the other, for
            a new trial.

    Raises:
        ConfigError: an argument of a wrong type, a number out of range, or an unknown codec or
            policy.
    """

    codecs: Sequence[str] = ("qsgd:bits=4",)
    methods: Sequence[str] = ()
    policy: Policy | Replan | str | None = "lgreco"
    trial: int = 8
    watch: int = 50
    changed: float = 0.2
    replan: InitVar[object] = None  # of earlier versions

    def __post_init__(self, replan: object) -> None:
        if replan is not None:
            raise ConfigError("Auto: replan is given otherwise now: write policy=gw.Replan()")
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
        for one in self.candidates:
            if self.candidates.count(one) > 1:
                raise ConfigError(f"Auto: {one!r} would be tried twice: leave it out once")
        if self.policy is not None:
            policy, replan = decides_of(self.policy)
            if policy.budget is not None:
                raise ConfigError(
                    f"gw.Auto: policy={self.policy!r:.60}: its budget is the codec that is chosen: "
                    "leave the policy's budget out"
                )
            if replan.mixed:
                raise ConfigError(
                    'Auto: policy has mixed=True, which needs error feedback, and "auto" keeps '
                    "none: leave it out, or give attach a codec, a policy and error_feedback"
                )
        checks.integer(self, "trial", 1)
        checks.integer(self, "watch", 0)
        checks.number(self, "changed", above=0)
        _ = self.known_codecs

    @property
    def candidates(self) -> tuple[str, ...]:
        """By name, from the most exact to the least."""
        return *EXACT, *self.codecs, *self.methods

    def rules(self, given: Rules, method: str) -> Rules:
        """The user's, with a candidate as the codec."""
        return given.changed(codec=None if method == "none" else method)

    @property
    def known_codecs(self) -> list[Codec]:
        """The codecs themselves."""
        return [codec_table.get(codec, **options) for codec, options in map(parse, self.codecs)]


class Adaptable(Subject, Protocol):
    """What automatic mode needs of the module that it works on.

    Attributes:
        adaptation: of the policy at work.
    """

    adaptation: Adaptation | None


class Automatic:
    """Automatic mode of one handle.

    Attributes:
        history: what was decided, in order: pass; line; and where candidates were tried, tried: of
            each its setting, the seconds of a pass, and whether it is used from now on.
        setting: the candidate in use.
        trying: those that are in use in turn; (): what was decided is.
    """

    def __init__(self, auto: Auto, on: Adaptable) -> None:
        self.history: list[dict[str, Any]] = []
        self.setting, self.trying = "bf16", auto.candidates
        self._auto, self._on = auto, on
        self._rules = on.plan.rules  # the user's

    def script(self) -> Script:
        plans = [partial(self._plan, method) for method in self._auto.candidates]
        try:
            yield Passes(_FIRST)
            while True:
                of = self._auto.trial, _TURNS
                seconds = yield from tried("auto", plans, *of, then=self._stop_policy)
                best = worth(seconds)
                chosen = self._auto.candidates[best]
                yield Use(plans[best], nothing if chosen in EXACT else self._start_policy)
                self.setting, self.trying = chosen, ()
                self._say_tried(seconds, best)
                policy = self._on.adaptation
                if policy is not None:
                    policy.start()
                if not self._auto.watch:
                    return
                changed = yield from self._changed()
                if policy is not None:
                    policy.stop()
                self.trying = self._auto.candidates
                self._note(changed)
        except Exception as error:
            self.trying = ()
            line = f"automatic mode has ended, {self.setting} stays: {error}"
            self._note(line, logging.WARNING, said_by_all=True)
            if isinstance(error, ConfigError):  # alike on all ranks; else the group is broken
                with suppress(ConfigError):
                    yield Use(partial(self._plan, self.setting))

    def _plan(self, method: str, before: Plan) -> Plan:
        rules = self._auto.rules(self._rules, method)
        return self._on.remade(replace(before, version=before.version + 1), rules)

    def _start_policy(self) -> None:
        if self._auto.policy is None:
            return
        try:
            self._on.adaptation = Adaptation(*decides_of(self._auto.policy), self._on)
        except ConfigError as error:
            self._note(f"no policy chooses bits: {error}")

    def _stop_policy(self) -> None:
        self._on.adaptation = None

    def _changed(self) -> Script:
        """Wait until passes have changed their pace under the same plan; a line that says so."""
        recent: deque[Pass] = deque(maxlen=_REMEMBERED)
        usual: tuple[int, float] | None = None  # a version of the plan, and seconds of its passes
        changes = 0
        while True:
            recent.extend((yield Passes(self._auto.watch)))
            every = yield Tell("auto/pace", pace(recent))
            if None in every:
                continue
            now, version = max(every), recent[-1].version
            if usual is None or usual[0] != version:
                usual = version, now
            differs = max(now, usual[1]) > (1 + self._auto.changed) * min(now, usual[1])
            changes = changes + 1 if differs else 0
            if changes == LOOKS:
                return f"passes take {1e3 * now:.4g} ms, no longer {1e3 * usual[1]:.4g}"

    # ---- what it tells

    def _say_tried(self, seconds: Sequence[float], best: int) -> None:
        named = list(zip(self._auto.candidates, seconds, strict=True))
        told = "; ".join(f"{setting}: {1e3 * took:.4g} ms" for setting, took in named)
        what, level = "", logging.INFO
        if self.setting in EXACT:
            what, level = "compression does not pay here; ", logging.WARNING
        tried = [
            {"setting": setting, "seconds": took, "used": number == best}
            for number, (setting, took) in enumerate(named)
        ]
        line = f"{what}in use from now on: {self.setting} (tried: {told})"
        self._note(line, level, tried=tried)

    def _note(
        self, line: str, level: int = logging.INFO, said_by_all: bool = False, **more: Any
    ) -> None:
        row = {"pass": self._on.runner.passes, "line": line, **more}
        self.history.append(row)
        self._on.decided({"by": "auto", **row})
        if self._on.place.first or said_by_all:
            rank = f"rank {self._on.place.rank}: " if said_by_all else ""
            log.log(level, "%spass %d: auto: %s", rank, row["pass"], line)


def automate(auto: Auto, on: Adaptable) -> Automatic | None:
    """Let trials choose the plan from now on; None: there is nothing to compress, which is said."""
    uncompressed = on.remade(on.plan, on.plan.rules.changed(codec=None))
    both = zip(on.plan.parameters, uncompressed.parameters, strict=True)
    if any(p.numel and p.inner != without.inner for p, without in both):
        made = Automatic(auto, on)
        on.runner.start(made.script())
        return made
    line = (
        "there is nothing to compress: include, exclude and codecs leave no matrix of fp32, fp16 "
        "or bf16; nothing is tried"
    )
    on.decided({"by": "auto", "pass": 0, "line": line})
    if on.place.first:
        log.warning("auto: %s", line)
    return None


def pace(passes: Iterable[Pass]) -> float | None:
    """The median of the seconds of passes with the newest one's plan; None: there are too few."""
    *_, last = passes
    took = [one.seconds for one in passes if one.version == last.version]
    return statistics.median(took) if len(took) >= _FEWEST else None


def worth(seconds: Sequence[float]) -> int:
    """Which of several to use, by what they take, from the most exact to the least: the last that
    saves `MARGIN` beside each one before it."""
    best, least = 0, seconds[0]
    for number, taken in enumerate(seconds):
        if taken < (1 - MARGIN) * least:
            best = number
        least = min(least, taken)
    return best
