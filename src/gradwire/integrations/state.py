"""Loading a handle's state, also into another number of ranks.

A state is checked whole before any of it is used: the kernels read and write a residual by its
address, so one of another size or dtype would reach beyond its memory; and what one codec left
unsent says nothing about another's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.errors import ConfigError
from gradwire.planner import ParameterPlan, Plan

_KEYS = {
    "version": int,
    "rank": int,
    "world_size": int,
    "seed": int,
    "parameters": Mapping,
    "steps": Mapping,
    "aggregators": Mapping,
}


def merge_states(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, plan: Plan
) -> dict[str, Any]:
    """The state that `rank` of `world_size` starts from; nothing is changed here.

    Args:
        states: one rank's state, or those of all ranks of the job that was saved.
        plan: of the handle that loads.

    Raises:
        ConfigError: no state, another format, missing ranks, or another plan: the first parameter
            that differs is named.
    """
    if not states:
        raise ConfigError("load_state_dict: the list of states is empty")
    for state in states:
        _check_form(state)
        _check_plan(state, plan, world_size)
        _check_residuals(state, plan)
    first = states[0]
    for state in states:
        for key in ("world_size", "seed", "steps"):
            if state[key] != first[key]:
                raise ConfigError(
                    f"load_state_dict: the states of ranks {first['rank']} and {state['rank']} "
                    f"differ in {key}: give states that were saved together"
                )
    old = first["world_size"]
    mine = [s for s in states if s["rank"] == rank]
    if old == world_size and mine:
        return dict(mine[0])
    if world_size == 1:
        if any(state["aggregators"] for state in states):
            warnings.warn(
                "load_state_dict: one rank alone has no error feedback: the residuals of this "
                f"state of {old} ranks are dropped",
                stacklevel=3,
            )
        return {**first, "aggregators": {}}
    if len(states) == 1:
        if first["aggregators"]:
            warnings.warn(
                f"load_state_dict: this state is rank {first['rank']}'s of {old} ranks, now there "
                f"are {world_size} and this is rank {rank}: residuals start at zero. Give the "
                "list of all ranks' states to keep them",
                stacklevel=3,
            )
        return {**first, "aggregators": {}}
    if sorted(s["rank"] for s in states) != list(range(old)):
        raise ConfigError(f"load_state_dict: give the states of all {old} old ranks, once each")
    return {**first, "aggregators": _share_out(states, rank, world_size)}


def _check_form(state: object) -> None:
    """It is the state_dict of a handle, in this version's format."""
    if not isinstance(state, Mapping) or state.get("version") != 1:
        raise ConfigError("load_state_dict: not the state_dict of a gradwire handle (version 1)")
    for key, kind in _KEYS.items():
        if not isinstance(state.get(key), kind):
            found = f"has {state[key]!r} for {key!r}" if key in state else f"lacks {key!r}"
            raise ConfigError(
                f"load_state_dict: the state {found}: not one that Handle.state_dict made"
            )


def _check_plan(state: Mapping[str, Any], plan: Plan, world_size: int) -> None:
    """It was saved from this plan: the same parameters, each synchronised in the same way."""
    here = {p.name: p.facts() for p in plan.parameters}
    there = state["parameters"]
    for key in ("parameters", "steps"):
        if list(state[key]) != list(here):
            unmatched = [n for n in state[key] if n not in here]
            unmatched += [n for n in here if n not in state[key]]
            odd = unmatched[0] if unmatched else "the order of parameters"
            raise ConfigError(
                f"load_state_dict: the state is of another model or plan; its {key} differ in {odd}"
            )
    for name, facts in here.items():
        for fact, value in facts.items():
            if fact == "feedback" and 1 in (world_size, state["world_size"]):
                continue  # one rank alone has none, whatever was asked for
            found = there[name].get(fact) if isinstance(there[name], Mapping) else None
            if found != value:
                raise ConfigError(
                    f"load_state_dict: parameter {name} has {fact} {found} in the state and "
                    f"{value} here: a state belongs to the plan that it was saved from"
                )
        if not isinstance(state["steps"][name], int):
            raise ConfigError(
                f"load_state_dict: parameter {name} is at step {state['steps'][name]!r}: "
                "not a number"
            )


def _check_residuals(state: Mapping[str, Any], plan: Plan) -> None:
    """Each fits its parameter. Before the first step there is none."""
    kept = {p.name: p for p in plan.parameters if state["parameters"][p.name]["feedback"]}
    for name, tensors in state["aggregators"].items():
        if name not in kept:
            raise ConfigError(
                f"load_state_dict: the state has a residual for {name}, which has no error feedback"
            )
        if not isinstance(tensors, Mapping) or list(tensors) != ["residual"]:
            raise ConfigError(f"load_state_dict: the state of {name} is not one residual")
        _check_residual(kept[name], tensors["residual"])


def _check_residual(parameter: ParameterPlan, residual: object) -> None:
    if not isinstance(residual, torch.Tensor):
        raise ConfigError(
            f"load_state_dict: the residual of {parameter.name} is {type(residual).__name__}, "
            "not a tensor"
        )
    for what, found, wanted in (
        ("dtype", residual.dtype, torch.float32),
        ("shape", tuple(residual.shape), (parameter.numel,)),
        ("device meta", residual.is_meta, False),
        ("layout", residual.layout, torch.strided),
    ):
        if found != wanted:
            raise ConfigError(
                f"load_state_dict: the residual of {parameter.name} has {what} {found}, not "
                f"{wanted}"
            )
    if not residual.is_contiguous():
        raise ConfigError(f"load_state_dict: the residual of {parameter.name} is not contiguous")


def _share_out(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """New rank r takes the residuals of old ranks r, r + world_size, ...

    A residual counts in the average with weight 1 / number of ranks, so they are scaled by new /
    old: then the average of what is still to be sent stays what it was.
    """
    old = len(states)
    shared: dict[str, dict[str, torch.Tensor]] = {}
    for state in states:
        if state["rank"] % world_size != rank:
            continue
        for name, tensors in state["aggregators"].items():
            target = shared.setdefault(name, {})
            for key, value in tensors.items():
                scaled = value.cpu() * (world_size / old)
                target[key] = target[key] + scaled if key in target else scaled
    return shared
