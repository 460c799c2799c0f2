"""A handle's state: the list of its sections, and how each is saved and loaded.

A *section* (handles/sections.py) is what one part of a handle keeps between steps.

A state is checked completely before any of it is used: kernels access a residual by its address, so
a wrong size or dtype would corrupt memory; and the residual of one codec is meaningless for
another. The forms in which a state is saved are in state/formats.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
import torch.distributed.checkpoint as dcp

from gradwire.aggregators import OWED, Attached, StateSpec
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.errors import ConfigError
from gradwire.lang import rng
from gradwire.planner import ParameterPlan, Plan
from gradwire.state.formats import (
    OfOneRank,
    State,
    StateGather,
    check_caller,
    full,
    read_states,
    states_of,
    to_keys,
)

_STEP_BITS = 32  # bits of a handle's step counter


@dataclass
class SavedJob:
    """The states that a handle loads, each of the form of a state.

    Attributes:
        states: one rank's, or those of all ranks of the saved job, in the order of ranks.
        rank, world_size: of the handle, among the ranks that take part in an average.
        plan: in force once they are loaded, which a policy's section sets.
        any_plan: states of other methods are taken, too: what this plan does not keep of a residual
            is owed, as after an update. A single rank does so, since it uses no method.
    """

    states: Sequence[State]
    rank: int
    world_size: int
    plan: Plan
    any_plan: bool = False

    def __post_init__(self) -> None:
        self.states = sorted(self.states, key=lambda state: int(state["rank"]))
        self.any_plan = self.any_plan or self.world_size == 1

    @property
    def ranks(self) -> int:
        """Of the saved job."""
        return int(self.states[0]["world_size"])

    @property
    def own(self) -> State | None:
        """What this rank saved, if as many ranks load it."""
        mine = (state for state in self.states if state["rank"] == self.rank)
        return next(mine, None) if self.ranks == self.world_size else None

    @property
    def lacks_ranks(self) -> bool:
        """Whether it is the state of one rank, of which this one has what all ranks have alike."""
        return self.own is None and len(self.states) < self.ranks

    def moved(self, spec: StateSpec, by_rank: Mapping[int, torch.Tensor]) -> torch.Tensor | None:
        """What this rank gets of a tensor that these ranks have saved; None: nothing.

        A per-rank one is shared out: new rank r gets the sum over old ranks r, r + world_size, ...
        It is scaled by new / old number of ranks, which preserves the average over ranks.
        """
        if self.own is not None:
            return by_rank.get(self.rank)
        if spec.kind == "replicated":
            return next(iter(by_rank.values()))
        if self.lacks_ranks:
            return None
        if spec.kind == "sharded":
            return part_of(whole(by_rank.values(), spec.dim), spec, self.rank, self.world_size)
        # Zeros also if this rank gets nothing: an initial state need not be zero.
        total = torch.zeros_like(next(iter(by_rank.values())), device="cpu")
        for rank, tensor in by_rank.items():
            if rank % self.world_size == self.rank:
                total += tensor.cpu() * (self.world_size / self.ranks)
        return total


@dataclass(frozen=True)
class StateSection:
    """A part of a handle's state.

    Attributes:
        save: what this rank saves of it, under keys of the state.
        loading: checks what saved states have of it, and changes nothing; what it returns loads it.
            It raises ConfigError for what cannot be loaded.
        alike: the paths of what all ranks save alike; of the rest each rank has its own.
    """

    save: Callable[[], dict[str, Any]]
    loading: Callable[[SavedJob], Callable[[], None]]
    alike: tuple[str, ...] = ()


def loading(job: SavedJob, sections: Sequence[StateSection]) -> list[Callable[[], None]]:
    """What loads all sections, which are checked: what `Handle.load_state_dict` says."""
    _check_alike(job.states, ["world_size", *(path for one in sections for path in one.alike)])
    return [section.loading(job) for section in sections]


def of_job(states: Sequence[State]) -> State:
    """The state that has what is of the job: rank 0's, if it is among them."""
    return next((state for state in states if state["rank"] == 0), states[0])


def _check_alike(states: Sequence[State], paths: Sequence[str]) -> None:
    """Check that several states are those of all ranks of a job, saved together."""
    first = states[0]
    for state in states:
        for path in paths:
            if _at(state, path) != _at(first, path):
                what = " of ".join(reversed(path.split("/")))
                raise ConfigError(
                    f"load_state_dict: the states of ranks {first['rank']} and {state['rank']} "
                    f"differ in {what}: give states that were saved together"
                )
    old = first["world_size"]
    if len(states) > 1 and sorted(s["rank"] for s in states) != list(range(old)):
        raise ConfigError(f"load_state_dict: give the states of all {old} old ranks, once each")


def _at(state: State, path: str) -> Any:
    found: Any = state
    for key in path.split("/"):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def whole(parts: Iterable[torch.Tensor], dim: int) -> torch.Tensor:
    """Of all ranks' shards, on the CPU."""
    return torch.cat([part.detach().cpu() for part in parts], dim)


