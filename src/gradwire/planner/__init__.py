"""Plans: how each parameter is averaged."""

from gradwire.planner.learned import Learned
from gradwire.planner.plan import ParameterPlan, Plan, make_plan
from gradwire.planner.rules import Rules
from gradwire.planner.weights import WeightRules

__all__ = ["Learned", "ParameterPlan", "Plan", "Rules", "WeightRules", "make_plan"]
