"""`gradwire bench aggregators`: what averaging a model's gradients costs in CPU time and memory.

The gradients have the shapes and the values of a task's first step. Two ranks on loopback average
them through DDP in one bucket, so that all parameters share each round; backward itself only copies
given gradients. Methods take turns, each rank has one thread, and CPU time is that of the whole
process, summed over its threads, so it does not grow with other load or with waiting. The time of a
hook that does nothing is subtracted. Medians over turns of the mean over ranks.

The limit is a copy of the gradients in memory, measured in the same turns: a method of of_limit 1
takes as long as reading the gradients and writing the averages.

By default the rows are those of the sweep of ranks of UTIL 3.3, PowerSGD beside torch's hook, with
the share of the time that orthogonalisation takes; then all other aggregators at their defaults.

A row: method, task, numel, parameters (how many), seconds (CPU per backward), ms_per_million (of
values), wall_seconds (of a backward, on this machine, which the ranks share), limit_seconds,
of_limit (limit_seconds / seconds), orthogonal_share (of seconds, in orthogonalisation; null where a
method has none), rounds (collectives per backward), wire_bytes (per rank and backward), state_bytes
(kept from step to step), state_bytes_per_value, peak_extra_bytes (state, and messages in flight;
null for torch's hooks, which do not count it).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from gradwire.aggregators import registry
from gradwire.lang import lowrank
from gradwire_tools.bench import tasks, workers
from gradwire_tools.bench.given import Weights, as_hook
from gradwire_tools.bench.network.world import World
from gradwire_tools.bench.progress import progress
from gradwire_tools.bench.provenance import stamped
from gradwire_tools.bench.quantities import plural
from gradwire_tools.bench.rows import Row, row_kind
from gradwire_tools.bench.train import methods as method_table

KINDS = (
    row_kind(
        "bench aggregators",
        "method ms_per_million",
        "method:text task:text ranks:positive numel:positive seconds:number ms_per_million:number "
        "limit_seconds:amount of_limit:number? orthogonal_share:amount? rounds:count "
        "wire_bytes:amount state_bytes:amount wall_seconds:amount peak_extra_bytes:amount?",
        "parameters:count state_bytes_per_value:amount",
    ),
)

_TIMEOUT_S = 580.0
_WARM_UP = 4  # torch's PowerSGD sends its first two uncompressed; DDP rebuilds its bucket once
_ONE_BUCKET_MB = 1 << 20
_COLD = 1 << 28  # bytes, more than any cache holds
_ORTHOGONAL = (  # functions that orthogonalise
    (powerSGD_hook, "_orthogonalize"), (lowrank.Compiled, "columns"), (lowrank.Eager, "columns")
)  # fmt: skip
_RANKS, _QUICK_RANKS = (1, 4, 16, 32, 64), (4, 32)  # of matrices: UTIL's, and 32


@stamped
def run(
    methods: Sequence[str] | None = None,
    task: str = "gpt",
    ranks: int = 2,
    quick: bool = False,
) -> Iterator[Row]:
    """Yield a row per method.

    Args:
        methods: names as in `bench train`.
        task: whose gradients: "gpt" or "image".
        ranks: number of ranks.
        quick: fewer ranks of matrices and turns.

    Raises:
        ConfigError: an unknown task, method or option, or a number out of range.
        WorkerError: a rank failed.
    """
    trained = tasks.get(task)
    names = tuple(methods or default_methods(_QUICK_RANKS if quick else _RANKS))
    world = World.here(ranks, "none")
    for name in names:
        method_table.parse(name).check(ranks, tasks.shapes(trained))
    for row in workers.measured(world, _TIMEOUT_S, measure, names, task, 3 if quick else 25):
        yield {**row, "ranks": ranks}


def default_methods(ranks: Sequence[int]) -> list[str]:
    """PowerSGD, with both ways to orthogonalise, and torch's hook at each rank; all others."""
    sweep = []
    for rank in ranks:
        ours = f"powersgd:rank={rank}"
        sweep += [f"torch-powersgd:rank={rank}", ours, f"{ours}:orthogonal=qr"]
    return [*sweep, *(name for name in registry.REGISTRY if name != "powersgd")]


# ---- a rank


class _HookedDDP(DistributedDataParallel):
    """DDP that keeps the state of its communication hook."""

    state: Any = None

    def register_comm_hook(self, state: object, hook: Any) -> None:
        self.state = state
        super().register_comm_hook(state, hook)


class _Clock:
    """The CPU time spent in orthogonalisation."""

    def __init__(self) -> None:
        self.seconds = 0.0
        for owner, name in _ORTHOGONAL:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            result = function(*args, **kwargs)
            self.seconds += time.thread_time() - begun
            return result

        return timed


