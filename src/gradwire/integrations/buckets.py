"""DDP's buckets on their way to their averages: small ones together, beside backward."""

from __future__ import annotations

import operator
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gradwire.aggregators import Attached, Rounds
from gradwire.collectives import DTYPES, Options
from gradwire.collectives.calling import future_on
from gradwire.engine import Outcome, Owner
from gradwire.errors import ConfigError, TransportError
from gradwire.integrations.backward import Backward
from gradwire.integrations.hook import average


class Buckets:
    """The reducer of a DDP module's hook.

    Args:
        members: parameter -> its state, for each that DDP synchronises.
        owner: of the module's scopes, on `group`, its process group.
        options: of every collective.
        coalesce_bytes: buckets wait for each other until they hold as many.
    """

    def __init__(
        self,
        members: Mapping[torch.Tensor, Attached],
        owner: Owner,
        group: dist.ProcessGroup,
        options: Options,
        coalesce_bytes: int,
    ) -> None:
        self._members = members
        self._owner = owner
        self._comm = owner.comm
        self._group = group
        self._options = options
        self._coalesce_bytes = coalesce_bytes
        self._lock = threading.Lock()
        self._totals = {"steps": 0, "wire_bytes": 0, "gradient_bytes": 0, "seconds": 0.0}
        self._totals["kernel_seconds"] = 0.0
        self._contents: dict[int, _Content] = {}
        self._arrived: set[torch.Tensor] = set()  # parameters of this pass whose buckets have come
        self._held: list[_Bucket] = []
        self._pending: list[torch.futures.Future[torch.Tensor]] = []
        self.backward = Backward(self._settle, self._abandoned)
        self._then: Callable[[], None] | None = None
        self._error: BaseException | None = None

    def totals(self) -> dict[str, float]:
        """steps, wire_bytes, gradient_bytes, seconds, kernel_seconds: of `Handle.stats`."""
        with self._lock:
            return dict(self._totals)

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average `bucket`; called by DDP while backward runs: what it starts ends beside it.

        A rank that has joined early (`with model.join()`) mirrors the others' buckets outside any
        backward; then the average is awaited here.
        """
        buffer = bucket.buffer()
        content = self._content(bucket, buffer)
        is_last = self._arrives(content.parameters) or bucket.is_last()
        self._totals["gradient_bytes"] += buffer.numel() * buffer.dtype.itemsize

        future = future_on(buffer.device)
        gradients = [buffer[part] for part in content.parts]
        ready = _Bucket(buffer, content.members, gradients, future, time.perf_counter())
        # All ranks hold and start the same buckets, in the same order: nothing depends on time.
        if content.by_torch:
            self._start_by_torch(ready)
        else:
            self._held.append(ready)
        held = sum(b.buffer.nbytes for b in self._held)
        if self._held and (held >= self._coalesce_bytes or is_last):
            self._start()
        if is_last:
            self._arrived.clear()
        return future

    def _arrives(self, parameters: list[torch.Tensor]) -> bool:
        """Note that a bucket has come; whether all parameters have, in this pass over them.

        Counted, since a bucket does not know: with static_graph DDP hands over those of its first
        pass together, and each says that it is number 0 and not the last.
        """
        if not self._arrived.isdisjoint(parameters):  # the pass before has ended on its way
            for stale in self._held:
                stale.future.set_result(stale.buffer)
            self._held.clear()
            self._arrived.clear()
        if not self._arrived:
            self._totals["steps"] += 1
        self._arrived.update(parameters)
        return len(self._arrived) == len(self._members)

    def _start(self) -> None:
        """Average the buckets held, in one collective."""
        held, self._held = self._held, []
        within = self._expect(held)
        members = [member for bucket in held for member in bucket.members]
        gradients = [gradient for bucket in held for gradient in bucket.gradients]

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            sent = sum(o.wire_bytes for o in outcomes)
            self._ended(held, error, sent, sum(o.kernel_seconds for o in outcomes))

        try:
            rounds = Rounds(self._owner, members, gradients, self._options, done)
        except Exception as error:
            done(error, [])  # or a later backward would wait for these buckets
        else:
            rounds.start()
        if not within:
            self._settle()

    def _start_by_torch(self, bucket: _Bucket) -> None:
        """Average a bucket that no codec takes: through torch's own all-reduce."""
        within = self._expect([bucket])
        for member in bucket.members:
            member.step += 1

        def failed(error: BaseException) -> TransportError:
            names = ", ".join(member.name for member in bucket.members)
            return TransportError(
                f"rank {self._comm.rank}: torch's all-reduce of the gradients of {names} failed: "
                f"{error}. A rank of this process group died, hangs or cannot be reached: look at "
                "the ranks' logs, then restart the job"
            )

        def done(averaged: torch.futures.Future[list[torch.Tensor]]) -> None:
            try:
                averaged.value()
            except Exception as error:
                self._ended([bucket], failed(error), 0, 0.0)
            else:
                self._ended([bucket], None, self.raw_bytes(bucket.buffer.nbytes), 0.0)

        try:
            averaged = average(bucket.buffer, self._group)
        except BaseException as error:
            # Raised at the end of backward, as what fails later is; but a Ctrl-C at once.
            self._ended([bucket], failed(error), 0, 0.0)
            if not isinstance(error, Exception):
                raise
        else:
            averaged.add_done_callback(done)
        if not within:
            self._settle()

    def _expect(self, buckets: list[_Bucket]) -> bool:
        """Have the running backward, if any, wait for these, which are about to start."""
        self._pending += [bucket.future for bucket in buckets]
        return self.backward.enter()

    def _ended(
        self,
        buckets: list[_Bucket],
        error: BaseException | None,
        wire_bytes: float,
        kernel_seconds: float,
    ) -> None:
        """These have their average, or never will; called once for each that was expected."""
        with self._lock:
            # An error that names a peer says more than torch's own, which may come first.
            if self._error is None or getattr(self._error, "peer", self) is None:
                self._error = error or self._error
            self._totals["wire_bytes"] += round(wire_bytes)
            now = time.perf_counter()
            self._totals["seconds"] += sum(now - bucket.ready for bucket in buckets)
            self._totals["kernel_seconds"] += kernel_seconds
        for bucket in buckets:
            bucket.future.set_result(bucket.buffer)

    def raw_bytes(self, nbytes: float) -> float:
        """What an uncompressed all-reduce of so many bytes sends from each rank."""
        n = self._comm.world_size
        return 2 * (n - 1) / n * nbytes

    def _content(self, bucket: dist.GradBucket, buffer: torch.Tensor) -> _Content:
        """What is in `bucket`: the same at every step, once DDP has rebuilt its buckets."""
        parameters = bucket.parameters()
        known = self._contents.get(bucket.index())
        if (
            known is None
            or len(known.parameters) != len(parameters)
            or not all(map(operator.is_, known.parameters, parameters))
        ):
            members = [self._member(p) for p in parameters]
            # of one dtype; the buffer has complex ones as pairs
            by_torch = parameters[0].dtype not in DTYPES
            parts = [] if by_torch else _parts(buffer, bucket.gradients())
            known = _Content(parameters, members, parts, by_torch)
            self._contents[bucket.index()] = known
        return known

    def _member(self, parameter: torch.Tensor) -> Attached:
        if parameter not in self._members:
            raise ConfigError(
                f"DDP hands over the gradient of a parameter of shape {tuple(parameter.shape)}, "
                f"{parameter.dtype}, that it did not synchronise at attach: detach and attach anew"
            )
        return self._members[parameter]

    def _settle(self) -> None:
        """Until every bucket that was started has its average; raises what went wrong."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()
        self._leave()
        if self._error is not None:
            raise self._error

    def _abandoned(self) -> None:
        """Backward ended by an exception: its buckets will never be complete."""
        rank, step = self._comm.rank, self._totals["steps"]
        self._arrived.clear()
        self._held.clear()
        self._pending.clear()
        self._comm.fail_owner(
            self._owner,
            TransportError(
                f"rank {rank}: backward raised an exception at step {step} of {self._owner.name}, "
                f"so its gradients are not complete: see what rank {rank} raised",
                peer=rank,
            ),
        )
        self._leave()

    def at_end(self, then: Callable[[], None]) -> None:
        """Call `then` when the pass that is under way has ended, or now if none is."""
        self._then = then
        self._leave()

    def _leave(self) -> None:
        if self._then is not None and not (self._arrived or self._pending):
            then, self._then = self._then, None
            then()


@dataclass(frozen=True)
class _Content:
    """What DDP has put into a bucket, for good: no gradients, whose memory may be replaced.

    Attributes:
        parts: each parameter's stretch of the buffer, in memory order: of any layout.
        by_torch: no codec takes this dtype.
    """

    parameters: list[torch.Tensor]
    members: list[Attached]
    parts: list[slice]
    by_torch: bool


@dataclass(frozen=True)
class _Bucket:
    """A bucket of DDP's that waits for company."""

    buffer: torch.Tensor
    members: list[Attached]
    gradients: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]
    ready: float  # time.perf_counter when DDP had it


def _parts(buffer: torch.Tensor, gradients: list[torch.Tensor]) -> list[slice]:
    """Where in the bucket each gradient lies."""
    base, width = buffer.data_ptr(), buffer.element_size()
    starts = [(g.data_ptr() - base) // width for g in gradients]
    return [slice(at, at + g.numel()) for at, g in zip(starts, gradients, strict=True)]
