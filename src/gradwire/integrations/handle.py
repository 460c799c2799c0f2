"""What a user holds of an attached module: statistics, state, and the way back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Attached
from gradwire.codecs import Identity
from gradwire.collectives import Options
from gradwire.engine import Owner
from gradwire.integrations.buckets import Buckets
from gradwire.integrations.hook import HookState
from gradwire.integrations.state import merge_states
from gradwire.lang import layout, rng
from gradwire.planner import Plan

_STEP_BITS = 32  # of a handle's steps


class Handle:
    """What `attach` returns.

    Attributes:
        plan: how each parameter is synchronised.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        state: HookState,
        parameters: Mapping[str, torch.Tensor],
        plan: Plan,
        owner: Owner,
        seed: int,
        options: Options,
        coalesce_bytes: int,
    ) -> None:
        self.plan = plan
        self._owner = owner
        self._comm = comm = owner.comm
        self._seed = seed
        # No two handles of a module draw the same numbers.
        first = state.attached << _STEP_BITS
        state.attached += 1
        self._members = {
            p.name: Attached(
                p.name, p.aggregator(), rng.parameter_keys(seed, p.name, comm.rank), p.rotation,
                first,
            )
            for p in plan.parameters
        }  # fmt: skip
        by_parameter = {parameters[name]: member for name, member in self._members.items()}
        self._buckets = Buckets(by_parameter, owner, state.group, options, coalesce_bytes)
        self._buckets.backward.watch(model)
        # A module that is let go without `detach` issues nothing more either.
        weakref.finalize(self._buckets, setattr, owner, "closed", True).atexit = False
        self._state: HookState | None = state
        state.reducer = self._buckets

    def stats(self) -> dict[str, Any]:
        """What has been sent so far.

        Returns:
            steps: synchronised backward passes.
            wire_bytes: sent by this rank, headers included; of what goes by torch's all-reduce,
                which does not count, as raw_bytes has it.
            raw_bytes: what an uncompressed all-reduce would have sent: 2 (N-1)/N of the gradients.
            ratio: raw_bytes / wire_bytes (None before anything was sent).
            seconds: from a bucket's readiness to its average, summed over buckets (they overlap).
            kernel_seconds: of these, in kernels, and in checksums of what they wrote. Over NCCL
                nobody on the host knows: `seconds` are those of queueing the work, and this is 0.
            residual_bytes: memory of error feedback.
            shared_bytes: of memory shared with the machine's other ranks now: rings, whatever is
                sent, and what this rank's messages take of its store.
            lent_bytes: of wire_bytes, what ranks of this machine read where it lay (of all handles
                of the process group).
            peak_extra_bytes: most memory held beyond plain DDP's and rings: messages in flight (of
                all handles of the process group), wherever they lie, and residuals.
            parameters: name -> codec (or "dense", or "torch's all-reduce"), numel, payload_bytes
                (of one whole gradient), ratio.
        """
        totals: dict[str, Any] = self._buckets.totals()
        raw = self._buckets.raw_bytes(totals.pop("gradient_bytes"))
        wire = totals["wire_bytes"]
        residual = sum(
            t.numel() * t.element_size()
            for member in self._members.values()
            for t in member.aggregator.state_dict().values()
        )
        parameters = {}
        for p in self.plan.parameters:
            raw_payload = p.numel * p.dtype.itemsize
            codec = p.codec or Identity()
            payload = raw_payload if p.by_torch else layout(codec, p.dtype).nbytes(p.numel)
            parameters[p.name] = {
                "codec": p.how,
                "numel": p.numel,
                "payload_bytes": payload,
                "ratio": raw_payload / payload if payload else None,
            }
        transport = self._comm.opened  # to open it would wait for the others
        return {
            **totals,
            "raw_bytes": round(raw),
            "ratio": raw / wire if wire else None,
            "residual_bytes": residual,
            "shared_bytes": 0 if transport is None else transport.shared_bytes,
            "lent_bytes": 0 if transport is None else transport.lent_bytes,
            "peak_extra_bytes": self._comm.pools.peak_bytes + residual,
            "parameters": parameters,
        }

    def state_dict(self) -> dict[str, Any]:
        """This rank's state: saved on every rank beside the model's, it resumes bit by bit.

        A snapshot: residuals are copied, so later training does not change it.
        """
        return {
            "version": 1,
            "rank": self._comm.rank,
            "world_size": self._comm.world_size,
            "seed": self._seed,
            "parameters": {p.name: p.facts() for p in self.plan.parameters},
            "steps": {name: member.step for name, member in self._members.items()},
            "aggregators": {
                name: {key: kept.clone() for key, kept in state.items()}
                for name, member in self._members.items()
                if (state := member.aggregator.state_dict())
            },
        }

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Restore what `state_dict` gave. It is copied: training does not change `state`.

        Args:
            state: this rank's state; or, after a change of the number of ranks, the list of all
                old ranks' states: their residuals are shared out so that what was not sent still
                will be. One state from another world size restores the steps alone, and warns that
                residuals start at zero.

        Raises:
            ConfigError: no such state, or of another plan: the first parameter that differs is
                named, and how. Nothing is changed then.
        """
        states = [state] if isinstance(state, Mapping) else list(state)
        merged = merge_states(states, self._comm.rank, self._comm.world_size, self.plan)
        for name, member in self._members.items():
            member.step = merged["steps"][name]
            member.keys = rng.parameter_keys(merged["seed"], name, self._comm.rank)
            member.aggregator.load_state_dict(merged["aggregators"].get(name, {}))
        self._seed = merged["seed"]

    def detach(self) -> None:
        """Give the module back to plain averaging; within a backward pass, when that has ended.

        The statistics and state stay readable.
        """
        state, self._state = self._state, None
        if state is not None:
            self._buckets.at_end(partial(self._detach, state))

    def _detach(self, state: HookState) -> None:
        self._buckets.backward.unwatch()
        if state.reducer is self._buckets:
            state.reducer = None
        self._comm.close_owner(self._owner)
