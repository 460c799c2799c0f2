"""The state that a handle saves and loads: steps, seed, and every parameter's aggregator state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gradwire.aggregators import Attached
from gradwire.integrations.state import merge_states
from gradwire.lang import rng
from gradwire.planner import Plan


class Saved:
    """Base class of handles, for their state.

    Args:
        members: the parameters, by name.
        seed: of random numbers.
        rank, world_size: among the ranks that take part in an average.
    """

    def __init__(
        self,
        members: Mapping[str, Attached],
        seed: int,
        rank: int,
        world_size: int,
    ) -> None:
        self._members = members
        self._seed = seed
        self.rank = rank
        self.world_size = world_size

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """This rank's state. If every rank saves it with the model, resuming is bit-identical.

        It is a snapshot: tensors are copied, so later training does not change it.
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

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Load a result of `state_dict`. Tensors are copied: training does not change `state`.

        Args:
            state: this rank's state; or, after a change of the number of ranks, the list of all
                old ranks' states, whose residuals are distributed over the new ranks. A single
                state from another world size restores the steps and the replicated state, and warns
                that the rest starts from its initial values.

        Raises:
            ConfigError: `state` is not a handle's state, or of another plan; the message names the
                first parameter that differs. Nothing is changed then.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        merged = merge_states(states, self.rank, self.world_size, self.plan)
        for name, member in self._members.items():
            member.step = merged["steps"][name]
            member.keys = rng.parameter_keys(merged["seed"], name, self.rank)
            kept = merged["aggregators"].get(name, {})
            member.keep({key: tensor.clone() for key, tensor in kept.items()})
        self._seed = merged["seed"]

    def _state_bytes(self) -> int:
        """Memory of aggregators' state."""
        return sum(
            t.numel() * t.element_size()
            for member in self._members.values()
            for t in member.state.values()
        )

    def _facts(self) -> dict[str, dict[str, Any]]:
        """Per parameter: codec or aggregator, numel, payload_bytes, ratio."""
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
