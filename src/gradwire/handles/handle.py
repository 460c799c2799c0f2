"""The handle of an attached module: update, statistics, state and detach."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gradwire.aggregators import Observation
from gradwire.aggregators.registry import OPTIONS, Method
from gradwire.collectives import Options
from gradwire.collectives.calling import options_of
from gradwire.engine import ranks_of
from gradwire.errors import ConfigError, check_keywords
from gradwire.handles.arguments import check_renamed
from gradwire.handles.metrics import EVERY, times_less
from gradwire.handles.reductions import Reductions
from gradwire.handles.sections import (
    aggregators_section,
    policy_section,
    sharding_section,
    steps_section,
)
from gradwire.handles.summary import headline, summary
from gradwire.handles.switch import Update
from gradwire.planner import Plan
from gradwire.planner.files import PlanFile
from gradwire.planner.weights import Weights
from gradwire.state.formats import StateGather
from gradwire.state.state import Saved, StateSection

SMALLEST = 100_000  # values of a parameter; learning does not pay below (THESIS 5.6.2)


class _Unchanged:
    """An argument of `update` that is left out; its text is the default that help() shows."""

    def __repr__(self) -> str:
        return "unchanged"


_SAME: Any = _Unchanged()
# What handles had -> what to write.
RENAMED = {
    "load_checkpoint": "handle.load(path)",
    "summary": "str(handle)",
    "adaptation": "handle.history()",
    "automatic": "handle.history()",
    "attached": '"(detached)" not in repr(handle)',
}

_TOLD = 3  # of the newest decisions in a summary
# Arguments of `attach` alone.
_FIXED = {"plan", "policy", "seed", "keep", "replan", "auto", "optimizer", "cross_barrier"}


class Handle(Saved):
    """What `attach` returns."""

    __signature__ = inspect.Signature()  # nobody else makes one

    def __init__(
        self,
        reductions: Reductions,
        seed: int,
        rank: int,
        gather: StateGather,
        install: Callable[[Plan], Reductions] | None = None,
    ) -> None:
        super().__init__(reductions.members, seed, rank, reductions.ranks, gather)
        self._reductions = reductions
        self._pinned: PlanFile | None = None  # the file that `attach` was given
        self._install = install  # anew, after an exception in backward; None: that ends training

    @property
    def plan(self) -> Plan:
        """How each parameter is synchronised: the plan in force."""
        return self._reductions.switch.plan

    # ---- plans

    def update(
        self,
        codec: Method = _SAME,
        *,
        include: Sequence[str] = _SAME,
        exclude: Sequence[str] = _SAME,
        codecs: Mapping[str, Method] = _SAME,
        error_feedback: bool = _SAME,
        options: Options | None = None,
        weights: Weights = _SAME,
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
            handle.update(options=dataclasses.replace(handle.plan.options, algorithm="ring"))

        Args:
            codec: the new default codec; options that are not given have their defaults. Without
                it, `codec_options` change the present default codec.
            codecs: these precede the present ones; a known pattern gets the new codec.
            include, exclude, error_feedback: as in `attach`.
            options: in place of all present ones: what `gw.Options(...)` leaves out has its default
                again. To change one, replace it in `handle.plan.options`, as above. Seed and keep
                stay as `attach` was told, and so does coalesce_bytes if it is left out.
            weights: of an FSDP2 module that was attached with `weights`: from the forward on that
                follows the switch. What is kept of gathered weights stays as `attach` was told.

        Returns:
            The update: its `wait()` returns when this rank has prepared it; its text, and
            `in_force`, say whether it is pending or in force.

        Raises:
            ConfigError: as `attach`; or the handle was detached, its module is gone, or its process
                group was destroyed. If ranks differ, a later forward of the module raises it, on
                every rank at the same step, and the present plan stays in force.
        """
        self._check_attached("update")
        self._reductions.refuse_update()
        rules = {
            "codec": codec, "include": include, "exclude": exclude, "codecs": codecs,
            "error_feedback": error_feedback,
        }  # fmt: skip
        given = {name: value for name, value in rules.items() if value is not _SAME}
        held = getattr(options, "coalesce_bytes", None)
        others = {} if held is None else {"coalesce_bytes": held}
        others |= {} if weights is _SAME else {"weights": weights}
        on = self._reductions

        def changed(before: Plan) -> Plan:
            told = {"seed": self._seed, "keep": before.weights and before.weights.keep}
            fixed = [n for n, one in told.items() if getattr(options, n, None) not in (None, one)]
            for name in [*_FIXED.intersection(codec_options), *fixed]:
                raise ConfigError(f"update: {name} is as `attach` was told: detach, attach again")
            check_renamed("update", codec_options)
            if codec == "auto" or type(codec).__name__ == "Auto":
                raise ConfigError('update: "auto" is for attach: detach and attach again')
            try:
                plan = replace(before, version=before.version + 1)
                if options is not None:
                    plan = replace(plan, options=options_of(options).of_collectives)
                plan = on.changed(plan, others)
                rules = before.rules.changed(codec_options, **on.methods(given, codec_options))
                return on.remade(plan, rules)
            except ConfigError:  # a method that is known only now may have such an option
                check_keywords(Handle.update, codec_options, OPTIONS, _FIXED)
                raise

        return on.switch.ask(changed)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> object:
            if name in RENAMED:
                raise ConfigError(f"handle.{name} is no more: write {RENAMED[name]}")
            raise AttributeError(f"a handle has no attribute {name!r}")

    def _check_attached(self, verb: str) -> None:
        if not self._reductions.installed:
            raise ConfigError(f"{verb}: this handle was detached: attach again")
        self._reductions.check_living(verb)

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
        return self._reductions.learn(smallest, steps)

    # ---- what it tells

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        """Call `observer` with every parameter's gradient, contribution and average, as soon as the
        average is known. It is called on gradwire's own threads, and costs a copy of each gradient.

        Returns:
            A function that removes the observer.

        Raises:
            ConfigError: it cannot be called, or the handle was detached.
        """
        self._check_attached("observe")
        if not callable(observer):
            raise ConfigError(f"observe: {observer!r:.60}: give a function of an observation")
        return self._reductions.observe(observer)

    def stats(self) -> dict[str, Any]:
        """Totals since `attach`, or `recover`.

        Returns:
            steps: synchronised backward passes.
            calls: collectives of gradients. Under DDP one for each round of each scope, a scope
                being the buckets that travel together; more where a round has several ways. Under
                FSDP2 reduce-scatters, all-reduces between replicas, and exchanges of plan versions
                with ranks to which no scatter sends.
            wire_bytes: sent by this rank, headers included.
            raw_bytes: what would have been sent uncompressed: 2 (N-1)/N of the gradients in an
                all-reduce; under FSDP2 (N-1)/N, and 2 (N-1)/N of their shards between N replicas.
            replicas_wire_bytes: under FSDP2, the part of wire_bytes that went to other replicas.
            ratio: raw_bytes / wire_bytes; 1.0 where nothing was sent, as in a single process.
            seconds: summed over buckets, which overlap, from a bucket's readiness to its average;
                under FSDP2 over collectives, from start to result.
            exposed_seconds: what communication added to backward. Under DDP: from where the
                module's backward has computed its last gradient, and all buckets have been handed
                over, until the last average is there, summed over passes. It is measured in the
                thread that waits, by a callback of autograd's that runs before DDP looks at its
                futures; DDP's own wait behind it finds them done. Time in DDP's hook itself counts
                as computing. FSDP2 waits for each collective where it calls it, so there it is all
                of the time from call to result. Waits for ranks that come later are included and,
                in the first passes, for kernels to be compiled. Over NCCL the host does not wait:
                this is about nothing, or the time of queueing the work. Under cross_barrier: where
                a parameter's average, or the next backward, is waited for.
            backward_seconds: under DDP, from the first bucket's readiness to where backward has
                computed its last gradient, summed over passes: what may hide communication.
            kernel_seconds: of `seconds`, in kernels, and in checksums of what they wrote. Over NCCL
                nobody on the host knows: `seconds` are those of queueing the work, and this is 0.
            kernel_calls: of kernels by this rank: on target c one for each task of a bucket (an
                encode, merge or decode), whatever its codecs; on others one for each codec in it.
            residual_bytes: memory of aggregators' state, mainly residuals; under FSDP2 those of
                whole parameters, on each rank.
            shared_bytes: memory shared with other ranks of this node at present: rings, which have
                a fixed size, and this rank's messages in its store.
            lent_bytes: the part of wire_bytes that ranks of this node read in place (of all
                handles of the process group).
            peak_extra_bytes: peak memory beyond that of the module without gradwire and the rings:
                messages in flight (of all handles of the process group) and residuals; kept
                weights are not in it.
            weights_calls, weights_wire_bytes, weights_raw_bytes, weights_ratio: under FSDP2, of
                gathers of weights through gradwire, which none of the above counts: their number,
                what this rank sent, and what sending its shards uncompressed to N - 1 ranks would
                send. Gathers that are left to torch are not counted, nor those that sent nothing;
                exchanges of whether weights have changed are.
            weights_seconds, weights_exposed_seconds: from their start until payloads have arrived,
                and what FSDP2 spent in starting them and in waiting for them.
            weights_kept_bytes: under FSDP2, memory of what is kept of gathered weights.
            weights_frozen_values: under FSDP2, of groups without a trained parameter, which are
                gathered once, and again only if somebody has changed them.
            parameters: name -> codec or aggregator (or "none"), numel, payload_bytes (of one
                gradient, at most), ratio: of the plan in force.
            plan: its version.
        """
        totals: dict[str, Any] = self._reductions.totals()
        raw, wire = totals["raw_bytes"], totals["wire_bytes"]
        residual = self._state_bytes()
        comms = self._reductions.comms()
        opened = [c.opened for c in comms if c.opened is not None]  # waits for no other rank
        return {
            **totals,
            "raw_bytes": round(raw),
            "ratio": times_less(raw, wire),
            "residual_bytes": residual,
            "shared_bytes": sum(transport.shared_bytes for transport in opened),
            "lent_bytes": sum(transport.lent_bytes for transport in opened),
            "peak_extra_bytes": sum(comm.pools.peak_bytes for comm in comms) + residual,
            **self._reductions.facts(),
            "parameters": self._facts(),
            "plan": self.plan.version,
        }

    def metrics(
        self, layers: bool = False, every: int = EVERY, prefix: str = ""
    ) -> dict[str, float]:
        """Scalars for a logger, one chart for each:

            for name, value in handle.metrics(prefix="gradwire/").items():
                writer.add_scalar(name, value, step)

        Of this rank; over the passes since the previous call:

        - ratio: bytes of uncompressed collectives, as in `stats`, / bytes sent.
        - bits_per_value: a gradient's bits per value / ratio, headers included.
        - exposed_seconds: what communication added to a backward, on average; see `stats`.
        - weights_ratio, weights_exposed_seconds: of gathers of weights, under FSDP2.

        Of the last sampled pass, in which this rank fed p into the average, its gradient plus its
        residual, and sent s of it; sums are over all parameters but uncompressed ones:

        - nmse: sum of |p - s|^2 / sum of |p|^2: of this rank's own contribution. Errors of ranks
          partly cancel in the average, which no rank knows exactly. With error feedback p - s is
          the residual: what later steps still send. On a rank that sums and encodes others' values,
          it includes the error of that sum. Without error feedback s is what the codec makes of p,
          drawn anew. Under FSDP2 the own shard is exact.
        - compression_gain: sum of |s|^2 / sum of |p|^2 (ARTOPK 3-E).
        - residual_norm: sqrt of the sum of |residual|^2; in units of the scaled loss under
          GradScaler.
        - weights_nmse: under FSDP2, sum of |w - v|^2 / sum of |w|^2 over this rank's shards w that
          go through a codec, which all ranks decode as v: of the forward before.
        - sampled_step: which pass it was, counted from 1 as in `stats`.

        And what aggregators tell, such as the share of saturated values: the newest, as the mean
        over parameters weighted by their numbers of values.

        A value that is not known yet has no key: in another thread, which may call it in the middle
        of a pass, no ratio where no gradient was sent since the previous call. A single rank sends
        nothing, so its ratio is 1.0, and it has no sample.
        Nothing is sampled before the first call. A sampled pass copies its gradients and reads them
        several times; nothing in training changes.

        Args:
            layers: in addition, the same for each parameter, under "NAME/KEY"; there bits_per_value
                is that of the payload in the plan in force, at most.
            every: sample one pass in so many.
            prefix: stands before each key.

        Raises:
            ConfigError: `every` is not a number of passes, or `prefix` no text.
        """
        on = self._reductions
        totals = on.totals() | on.facts()
        if not isinstance(prefix, str):
            raise ConfigError(f"prefix={prefix!r:.60}: give a text")
        found = on.metrics.read(totals, self._plan_now(), self._members, layers, every)
        return {prefix + key: value for key, value in found.items()}

    def history(self) -> list[dict[str, Any]]:
        """What a policy and "auto" have decided so far, in order. Of each decision: step (passes
        until then), by (the policy's name, or "auto"), line (what was decided, and why), and what
        else there is (docs/how-to/adaptive.md, docs/how-to/automatic.md); as JSON has it.
        """
        return [dict(row) for row in self._reductions.decisions]

    def __str__(self) -> str:
        """What is attached, as text: the codec of each group of parameters with its bits per value,
        the bytes that a step is expected to send from this rank, algorithm, transport, memory of
        residuals, the newest decisions (see `history`), and updates that are not in force yet;
        `repr` is its first line.

        It can be called at any time, on one rank alone: it sends nothing and waits for no rank.
        Bytes are those of all gradients in one collective, headers included; more buckets have more
        headers. What the first step decides is named as not known before it.
        """
        on = self._reductions
        comms = [owner.comm for owner in on.owners]
        stats = self.stats()
        of = self._plan_now(), self.rank, comms, on.expected(), stats, self.world_size
        remarks = [f"  {line}" for line in on.remarks()]
        if self._pinned is not None and self._pinned.planned and self.plan.version == 0:
            remarks.append(f"  {self._pinned.expectation(self.plan, self.world_size, stats)}")
        decided = [f"  {row['by']}, step {row['step']}: {row['line']}" for row in on.decisions]
        pending = [f"  {update}" for update in on.switch.pending()]
        found = summary(self._what(), *of)
        return "\n".join([found, *remarks, *decided[-_TOLD:], *pending])

    def __repr__(self) -> str:
        return headline(self._what(), self.plan, self.rank, self.world_size)

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
                "codec": str(p.inner),
                "numel": p.numel,
                "payload_bytes": payload,
                "ratio": times_less(raw_payload, payload),
            }
        return parameters

    def _what(self) -> str:
        on = self._reductions
        return on.what if on.installed else f"{on.what} (detached)"

    # ---- state

    def _sections(self) -> list[StateSection]:
        on = self._reductions
        on.settle()
        return [
            policy_section(on.adaptation, loads=not self._takes_any_plan()),
            sharding_section(on.sharding),
            steps_section(self._members, lambda: self.plan, self._seed, self._seeded),
            aggregators_section(self._members, on.sharding, on.idle),
            *on.sections(),
        ]

    def _seeded(self, seed: int) -> None:
        self._seed = seed

    def _takes_any_plan(self) -> bool:
        return self._reductions.automatic is not None

    # ---- its end

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
            ConfigError: the handle was detached; or FSDP2 has not recovered on some rank, and
                later passes go on to raise.
            TransportError: the group itself is broken, or a rank did not make the call.
        """
        self._check_attached("recover")
        on = self._reductions
        if self._install is None:
            raise ConfigError(
                f"recover: {on.what} does not go on after an exception in backward: wrap the "
                "module again, and attach"
            )
        adaptation = on.adaptation
        passes = 0 if adaptation is None else adaptation.passes
        lacking, steps = on.unrecovered(), [m.step for m in self._members.values()]
        now = lacking, max(steps), self.plan.version, passes
        comms = [owner.comm for owner in on.owners]
        for comm in comms:
            comm.check()
        told = ranks_of(comms, [owner.key for owner in on.owners]).tell("recovery", now).result()
        lacking, step, version, passes = map(max, zip(*told, strict=True))
        if lacking:  # on one rank at least
            raise ConfigError(f"recover: {lacking}")
        for member in self._members.values():
            member.step = step  # equal on all ranks, and random numbers that were not drawn yet
        # Some ranks may have adopted it, so all have prepared it.
        plan = on.switch.prepared(version)
        self.detach()
        self._reductions = self._install(plan)
        self._reductions.adopt()
        self._reductions.decisions = on.decisions
        if adaptation is not None:
            self._reductions.adapt(adaptation.policy, adaptation.replan, adaptation, passes)

    def detach(self) -> None:
        """Give the module its own synchronisation back: under DDP plain averages, from the end of
        the running backward on; under FSDP2 call it between two steps.

        Statistics and state stay readable.
        """
        if self._reductions.installed:
            self._reductions.remove()
