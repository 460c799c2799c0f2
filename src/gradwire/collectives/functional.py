"""The public functions: collectives on one tensor, with torch's calling conventions, and the state
that they need to resume.

`reduce_scatter` and `all_gather` correspond to torch's reduce_scatter_tensor and
all_gather_into_tensor: one tensor consists of world_size equal parts, of any size; part n is the
*shard* of rank n. They are the halves of SRA, or their forms in two levels.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial, wraps
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gradwire.collectives.calling import (
    Async,
    Op,
    begin,
    check_tensor,
    codec_of,
    flat,
    flat_residual,
    future_on,
    op_of,
    options_of,
)
from gradwire.collectives.options import OF_ATTACH, Options, check_seed
from gradwire.collectives.typed import AllGather, AllReduce, Broadcast, ReduceScatter, Request
from gradwire.engine import Communicator, Outcome
from gradwire.errors import ConfigError
from gradwire.groups import communicator
from gradwire.lang import Codec, rng
from gradwire.waiting import result_of

P = ParamSpec("P")
T = TypeVar("T")
_COUNTED = 1 << 62  # steps from here on belong to calls without a given step


def _told(call: Callable[P, T]) -> Callable[P, T]:
    """A public call: one thread at a time makes them, and its peers are told what it raises, in
    case they wait for it in vain."""

    @wraps(call)
    def run(*arguments: P.args, **named: P.kwargs) -> T:
        if not dist.is_initialized() and "group" not in named:
            return call(*arguments, **named)  # which says so, or else what is wrong
        comm = _communicator(named.get("group"))  # type: ignore[arg-type]
        comm.calls.check_process()
        issued, alone = comm.calls.core.issued, comm.calls.calling.acquire(blocking=False)
        try:
            if not alone:
                raise ConfigError(
                    f"{call.__name__}: another thread is in a collective of this process group, "
                    "and ranks may meet the two in different orders: call them one after the "
                    "other, in the same order on all ranks, or give each thread a process group "
                    "of its own"
                )
            return call(*arguments, **named)
        except Exception as error:
            if comm.calls.core.issued == issued:
                comm.watchdog.refused(error)
            raise
        finally:
            if alone:
                comm.calls.calling.release()

    return run


@_told
def all_reduce(
    tensor: torch.Tensor,
    codec: str | Codec | None = "qsgd",
    *,
    op: Op = "sum",
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Reduce `tensor` over all ranks, in place, compressed or not (CGX 4.1).

    Every rank ends with bit-identical values. With one rank, `tensor` is unchanged.

    Args:
        tensor: on the CPU or a GPU, any shape and layout. Through a codec: fp32, fp16 or bf16.
        codec: a name (see `gradwire codec list`) with its options as keywords, a Codec, or None:
            the values travel uncompressed, integers and float64 too.
        op: "sum", "avg", "min" or "max", or torch's ReduceOp.SUM, AVG, MIN or MAX; the last two
            without a codec.
        algorithm: a name (docs/reference/algorithms.md); None leaves it to `options`.
        group: a process group; None is the default one.
        async_op: return a future at once; its `wait()` gives the tensor. Over NCCL nothing waits
            on the host, with it or without: the current stream does.
        residual: error feedback: fp32, `tensor.numel()` values, zeros at first; it is added before
            encoding, and holds what was not sent afterwards.
        seed, step, name: together with the rank, they determine the codec's random numbers. Calls
            without a step are counted per group, and each draws its own numbers; `gw.state_dict`
            saves the count, so that a restarted run draws the same numbers.
        options: algorithm, segments, checksum.

    Raises:
        ConfigError: unknown codec, op or algorithm; what docs/reference/algorithms.md does not
            list; ranks that disagree; or another thread is in a call on this group.
        TransportError: a peer or link failed.
        CodecError: a payload arrived corrupted.
    """
    wire = codec_of(all_reduce, codec, codec_options)
    comm, chosen = _checked(group, options, algorithm, seed, step)
    check_tensor("tensor", tensor)
    kept = flat_residual(residual, tensor.numel(), tensor)
    request = AllReduce(flat(tensor), op_of(op), kept, codec=wire)
    return _run(comm, chosen, request, tensor, async_op, seed, step, name)


