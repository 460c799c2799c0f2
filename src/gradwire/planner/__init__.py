"""Plans: which parameter is synchronised how."""

from gradwire.planner.plan import ParameterPlan, Plan, make_plan

__all__ = ["ParameterPlan", "Plan", "make_plan"]