class _Measured:
    """One method on its own module and process group; without a name, a hook that does nothing."""

    def __init__(self, name: str | None, shapes: Sequence[torch.Size]) -> None:
        self.name = name
        self.model = _HookedDDP(
            Weights(shapes), bucket_cap_mb=_ONE_BUCKET_MB, gradient_as_bucket_view=True,
            init_sync=False, process_group=dist.new_group(backend="gloo"),
        )  # fmt: skip
        self.method = None if name is None else method_table.parse(name)
        if self.method is None:
            self.model.register_comm_hook(None, _nothing)
        else:
            self.applied = self.method.apply(self.model)
        self.steps = 0
        self.sent: list[int] = []
        self.spent: list[list[float]] = []  # CPU time, time and that of orthogonalising, of steps

    def step(self, gradients: Sequence[torch.Tensor], clock: _Clock, counts: bool) -> None:
        self.model()
        parameters = list(self.model.parameters())
        dist.barrier()
        orthogonal, begun, cpu = clock.seconds, time.perf_counter(), time.process_time()
        torch.autograd.backward(parameters, gradients)
        wall = time.perf_counter() - begun
        dist.barrier()  # a rank may still be sending
        spent = [time.process_time() - cpu, wall, clock.seconds - orthogonal]
        mean = torch.tensor(spent, dtype=torch.float64)
        dist.all_reduce(mean)
        self.steps += 1
        if self.method is not None:
            self.sent.append(self.applied.traffic(self.steps)["wire_bytes"])
        if counts:
            self.spent.append((mean / dist.get_world_size()).tolist())

    def row(self, idle: _Measured, copying: float, task: str) -> Row:
        cpu, wall, orthogonal = map(statistics.median, zip(*self.spent, strict=True))
        seconds = cpu - statistics.median(of[0] for of in idle.spent)
        numel = sum(p.numel() for p in self.model.parameters())
        state_bytes, rounds = self._state()
        return {
            "method": self.name,
            "task": task,
            "numel": numel,
            "parameters": len(list(self.model.parameters())),
            "seconds": seconds,
            "ms_per_million": 1e9 * seconds / numel,
            "wall_seconds": wall,
            "limit_seconds": copying,
            # Below the time of a hook that does nothing, a share says nothing.
            "of_limit": copying / seconds if seconds > 0 else None,
            "orthogonal_share": orthogonal / seconds if orthogonal and seconds > 0 else None,
            "rounds": rounds,
            "wire_bytes": self.sent[-1] - self.sent[-2],
            "state_bytes": state_bytes,
            "state_bytes_per_value": state_bytes / numel,
            "peak_extra_bytes": self.applied.traffic(self.steps)["peak_extra_bytes"],
        }

    def _state(self) -> tuple[int, int]:
        """(bytes kept from step to step, collectives per backward)."""
        state = self.model.state
        if isinstance(state, powerSGD_hook.PowerSGDState):
            kept = (state.error_dict, state.p_memory_dict, state.q_memory_dict)
            return sum(t.nbytes for tensors in kept for t in tensors.values()), 3
        if self.applied.handle is None:
            return 0, 1  # torch's other hooks
        stats = self.applied.handle.stats()
        return int(stats["residual_bytes"]), round(stats["calls"] / stats["steps"])


@as_hook
def _nothing(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def gradients_of(task: str, rank: int) -> list[torch.Tensor]:
    """This rank's gradients of the task's first step."""
    made = tasks.get(task)
    model = made.model(0)
    made.loss(model, made.batch(0, rank, 0)).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def measure(methods: Sequence[str], task: str, turns: int) -> list[Row]:
    """A row for each method; all take turns."""
    torch.set_num_threads(1)
    clock, gradients = _Clock(), gradients_of(task, dist.get_rank())
    shapes = [gradient.shape for gradient in gradients]
    idle, *measured = [_Measured(name, shapes) for name in (None, *methods)]
    numel = sum(gradient.numel() for gradient in gradients)
    # In no cache: so many that what was copied is displaced before its turn comes again.
    arrays = [
        torch.zeros(numel, dtype=torch.float32)
        for _ in range(max(2, min(64, _COLD // (4 * numel))))
    ]
    copies: list[float] = []
    for turn in range(_WARM_UP + turns):
        progress(f"turns of {plural(len(measured), 'method')}", turn, _WARM_UP + turns)
        for one in (idle, *measured):
            one.step(gradients, clock, counts=turn >= _WARM_UP)
        for source, target in zip(arrays[::2], arrays[1::2], strict=False):
            begun = time.thread_time()
            target.copy_(source)
            copies.append(time.thread_time() - begun)
    copying = statistics.median(copies)
    rows = [one.row(idle, copying, task) for one in measured]
    for one in measured:
        one.applied.remove()
    return rows