def part_of(tensor: torch.Tensor, spec: StateSpec, rank: int, ranks: int) -> torch.Tensor:
    """The shard of a rank; some of the last ranks may get none."""
    each, own = (spec.local(one, ranks)[spec.dim] for one in (0, rank))
    first = min(rank * each, tensor.shape[spec.dim])
    return tensor.narrow(spec.dim, first, own).contiguous()


@dataclass(frozen=True)
class Sharding:
    """How FSDP2 shards the module of a handle.

    It scatters a parameter shard by shard. Of a parameter that is sharded in another dimension than
    the first, that is not the order of its own values. A saved residual has the parameter's order,
    so it does not depend on how the module is sharded.

    Attributes:
        shapes: of whole parameters, by name.
        dims: the dimension in which one is sharded; those of the first are left out.
        shards: how many there are; with replicas (HSDP), fewer than ranks; 0: DDP.
    """

    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    dims: Mapping[str, int] = field(default_factory=dict)
    shards: int = 0

    def spec(self, name: str) -> StateSpec:
        """How ranks share a parameter."""
        return StateSpec(self.shapes[name], kind="sharded", dim=self.dims.get(name, 0))

    def part(self, name: str, shard: int) -> tuple[int, ...]:
        """The shape of a shard."""
        return self.spec(name).local(shard, self.shards)

    def of(self, state: State) -> Sharding:
        """How the same module was sharded where a state was saved."""
        return replace(self, dims=dict(state.get("dims", {})), shards=state.get("shards", 0))

    def saved(self, name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor of the state, in the order of the parameter's values."""
        dim = self.dims.get(name, 0)
        if dim == 0 or key not in (RESIDUAL, OWED):
            return tensor.clone()
        part = list(self.shapes[name])
        part[dim] //= self.shards
        return torch.cat(tensor.view(self.shards, *part).unbind(), dim).view(tensor.shape)

    def loaded(self, name: str, key: str, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of a saved tensor, in the order in which the parameter is reduced."""
        dim, tensor = self.dims.get(name, 0), tensor.detach()
        if dim == 0 or key not in (RESIDUAL, OWED):
            return tensor.clone()
        chunks = tensor.view(self.shapes[name]).chunk(self.shards, dim)
        return torch.cat(chunks).view(tensor.shape)


UNSHARDED = Sharding()
KEY = "gradwire"  # of a handle in a checkpoint


# ---- the handle


class Saved:
    """Base class of handles, for their state.

    Args:
        members: the parameters, by name.
        seed: of random numbers.
        rank, world_size: among the ranks that take part in an average.
        gather: gathers the states of all these ranks.
    """

    def __init__(
        self,
        members: Mapping[str, Attached],
        seed: int,
        rank: int,
        world_size: int,
        gather: StateGather,
    ) -> None:
        self._members = members
        self._seed = seed
        self.rank = rank
        self.world_size = world_size
        self._gather = gather

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        raise NotImplementedError

    def _takes_any_plan(self) -> bool:
        """Whether it loads states of other methods than those of its plan."""
        raise NotImplementedError

    def _sections(self) -> list[StateSection]:
        """What is saved, in the order in which it is loaded."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: steps, seed and residuals. It is a snapshot: tensors are copied, so
        later training does not change it.

        Saved on every rank in a file of its own, it resumes bit for bit. A file of rank 0 alone
        lacks the other ranks' residuals: use `full_state_dict` for that. Under FSDP2 it also has
        the number of `shards`, and as `dims` of each parameter that is not sharded in its first
        dimension, in which it is. Residuals are in the order of the parameter's values, however
        it is sharded.

        Raises:
            ConfigError: within `dcp.save`, which takes `checkpoint` (below); given the dict, it
                raises a CheckpointException that says the same. Or within a trainer's call that
                keeps what rank 0 gives (docs/how-to/trainers.md).
        """
        check_caller(self.world_size)
        state = self._own_state()
        kept = {name: OfOneRank(of) for name, of in state["aggregators"].items()}
        return {**state, "steps": OfOneRank(state["steps"]), "aggregators": OfOneRank(kept)}

    def _own_state(self) -> dict[str, Any]:
        """What `state_dict` says, whoever asks: `checkpoint` may be called within `dcp.save`."""
        state = {"version": 1, "plan": self.plan.version, "rank": self.rank}
        state["world_size"] = self.world_size
        for section in self._sections():
            state.update(section.save())
        return state

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The state of all ranks, on the CPU, for one checkpoint. Collective: every rank of the
        module's process group calls it, between two steps.

            state = {"model": ddp.module.state_dict(), "gradwire": handle.full_state_dict(True)}
            if rank == 0:
                torch.save(state, path)

        Args:
            rank0_only: only rank 0 gets the state, the others an empty dict, as with torch's
                FullStateDictConfig(rank0_only=True). The state takes host memory for all ranks'
                residuals: 4 bytes per compressed value and rank.

        Returns:
            world_size, and in `ranks` every rank's `state_dict`: dicts, lists, numbers, strings and
            tensors, which torch.load(weights_only=True) reads.

        Raises:
            ConfigError: the process group was destroyed, or ranks differ in `rank0_only`.
            TransportError: a rank did not make the call within the group's timeout.
        """
        return full(self._gather(self._own_state(), rank0_only))

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a result of `full_state_dict` or `state_dict`, on every rank. Tensors are copied:
        training does not change `state`, which may be on another device.

        At the world size that saved it, each rank takes its own state, and training resumes bit for
        bit. From M old ranks to N new ranks:

        - residuals: with e_i the residual of old rank i, new rank r takes N / M times the sum of
          e_i over i = r, r + N, r + 2 N, ... below M. So the sum of all residuals divided by the
          number of ranks is preserved, which is what later averages still have to receive. A rank
          without an old rank starts at zero. A single rank under DDP, which has no error feedback,
          adds its residual to its next gradient; a module without DDP drops it, with a warning.
        - between DDP and FSDP2, and between shardings, residuals move in the same way, since they
          are of whole parameters. Residuals of replicas (HSDP) load only into the same mesh.
        - with FSDP2 a rank's own shard is sent exactly: what a residual holds of it, from another
          number of ranks, another sharding or DDP, is added to the next gradient.
        - state that is equal on all ranks (PowerSGD's factor, steps, the seed) is copied, and
          sharded state is put together and sharded anew. What a policy remembers is in rank 0's
          state; a single rank has no policy, and leaves it out.
        - a single rank uses no codec, so it takes states of any; so does "auto", whose plan no
          state has. A residual that the plan in force does not keep is added to the next gradient.

        Args:
            state: a result of `full_state_dict`, or this rank's `state_dict`, or a list of those of
                all old ranks. A single state from another world size restores the steps and the
                state that is equal on all ranks, and warns that residuals start at zero.

        Raises:
            ConfigError: `state` is not a handle's state, or of another plan; the message names the
                first parameter that differs. (A codec may round otherwise now, and store its grid's
                numbers in another dtype.) Or it has residuals of other replicas (HSDP). Nothing is
                changed then.
        """
        for load in self._loading(state):
            load()

    def _loading(self, state: object) -> list[Callable[[], None]]:
        of = self.rank, self.world_size, self.plan, self._takes_any_plan()
        return loading(SavedJob(states_of(state), *of), self._sections())

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """This rank's state for torch.distributed.checkpoint: tensors, under keys of this rank.

            state = {"model": weights, "optimizer": moments, "gradwire": handle.checkpoint()}
            dcp.save(state, checkpoint_id=path)  # on every rank

        `load` reads them, on any number of ranks. Tensors are copies.
        """
        return to_keys(self._own_state(), self.rank, self._part())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the state of all ranks, each its own, in a folder that all see: a checkpoint of
        torch.distributed.checkpoint, which `load` reads on any number of ranks. Collective: every
        rank of the job calls it, between two steps.

            handle.save(f"checkpoints/{step}/gradwire")
        """
        dcp.save({KEY: self.checkpoint()}, checkpoint_id=path)

    def load(self, path: str | os.PathLike[str], key: str = KEY) -> None:
        """Load what `save` has saved, or what `checkpoint` gave to `dcp.save`. Collective: every
        rank calls it, between two steps. On as many ranks as saved it each rank reads its own state
        alone, and training resumes bit for bit; otherwise as `load_state_dict` with the states of
        all old ranks.

        Args:
            path: of the checkpoint, in a file system.
            key: under which the state was saved.

        Raises:
            ConfigError: no checkpoint there, a damaged one, no state of a handle in it, one of
                another number of handles side by side (tensor parallelism), or as
                `load_state_dict`; on one rank or more. Nothing is changed then, on any rank.
            TransportError: a rank did not make the call, or has failed.
        """
        of = self.rank, self.world_size, self._part()
        for load in read_states(path, key, *of, self._loading):
            load()

    def _part(self) -> int | None:
        """Which part of the job these ranks are; None: all of it. Others, such as those of another
        column of a mesh (tensor parallelism), have a handle of their own."""
        return self._gather.part()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Of pickle, torch.save and copy: a handle has threads, and hooks on its module."""
        raise ConfigError(
            "a handle is of one module and process group, and cannot be pickled or copied: save "
            "its state_dict(), with torch.distributed.checkpoint its checkpoint(), or attach to "
            "the copied module"
        )

    def _state_bytes(self) -> int:
        """Memory of aggregators' state; they are copied, since a pass may add to them."""
        states = [dict(member.state) for member in self._members.values()]
        return sum(t.numel() * t.element_size() for state in states for t in state.values())


def members_of(
    plan: Plan, seed: int, rank: int, number: int, may_be_unused: bool = False
) -> dict[str, Attached]:
    """A plan's parameters, by name. Each handle of a module has a number, for other steps, and so
    other random numbers."""
    first = number << _STEP_BITS

    def made(p: ParameterPlan) -> Attached:
        keys = rng.parameter_keys(seed, p.name, rank)
        of = p.name, p.shape, p.aggregator, keys, p.rotation, first
        return Attached(*of, may_be_unused=may_be_unused)

    return {p.name: made(p) for p in plan.parameters}
