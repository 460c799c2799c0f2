"""Loads a handle's state, also into another number of ranks.

A state is checked completely before any of it is used: kernels access a residual by its address, so
a wrong size or dtype would corrupt memory; and the residual of one codec is meaningless for
another. A tensor's declaration (gradwire.aggregators.StateSpec) determines how it is redistributed
over another number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from gradwire.aggregators import OWED, ErrorFeedback, StateSpec
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives.calling import check_seed
from gradwire.errors import ConfigError
from gradwire.integrations.bias import warn_user
from gradwire.integrations.residual_layout import UNSHARDED, ResidualLayout
from gradwire.planner import ParameterPlan, Plan
from gradwire.planner.plan import meaning

_KEYS = {
    "version": int,
    "rank": int,
    "world_size": int,
    "seed": int,
    "parameters": Mapping,
    "steps": Mapping,
    "aggregators": Mapping,
}
_MOST_STEPS = 1 << 48  # the bits above number the rounds of a step

# What all ranks have alike, by path. Of the rest, a tensor's declaration says who has what of it;
# gathered weights are of each rank; and what a policy remembers is of the job, and with rank 0.
_REPLICATED = (
    "world_size", "seed", "steps", "shards", "dims", "levels",
    "policy/passes", "policy/methods", "policy/byte_weights",
)  # fmt: skip


def merge_states(
    states: Sequence[Mapping[str, Any]],
    rank: int,
    world_size: int,
    plan: Plan,
    layout: ResidualLayout = UNSHARDED,
    any_plan: bool = False,
) -> dict[str, Any]:
    """The state from which `rank` of `world_size` starts; a pure function.

    Args:
        states: one rank's state, or those of all ranks of the saved job, in the form that
            `check_form` checks.
        plan, layout: of the handle that loads.
        any_plan: take states of other methods, too: what this plan does not keep of a residual is
            owed, as after an update. A single rank does so, since it uses no method.

    Raises:
        ConfigError: missing ranks, residuals that this layout cannot take, or another plan: the
            message names the first parameter that differs.
    """
    any_plan = any_plan or world_size == 1
    if any_plan:
        states = [_fitted(state, plan) for state in states]
    for state in states:
        layout.check(state, world_size)
        _check_plan(state, plan, world_size)
        _check_tensors(state, plan, any_plan)
    _check_alike(states)
    merged = _merged(states, rank, world_size, plan)
    if any_plan:
        merged["aggregators"] = {
            p.name: _owed(p, merged["aggregators"][p.name], world_size)
            for p in plan.parameters
            if p.name in merged["aggregators"]
        }
    return merged


def of_job(states: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The state that has what is of the job: rank 0's, if it is among them."""
    return next((state for state in states if state["rank"] == 0), states[0])


def _check_alike(states: Sequence[Mapping[str, Any]]) -> None:
    """Check that several states are those of all ranks of a job, saved together."""
    first = states[0]
    for state in states:
        for path in _REPLICATED:
            if _at(state, path) != _at(first, path):
                what = " of ".join(reversed(path.split("/")))
                raise ConfigError(
                    f"load_state_dict: the states of ranks {first['rank']} and {state['rank']} "
                    f"differ in {what}: give states that were saved together"
                )
    old = first["world_size"]
    if len(states) > 1 and sorted(s["rank"] for s in states) != list(range(old)):
        raise ConfigError(f"load_state_dict: give the states of all {old} old ranks, once each")


def _at(state: Mapping[str, Any], path: str) -> Any:
    found: Any = state
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _merged(
    states: Sequence[Mapping[str, Any]], rank: int, world_size: int, plan: Plan
) -> dict[str, Any]:
    """As `merge_states`, of states that are checked."""
    first = states[0]
    old = first["world_size"]
    mine = [s for s in states if s["rank"] == rank]
    if old == world_size and mine:
        return dict(mine[0])
    if len(states) == 1 and old > 1:
        if _tensors(first, plan, "per_rank", "sharded"):
            warn_user(
                f"load_state_dict: this state is of rank {first['rank']} of {old}, and this is "
                f"rank {rank} of {world_size}: residuals start at zero. Save full_state_dict(), or "
                "give the list of all ranks' states, to keep them"
            )
        return {**first, "aggregators": _tensors(first, plan, "replicated")}
    moved = _tensors(first, plan, "replicated")
    for shared in (
        _share_out(states, plan, rank, world_size),
        _cut(states, plan, rank, world_size),
    ):
        for name, tensors in shared.items():
            moved.setdefault(name, {}).update(tensors)
    return {**first, "aggregators": moved}


def check_form(state: object) -> None:
    """Raise ConfigError unless `state` is a handle's state_dict in this version's format."""
    version = state.get("version") if isinstance(state, Mapping) else None
    if not isinstance(state, Mapping) or type(version) is not int or version != 1:
        raise ConfigError("load_state_dict: not the state_dict of a gradwire handle (version 1)")
    for key, kind in _KEYS.items():
        if not isinstance(state.get(key), kind) or isinstance(state[key], bool):
            found = f"has {state[key]!r} for {key!r}" if key in state else f"lacks {key!r}"
            raise ConfigError(
                f"load_state_dict: the state {found}: it is not a result of Handle.state_dict"
            )
    try:
        check_seed(state["seed"])
    except ConfigError as error:
        raise ConfigError(f"load_state_dict: the state has {error}") from None
    if not 0 <= state["rank"] < state["world_size"]:
        raise ConfigError(
            f"load_state_dict: the state is of rank {state['rank']} of {state['world_size']}: it "
            "is not a result of Handle.state_dict"
        )


def _check_plan(state: Mapping[str, Any], plan: Plan, world_size: int) -> None:
    """Check that the state was saved from this plan: equal parameters with equal codecs."""
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
                continue  # a single rank has no error feedback, whatever the arguments
            found = there[name].get(fact) if isinstance(there[name], Mapping) else None
            if found != value and not (fact == "codec" and _same_method(found, value)):
                raise ConfigError(
                    f"load_state_dict: parameter {name} has {fact} {found} in the state and "
                    f"{value} here: load a state with the same plan with which it was saved"
                )
        step = state["steps"][name]
        if type(step) is not int or not 0 <= step < _MOST_STEPS:
            raise ConfigError(
                f"load_state_dict: parameter {name} is at step {step!r:.60}: not a whole number "
                "from 0 to below 2^48"
            )


def _same_method(there: object, here: object) -> bool:
    """Whether what is kept between steps means the same."""
    return meaning(str(there)) == meaning(str(here))


def _fitted(state: Mapping[str, Any], plan: Plan) -> Mapping[str, Any]:
    """A state as of this plan's methods, whatever methods it was saved from. Of what another method
    kept, what was not sent stays."""
    parameters, aggregators = dict(state["parameters"]), dict(state["aggregators"])
    for p in plan.parameters:
        there, kept = parameters.get(p.name), aggregators.get(p.name)
        if not isinstance(there, Mapping):
            continue
        here = p.facts()
        parameters[p.name] = {**there, "codec": here["codec"], "feedback": here["feedback"]}
        if isinstance(kept, Mapping) and not _same_method(there.get("codec"), here["codec"]):
            owed = {key: kept[key] for key in (RESIDUAL, OWED) if key in kept}
            aggregators[p.name] = owed
    return {**state, "parameters": parameters, "aggregators": aggregators}


def _check_tensors(state: Mapping[str, Any], plan: Plan, any_plan: bool) -> None:
    """Check that each tensor is as declared. A state from before the first step has none."""
    rank, world_size = state["rank"], state["world_size"]
    planned = {p.name: p for p in plan.parameters}
    for name, tensors in state["aggregators"].items():
        declared = _declared(planned[name], any_plan) if name in planned else {}
        if not isinstance(tensors, Mapping):
            raise ConfigError(f"load_state_dict: the state of {name} is not a mapping of tensors")
        for key, tensor in tensors.items():
            if key not in declared:
                raise ConfigError(
                    f"load_state_dict: the state has {key!r} for {name}, whose aggregator, "
                    f"{planned[name].aggregator if name in planned else None}, keeps "
                    f"{', '.join(declared) or 'nothing'}"
                )
            shape = declared[key].local(rank, world_size)
            _check_tensor(f"{key} of {name}", tensor, shape, declared[key].dtype)


def _declared(parameter: ParameterPlan, any_plan: bool) -> dict[str, StateSpec]:
    """The state that a parameter may have; of any plan, a residual that will be owed, too."""
    kept = parameter.aggregator
    if any_plan and not kept.own_feedback:
        kept = ErrorFeedback(parameter.inner)
    return {**kept.states(parameter.shape), OWED: StateSpec((parameter.numel,))}


def _check_tensor(what: str, tensor: object, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ConfigError(f"load_state_dict: the {what} is {type(tensor).__name__}, not a tensor")
    for quality, found, wanted in (
        ("dtype", tensor.dtype, dtype),
        ("shape", tuple(tensor.shape), shape),
        ("device meta", tensor.is_meta, False),
        ("layout", tensor.layout, torch.strided),
    ):
        if found != wanted:
            raise ConfigError(f"load_state_dict: the {what} has {quality} {found}, not {wanted}")
    if not tensor.is_contiguous():
        raise ConfigError(f"load_state_dict: the {what} is not contiguous")


def _tensors(
    state: Mapping[str, Any], plan: Plan, *kinds: str
) -> dict[str, dict[str, torch.Tensor]]:
    """The tensors of a state with one of these declared kinds."""
    planned = {p.name: p for p in plan.parameters}
    found = {}
    for name, tensors in state["aggregators"].items():
        declared = _declared(planned[name], True)
        of_kind = {key: t for key, t in tensors.items() if declared[key].kind in kinds}
        if of_kind:
            found[name] = of_kind
    return found


def _share_out(
    states: Sequence[Mapping[str, Any]], plan: Plan, rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Redistribute per-rank state: new rank r gets the sum over old ranks r, r + world_size, ...

    It is scaled by new / old number of ranks, which preserves the average over ranks.
    """
    old = len(states)
    shared: dict[str, dict[str, torch.Tensor]] = {}
    for state in sorted(states, key=lambda s: int(s["rank"])):
        for name, tensors in _tensors(state, plan, "per_rank").items():
            target = shared.setdefault(name, {})
            for key, value in tensors.items():
                # Zeros also if this rank gets nothing: an initial state need not be zero.
                target.setdefault(key, torch.zeros_like(value, device="cpu"))
                if state["rank"] % world_size == rank:
                    target[key] += value.cpu() * (world_size / old)
    return shared


def _owed(
    parameter: ParameterPlan, tensors: Mapping[str, torch.Tensor], ranks: int
) -> dict[str, torch.Tensor]:
    """The state with a residual that is not kept added to the next gradient; a single rank keeps
    none for error feedback."""
    method, found = parameter.inner if ranks == 1 else parameter.aggregator, dict(tensors)
    if RESIDUAL in found and RESIDUAL not in method.states(parameter.shape):
        residual = found.pop(RESIDUAL)
        found[OWED] = found[OWED] + residual if OWED in found else residual
    return found


def _cut(
    states: Sequence[Mapping[str, Any]], plan: Plan, rank: int, world_size: int
) -> dict[str, dict[str, torch.Tensor]]:
    """Reshard sharded state: concatenate all shards, and cut them for the new ranks."""
    planned = {p.name: p for p in plan.parameters}
    by_rank = [_tensors(s, plan, "sharded") for s in sorted(states, key=lambda s: int(s["rank"]))]
    found: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensors in by_rank[0].items():
        for key in tensors:
            declared = _declared(planned[name], True)[key]
            whole = torch.cat([shards[name][key].cpu() for shards in by_rank], declared.dim)
            length = declared.local(0, world_size)[declared.dim]
            mine = declared.local(rank, world_size)[declared.dim]
            part = whole.narrow(declared.dim, min(rank * length, whole.shape[declared.dim]), mine)
            found.setdefault(name, {})[key] = part.contiguous()
    return found
