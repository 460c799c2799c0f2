"""The handle of FSDP2 modules: gradients are reduce-scattered through a codec per parameter.

Their collectives run in integrations/reduced.py; those of weights, where `attach` was given
`weights`, in integrations/gathered.py.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gradwire.aggregators.registry import Method
from gradwire.collectives import (
    Collective,
    retire,
)  # fmt: skip
from gradwire.controllers import Policy
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.integrations.adaptation import Adaptation, refuse_update
from gradwire.integrations.bias import warn_of_bias
from gradwire.integrations.fsdp import process_groups
from gradwire.integrations.full_state import StateGather, states_of
from gradwire.integrations.gathered import NO_STATS, GatheredWeights
from gradwire.integrations.learning import SMALLEST, learned, wanted
from gradwire.integrations.metrics import EVERY, Metrics
from gradwire.integrations.reduced import ReducedGradients
from gradwire.integrations.references import Sharding
from gradwire.integrations.replan import Replan
from gradwire.integrations.residual_layout import ResidualLayout
from gradwire.integrations.saved import Saved, members_of
from gradwire.integrations.sharded_plan import Trained, make_sharded_plan
from gradwire.integrations.summary import Expected, expected_scatter, summary
from gradwire.integrations.switch import Switch, Update
from gradwire.planner import Levels, Plan, Rules, WeightRules
from gradwire.planner.weights import Weights, in_blocks

_SAME: Any = object()
_ADVICE = (
    "all ranks must make the same calls in the same order; where they use different parameters, "
    "call set_reduce_scatter_unused_params(True) of the root module"
)


class Sharded(Saved):
    """What `attach` returns for an FSDP2 module."""

    def __init__(
        self, model: torch.nn.Module, trained: Trained, plan: Plan, seed: int, first: int
    ) -> None:
        self.groups = groups = trained.groups
        self._of = model, trained, plan.parameters[0].name
        members = members_of(plan, seed, groups.rank, first)
        gather = StateGather(process_groups(trained.records[0]).all)
        layout = ResidualLayout(groups.shards, trained.dims())
        super().__init__(members, seed, groups.rank, groups.size, gather, layout)
        self._named, self._shards = trained.named, trained.shards()
        self._parameters = {name: p for p, name in trained.names.items()}
        self._install(plan)

    def _install(self, plan: Plan) -> None:
        """Replace FSDP2's collectives, with owners of their own; on all ranks together."""
        (model, trained, first), groups = self._of, self.groups
        what = f"the sharded module of {first}"
        owners = [communicator(group).owner(what, advice=_ADVICE) for group in groups.all]
        self._metrics = Metrics(groups.size)
        self._switch = Switch(plan, owners[0], self._rehearse)
        of = owners, self._switch, self._adopt, self._metrics.sampler
        self._gradients = ReducedGradients(model, trained, self._members, *of)
        self.weights: GatheredWeights | None = None
        if plan.weights is not None and groups.shards > 1:
            shapes = {name: tuple(p.shape) for name, p in trained.named}
            of_shard = groups.shard, groups.shards, groups.rank, groups.size
            sharding = Sharding(shapes, self._layout.dims, *of_shard)
            self.weights = GatheredWeights(what, trained, self._members, plan, self._seed, sharding)
            self._gradients.weights = self.weights

    # ---- plans

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
        weights: Weights = _SAME,
        **codec_options: object,
    ) -> Update:
        """Change arguments of `attach` during training, as `Handle.update`. New codecs of weights
        are in force from the forward on that follows the switch; what is kept of gathered weights
        stays as `attach` was told.

        Raises:
            ConfigError: as `Handle.update`; the module has replicas (HSDP); or `weights` is given
                where `attach` had none.
        """
        if self.groups.replicas is not None:
            raise ConfigError(
                "update: the plan of a module with replicas (HSDP) cannot change: detach and "
                "attach again"
            )
        if not self._gradients.installed:
            raise ConfigError("update: this handle was detached: attach again")
        self._switch.check()
        refuse_update(self.adaptation)
        codec = in_blocks(codec, codec_options)
        if isinstance(codecs, Mapping):
            codecs = {pattern: in_blocks(method) for pattern, method in codecs.items()}
        rules = {
            "codec": codec, "include": include, "exclude": exclude, "codecs": codecs,
            "error_feedback": error_feedback,
        }  # fmt: skip
        given = {name: value for name, value in rules.items() if value is not _SAME}
        if weights is not _SAME and self.plan.weights is None:
            raise ConfigError(
                "update: attach was given no weights, so FSDP2 gathers them: detach and attach "
                "again, with weights"
            )

        def changed(before: Plan) -> Plan:
            gathered = before.weights
            if gathered is not None and weights is not _SAME:
                gathered = WeightRules.of(weights, gathered.keep)
            before = replace(before, weights=gathered, version=before.version + 1)
            return self._remade(before, before.rules.changed(codec_options, **given))

        return self._switch.ask(changed)

    def _remade(self, plan: Plan, rules: Rules) -> Plan:
        """The plan with other rules."""
        of = self.world_size, plan.version, plan.weights, plan.options
        made = replace(make_sharded_plan(self._named, rules, *of), levels=plan.levels)
        warn_of_bias(made, self.world_size)  # a warning may be an error: then nothing changes
        return made

    def adapt(self, policy: Policy, replan: Replan) -> None:
        """Let a policy choose methods of gradients, and codecs of weights, from now on; called by
        `attach`, on all ranks.

        Raises:
            ConfigError: there is no choice around the plan's methods.
        """

        def shard(name: str) -> torch.Tensor:
            parameter = self._parameters[name].sharded_param
            local: torch.Tensor = getattr(parameter, "_local_tensor", parameter).detach()
            return local

        self._adaptive = policy, replan
        of = self._gradients.owner, self._switch, self._remade, self._adopt
        adaptation = Adaptation(policy, replan, *of, shards=shard)
        if self.world_size > 1:  # a single rank sends nothing
            self.adaptation = self._gradients.adaptation = adaptation

    def _rehearse(self, plan: Plan) -> list[Collective]:
        """Prepare the collectives of `plan`."""
        if self.weights is not None:
            self.weights.rehearse(plan)
        return self._gradients.rehearse(plan)

    def _adopt(self) -> None:
        """Run as the plan in force says: gradients at once, weights from the next forward on."""
        plan = self._switch.plan
        for planned in plan.parameters:
            self._members[planned.name].adopt(plan.levels.aggregator(planned))
        for owner in self._gradients.owners:
            retire(owner)
        if self.weights is not None:
            self.weights.adopt(plan)

    # ---- learned levels

    def learn_levels(self, smallest: int = SMALLEST, steps: int = 2000) -> int:
        """Fit the levels of "learnedlevels" codecs, of weights and gradients, to what they send now
        (THESIS 5.6.2, Alg. 5.1). Collective: every rank calls it between `optimizer.step()` and
        `zero_grad()`, after warm-up and a few times later, since the best levels change slowly.

            if step in (400, 1900, 3800):
                handle.learn_levels()

        Each rank learns for some of the parameters, about half a second for each. The levels are
        equal on all ranks, in force when it returns, kept by `update` as long as bits and rounding
        stay, and saved in the state.

        Args:
            smallest: values of a parameter that is worth it.
            steps: of gradient descent.

        Returns:
            How many codecs have learned.

        Raises:
            ConfigError: no codec is a "learnedlevels" that was given no levels, for a parameter of
                this size; there are no gradients; or the handle was detached.
        """
        if self.groups.scatter is None or not self._gradients.installed:
            raise ConfigError(
                "learn_levels: this handle does not scatter the module's gradients (any more): "
                "attach to the module itself"
            )
        targets = list(wanted(self.plan, self._parameters, self.groups.shards, smallest))
        if not targets:
            raise ConfigError(
                f"learn_levels: no parameter of {smallest} values or more is sent through "
                '"learnedlevels": attach with "learnedlevels:rounding=stochastic" for gradients or '
                'weights="learnedlevels", or give a lower `smallest`'
            )
        found = learned(targets, self._parameters, self.groups, self._gradients.summed, steps)
        self._use(found)
        return len(found.gradients) + len(found.weights)

    def _use(self, new: Levels) -> None:
        """Put levels in force, between two passes on all ranks."""
        self._switch.change(lambda plan: replace(plan, levels=plan.levels.changed(new)))
        self._adopt()

    # ---- statistics, state, detach

    def stats(self) -> dict[str, Any]:
        """Totals since `attach`.

        Returns:
            steps: backward passes that reduced gradients.
            calls: reduce-scatters, all-reduces between replicas, and exchanges of plan versions
                with ranks that scatter nothing.
            wire_bytes: sent by this rank, headers included.
            raw_bytes: what they would have sent uncompressed: (N-1)/N of the gradients, and
                2 (N-1)/N of their shards between N replicas.
            ratio: raw_bytes / wire_bytes (None before anything was sent).
            seconds: from the start of each to its result.
            exposed_seconds: what communication added to backward: FSDP2 waits for each of these
                where it calls it, so all of the time from call to result, waits for ranks that come
                later and for kernels to be compiled included. Over NCCL the host does not wait, and
                this is the time of queueing the work.
            weights_calls, weights_wire_bytes, weights_raw_bytes: of gathers of weights through
                gradwire, which none of the above counts: their number, what this rank sent, and
                what sending its shards uncompressed to N - 1 ranks would send. Gathers that are
                left to torch are not counted. With keep="reference", gathers that sent nothing are
                not, and exchanges of whether weights have changed are.
            weights_kept_bytes: memory of what is kept of gathered weights.
            kernel_seconds, kernel_calls: as of `Handle.stats`.
            residual_bytes: memory of residuals: with error feedback 4 bytes for every value of
                every compressed parameter, whole, on each rank.
            parameters: name -> codec (or "dense"), numel, payload_bytes, ratio.
            plan: its version.
        """
        totals = self._gradients.totals()
        wire = totals["wire_bytes"]
        return {
            **totals,
            "ratio": totals["raw_bytes"] / wire if wire else None,
            "residual_bytes": self._state_bytes(),
            **(NO_STATS if self.weights is None else self.weights.stats()),
            "parameters": self._facts(),
            "plan": self.plan.version,
        }

    def metrics(self, layers: bool = False, every: int = EVERY) -> dict[str, float]:
        """Scalars for a logger; see `Handle.metrics`. Uncompressed bytes are those of `stats`. A
        sample is of reduce-scatters, in which the own shard is exact, and is there as the next pass
        begins.

        Raises:
            ConfigError: `every` is not a number of passes.
        """
        totals = self._gradients.totals()
        return self._metrics.read(totals, self.plan, self._members, layers, every)

    def summary(self) -> str:
        planned = {p.name: p for p in self.plan.parameters}
        scatter = None if self.groups.scatter is None else self._gradients.owner.comm
        between = None if self.groups.replicas is None else self._gradients.replicas.comm
        expected = Expected(0, 0)
        for group in self._shards:
            pieces = [(planned[name], lengths, dtype) for name, lengths, dtype in group]
            of_group = pieces, scatter, between, self.groups.shard
            expected += expected_scatter(*of_group, self.plan.options)
        comms = [owner.comm for owner in self._gradients.owners]
        of = self.plan, self.rank, comms, expected, self.stats(), self.world_size
        return summary(
            "an FSDP2 module" + ("" if self._gradients.installed else " (detached)"), *of
        )

    summary.__doc__ = Saved.summary.__doc__

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """As `Handle.load_state_dict`. With FSDP2 a rank's own shard is sent exactly: what a
        residual holds of it, from another number of ranks, another sharding or DDP, is added to
        the next gradient.

        Raises:
            ConfigError: as there.
        """
        states = states_of(state)
        references = None if self.weights is None else self.weights.references(states)
        levels = Levels.of(states[0].get("levels"))
        super().load_state_dict(state)
        self._switch.change(lambda plan: replace(plan, levels=levels))
        self._adopt()
        if self.groups.size == 1 and any(member.state for member in self._members.values()):
            warnings.warn(
                "load_state_dict: a single rank reduces nothing under FSDP2, so the residuals of "
                "this state are dropped",
                stacklevel=2,
            )
            for member in self._members.values():
                member.keep({})
        if self.weights is not None and references is not None:
            self.weights.load(references, states[0].get("counted") is True)

    def _own_state(self) -> dict[str, Any]:
        state = super()._own_state()
        if self.plan.levels != Levels():
            state["levels"] = self.plan.levels.state()
        if self.weights is not None and self.weights.versions.steps:
            state["counted"] = True  # versions of weights, by the steps of an optimizer
        kept = None if self.weights is None else self.weights.state()
        return state if kept is None else {**state, "weights": kept}

    def recover(self) -> None:
        """Go on after an exception in a backward, once every rank has caught it or the error that
        it caused there, and FSDP2 itself has recovered. Collective: every rank calls it.

            except Exception:
                model.reset_iter_state()  # FSDP2's, of the root module
                handle.recover()
                continue

        Residuals and the plan in force are kept, an update that was not in force is dropped, and
        statistics begin anew. What the broken pass had sent is in residuals, or lost.

        Raises:
            ConfigError: the handle was detached.
            TransportError: the group itself is broken, or a rank did not make the call.
        """
        if not self._gradients.installed:
            raise ConfigError("recover: this handle was detached: attach again")
        step = max(member.step for member in self._members.values())
        for owner in self._gradients.owners:
            owner.comm.check()
            if owner.comm.member is not None:
                told = owner.comm.member.exchange(f"{owner.key}/recovery", str(step).encode())
                step = max(map(int, told.result()))
        for member in self._members.values():
            member.step = step  # equal on all ranks, and random numbers that were not drawn yet
        adapts = self.adaptation is not None
        self.detach()
        self.adaptation = None
        self._install(self.plan)
        if adapts:
            self.adapt(*self._adaptive)

    def detach(self) -> None:
        """Restore FSDP2's own collectives; call it between two steps. Statistics and state stay
        readable."""
        if self.adaptation is not None:
            self.adaptation.close()
        if self.weights is not None:
            self.weights.remove()
        self._gradients.remove()
        for owner in self._gradients.all_owners():
            owner.comm.close_owner(owner)
