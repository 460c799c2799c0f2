"""Averages DDP's buckets during the backward pass; small buckets are combined."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from gradwire.aggregators import Attached, Observation, Rounds
from gradwire.collectives import Item, Operation, prepare
from gradwire.collectives.calling import future_on
from gradwire.collectives.legal import uncompressed
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, GradwireError, TransportError
from gradwire.integrations.adaptation import Adaptation
from gradwire.integrations.automatic import Automatic
from gradwire.integrations.backward import Backward
from gradwire.integrations.gather import Gather, Share, Split
from gradwire.integrations.memory_order import as_in_memory
from gradwire.integrations.metrics import Sampler
from gradwire.integrations.switch import Switch
from gradwire.integrations.torch_versions import values_of
from gradwire.lang import rng
from gradwire.partition import Spec


class Buckets:
    """The reducer of a DDP module's hook.

    Args:
        members: parameter -> its state, for each parameter that DDP synchronises.
        owner: of the module's scopes.
        switch: the module's plans.
        adopt: called when a pass begins with another plan than the one before.
        sampler: of metrics.

    Attributes:
        observers: called with every parameter's average.
        adaptation: of a policy; is given averages.
        automatic: mode; is told of passes.
        known: the contents of the buckets of the last complete pass, in order.
        span: seconds from the first bucket's readiness to the last average, of the last pass whose
            averages were awaited.
    """

    def __init__(
        self,
        members: Mapping[torch.Tensor, Attached],
        owner: Owner,
        switch: Switch,
        adopt: Callable[[], None],
        sampler: Sampler,
    ) -> None:
        self.observers: list[Callable[[Observation], None]] = []
        self.adaptation: Adaptation | None = None
        self.automatic: Automatic | None = None
        self.known: list[Content] = []
        self.span: float | None = None
        self._members = members
        self._owner = owner
        self._comm = owner.comm
        self._switch = switch
        self._adopt = adopt
        self._sampler = sampler
        self._by_name = {member.name: member for member in members.values()}
        self._lock = threading.Lock()
        self._totals: dict[str, float] = {
            "steps": 0,
            "calls": 0,
            "wire_bytes": 0,
            "gradient_bytes": 0,
        }
        self._totals |= {"seconds": 0.0, "exposed_seconds": 0.0, "backward_seconds": 0.0}
        self._totals |= {"kernel_seconds": 0.0, "kernel_calls": 0}
        self._contents: dict[int, Content] = {}
        self._arrived: set[Attached] = set()  # parameters of the buckets of this pass so far
        self._gather = Gather(0)
        self._pass: list[_Bucket] = []  # the buckets of this pass, in order
        self._version = 0  # the plan version that this rank offers in this pass
        self._least: int | None = None  # the least version that any rank offers, if known
        self._word: tuple[torch.Tensor, Future[Outcome]] | None = None  # `_least` on a device
        self._pending: list[torch.futures.Future[torch.Tensor]] = []
        self.backward = Backward(self._pass_ended, self._abandoned, self._forward)
        self._then: Callable[[], None] | None = None
        self._begun: float | None = None  # when the running pass did
        self._error: BaseException | None = None

    def totals(self) -> dict[str, float]:
        """steps, calls, {wire,gradient}_bytes, {,exposed_,backward_,kernel_}seconds, kernel_calls:
        of `Handle.stats`."""
        with self._lock:
            return dict(self._totals)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the average of `bucket`; DDP calls this during backward, which it overlaps.

        A rank that has joined early (`with model.join()`) mirrors the others' buckets outside any
        backward; then this call waits for the average.
        """
        buffer = values_of(bucket)
        content = self._content(bucket, buffer)
        is_last = self._arrives(content.members) or bucket.is_last()
        self._totals["gradient_bytes"] += buffer.numel() * buffer.dtype.itemsize
        ready = _Bucket(buffer, bucket.buffer(), content, future_on(buffer.device))
        self._pass.append(ready)
        # All ranks combine and start the same buckets in the same order, whatever the timing.
        for shares in self._gather.add(content.split, content.nbytes, is_last):
            self._start(shares)
        if is_last:
            if self._comm.stream(buffer.device) is not None:
                self._tell_version(buffer.device)
            self._arrived.clear()
            self.known = [one.content for one in self._pass]
        return ready.future

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
        return len(self._arrived) == len(self._members)

    def _begin_pass(self) -> None:
        """Begin a pass, after all collectives of the previous one have ended. The newest plan that
        all ranks have prepared comes into force."""
        self._totals["steps"] += 1
        self._begun = time.perf_counter()
        if self.automatic is not None:
            self.automatic.begin()
        if self.adaptation is not None:
            self.adaptation.begin(self.span)
        self._sampler.begin(int(self._totals["steps"]))
        before = self._switch.plan
        self._version = self._switch.begin(self._agreed())
        self._least, self._word = None, None
        if self._switch.plan is not before:
            self._adopt()
            self._comm.in_flight.mark(f"adopt: plan {self._switch.plan.version}")
            for content in self._contents.values():
                content.split = Split.of([m.aggregator for m in content.members])
        self._gather = Gather(self._switch.plan.coalesce_bytes)
        self._pass = []

    def _agreed(self) -> int:
        """The least version that any rank offered in the previous pass."""
        if self._word is not None and self._version > self._switch.plan.version:
            values, running = self._word  # on a device: the host waits for its stream
            running.result()
            return int(values.item())
        return self._switch.plan.version if self._least is None else self._least

    def _tell_version(self, device: torch.device) -> None:
        """Exchange plan versions at the end of a pass in stream order, where the host sees no
        headers."""
        values = torch.tensor([self._version], dtype=torch.int32, device=device)
        least = Operation("all_reduce", "min")
        spec = Spec("plan version", 1, torch.int32, uncompressed(least, torch.int32))
        collective = prepare(self._owner, [spec], None, least, device)
        keys = rng.Keys(0, 0)  # nothing is drawn
        self._word = values, collective.start([Item(values, keys, 0)])

    def _give_up(self) -> None:
        """Complete the buckets that wait to be combined, without averaging them."""
        for stale in self._pass:
            if stale.unstarted:
                stale.future.set_result(stale.result)
        self._pass.clear()
        self._arrived.clear()

    def _start(self, shares: Sequence[Share]) -> None:
        """Start the rounds of one scope."""
        buckets = [self._pass[share.bucket] for share in shares]
        members: list[Attached] = []
        gradients: list[torch.Tensor] = []
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
                gradients.append(part)
        within = self._expect(buckets)

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            if error is None:
                for in_memory, average in copied:
                    in_memory.copy_(average.view(in_memory.shape))
                self._know(rounds.least)
                if self.adaptation is not None and self.adaptation.running:
                    for member, average in zip(members, gradients, strict=True):
                        self.adaptation.add(member.name, average)
            self._ended(buckets, error, outcomes)

        try:
            observed = self.observers or self._sampler.running
            plan, observe = self._switch.plan, self._observe if observed else None
            rounds = Rounds(
                self._owner, members, gradients, plan.options, done, observe, self._version,
                plan.version,
            )  # fmt: skip
        except Exception as error:
            self._ended(buckets, error, [])  # otherwise a later backward would wait for these
        else:
            rounds.start()
        if not within:
            self._settle()

    def _observe(self, observation: Observation) -> None:
        if self._sampler.running:
            self._sampler.observe(self._by_name[observation.name], observation)
        for observer in self.observers:
            observer(observation)

    def _know(self, least: int | None) -> None:
        """Note the least version that any rank offers in this pass, from a scope's headers."""
        if least is not None:
            with self._lock:
                self._least = least if self._least is None else min(self._least, least)

    def _expect(self, buckets: list[_Bucket]) -> bool:
        """Make the running backward, if any, wait for the buckets that are completely started."""
        self._pending += [bucket.future for bucket in buckets if not bucket.unstarted]
        return self.backward.enter()

    def _ended(
        self, buckets: list[_Bucket], error: BaseException | None, outcomes: Sequence[Outcome]
    ) -> None:
        """A scope has ended; called once per scope."""
        with self._lock:
            # An error that names a peer replaces one that does not, such as torch's own.
            if self._error is None or getattr(self._error, "peer", self) is None:
                self._error = error or self._error
            self._totals["calls"] += len(outcomes)
            self._totals["wire_bytes"] += sum(o.wire_bytes for o in outcomes)
            self._totals["kernel_seconds"] += sum(o.kernel_seconds for o in outcomes)
            self._totals["kernel_calls"] += sum(o.kernel_calls for o in outcomes)
            for bucket in buckets:
                bucket.left -= 1
            ended = [bucket for bucket in buckets if not bucket.left or error is not None]
            now = time.perf_counter()
            self._totals["seconds"] += sum(now - bucket.ready for bucket in ended)
        for bucket in ended:
            if not bucket.future.done():
                bucket.future.set_result(bucket.result)

    def raw_bytes(self, nbytes: float) -> float:
        """Bytes that each rank sends in an uncompressed all-reduce of `nbytes`."""
        n = self._comm.world_size
        return 2 * (n - 1) / n * nbytes

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
            lengths = _lengths(buffer, parameters)
            known = Content(parameters, members, lengths, buffer.dtype, buffer.device, split)
            self._contents[bucket.index()] = known
        return known

    def _member(self, parameter: torch.Tensor) -> Attached:
        if parameter not in self._members:
            raise ConfigError(
                f"DDP reduces the gradient of a parameter of shape {tuple(parameter.shape)}, "
                f"{parameter.dtype}, that it did not synchronise at attach: detach and attach again"
            )
        return self._members[parameter]

    def _pass_ended(self) -> None:
        self._settle()
        self._sampler.end()

    def _settle(self) -> None:
        """Wait for the averages of all started buckets; raises their error."""
        pending, self._pending = self._pending, []
        begun = time.perf_counter()
        with self._owner.awaited():
            for future in pending:
                future.wait()
        with self._lock:
            self._totals["exposed_seconds"] += time.perf_counter() - begun
            if pending and self._begun is not None:
                self._totals["backward_seconds"] += begun - self._begun
                self.span = time.perf_counter() - self._begun
                self._begun = None
        self._leave()
        if self._error is not None:
            raise self._error

    def _forward(self) -> None:
        """Raise a refused update after forward, since an error in backward would end training."""
        refusal = self._switch.refusal()
        if refusal is not None:
            raise refusal

    def _abandoned(self) -> None:
        """Backward ended with an exception, so its buckets will never be complete."""
        rank, step = self._comm.rank, self._totals["steps"]
        self._arrived.clear()
        self._pass.clear()
        self._pending.clear()
        error: GradwireError = TransportError(
            f"rank {rank}: backward raised an exception at step {step} of {self._owner.name}, "
            f"so its gradients are not complete: see what rank {rank} raised",
            peer=rank,
        )
        for parameter, member in self._members.items():
            # DDP's reducer has raised a NotImplementedError that names none, before any hook.
            if parameter.grad is not None and parameter.grad.is_sparse:
                error = ConfigError(
                    f"rank {rank}: parameter {member.name} has sparse gradients in "
                    f"{self._owner.name}, which lie in no flat bucket: compute them with "
                    "sparse=False"
                )
        self._comm.fail_owner(self._owner, error)
        self._leave()

    def at_end(self, then: Callable[[], None]) -> None:
        """Call `then` at the end of the running pass, or now if none is running."""
        self._then = then
        self._leave()

    def _leave(self) -> None:
        if self._then is not None and not (self._arrived or self._pending):
            then, self._then = self._then, None
            then()


