"""Averages DDP's buckets during the backward pass; small buckets are combined."""

from __future__ import annotations

import operator
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Attached, Observation, Rounds
from gradwire.collectives import AllReduce, ScopeProgram
from gradwire.collectives.calling import future_on
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, again
from gradwire.handles.backward import Backward
from gradwire.handles.bucket import Bucket, Content, as_in_memory, lengths_in
from gradwire.handles.coalescing import Coalescing, Share, Split
from gradwire.handles.hook import HookState
from gradwire.handles.momentum import MomentumGuard
from gradwire.handles.oversights import Oversights
from gradwire.handles.reductions import Reductions
from gradwire.handles.rehearsal import alike, rehearse
from gradwire.handles.summary import Expected, expected_all_reduce
from gradwire.handles.torch_versions import values_of
from gradwire.planner import Plan, Rules, make_plan
from gradwire.waiting import until_set

if TYPE_CHECKING:
    from gradwire.handles.cross_barrier import CrossBarrier


class Buckets(Reductions):
    """The averages of a DDP module's buckets: the reducer of its hook.

    Args:
        model: the module.
        state: of its hook.
        named: the parameters that DDP synchronises, by name.
        plan: the first one.
        members: their states, by name.
        owner: of the module's scopes.
        optimizer: of cross-barrier training; None: each backward waits for its averages.

    Attributes:
        observers: called with every parameter's average.
        known: the contents of the buckets of the last complete pass, in order.
        span: seconds from the first bucket's readiness to the last average, of the last pass whose
            averages were awaited.
    """

    what = "a DDP module"

    def __init__(
        self,
        model: DistributedDataParallel,
        state: HookState,
        named: Sequence[tuple[str, torch.Tensor]],
        plan: Plan,
        members: Mapping[str, Attached],
        owner: Owner,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(plan, members, [owner], owner.comm.world_size)
        self.known: list[Content] = []
        self.span: float | None = None
        self.observers: list[Callable[[Observation], None]] = []
        self._named = named
        by_name = dict(named)  # tied weights have several
        self._by_parameter = {by_name[name]: member for name, member in members.items()}
        self._comm = owner.comm
        self._totals["backward_seconds"] = 0.0
        self._contents: dict[int, Content] = {}
        self._arrived: set[Attached] = set()  # parameters of the buckets of this pass so far
        self._coalescing = Coalescing(0)
        self._pass: list[Bucket] = []  # the buckets of this pass, in order
        self._pending: list[Bucket] = []
        self._then: Callable[[], None] | None = None
        self._began = 0.0  # when the running pass did
        self._begun: float | None = None  # the same, until it has ended
        self._error: BaseException | None = None
        # A module that is deleted without `detach` starts no collective any more.
        weakref.finalize(self, setattr, owner, "closed", True).atexit = False
        self._momentum = MomentumGuard(named)
        self._momentum.watch(plan)
        self._oversights = Oversights(model, named)
        self.backward = Backward(self._pass_ended, self._abandoned, self.after_forward)
        self._crossing: CrossBarrier | None = None
        if optimizer is not None and self.ranks > 1:
            from gradwire.handles.cross_barrier import CrossBarrier  # loaded on use

            names = {p: name for name, p in reversed([*named])}
            of = model, optimizer, names, self._wait, owner.core.window
            self._crossing = CrossBarrier(*of)
            # After the first pass DDP makes its buckets anew, and may move gradients.
            begin = self._crossing.begin
            self.backward.begins = lambda: begin(first=not self.known)
            self.runner.start(self._crossing.urgency.script(owner.key))
        self.backward.watch(model)
        self._state = state
        state.reducer = self

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the average of `bucket`; DDP calls this during backward, which it overlaps.

        A rank that has joined early (`with model.join()`) mirrors the others' buckets outside any
        backward; then this call waits for the average.
        """
        result = bucket.buffer()
        buffer, future = values_of(result), future_on(result.device)
        if self._crossing is not None:
            self.backward.enter()  # unless a forward that was compiled let it be known
        crosses = self._crossing is not None and self._crossing.crosses
        content = self._content(bucket, buffer)
        is_last = self._arrives(content.members) or bucket.is_last()
        ready = Bucket(buffer, result, content, future, crosses=crosses)
        self._pass.append(ready)
        # All ranks combine and start the same buckets in the same order, whatever the timing.
        due = self._coalescing.add(content.split, content.nbytes, is_last)
        if self._crossing is not None:
            due = self._crossing.urgency.order(due, is_last)
        for shares in due:
            self._start(shares)
        if is_last:
            if self._comm.stream(buffer.device) is not None:
                self.tell_version(buffer.device)
            self._arrived.clear()
            self.known = [one.content for one in self._pass]
            self._pass = []
        if crosses:  # DDP has it back at once, and its future is ours alone
            future = future_on(result.device)
            future.set_result(result)
        return future

    def _arrives(self, members: list[Attached]) -> bool:
        """Note the arrival of a bucket; whether all parameters of this pass have arrived.

        Parameters are counted since `is_last` is not reliable: with static_graph DDP submits all
        buckets of its first pass together, each with index 0 and is_last() False.
        """
        if not self._arrived.isdisjoint(members):  # the previous pass ended early
            self._give_up()
        if not self._arrived:
            self._begin_pass()
        self._arrived.update(members)
        return len(self._arrived) == len(self.members)

    def _begin_pass(self) -> None:
        self._began = self._begun = time.perf_counter()
        before = self.switch.plan
        self.begin(self.span)
        if self.switch.plan is not before:
            for content in self._contents.values():
                content.split = Split.of([m.aggregator for m in content.members])
        self._coalescing = Coalescing(self.switch.plan.coalesce_bytes)
        self._pass = []
        if self._crossing is not None:
            self._crossing.urgency.begin()

    def _give_up(self) -> None:
        """Complete the buckets that wait to be combined, without averaging them."""
        for stale in self._pass:
            if stale.unstarted:
                stale.end()
        self._pass.clear()
        self._arrived.clear()

    def _start(self, shares: Sequence[Share]) -> None:
        """Start the rounds of one scope."""
        buckets = [self._pass[share.bucket] for share in shares]
        members: list[Attached] = []
        gradients: list[torch.Tensor] = []
        before: list[torch.Tensor] = []
        observe = self._observe if self.observers or self.sampler.running else None
        copied: list[tuple[torch.Tensor, torch.Tensor]] = []  # (in the buffer, in order)
        for bucket, share in zip(buckets, shares, strict=True):
            bucket.unstarted -= 1
            content, parts = bucket.content, bucket.buffer.split(bucket.content.lengths)
            members += [content.members[place] for place in share.places]
            for place in share.places:
                part = parts[place]
                in_memory = as_in_memory(content.parameters[place], part)
                if in_memory is not None:
                    part = in_memory.reshape(-1)
                    copied.append((in_memory, part))
                if observe is not None:
                    before.append(part.clone())
                content.members[place].add_owed(part)
                gradients.append(part)
        within = self._expect(buckets)
        adaptation = self.adaptation  # of this pass

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            if error is None:
                for in_memory, average in copied:
                    in_memory.copy_(average.view(in_memory.shape))
                self.know(rounds.least)
                if adaptation is not None and adaptation.running:
                    for member, average in zip(members, gradients, strict=True):
                        adaptation.add(member.name, average)
            self._ended(buckets, error, outcomes, sum(g.nbytes for g in gradients))

        try:
            plan, reductions = self.switch.plan, [*map(AllReduce, gradients)]
            of = self._version, plan.version
            rounds = Rounds(
                self.owner, members, reductions, plan.options, done, observe, before, *of
            )
        except Exception as error:
            self._ended(buckets, error, [], 0)  # otherwise a later backward would wait for these
        else:
            rounds.start()
        if not within:
            self._settle()

    def _observe(self, observation: Observation) -> None:
        if self.sampler.running:
            self.sampler.observe(self.members[observation.name], observation)
        for observer in self.observers:
            observer(observation)

    def _expect(self, buckets: list[Bucket]) -> bool:
        """Make the running backward, if any, wait for the buckets that are completely started."""
        self._pending += [bucket for bucket in buckets if not bucket.unstarted]
        return self.backward.enter()

    def _ended(
        self,
        buckets: list[Bucket],
        error: BaseException | None,
        outcomes: Sequence[Outcome],
        nbytes: int,
    ) -> None:
        """A scope of gradients of `nbytes` has ended; called once per scope."""
        with self._lock:
            # An error that names a peer replaces one that does not, such as torch's own.
            if self._error is None or getattr(self._error, "peer", self) is None:
                self._error = error or self._error
            if self._crossing is not None:
                self._crossing.urgency.ended += 1
            for bucket in buckets:
                bucket.left -= 1
            ended = [bucket for bucket in buckets if not bucket.left or error is not None]
            now = time.perf_counter()
        uncompressed = 2 * (self.ranks - 1) / self.ranks * nbytes  # an all-reduce sends
        seconds = sum(now - bucket.ready for bucket in ended)
        self.count(*outcomes, raw_bytes=uncompressed, seconds=seconds)
        for bucket in ended:
            if not bucket.future.done():
                bucket.end()

    def _content(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> Content:
        """The contents of `bucket`; constant once DDP has rebuilt its buckets."""
        parameters = bucket.parameters()
        known = self._contents.get(bucket.index())
        if (
            known is None
            or len(known.parameters) != len(parameters)
            or not all(map(operator.is_, known.parameters, parameters))
        ):
            members = [self._member(p) for p in parameters]
            split = Split.of([member.aggregator for member in members])
            lengths = lengths_in(buffer, parameters)
            known = Content(parameters, members, lengths, buffer.dtype, buffer.device, split)
            self._contents[bucket.index()] = known
        return known

    def _member(self, parameter: torch.Tensor) -> Attached:
        if parameter not in self._by_parameter:
            raise ConfigError(
                f"DDP reduces the gradient of a parameter of shape {tuple(parameter.shape)}, "
                f"{parameter.dtype}, that it did not synchronise at attach: detach and attach again"
            )
        return self._by_parameter[parameter]

    def _pass_ended(self) -> None:
        self._settle()
        self.sampler.end()

    def _settle(self) -> None:
        """Wait for the averages of all started buckets, or leave them late; raises their error."""
        pending, self._pending = self._pending, []
        if pending and self._begun is not None:
            self.count(backward_seconds=time.perf_counter() - self._begun)
            self._begun = None
        late: list[Bucket] = []
        if self._crossing is not None and self._crossing.crosses:
            self._crossing.ends()
            if not self._arrived and self._then is None:  # else a part of DDP's pass
                late = [bucket for bucket in pending if bucket.crosses]
                # Once DDP has put its buckets into gradients: they are of this rank alone.
                take = partial(self._crossing.take, late)
                Variable._execution_engine.queue_callback(take)
        try:
            self._wait(*(bucket for bucket in pending if bucket not in late))
        finally:
            self._leave()

    def _wait(self, *buckets: Bucket) -> None:
        """Wait for the averages of buckets; raises their error."""
        begun = time.perf_counter()
        with self.owner.awaited():
            for bucket in buckets:
                until_set(bucket.ended)  # which a signal interrupts, unlike torch's own wait
                bucket.future.wait()  # on a GPU, the stream's
        self.count(exposed_seconds=time.perf_counter() - begun)
        if buckets:
            self.span = max(bucket.finished for bucket in buckets) - self._began
        if self._error is not None:
            raise again(self._error)

    def _abandoned(self) -> None:
        """Backward ended with an exception, so its buckets will never be complete."""
        self._arrived.clear()
        self._pass.clear()
        self._pending.clear()
        self.abandon(self._sparse())
        self._leave()

    def _sparse(self) -> ConfigError | None:
        """Names what DDP's reducer has raised a NotImplementedError of, before any hook."""
        for parameter, member in self._by_parameter.items():
            if parameter.grad is not None and parameter.grad.is_sparse:
                return ConfigError(
                    f"rank {self._comm.rank}: parameter {member.name} has sparse gradients in "
                    f"{self.owner.name}, which lie in no flat bucket: compute them with "
                    "sparse=False"
                )
        return None

    def _leave(self) -> None:
        if self._then is not None and not (self._arrived or self._pending):
            then, self._then = self._then, None
            then()

    def check_living(self, verb: str) -> None:
        if self._state.model_is_gone:
            raise ConfigError(f"{verb}: the module of this handle is gone: attach to the new one")
        super().check_living(verb)

    # ---- plans

    def adopt(self) -> None:
        super().adopt()
        self._momentum.watch(self.switch.plan)

    def planned(self, plan: Plan, rules: Rules) -> Plan:
        of = self.ranks, plan.options, plan.coalesce_bytes, plan.version
        return make_plan(self._named, rules, *of)

    def changed(self, plan: Plan, given: Mapping[str, Any]) -> Plan:
        if "weights" in given:
            raise ConfigError(
                "update: weights are for FSDP2 modules, which gather weights; DDP sends gradients "
                "alone: leave them out"
            )
        held = given.get("coalesce_bytes", plan.coalesce_bytes)
        return replace(plan, coalesce_bytes=held)

    def rehearse(self, plan: Plan) -> Sequence[ScopeProgram]:
        name = f"{self.owner.key}/plan {plan.version}"
        contents, step = alike(self.owner, name, lambda: self.known, self.switch.check)
        aggregators = {p.name: p.aggregator for p in plan.parameters}
        coalescing = Coalescing(plan.coalesce_bytes)
        found: list[ScopeProgram] = []
        for number, content in enumerate(contents):
            split = Split.of([aggregators[member.name] for member in content.members])
            is_last = number == len(contents) - 1
            for shares in coalescing.add(split, content.nbytes, is_last):
                places = [(contents[share.bucket], at) for share in shares for at in share.places]
                zeros = [
                    torch.zeros(of.lengths[at], dtype=of.dtype, device=of.device)
                    for of, at in places
                ]
                members = [of.members[at] for of, at in places]
                found += rehearse(self.owner, plan, members, [*map(AllReduce, zeros)], step)
        return found

    def bucket_names(self) -> list[list[str]]:
        """Of the parameters of each bucket, in the order of sending."""
        return [[member.name for member in content.members] for content in self.known]

    # ---- what is told of them

    def observe(self, observer: Callable[[Observation], None]) -> Callable[[], None]:
        self.observers.append(observer)
        return partial(self.observers.remove, observer)

    def expected(self) -> Expected:
        steps = {name: member.step for name, member in self.members.items()}
        return expected_all_reduce(self.switch.plan.at(steps), self._comm)

    def remove(self) -> None:
        """During a backward pass, at its end."""
        super().remove()
        self._then = self._removed
        self._leave()

    def settle(self) -> None:
        if self._crossing is not None:
            self._crossing.land()

    def _removed(self) -> None:
        try:
            if self._crossing is not None:
                self._crossing.remove()
        finally:
            self._uninstalled()

    def _uninstalled(self) -> None:
        self.backward.unwatch()
        self._momentum.unwatch()
        self._oversights.unwatch()
        if self._state.reducer is self:
            self._state.reducer = None
        self.close()
