"""The state that a handle saves and loads: steps, seed, and every parameter's aggregator state."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from gradwire.aggregators import Attached
from gradwire.decide.auto import Automatic
from gradwire.decide.policy import Adaptation
from gradwire.errors import ConfigError
from gradwire.integrations.checkpoint import OfOneRank, check_caller, read_states, to_keys
from gradwire.integrations.full_state import StateGather, full, states_of
from gradwire.integrations.metrics import times_less
from gradwire.integrations.residual_layout import UNSHARDED, ResidualLayout
from gradwire.integrations.state import merge_states, of_job
from gradwire.lang import rng
from gradwire.planner import ParameterPlan, Plan

_STEP_BITS = 32  # bits of a handle's step counter


class Saved:
    """Base class of handles, for their state.

    Args:
        members: the parameters, by name.
        seed: of random numbers.
        rank, world_size: among the ranks that take part in an average.
        gather: gathers the states of all these ranks.
        layout: how the module is sharded.
    """

    def __init__(
        self,
        members: Mapping[str, Attached],
        seed: int,
        rank: int,
        world_size: int,
        gather: StateGather,
        layout: ResidualLayout = UNSHARDED,
    ) -> None:
        self._members = members
        self._seed = seed
        self.rank = rank
        self.world_size = world_size
        self._gather = gather
        self._layout = layout

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        raise NotImplementedError

    @property
    def adaptation(self) -> Adaptation | None:
        """Of a policy; None: there is none at work."""
        raise NotImplementedError

    @property
    def automatic(self) -> Automatic | None:
        """What chooses the plan with "auto", which no state has; None: the caller did."""
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
        return {
            "version": 1,
            "plan": self.plan.version,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self._seed,
            "parameters": {p.name: p.facts() for p in self.plan.parameters},
            "steps": {name: member.step for name, member in self._members.items()},
            "aggregators": {
                name: {
                    key: self._layout.saved(member, key, kept) for key, kept in member.state.items()
                }
                for name, member in self._members.items()
                if member.state
            },
            **self._layout.facts(),
            **({} if self.adaptation is None else {"policy": self.adaptation.state()}),
        }

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
        states, any_plan = states_of(state), self.automatic is not None
        of_policy = None
        if self.adaptation is not None and not any_plan:
            of_policy = self.adaptation.loading(of_job(states).get("policy"))
        plan, load_policy = of_policy or (self.plan, None)
        of = self.rank, self.world_size, plan, self._layout, any_plan
        merged = merge_states(states, *of)
        load_others = self._loading(states, merged)
        # All is checked: nothing is changed above, and nothing is refused below.
        if load_policy is not None:
            load_policy()
        for name, member in self._members.items():
            member.step = merged["steps"][name]
            member.keys = rng.parameter_keys(merged["seed"], name, self.rank)
            kept = merged["aggregators"].get(name, {})
            member.keep({key: self._layout.loaded(member, key, t) for key, t in kept.items()})
        self._seed = merged["seed"]
        load_others()

    def _loading(
        self, states: Sequence[Mapping[str, Any]], merged: dict[str, Any]
    ) -> Callable[[], None]:
        """Check what states have that is not of the parameters or of a policy; what it returns
        loads it. Takes out of `merged`, from which this rank starts, what it has no use for."""
        raise NotImplementedError

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """This rank's state for torch.distributed.checkpoint: tensors, under keys of this rank.

            state = {"model": weights, "optimizer": moments, "gradwire": handle.checkpoint()}
            dcp.save(state, checkpoint_id=path)  # on every rank

        `load_checkpoint` reads them, on any number of ranks. Tensors are copies.
        """
        return to_keys(self._own_state(), self.rank, self.part())

    def load_checkpoint(self, path: str | os.PathLike[str], key: str = "gradwire") -> None:
        """Load what `checkpoint` gave to `dcp.save`. Collective: every rank calls it, between two
        steps. On as many ranks as saved it each rank reads its own state alone, and training
        resumes bit for bit; otherwise as `load_state_dict` with the states of all old ranks.

        Args:
            path: of the checkpoint, in a file system.
            key: under which the state was saved.

        Raises:
            ConfigError: no checkpoint there, a damaged one, no state of a handle in it, one of
                another number of handles side by side (tensor parallelism), or as
                `load_state_dict`.
        """
        self.load_state_dict(read_states(path, key, self.rank, self.world_size, self.part()))

    def part(self) -> int | None:
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

    def summary(self) -> str:
        """What is attached, as text: the codec of each group of parameters with its bits per value,
        the bytes that a step is expected to send from this rank, algorithm, transport, memory of
        residuals, the newest decisions (see `history`), and updates that are not in force yet.
        `print(handle)` prints it; `repr` is its first line.

        It can be called at any time, on one rank alone: it sends nothing and waits for no rank.
        Bytes are those of all gradients in one collective, headers included; more buckets have more
        headers. What the first step decides is named as not known before it.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return self.summary()

    def _state_bytes(self) -> int:
        """Memory of aggregators' state; they are copied, since a pass may add to them."""
        states = [dict(member.state) for member in self._members.values()]
        return sum(t.numel() * t.element_size() for state in states for t in state.values())

    def _plan_now(self) -> Plan:
        """The plan in force, as the next step runs it."""
        return self.plan.at({name: member.step for name, member in self._members.items()})

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Per parameter: codec or aggregator, numel, payload_bytes, ratio."""
        parameters = {}
        for p in self._plan_now().parameters:
            raw_payload = p.numel * p.dtype.itemsize
            payload = p.aggregator.payload_bytes(p.shape, p.dtype)
            parameters[p.name] = {
                "codec": p.how,
                "numel": p.numel,
                "payload_bytes": payload,
                "ratio": times_less(raw_payload, payload),
            }
        return parameters


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