@_told
def reduce_scatter(
    output: torch.Tensor,
    input: torch.Tensor,
    codec: str | Codec | None = "qsgd",
    *,
    op: Op = "sum",
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Reduce `input` over all ranks, compressed or not; rank n gets shard n.

    A rank's contribution to its own shard is not encoded, and neither is the sum. With algorithm
    "hierarchical", the ranks of a machine first sum what they send to other machines.

    Args:
        output: this rank's shard of the result; `input`'s dtype, any shape. It may be this rank's
            shard of `input` itself; otherwise `input` is unchanged.
        input: on the CPU or a GPU; world_size * output.numel() values, the shards in rank order.
            With a codec: fp32, fp16 or bf16.
        residual: error feedback: fp32, `input.numel()` values, zeros at first. Its part for this
            rank's shard is neither used nor changed.
        codec, op, group, async_op, seed, step, name, options: as in `all_reduce`; the future's
            value is `output`.
        algorithm: "sra", of which this is one half; or "hierarchical", for machines of several
            ranks, which works on a copy of `input`.

    Raises:
        ConfigError: as `all_reduce`, or sizes do not match.
        TransportError, CodecError: as `all_reduce`.
    """
    wire = codec_of(reduce_scatter, codec, codec_options)
    comm, chosen = _checked(group, options, algorithm, seed, step)
    _check_shards(comm, whole=("input", input), shard=("output", output))
    kept = flat_residual(residual, input.numel(), input, output)
    values, home = flat(input), flat(output)
    home.copy_(values[comm.rank * home.numel() :][: home.numel()])
    if chosen.algorithm == "hierarchical":
        values = values.clone()  # sums of machines replace some of them
    request = ReduceScatter(values, op_of(op), residual=kept, home=home, codec=wire)
    return _run(comm, chosen, request, output, async_op, seed, step, name)


@_told
def all_gather(
    output: torch.Tensor,
    input: torch.Tensor,
    codec: str | Codec | None = "qsgd",
    *,
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Gather every rank's `input`, compressed or not, into `output` on every rank, in rank order.

    Every rank ends with bit-identical values: a rank's own shard, too, is its decoded payload.

    Args:
        output: `input`'s dtype, world_size * input.numel() values, any shape.
        input: on the CPU or a GPU, any shape; unchanged, unless it is this rank's shard of
            `output`. With a codec: fp32, fp16 or bf16.
        codec, group, async_op, seed, step, name, options: as in `all_reduce`; the future's value
            is `output`.
        algorithm: "sra", of which this is one half; or "hierarchical", for machines of several
            ranks: the same results.

    Raises:
        ConfigError: as `all_reduce`, or sizes do not match.
        TransportError, CodecError: as `all_reduce`.
    """
    wire = codec_of(all_gather, codec, codec_options)
    comm, chosen = _checked(group, options, algorithm, seed, step)
    _check_shards(comm, whole=("output", output), shard=("input", input))
    request = AllGather(flat(input), into=flat(output), codec=wire)
    return _run(comm, chosen, request, output, async_op, seed, step, name)


@_told
def broadcast(
    tensor: torch.Tensor,
    root: int = 0,
    codec: str | Codec | None = None,
    *,
    algorithm: str | None = None,
    group: dist.ProcessGroup | Communicator | None = None,
    async_op: bool = False,
    seed: int = 0,
    step: int | None = None,
    name: str = "tensor",
    options: Options | None = None,
    **codec_options: object,
) -> Async | None:
    """Replace every rank's `tensor` by that of rank `root` (of the group), in place.

    With a codec all ranks, the root too, end with the decoded payload: bit-identical values.

    Args:
        tensor: on the CPU or a GPU, any shape and layout. Through a codec: fp32, fp16 or bf16.
        root: the source, a rank within `group`.
        codec: as in `all_reduce`; None: the values travel uncompressed, whatever their dtype.
        algorithm: "sra" (scatter, then all-gather) or "tree", for few values.
        group, async_op, seed, step, name, options: as in `all_reduce`.

    Raises:
        ConfigError, TransportError, CodecError: as `all_reduce`.
    """
    wire = codec_of(broadcast, codec, codec_options)
    comm, chosen = _checked(group, options, algorithm, seed, step)
    check_tensor("tensor", tensor)
    request = Broadcast(flat(tensor), root, codec=wire)
    return _run(comm, chosen, request, tensor, async_op, seed, step, name)


def state_dict(group: dist.ProcessGroup | Communicator | None = None) -> dict[str, int]:
    """The state of `gw.all_reduce` and its like on a group, the same on every rank.

    It holds how many calls named no `step`, from which their random numbers derive. What a handle
    needs is in the handle's own state.
    """
    return {"calls": _communicator(group).counted}


def load_state_dict(
    state: Mapping[str, int], group: dist.ProcessGroup | Communicator | None = None
) -> None:
    """Go on from `state_dict()`, on every rank, between calls.

    Raises:
        ConfigError: it is not what `state_dict` returns.
    """
    calls = state.get("calls") if isinstance(state, Mapping) else None
    if type(calls) is not int or not 0 <= calls < _COUNTED >> 1 or len(state) != 1:
        raise ConfigError(f"state {state!r:.60} is not what gradwire.state_dict() returns")
    _communicator(group).counted = calls


def _communicator(group: dist.ProcessGroup | Communicator | None) -> Communicator:
    return group if isinstance(group, Communicator) else communicator(group)


def _checked(
    group: dist.ProcessGroup | Communicator | None,
    options: Options | None,
    algorithm: str | None,
    seed: int,
    step: int | None,
) -> tuple[Communicator, Options]:
    """What a call's common arguments stand for; raises ConfigError if one is wrong."""
    check_seed(seed)
    if step is not None and (type(step) is not int or not 0 <= step < _COUNTED):
        raise ConfigError(f"step is {step!r}, must be a whole number, 0 or more, or None")
    chosen = options_of(options, algorithm)
    for name in OF_ATTACH:
        if getattr(chosen, name) is not None:
            raise ConfigError(f"options: {name} of gw.Options is for gw.attach: leave it out")
    return _communicator(group), chosen


def _check_shards(
    comm: Communicator, whole: tuple[str, torch.Tensor], shard: tuple[str, torch.Tensor]
) -> None:
    """Raise ConfigError unless `whole` has a shard like `shard` for every rank."""
    for name, tensor in (whole, shard):
        check_tensor(name, tensor)
    (whole_name, all_values), (shard_name, own) = whole, shard
    if all_values.numel() != comm.world_size * own.numel():
        raise ConfigError(
            f"{whole_name} has {all_values.numel()} values; with {comm.world_size} ranks it must "
            f"have {comm.world_size * own.numel()} values: {comm.world_size} x {shard_name}'s"
        )
    if all_values.dtype != own.dtype:
        raise ConfigError(
            f"{whole_name} is {all_values.dtype} and {shard_name} is {own.dtype}; give both the "
            "same dtype"
        )


def _run(
    comm: Communicator,
    options: Options,
    request: Request,
    output: torch.Tensor,
    async_op: bool,
    seed: int,
    step: int | None,
    name: str,
) -> Async | None:
    """Run a collective and move its result to `output`; or, if `async_op`, return a future of it.

    Raises:
        ConfigError: as `begin`, or the call would wait on the thread that must do the work.
        CodecError, TransportError: as the public functions.
    """
    if not async_op and comm.workers.owns(threading.current_thread()):
        raise ConfigError(
            f"{request.verb} was called in a callback on gradwire's own thread, where waiting "
            "would deadlock: use async_op=True"
        )
    keys = rng.parameter_keys(seed, name, comm.rank)
    # Ranks make the same calls, so they count the same: those that are legal.
    number = partial(int, step) if step is not None else lambda: _COUNTED | comm.count()
    running, values = begin(comm.calls, request, name, options, keys, number)

    def finish() -> torch.Tensor:
        if values.data_ptr() != output.data_ptr():
            output.detach().copy_(values.view(output.shape))
        return output

    if not async_op:
        with comm.calls.awaited():
            result_of(running)
        finish()
        return None
    result: Async = future_on(output.device)

    def ended(outcome: Future[Outcome]) -> None:
        try:
            outcome.result()
            finished = finish()
        except BaseException as error:
            result.set_exception(error)  # type: ignore[arg-type]
        else:
            result.set_result(finished)

    running.add_done_callback(ended)
    return result
