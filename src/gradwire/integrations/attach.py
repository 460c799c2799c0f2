"""`gw.attach(ddp_model)`: one line that compresses what DDP sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import Member, Rounds
from gradwire.codecs import Identity
from gradwire.collectives import DTYPES, Options, check_defined, check_feedback
from gradwire.collectives.calling import check_seed, future_on
from gradwire.engine import Communicator, Outcome
from gradwire.errors import ConfigError, TransportError
from gradwire.groups import communicator
from gradwire.integrations.hook import Plug, average, socket_of
from gradwire.integrations.state import merge_states
from gradwire.integrations.synchronised import synchronised
from gradwire.lang import Codec, layout, rng
from gradwire.planner import Plan, make_plan


def attach(
    model: DistributedDataParallel,
    codec: str | Codec | None = "qsgd",
    *,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    codecs: Mapping[str, str | Codec | None] | None = None,
    error_feedback: bool = False,
    seed: int = 0,
    algorithm: str | None = None,
    options: Options | None = None,
    coalesce_bytes: int = 1 << 18,
    **codec_options: object,
) -> Handle:
    """Compress the gradients that `model` synchronises; nothing else of the process is touched.

    Call it on every rank, with the same arguments, after wrapping the module:

        model = DistributedDataParallel(model)
        gw.attach(model, bits=4)

    Args:
        model: its parameters are on the CPU or on one GPU. Those in fp32, fp16 or bf16 are
            gradwire's; torch's own all-reduce averages the others (float64, complex). Over NCCL,
            what a GPU has goes from GPU to GPU; over gloo alone by way of the host's memory.
        codec: for parameters of two dimensions and more: a name with its options as further
            keywords (see `gradwire codec list`), a Codec, or None for none.
        include: name patterns ("*.bias") to compress although they have fewer dimensions.
        exclude: name patterns to leave dense.
        codecs: name pattern -> codec (a name, a Codec, or None for dense); the first match wins
            over everything else.
        error_feedback: keep what was not sent, one fp32 residual a compressed parameter, and add
            it to the next step's gradient.
        seed: of the codecs' random numbers; not negative.
        algorithm: of every all-reduce, a name (docs/algorithms.md); None leaves it to `options`.
        options: algorithm, segments, checksum, kernels.
        coalesce_bytes: DDP's buckets smaller than this wait for the next ones, until they have as
            many bytes together, or there are no more; 0 sends each alone.

    Returns:
        A handle with statistics and state.

    Raises:
        ConfigError: not a DDP module, attached already, an argument of a wrong type or value (it is
            named), nothing to synchronise, sparse gradients,
            unknown codec, algorithm, option or pattern, a codec that is not defined in the
            algorithm, one for a parameter of a dtype that codecs do not take, or ranks that
            disagree (the first parameter that differs is named).
    """
    if not (options is None or isinstance(options, Options)):
        raise ConfigError(f"options={options!r}: give a gradwire.Options(...), or None")
    options = options or Options()
    if algorithm is not None:
        options = replace(options, algorithm=algorithm)
    check_seed(seed)
    if type(coalesce_bytes) is not int or coalesce_bytes < 0:
        raise ConfigError(f"coalesce_bytes={coalesce_bytes!r}: give a number of bytes, 0 or more")
    socket = socket_of(model)
    if socket.handle is not None:
        raise ConfigError(
            "this module has a handle attached: call its detach() before attaching anew"
        )
    comm = communicator(model.process_group)
    named = synchronised(model)
    device = named[0][1].device
    away = next(((n, p.device) for n, p in named if p.device != device), None)
    if away is not None or device.type not in ("cpu", "cuda"):
        raise ConfigError(
            f"parameter {named[0][0]} is on {device}" + (", {} on {}".format(*away) if away else "")
            + ": gradwire needs all of them on the CPU, or on one GPU"
        )  # fmt: skip
    plan = make_plan(
        named, codec, codec_options, comm.world_size, include, exclude, codecs, error_feedback
    )
    for parameter in plan.parameters:
        if parameter.codec is not None:
            check_defined(options.algorithm, parameter.codec)
            if error_feedback:
                check_feedback(parameter.codec)
    agreed = [f"seed {seed}, buckets of {coalesce_bytes} bytes", str(options)]
    comm.agree("what is attached", [*agreed, *plan.describe()])
    handle = Handle(dict(named), plan, comm, seed, options, coalesce_bytes)
    socket.handle = handle
    handle._socket = socket
    return handle


class Handle(Plug):
    """What `attach` returns: statistics, state, and the way back.

    Attributes:
        plan: how each parameter is synchronised.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.Tensor],
        plan: Plan,
        comm: Communicator,
        seed: int,
        options: Options,
        coalesce_bytes: int = 0,
    ) -> None:
        self.plan = plan
        self._comm = comm
        self._seed = seed
        self._options = options
        self._socket: Any = None
        self._members = {
            p.name: Member(
                p.name, p.aggregator(), rng.parameter_keys(seed, p.name, comm.rank), p.rotation
            )
            for p in plan.parameters
        }
        self._by_parameter = {parameters[name]: member for name, member in self._members.items()}
        self._lock = threading.Lock()
        self._totals = {"steps": 0, "wire_bytes": 0, "gradient_bytes": 0, "seconds": 0.0}
        self._totals["kernel_seconds"] = 0.0
        self._coalesce_bytes = coalesce_bytes
        self._held: list[_Bucket] = []
        self._pending: list[torch.futures.Future[torch.Tensor]] = []
        self._backward = _NO_BACKWARD
        self._error: BaseException | None = None

    # ---- each bucket

    def reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average `bucket`; called by DDP while backward runs: what it starts ends beside it.

        A rank that has joined early (`with model.join()`) mirrors the others' buckets outside any
        backward; then the average is awaited here.
        """
        buffer = bucket.buffer()
        parameters = bucket.parameters()  # of one dtype; the buffer has complex ones as pairs
        members = [self._member(p) for p in parameters]
        if bucket.index() == 0:
            for stale in self._held:  # of a backward that has failed
                stale.future.set_result(stale.buffer)
            self._held.clear()
        if bucket.is_last():
            self._totals["steps"] += 1
        self._totals["gradient_bytes"] += buffer.numel() * buffer.dtype.itemsize

        future = future_on(buffer.device)
        by_torch = parameters[0].dtype not in DTYPES
        gradients = [] if by_torch else _flat(buffer, bucket.gradients())
        ready = _Bucket(buffer, members, gradients, future, time.perf_counter())
        # All ranks hold and start the same buckets, in the same order: nothing depends on time.
        if by_torch:
            self._start_by_torch(ready)
        else:
            self._held.append(ready)
        held = sum(b.buffer.nbytes for b in self._held)
        if self._held and (held >= self._coalesce_bytes or bucket.is_last()):
            self._start()
        return future

    def _start(self) -> None:
        """Average the buckets held, in one collective."""
        held, self._held = self._held, []
        self._expect(held)
        members = [member for bucket in held for member in bucket.members]
        gradients = [gradient for bucket in held for gradient in bucket.gradients]

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            sent = sum(o.wire_bytes for o in outcomes)
            self._ended(held, error, sent, sum(o.kernel_seconds for o in outcomes))

        try:
            Rounds(self._comm, members, gradients, self._options, done).start()
        except BaseException as error:
            done(error, [])  # or a later backward would wait for these buckets
            raise
        if self._backward == _NO_BACKWARD:
            self._wait()

    def _start_by_torch(self, bucket: _Bucket) -> None:
        """Average a bucket that no codec takes: through torch's own all-reduce."""
        self._expect([bucket])
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
                self._ended([bucket], None, self._raw_bytes(bucket.buffer.nbytes), 0.0)

        try:
            averaged = average(bucket.buffer, self._socket.group)
        except BaseException as error:
            # Raised at the end of backward, as what fails later is; but a Ctrl-C at once.
            self._ended([bucket], failed(error), 0, 0.0)
            if not isinstance(error, Exception):
                raise
        else:
            averaged.add_done_callback(done)
        if self._backward == _NO_BACKWARD:
            self._wait()

    def _expect(self, buckets: list[_Bucket]) -> None:
        """Have the running backward wait for these, which are about to start."""
        # One backward pass of the user's may be several of autograd's (reentrant checkpointing, or
        # a loss in parts), so a bucket is waited for in the one that starts its collective.
        backward = torch._C._current_graph_task_id()
        if backward not in (_NO_BACKWARD, self._backward):
            # At the end of this backward, before DDP looks at the futures: it would turn an
            # error of ours into a RuntimeError without its name.
            Variable._execution_engine.queue_callback(self._wait)
        self._backward = backward
        self._pending += [bucket.future for bucket in buckets]

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

    def _raw_bytes(self, nbytes: float) -> float:
        """What an uncompressed all-reduce of so many bytes sends from each rank."""
        n = self._comm.world_size
        return 2 * (n - 1) / n * nbytes

    def _member(self, parameter: torch.Tensor) -> Member:
        if parameter not in self._by_parameter:
            raise ConfigError(
                f"DDP hands over the gradient of a parameter of shape {tuple(parameter.shape)}, "
                f"{parameter.dtype}, that it did not synchronise at attach: detach and attach anew"
            )
        return self._by_parameter[parameter]

    def _wait(self) -> None:
        """Until every bucket that was started has its average; raises what went wrong."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.wait()
        if self._error is not None:
            raise self._error

    # ---- what a user asks

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
        with self._lock:
            totals = dict(self._totals)
        raw = self._raw_bytes(totals.pop("gradient_bytes"))
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
        return {
            **totals,
            "raw_bytes": round(raw),
            "ratio": raw / wire if wire else None,
            "residual_bytes": residual,
            "shared_bytes": self._comm.transport.shared_bytes,
            "lent_bytes": self._comm.transport.lent_bytes,
            "peak_extra_bytes": self._comm.peak_bytes + residual,
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
        """Give the module back to plain averaging. The statistics and state stay readable."""
        if self._socket is not None and self._socket.handle is self:
            self._socket.handle = None
        self._socket = None


@dataclass(frozen=True)
class _Bucket:
    """A bucket of DDP's that waits for company."""

    buffer: torch.Tensor
    members: list[Member]
    gradients: list[torch.Tensor]
    future: torch.futures.Future[torch.Tensor]
    ready: float  # time.perf_counter when DDP had it


_NO_BACKWARD = -1  # what autograd calls the running backward where there is none


def _flat(buffer: torch.Tensor, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each gradient's stretch of the bucket, 1-D, in memory order: of any layout."""
    base, width = buffer.data_ptr(), buffer.element_size()
    starts = [(g.data_ptr() - base) // width for g in gradients]
    return [buffer[at : at + g.numel()] for at, g in zip(starts, gradients, strict=True)]
