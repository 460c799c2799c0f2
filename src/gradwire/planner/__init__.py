"""Plans: which parameter is averaged how."""

from gradwire.planner.plan import ParameterPlan, Plan, make_plan
from gradwire.planner.rules import Rules

__all__ = ["ParameterPlan", "Plan", "Rules", "make_plan"]
