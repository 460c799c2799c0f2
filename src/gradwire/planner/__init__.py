"""Plans: how each parameter is averaged."""

from gradwire.planner.levels import Levels
from gradwire.planner.plan import ParameterPlan, Plan, make_plan
from gradwire.planner.rules import Rules
from gradwire.planner.weights import WeightRules

__all__ = ["Levels", "ParameterPlan", "Plan", "Rules", "WeightRules", "make_plan"]
