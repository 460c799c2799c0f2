"""The handle of an attached DDP module: statistics, state, update and detach."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Observation
from gradwire.aggregators.registry import Method
from gradwire.collectives import Options, retire
from gradwire.collectives.calling import options_of
from gradwire.controllers import Policy
from gradwire.engine import Owner
from gradwire.errors import ConfigError
from gradwire.integrations.adaptation import Adaptation, refuse_update
from gradwire.integrations.auto import Auto
from gradwire.integrations.automatic import Automatic, refuse_changes, without_plan
from gradwire.integrations.bias import warn_of_bias
from gradwire.integrations.buckets import Buckets
from gradwire.integrations.choices import policy_of
from gradwire.integrations.full_state import StateGather
from gradwire.integrations.hook import HookState
from gradwire.integrations.metrics import EVERY, Metrics
from gradwire.integrations.momentum import MomentumGuard
from gradwire.integrations.oversights import Oversights
from gradwire.integrations.rehearsal import alike, rehearse
from gradwire.integrations.replan import Replan
from gradwire.integrations.saved import Saved, members_of
from gradwire.integrations.summary import expected_all_reduce, summary
from gradwire.integrations.switch import Switch, Update
from gradwire.planner import Plan, Rules, make_plan
from gradwire.planner.rules import check_coalesce_bytes

_STEP_BITS = 32  # bits of a handle's step counter
_SAME: Any = object()


class Handle(Saved):
    """What `attach` returns for a DDP module."""

    def __init__(
        self,
        model: DistributedDataParallel,
        state: HookState,
        named: Sequence[tuple[str, torch.Tensor]],
        plan: Plan,
        owner: Owner,
        seed: int,
    ) -> None:
        comm = owner.comm
        self._owner = owner
        self._named = named
        # Each handle of a module draws different random numbers.
        first = state.attached << _STEP_BITS
        state.attached += 1
        members = members_of(plan, seed, comm.rank, first, model.find_unused_parameters)
        gather = StateGather([model.process_group])
        super().__init__(members, seed, comm.rank, comm.world_size, gather)
        self._comm = comm
        by_name = dict(named)
        by_parameter = {by_name[name]: member for name, member in self._members.items()}
        self._switch = Switch(plan, owner, self._rehearse)
        self._metrics = Metrics(comm.world_size)
        of = owner, self._switch, self._adopt, self._metrics.sampler
        self._buckets = Buckets(by_parameter, *of)
        self._buckets.backward.watch(model)
        # A module that is deleted without `detach` starts no collective any more.
        weakref.finalize(self._buckets, setattr, owner, "closed", True).atexit = False
        self._momentum = MomentumGuard(named)
        self._momentum.watch(plan)
        self._oversights = Oversights(model, named)
        self._state: HookState | None = state
        self.automatic: Automatic | None = None
        state.reducer = self._buckets

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        return self._switch.plan

    def update(
        self,
        codec: Method = _SAME,
        *,
        include: Sequence[str] = _SAME,
        exclude: Sequence[str] = _SAME,
        codecs: Mapping[str, Method] = _SAME,
        error_feedback: bool = _SAME,
        algorithm: str | None = None,
        options: Options | None = None,
        coalesce_bytes: int | None = None,
        **codec_options: object,
    ) -> Update:
        """Change arguments of `attach` during training; omitted arguments stay as they are.

        Call it on every rank with the same arguments; ranks may call it at different steps. The new
        plan is prepared in the background, and all ranks adopt it at the same pass, one or two
        passes after the last rank has prepared it. Residuals are kept; a residual that the new plan
        does not have is added to the next gradient.

            handle.update(bits=3)
            handle.update("topk", density=0.01)
            handle.update(codecs={"0.weight": "topk:density=0.05"})
            handle.update(algorithm="ring")

        Args:
            codec: the new default codec; options that are not given have their defaults. Without
                it, `codec_options` change the present default codec.
            codecs: these precede the present ones; a known pattern gets the new codec.
            include, exclude, error_feedback, algorithm, options, coalesce_bytes: as in `attach`.

        Returns:
            The update: its `wait()` returns when this rank has prepared it; see also `in_force`.

        Raises:
            ConfigError: as `attach`; or the handle was detached, its module is gone, or its process
                group was destroyed. If ranks differ, the module's next forward raises it, once,
                on every rank, and the present plan stays in force.
        """
        if self._state is None:
            raise ConfigError("update: this handle was detached: attach again")
        if self._state.model_is_gone:
            raise ConfigError("update: the module of this handle is gone: attach to the new one")
        self._switch.check()
        refuse_changes(self.automatic)
        refuse_update(self.adaptation)
        rules = {
            "codec": codec, "include": include, "exclude": exclude, "codecs": codecs,
            "error_feedback": error_feedback,
        }  # fmt: skip
        given = {name: value for name, value in rules.items() if value is not _SAME}
        if coalesce_bytes is not None:
            check_coalesce_bytes(coalesce_bytes)
        _options(options, algorithm, self.plan.options)  # raises here, not in the background

        def changed(before: Plan) -> Plan:
            before = replace(
                before,
                options=_options(options, algorithm, before.options),
                coalesce_bytes=before.coalesce_bytes if coalesce_bytes is None else coalesce_bytes,
                version=before.version + 1,
            )
            return self._remade(before, before.rules.changed(codec_options, **given))

        return self._switch.ask(changed)

    def _remade(self, plan: Plan, rules: Rules) -> Plan:
        """The plan with other rules."""
        of = self._comm.world_size, plan.options, plan.coalesce_bytes, plan.version
        made = make_plan(self._named, rules, *of)
        warn_of_bias(made, self.world_size)  # a warning may be an error: then nothing changes
        return made

    def adapt(self, policy: Policy, replan: Replan) -> None:
        """Let a policy choose methods from now on; called by `attach`, on all ranks.

        Raises:
            ConfigError: there is no choice around the plan's methods.
        """
        of = self._owner, self._switch, self._remade, self._adopt
        auto = self.automatic
        in_order: dict[str, Any] = {}
        if auto is not None:
            in_order = {"serial": auto.serial, "name": f"policy {auto.passes}"}
        adaptation = Adaptation(policy, replan, *of, buckets=self._names, **in_order)
        if self.world_size > 1:  # a single rank sends nothing
            self.adaptation = self._buckets.adaptation = adaptation

    def _names(self) -> list[list[str]]:
        """Of the parameters of each bucket, in the order of sending."""
        return [[member.name for member in content.members] for content in self._buckets.known]

    def automate(self, auto: Auto) -> None:
        """Let measurements choose the plan from now on; called by `attach`, on all ranks."""
        named = [(p.name, p.shape) for p in self.plan.parameters]

        def start() -> None:
            if auto.policy is not None:
                with suppress(ConfigError):  # there is no choice around bf16
                    self.adapt(policy_of(auto.policy), auto.replan)

        def stop() -> None:
            if self.adaptation is not None:
                self.adaptation.close()
            self.adaptation = self._buckets.adaptation = None

        def backward() -> float:
            return float(self._buckets.totals()["backward_seconds"])

        of = self._owner, self._switch, named, self._remade, backward, start, stop
        self.automatic = self._buckets.automatic = Automatic(auto, *of)

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        """Call `observer` with every parameter's gradient, contribution and average, as soon as the
        average is known. It is called on gradwire's own threads, and costs a copy of each gradient.

        Returns:
            A function that removes the observer.
        """
        self._buckets.observers.append(observer)
        return partial(self._buckets.observers.remove, observer)

    def _rehearse(self, plan: Plan) -> Sequence[Any]:
        name = f"{self._owner.key}/plan {plan.version}"
        contents = alike(self._owner, name, lambda: self._buckets.known)
        return rehearse(self._owner, plan, contents, self._members)

    def _adopt(self) -> None:
        """Adopt a new plan, as a pass begins."""
        for planned in self.plan.parameters:
            self._members[planned.name].adopt(planned.aggregator)
        self._momentum.watch(self.plan)
        retire(self._owner)

    def stats(self) -> dict[str, Any]:
        """Totals since `attach`.

        Returns:
            steps: synchronised backward passes.
            calls: collectives that averaged gradients: one for each round of each scope, a scope
                being the buckets that travel together; more where a round has several ways.
            wire_bytes: sent by this rank, headers included.
            raw_bytes: what an uncompressed all-reduce would have sent: 2 (N-1)/N of the gradients.
            ratio: raw_bytes / wire_bytes (None before anything was sent).
            seconds: from a bucket's readiness to its average, summed over buckets (they overlap).
            exposed_seconds: what communication added to backward: from where the module's backward
                has computed its last gradient, and all buckets have been handed over, until the
                last average is there, summed over passes. It is measured in the thread that waits,
                by a callback of autograd's that runs before DDP looks at its futures; DDP's own
                wait behind it finds them done. It includes waiting for ranks that come later, and,
                in the first passes, for kernels to be compiled. Time in DDP's hook itself counts as
                computing. Over NCCL the host does not wait, and this tells about nothing.
            backward_seconds: from the first bucket's readiness to where backward has computed its
                last gradient, summed over passes: what may hide communication.
            kernel_seconds: of `seconds`, in kernels, and in checksums of what they wrote. Over NCCL
                nobody on the host knows: `seconds` are those of queueing the work, and this is 0.
            kernel_calls: of kernels by this rank: on target c one for each task of a bucket (an
                encode, merge or decode), whatever its codecs; on others one for each codec in it.
            residual_bytes: memory of aggregators' state, mainly residuals.
            shared_bytes: memory shared with other ranks of this node at present: rings, which have
                a fixed size, and this rank's messages in its store.
            lent_bytes: the part of wire_bytes that ranks of this node read in place (of all
                handles of the process group).
            peak_extra_bytes: peak memory beyond plain DDP's and the rings: messages in flight (of
                all handles of the process group) and residuals.
            parameters: name -> codec or aggregator (or "dense"), numel, payload_bytes (of one
                gradient, at most), ratio: of the plan in force.
            plan: its version.
        """
        totals: dict[str, Any] = self._buckets.totals()
        raw = self._buckets.raw_bytes(totals.pop("gradient_bytes"))
        wire = totals["wire_bytes"]
        residual = self._state_bytes()
        transport = self._comm.opened  # not `transport`, which would wait for other ranks
        return {
            **totals,
            "raw_bytes": round(raw),
            "ratio": raw / wire if wire else None,
            "residual_bytes": residual,
            "shared_bytes": 0 if transport is None else transport.shared_bytes,
            "lent_bytes": 0 if transport is None else transport.lent_bytes,
            "peak_extra_bytes": self._comm.pools.peak_bytes + residual,
            "parameters": self._facts(),
            "plan": self.plan.version,
        }

    def metrics(self, layers: bool = False, every: int = EVERY) -> dict[str, float]:
        """Scalars for a logger:

            writer.add_scalars("gradwire", handle.metrics(), step)

        Of this rank; over the passes since the previous call:

        - ratio: bytes of an uncompressed all-reduce / bytes sent.
        - bits_per_value: a gradient's bits per value / ratio, headers included.
        - exposed_seconds: what communication added to a backward, on average; see `stats`.

        Of the last sampled pass, in which this rank fed p into the average, its gradient plus its
        residual, and sent s of it; sums are over all parameters but uncompressed ones:

        - nmse: sum of |p - s|^2 / sum of |p|^2: of this rank's own contribution. Errors of ranks
          partly cancel in the average, which no rank knows exactly. With error feedback p - s is
          the residual: what later steps still send. On a rank that sums and encodes others' values,
          it includes the error of that sum. Without error feedback s is what the codec makes of p,
          drawn anew.
        - compression_gain: sum of |s|^2 / sum of |p|^2 (ARTOPK 3-E).
        - residual_norm: sqrt of the sum of |residual|^2; in units of the scaled loss under
          GradScaler.
        - sampled_step: which pass it was, counted from 1 as in `stats`.

        And what aggregators tell, such as the share of saturated values: the newest, as the mean
        over parameters weighted by their numbers of values.

        A value that is not known yet has no key; a single rank sends nothing and has no sample.
        Nothing is sampled before the first call. A sampled pass copies its gradients and reads them
        several times; nothing in training changes.

        Args:
            layers: in addition, the same for each parameter, under "NAME/KEY"; there bits_per_value
                is that of the payload in the plan in force, at most.
            every: sample one pass in so many.

        Raises:
            ConfigError: `every` is not a number of passes.
        """
        totals = self._buckets.totals()
        totals["raw_bytes"] = self._buckets.raw_bytes(totals["gradient_bytes"])
        return self._metrics.read(totals, self._plan_now(), self._members, layers, every)

    def summary(self) -> str:
        plan = self._plan_now()
        comms, expected = [self._comm], expected_all_reduce(plan, self._comm)
        of = plan, self.rank, comms, expected, self.stats(), self.world_size
        return summary("a DDP module" + (" (detached)" if self._state is None else ""), *of)

    summary.__doc__ = Saved.summary.__doc__

    def _loadable(self, states: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        return states if self.automatic is None else without_plan(states, self.plan)

    def detach(self) -> None:
        """Return the module to plain averaging; during a backward pass, at its end.

        Statistics and state stay readable.
        """
        state, self._state = self._state, None
        if self.automatic is not None:
            self.automatic.close()
        if self.adaptation is not None:
            self.adaptation.close()
        if state is not None:
            self._buckets.at_end(partial(self._detach, state))

    def _detach(self, state: HookState) -> None:
        self._buckets.backward.unwatch()
        self._momentum.unwatch()
        self._oversights.unwatch()
        if state.reducer is self._buckets:
            state.reducer = None
        self._comm.close_owner(self._owner)


def _options(options: Options | None, algorithm: str | None, before: Options) -> Options:
    """The options after an update; a new algorithm drops options of the previous one."""
    if options is None and algorithm is not None and algorithm != before.algorithm:
        return before.through(algorithm)
    return options_of(options or before, algorithm)
