"""How ranks decide together about a target: rank 0 asks the policy with the tables of all.

    1. each rank makes the tables of what it has summed (gradwire/controllers), no faster than a
       share of one core
    2. ranks tell their tables
    3. rank 0 asks the policy, and tells its ruling

Under HSDP values are equal in all replicas, and those of the first one are used. A check is alike:
its tables have the errors of two choices, the plan in force and the uniform one. If a step fails on
one rank, it fails on all. What a policy remembers is on rank 0.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from gradwire.aggregators import Aggregator
from gradwire.controllers import Budget, Layer, Policy, error
from gradwire.controllers.layer import plan_error
from gradwire.controllers.losses import losses
from gradwire.controllers.replan import Replan
from gradwire.controllers.tables import table
from gradwire.controllers.targets import Target
from gradwire.decide.scripts import DecidingRank, Detached, Script, Tell
from gradwire.errors import ConfigError, GradwireError

_POLL_S = 0.05


@dataclass(frozen=True)
class Window:
    """What a rank has of a target.

    Attributes:
        number: of the last pass.
        values: by parameter, fp32[any]: whole, or this rank's shards; averages over ranks and
            passes, or weights.
        methods: those in force, by parameter; the same on all ranks.
    """

    number: int
    values: Mapping[str, torch.Tensor]
    methods: Mapping[str, Aggregator]


@dataclass(frozen=True)
class Ruling:
    """What rank 0 has decided. Errors are in units of the metric, and but for `planned_error` of
    this window.

    Attributes:
        choices: index of the method, by parameter.
        line: what was decided, and why.
        planned_error: of the plan in force, when it was chosen; None: it was not chosen.
        error: of the plan in force.
        uniform_error: of the uniform plan.
        new_error: of the chosen plan.
        budget: the most that it may be.
    """

    choices: dict[str, int]
    line: str
    planned_error: float | None
    error: float
    uniform_error: float
    new_error: float
    budget: float


@dataclass(frozen=True)
class Chosen:
    """The plan that was chosen last.

    Attributes:
        methods: by parameter.
        error: as chosen.
        ratio: of it to the uniform plan's error.
    """

    methods: Mapping[str, Aggregator]
    error: float
    ratio: float


class Decider:
    """This rank's part in decisions about one target.

    Args:
        check: called before each table and in pauses; what it raises ends the decision.
    """

    def __init__(
        self,
        policy: Policy,
        replan: Replan,
        target: Target,
        place: DecidingRank,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = self._given = policy
        self._replan, self._target, self._place, self._check = replan, target, place, check
        self._last: Chosen | None = None  # on rank 0

    def decide(self, key: str, window: Window, weights: Mapping[str, float]) -> Script:
        """Ask the policy.

        Args:
            key: of this decision.
            weights: what a byte of a parameter counts, where not 1.

        Returns:
            A `Ruling`, the same on all ranks.

        Raises:
            ConfigError: a rank failed.
        """
        answer = yield from self._asked(
            f"{key}/{self._target.kind}",
            lambda: dict(self._tables(window)),
            lambda every: dataclasses.asdict(self._ruling(window, self._layers(every, weights))),
        )
        return Ruling(**answer)

    def grown(self, key: str, window: Window) -> Script:
        """By which factor the error of the plan in force, over the uniform plan's, has grown since
        it was chosen; None: it was not chosen, or nothing can be said. Else as `decide`."""
        answer = yield from self._asked(
            f"{key}/check of {self._target.kind}",
            lambda: dict(self._errors(window)),
            lambda every: {"grown": self._growth(window, every)},
        )
        return answer["grown"]

    def _asked(
        self,
        key: str,
        tables: Callable[[], dict[str, Any]],
        answer: Callable[[list[dict[str, Any]]], dict[str, Any]],
    ) -> Script:
        """What rank 0 answers to the tables of all ranks."""
        mine = self._made(tables) if self._place.replica == 0 else {"made": {}}
        every = _whole((yield Tell(f"{key}/tables", mine)))
        mine = self._made(lambda: answer(every)) if self._place.first else {"made": {}}
        return _whole((yield Tell(f"{key}/ruling", mine)))[0]

    def _made(self, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        try:
            return {"made": make()}
        except Detached:
            raise
        except BaseException as failed:  # SystemExit, too: other ranks wait for this one
            return {"failed": f"rank {self._place.rank}: {reason(failed)}"}

    # ---- tables, as JSON has them

    def _throttled(self, window: Window) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, values in their shape); pauses in between keep to the share of a core."""
        pieces = self._place.pieces
        for name, values in window.values.items():
            self._check()
            if values.numel():
                begun = time.perf_counter()
                yield name, values.view((1, -1) if pieces else self._target.shapes[name])
                took = time.perf_counter() - begun
                self._pause(took * (1 / self._replan.share - 1))

    def _pause(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while (left := end - time.perf_counter()) > 0:
            time.sleep(min(left, _POLL_S))
            self._check()

    def _tables(self, window: Window) -> Iterator[tuple[str, Any]]:
        for name, values in self._throttled(window):
            layer = table(name, values, self._target.family)
            yield name, {
                "nbytes": layer.nbytes.tolist(), "errors": layer.errors.tolist(),
                "norm": layer.norm, "top_norm": layer.top_norm,
            }  # fmt: skip

    def _errors(self, window: Window) -> Iterator[tuple[str, Any]]:
        for name, values in self._throttled(window):
            uniform = self._target.family.reference(self._target.shapes[name])
            yield name, losses(values, [window.methods[name], uniform]).tolist()

    # ---- on rank 0

    def _layers(
        self, every: Sequence[Mapping[str, Any]], weights: Mapping[str, float]
    ) -> list[Layer]:
        """The tables of all ranks, in the order of parameters: shards of one are put together."""
        layers = []
        for name, shape in self._target.shapes.items():
            rows = [one[name] for one in every if name in one]
            if not rows:
                continue  # it had no gradient
            methods = self._target.family.methods(shape)
            nbytes = np.array([row["nbytes"] for row in rows], np.int64).sum(0)
            at = methods.index(self._target.family.reference(shape))
            errors, norm, top = (
                _norm([row[key] for row in rows]) for key in ("errors", "norm", "top_norm")
            )
            of = int(np.prod(shape)), tuple(methods), nbytes, errors, at, float(norm), float(top)
            layers.append(Layer(name, *of, weight=weights.get(name, 1.0)))
        return layers

    def _ruling(self, window: Window, layers: Sequence[Layer]) -> Ruling:
        metric = self._replan.metric
        budget = Budget.of(layers, self._replan.alpha, metric)
        proposal = self.policy.propose(layers, budget)
        now = [_index(one, window.methods[one.name]) for one in layers]
        error_now = plan_error(layers, now, metric)
        uniform = plan_error(layers, [one.reference for one in layers], metric)
        choices = {one.name: c for one, c in zip(layers, proposal.choices, strict=True)}
        planned = None if self._last is None else self._last.error
        was = "" if planned is None else f", planned {planned:.4g}"
        line = f"{proposal.line}; before: error {error_now:.4g}{was}; uniform {uniform:.4g}"
        ratio = proposal.error / uniform if uniform else 1.0
        methods = {**window.methods, **self._target.chosen(choices)}
        self._last = Chosen(methods, proposal.error, ratio)
        self.policy = self.policy.after(layers)
        of = planned, error_now, uniform, proposal.error, budget.error
        return Ruling(choices, line, *of)

    def _growth(self, window: Window, every: Sequence[Mapping[str, Any]]) -> float | None:
        last = self._last
        if last is None or dict(last.methods) != dict(window.methods) or not last.ratio > 0:
            return None
        names = [name for name in self._target.shapes if any(name in one for one in every)]
        pairs = [_norm([one[name] for one in every if name in one]) for name in names]
        norms = np.array(pairs, np.float64).reshape(-1, 2)
        now, uniform = (
            error.total(error.terms(column, self._replan.metric).tolist()) for column in norms.T
        )
        growth = now / uniform / last.ratio if uniform else math.nan
        return growth if math.isfinite(growth) else None

    # ---- state

    def state(self, methods: Mapping[str, Aggregator]) -> dict[str, Any]:
        """What rank 0 remembers, for JSON; {} on other ranks.

        Args:
            methods: those in force.
        """
        if not self._place.first:
            return {}
        found: dict[str, Any] = {"memory": self.policy.memory()}
        if self._last is not None and dict(self._last.methods) == dict(methods):
            found |= {"planned_error": self._last.error, "planned_ratio": self._last.ratio}
        return found

    def carry_on(self, before: Decider) -> None:
        """Remember what `before` does."""
        self.policy, self._last = before.policy, before._last

    def loading(
        self, saved: Mapping[str, Any], methods: Mapping[str, Aggregator]
    ) -> Callable[[], None]:
        """The inverse: what it returns loads what `state` gave; {}: nothing is remembered.

        Raises:
            TypeError, ValueError, KeyError, AttributeError: it is something else.
        """
        memory, planned = saved.get("memory"), saved.get("planned_error")
        policy = self._given if memory is None else self._given.remembering(memory)
        last = None
        if planned is not None:
            last = Chosen(methods, float(planned), float(saved["planned_ratio"]))

        def load() -> None:
            self.policy, self._last = policy, last

        return load


def reason(error: BaseException) -> str:
    """In one line; with its class, unless it is gradwire's own."""
    kind, text = type(error).__name__, " ".join(str(error).split())
    return text if isinstance(error, GradwireError) and text else f"{kind}: {text}".rstrip(": ")


def _whole(every: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What ranks have made; raises what the first of them tells that has failed."""
    for one in every:
        if "failed" in one:
            raise ConfigError(one["failed"])
    return [one["made"] for one in every]


def _norm(parts: Sequence[Any]) -> np.ndarray:
    """The L2 norms of vectors, of the norms of their parts."""
    found: np.ndarray = np.sqrt(np.square(np.array(parts, np.float64)).sum(0))
    return found


def _index(one: Layer, method: Aggregator) -> int:
    """The choice of a method; the reference for one that would not shrink the matrix."""
    return one.methods.index(method) if method in one.methods else one.reference