@dataclass
class Content:
    """The constant contents of a bucket: not its gradients, whose memory may be replaced.

    Attributes:
        lengths: number of values of each parameter in the buffer, in order.
        dtype, device: of the buffer; complex gradients are pairs of values.
        split: the parameters by scope, under the plan in force.
    """

    parameters: list[torch.Tensor]
    members: list[Attached]
    lengths: list[int]
    dtype: torch.dtype
    device: torch.device
    split: Split

    @property
    def nbytes(self) -> int:
        """Of the buffer."""
        return self.dtype.itemsize * sum(self.lengths)


@dataclass(eq=False)
class _Bucket:
    """A bucket of DDP in flight.

    Attributes:
        buffer: its values; complex ones as pairs.
        result: DDP's own tensor, which shares the memory.
        ready: time.perf_counter when DDP submitted it.
        left, unstarted: number of its scopes that have not ended, or not started.
    """

    buffer: torch.Tensor
    result: torch.Tensor
    content: Content
    future: torch.futures.Future[torch.Tensor]
    ready: float = field(default_factory=time.perf_counter)
    left: int = 0
    unstarted: int = 0

    def __post_init__(self) -> None:
        self.left = self.unstarted = bool(self.content.split.bucket) + bool(
            self.content.split.model
        )


def _lengths(buffer: torch.Tensor, parameters: Sequence[torch.Tensor]) -> list[int]:
    """The number of values of each gradient in the bucket: two per complex value, while
    `GradBucket.gradients` counts one."""
    lengths = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
    assert sum(lengths) == buffer.numel(), f"a bucket of {buffer.numel()} values for {lengths}"
    return lengths
