"""What a handle saves and loads: steps, seed, and the state of every parameter's aggregator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.aggregators import Attached
from gradwire.integrations.full_state import StateGather, full, states_of
from gradwire.integrations.state import merge_states
from gradwire.lang import rng
from gradwire.planner import Plan


class Saved:
    """The state of a handle: a base of what `attach` returns.

    Args:
        members: of the parameters, by name.
        seed: of random numbers.
        rank, world_size: of those that have a part in an average.
        gather: brings their states together.
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

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: steps, seed and residuals. It is a snapshot, which later training does
        not change.

        Saved on every rank in a file of its own, it resumes bit by bit. In one file that rank 0
        saves, the other ranks' residuals would be lost: `full_state_dict` is for that.
        """
        return {
            "version": 1,
            "plan": self.plan.version,
            "rank": self.rank,
            "world_size": self.world_size,
            "seed": self._seed,
            "parameters": {p.name: p.facts() for p in self.plan.parameters},
            "steps": {name: member.step for name, member in self._members.items()},
            "aggregators": {
                name: {key: kept.clone() for key, kept in member.state.items()}
                for name, member in self._members.items()
                if member.state
            },
        }

    def full_state_dict(self, rank0_only: bool = False) -> dict[str, Any]:
        """The state of all ranks, on the CPU, for one checkpoint. Collective: every rank of the
        module's process group calls it, between two steps.

            state = {"model": ddp.module.state_dict(), "gradwire": handle.full_state_dict(True)}
            if rank == 0:
                torch.save(state, path)

        Args:
            rank0_only: rank 0 alone gets it, and the others an empty dict, as with torch's
                FullStateDictConfig(rank0_only=True). Whoever gets it needs memory for all ranks'
                residuals: 4 bytes for each compressed value and rank.

        Returns:
            world_size, and in `ranks` every rank's `state_dict`: dicts, lists, numbers, strings and
            tensors, which torch.load(weights_only=True) reads.

        Raises:
            ConfigError: the process group was destroyed.
        """
        return full(self._gather(self.state_dict(), rank0_only))

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore what `full_state_dict` or `state_dict` gave, on every rank. It is copied:
        training does not change `state`, which may be on another device.

        At the number of ranks that saved it, each rank takes what was its own, and training goes on
        bit by bit. At another number, of M ranks that saved and N that load:

        - residuals: with e_i what rank i had not sent, new rank r takes N / M times the sum of e_i
          over i = r, r + N, r + 2 N, ... below M. So the sum of all residuals over N is what it was
          over M: a step's average, which divides by the number of ranks, owes as much as before. A
          rank that gets none starts at zero; one rank alone, which has no error feedback, adds what
          is owed to its next gradient.
        - what is alike on all ranks (PowerSGD's factor, steps, the seed) is taken as it is, and
          sharded state is put together and cut anew.

        Args:
            state: of `full_state_dict`; or this rank's `state_dict`; or a list of all old ranks'.
                One rank's state at another number of ranks restores steps and what is alike on all
                ranks, and warns that residuals start at zero.

        Raises:
            ConfigError: no such state, or of another plan: the first parameter that differs is
                named, and how. Nothing is changed then.
        """
        merged = merge_states(states_of(state), self.rank, self.world_size, self.plan)
        for name, member in self._members.items():
            member.step = merged["steps"][name]
            member.keys = rng.parameter_keys(merged["seed"], name, self.rank)
            kept = merged["aggregators"].get(name, {})
            member.keep({key: tensor.clone() for key, tensor in kept.items()})
        self._seed = merged["seed"]

    def summary(self) -> str:
        """What is attached, as text: the codec of each group of parameters with its bits per value,
        the bytes that a step is expected to send from this rank, algorithm, transport, and memory
        of residuals. `print(handle)` prints it.

        It can be called at any time, on one rank alone: it sends nothing and waits for no rank.
        Bytes are those of all gradients in one collective, headers included; more buckets have more
        headers. What the first step decides is named as not known before it.
        """
        raise NotImplementedError

    def __str__(self) -> str:
        return self.summary()

    def _state_bytes(self) -> int:
        """Memory of aggregators' state."""
        return sum(
            t.numel() * t.element_size()
            for member in self._members.values()
            for t in member.state.values()
        )

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Of each parameter: codec or aggregator, numel, payload_bytes, ratio."""
        parameters = {}
        for p in self.plan.parameters:
            raw_payload = p.numel * p.dtype.itemsize
            payload = p.aggregator.payload_bytes(p.shape, p.dtype)
            parameters[p.name] = {
                "codec": p.how,
                "numel": p.numel,
                "payload_bytes": payload,
                "ratio": raw_payload / payload if payload else None,
            }
        return parameters


def members_of(plan: Plan, seed: int, rank: int, first: int) -> dict[str, Attached]:
    """A plan's parameters, by name; their steps count from `first`."""
    return {
        p.name: Attached(
            p.name, p.shape, p.aggregator, rng.parameter_keys(seed, p.name, rank), p.rotation, first
        )
        for p in plan.parameters
    }
