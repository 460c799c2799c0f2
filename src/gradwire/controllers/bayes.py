"""Bayes: Bayesian optimisation of the choices, by optuna (CGX 5, the first approach).

It needs optuna 5 or later, of the extra `adapt`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.controllers.layer import Budget, Layer, plan_cost, plan_error
from gradwire.controllers.policy import Policy
from gradwire.errors import ConfigError


@dataclass(frozen=True)
class Bayes(Policy):
    """The best of some plans that a tree-structured Parzen estimator tries, the uniform one first.

    A plan's value is its cost, and an error above the budget is a constraint. CGX found that the
    method needs tuning; these are optuna's defaults. A trial takes about a millisecond per layer.

    Args:
        trials: plans to try.
        seed: of the sampler.

    Raises:
        ConfigError: an option has no legal value; from `propose` and `check`, optuna is missing.
    """

    trials: int = 200
    seed: int = 0

    name = "bayes"

    def __post_init__(self) -> None:
        if type(self.trials) is not int or self.trials < 1:
            raise ConfigError(f"Bayes: trials={self.trials!r}: give a whole number, 1 or more")
        if type(self.seed) is not int or not 0 <= self.seed < 2**32:
            raise ConfigError(f"Bayes: seed={self.seed!r}: give a whole number, 0 to 2^32 - 1")

    @staticmethod
    def check() -> None:
        """Raise ConfigError if optuna is missing."""
        _optuna()

    def choose(self, layers: Sequence[Layer], budget: Budget) -> Sequence[int] | None:
        optuna = _optuna()
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        free = [i for i, one in enumerate(layers) if len(one.methods) > 1]
        uniform = [one.reference for one in layers]
        study.enqueue_trial({str(i): uniform[i] for i in free})
        best, least = None, float("inf")
        for _ in range(self.trials):
            trial = study.ask()
            plan = list(uniform)
            for i in free:
                plan[i] = trial.suggest_int(str(i), 0, len(layers[i].methods) - 1)
            cost = plan_cost(layers, plan)
            above = plan_error(layers, plan, budget.metric) - budget.error
            trial.set_constraint("error", above)
            study.tell(trial, cost)
            if above <= 0 and cost < least:
                best, least = plan, cost
        return best


def _optuna() -> Any:
    try:
        import optuna
    except ModuleNotFoundError as missing:
        if missing.name != "optuna":
            raise
        raise ConfigError(
            'the policy bayes needs optuna: pip install "gradwire[adapt]"'
        ) from missing
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna
