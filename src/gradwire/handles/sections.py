"""The sections of a handle's state.

policy       what it remembers, and the methods that it chose: rank 0's (decide/policy.py)
sharding     how FSDP2 shards the module
steps        steps, seed and facts of parameters; equal on all ranks
aggregators  the tensors of each parameter's method, which declares how ranks share them
levels       learned ones; equal on all ranks (learning.py)
weights      with keep="reference", each rank's shards of the reference (gathered.py)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from gradwire.aggregators import OWED, Attached, ErrorFeedback, StateSpec
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.errors import ConfigError
from gradwire.handles.bias import warn_user
from gradwire.lang import rng
from gradwire.planner import ParameterPlan, Plan
from gradwire.planner.plan import meaning
from gradwire.state.formats import State
from gradwire.state.state import (
    UNSHARDED,
    SavedJob,
    Sharding,
    StateSection,
    of_job,
)

if TYPE_CHECKING:
    from gradwire.decide.policy import Adaptation

_MOST_STEPS = 1 << 48  # the bits above number the rounds of a step


# ---- the policy


def nothing() -> None:
    """Loads what a handle has no use for."""


def policy_section(policy: Adaptation | None, loads: bool) -> StateSection:
    """Of an Adaptation; None: there is no policy at work. It comes first, since the other sections
    depend on the plan that it loads."""

    def save() -> dict[str, Any]:
        return {} if policy is None else {"policy": policy.state()}

    def loading(job: SavedJob) -> Callable[[], None]:
        found = None
        if loads and policy is not None:
            found = policy.loading(of_job(job.states).get("policy"))
        load: Callable[[], None] = nothing
        if found is not None:
            job.plan, load = found
        return load

    return StateSection(save, loading, ("policy/passes", "policy/methods", "policy/byte_weights"))


# ---- steps


def steps_section(
    members: Mapping[str, Attached],
    plan: Callable[[], Plan],
    seed: int,
    seeded: Callable[[int], None],
) -> StateSection:
    """Of random numbers, and of the plan from which a state is.

    Args:
        plan: in force.
        seeded: is given the seed of a loaded state.
    """

    def save() -> dict[str, Any]:
        return {
            "seed": seed,
            "parameters": {p.name: p.facts() for p in plan().parameters},
            "steps": {name: member.step for name, member in members.items()},
        }

    def loading(job: SavedJob) -> Callable[[], None]:
        for state in job.states:
            _check_plan(state, job)
        saved = job.states[0]

        def load() -> None:
            seeded(saved["seed"])
            for name, member in members.items():
                member.step = saved["steps"][name]
                member.keys = rng.parameter_keys(saved["seed"], name, job.rank)

        return load

    return StateSection(save, loading, ("seed", "steps"))


def _check_plan(state: State, job: SavedJob) -> None:
    """Check that the state was saved from this plan: equal parameters with equal codecs."""
    here = {p.name: p.facts() for p in job.plan.parameters}
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
            if fact == "feedback" and 1 in (job.world_size, job.ranks):
                continue  # a single rank has no error feedback, whatever the arguments
            known = isinstance(there[name], Mapping)
            if known and job.any_plan and fact in ("codec", "feedback"):
                continue
            found = there[name].get(fact) if known else None
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


# ---- shards


def sharding_section(sharding: Sharding) -> StateSection:
    """Of how residuals are sharded: whether they can be loaded."""

    def save() -> dict[str, Any]:
        if not sharding.shards:
            return {}
        return {"shards": sharding.shards, "dims": dict(sharding.dims)}

    def loading(job: SavedJob) -> Callable[[], None]:
        for state in job.states:
            _check_sharding(state, sharding, job.world_size)
        return nothing

    return StateSection(save, loading, ("shards", "dims"))


def _check_sharding(state: State, sharding: Sharding, world_size: int) -> None:
    """Check that residuals of a state can be loaded by `world_size` ranks in this sharding.

    With replicas, the own shard's values in a residual have the weight of all shards. So they
    are of use only where the same shard is on the same rank.

    Raises:
        ConfigError: they cannot, or the state does not tell its layout.
    """
    size, shards, dims = state["world_size"], state.get("shards"), state.get("dims", {})
    if "shards" in state and not (
        type(shards) is int
        and 0 < shards <= size
        and size % shards == 0
        and isinstance(state.get("dims"), Mapping)
    ):
        raise ConfigError(
            f"load_state_dict: the state has {shards!r:.60} for 'shards' and "
            f"{state.get('dims')!r:.60} for 'dims': it is not a result of Handle.state_dict"
        )
    own = sharding.shards or None
    here, there = (world_size, own), (size, shards)
    if not any(map(_has_replicas, (here, there))) or not state["aggregators"]:
        return
    if here != there or dict(dims) != dict(sharding.dims):
        sharded = "" if here != there else ", sharded in other dimensions"
        raise ConfigError(
            f"load_state_dict: this state is of {size} ranks {_in_shards(shards)}; this group "
            f"has {world_size} {_in_shards(own)}{sharded}: residuals of replicas "
            "(HSDP) cannot be moved; load it with an empty 'aggregators' to start from zero "
            "residuals"
        )


def _has_replicas(of: tuple[int, int | None]) -> bool:
    world_size, shards = of
    return shards not in (None, world_size)


def _in_shards(shards: int | None) -> str:
    return "under DDP" if shards is None else f"in {shards} shards"


# ---- the state of aggregators


def aggregators_section(
    members: Mapping[str, Attached], sharding: Sharding = UNSHARDED, idle: bool = False
) -> StateSection:
    """Of the tensors that parameters keep.

    Args:
        idle: no gradient is given to a member, so residuals are of no use.
    """

    def save() -> dict[str, Any]:
        kept = {
            name: {key: sharding.saved(name, key, t) for key, t in member.state.items()}
            for name, member in members.items()
            if member.state
        }
        return {"aggregators": kept}

    def loading(job: SavedJob) -> Callable[[], None]:
        plan = {p.name: p for p in job.plan.parameters}
        for state in job.states:
            for name in state["aggregators"]:
                for key in () if name in plan else _of(state, name):
                    raise _undeclared(key, name, None, ())
        found = {name: _loaded(p, job) for name, p in plan.items()}
        first = job.states[0]
        kinds = {_declared(p, job)[k].kind for p in plan.values() for k in _kept(first, p, job)}
        if job.lacks_ranks and kinds - {"replicated"}:
            warn_user(
                f"load_state_dict: this state is of rank {job.states[0]['rank']} of {job.ranks}, "
                f"and this is rank {job.rank} of {job.world_size}: residuals start at zero. Save "
                "full_state_dict(), or give the list of all ranks' states, to keep them"
            )
        if idle and any(found.values()):
            warn_user(
                "load_state_dict: a single process reduces nothing on a plain module or under "
                "FSDP2, so the residuals of this state are dropped"
            )
            found = {}

        def load() -> None:
            for name, member in members.items():
                kept = found.get(name, {}).items()
                member.keep({key: sharding.loaded(name, key, tensor) for key, tensor in kept})

        return load

    return StateSection(save, loading)


def _declared(p: ParameterPlan, job: SavedJob) -> dict[str, StateSpec]:
    """The tensors that a parameter may have; of any plan, a residual that will be owed, too."""
    method = p.aggregator
    if job.any_plan and not method.own_feedback:
        method = ErrorFeedback(p.inner)
    return {**method.states(p.shape), OWED: StateSpec((p.numel,))}


def _loaded(p: ParameterPlan, job: SavedJob) -> dict[str, torch.Tensor]:
    """What a parameter keeps from now on, of tensors that are checked. A residual that its method
    does not keep is added to the next gradient; a single rank keeps none for error feedback."""
    saved: dict[str, dict[int, torch.Tensor]] = {}
    declared = _declared(p, job)
    for state in job.states:
        for key, tensor in _kept(state, p, job).items():
            if key not in declared:
                raise _undeclared(key, p.name, p.aggregator, declared)
            shape = declared[key].local(state["rank"], job.ranks)
            _check_tensor(f"{key} of {p.name}", tensor, shape, declared[key].dtype)
            saved.setdefault(key, {})[state["rank"]] = tensor
    moved = {key: job.moved(declared[key], by_rank) for key, by_rank in saved.items()}
    found = {key: tensor for key, tensor in moved.items() if tensor is not None}
    method = p.inner if job.world_size == 1 else p.aggregator
    if job.any_plan and RESIDUAL in found and RESIDUAL not in method.states(p.shape):
        residual = found.pop(RESIDUAL)
        found[OWED] = found[OWED] + residual if OWED in found else residual
    return found


def _kept(state: State, p: ParameterPlan, job: SavedJob) -> Mapping[str, Any]:
    """What a state has of a parameter: of another method's, what was not sent."""
    kept = _of(state, p.name)
    if job.any_plan and not _same_method(state["parameters"][p.name].get("codec"), p.how):
        return {key: kept[key] for key in (RESIDUAL, OWED) if key in kept}
    return kept


def _of(state: State, name: str) -> Mapping[str, Any]:
    kept = state["aggregators"].get(name, {})
    if not isinstance(kept, Mapping):
        raise ConfigError(f"load_state_dict: the state of {name} is not a mapping of tensors")
    return kept


def _undeclared(key: str, name: str, method: object, declared: Iterable[str]) -> ConfigError:
    return ConfigError(
        f"load_state_dict: the state has {key!r} for {name}, whose aggregator, {method}, keeps "
        f"{', '.join(declared) or 'nothing'}"
    )


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
