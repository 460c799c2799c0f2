"""Plans: how each parameter is averaged."""

from gradwire.planner.plan import ParameterPlan, Plan, make_plan
from gradwire.planner.rules import Rules

__all__ = ["ParameterPlan", "Plan", "Rules", "make_plan"]
