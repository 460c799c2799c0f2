"""The backend "gradwire" passes operations on to gloo, with bit-identical results.

Every operation runs on a group of each backend, on equal input; what comes out must be equal, and
so must the error, where gloo has one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from ranks import on
from typed_values import same_bits

LARGE = 40_000  # values: more than GRADWIRE_MIN_BYTES

Op = Callable[[dist.ProcessGroup], Any]

_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
    torch.complex64,
)


def values(dtype: torch.dtype = torch.float32, numel: int = LARGE, salt: int = 0) -> torch.Tensor:
    """Other values on every rank, the same each time."""
    generator = torch.Generator().manual_seed(100 * salt + dist.get_rank())
    drawn = torch.randn(numel, generator=generator)
    return (
        drawn.mul(3).to(dtype) if not dtype.is_complex else torch.complex(drawn, -drawn).to(dtype)
    )


def reduced(group: dist.ProcessGroup, dtype: torch.dtype, op: str, numel: int) -> torch.Tensor:
    tensor = values(dtype, numel)
    dist.all_reduce(tensor, getattr(dist.ReduceOp, op), group=group)
    return tensor


REDUCTIONS: dict[str, Op] = {
    f"all_reduce {op} of {numel} {dtype}": partial(reduced, dtype=dtype, op=op, numel=numel)
    for dtype in _DTYPES
    for op in ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
    for numel in ((0, 1, LARGE) if dtype is torch.float32 else (LARGE,))
}


def parts(count: int | None = None) -> list[torch.Tensor]:
    """One for each rank, unless their number is given."""
    return [values(salt=n) for n in range(count or dist.get_world_size())]


def whole(salt: int = 0) -> torch.Tensor:
    return values(numel=LARGE * dist.get_world_size(), salt=salt)


def on_first(made: Any) -> Any:
    return made if dist.get_rank() == 0 else None


# Calls that write their results into their last argument, and what that is before.
Writing = tuple[Callable[[dist.ProcessGroup, Any], Any], Callable[[], Any]]
WRITING: dict[str, Writing] = {
    "broadcast": (lambda g, x: dist.broadcast(x, dist.get_world_size() - 1, g), values),
    "all_gather": (lambda g, x: dist.all_gather(x, values(), g), parts),
    "all_gather_into_tensor": (lambda g, x: dist.all_gather_into_tensor(x, values(), g), whole),
    "gather": (lambda g, x: dist.gather(values(), x, 0, g), lambda: on_first(parts())),
    "scatter": (lambda g, x: dist.scatter(x, on_first(parts()), 0, g), values),
    "reduce_scatter": (lambda g, x: dist.reduce_scatter(x, parts(), group=g), values),
    "reduce_scatter_tensor": (lambda g, x: dist.reduce_scatter_tensor(x, whole(), group=g), values),
    "all_to_all": (lambda g, x: dist.all_to_all(x, parts(), g), lambda: parts()[::-1]),
    "strided": (lambda g, x: dist.all_reduce(x, group=g), lambda: values().view(200, 200).t()),
}


def written(group: dist.ProcessGroup, name: str) -> Any:
    call, make = WRITING[name]
    into = make()
    call(group, into)
    return into


def reduce(group: dist.ProcessGroup) -> torch.Tensor | None:
    tensor = values()
    dist.reduce(tensor, dst=0, group=group)
    return on_first(tensor)  # type: ignore[no-any-return]


def all_to_all_single(group: dist.ProcessGroup) -> torch.Tensor:
    n, rank = dist.get_world_size(), dist.get_rank()
    sent, received = [10 + k + rank for k in range(n)], [10 + rank + k for k in range(n)]
    out = torch.empty(sum(received))
    dist.all_to_all_single(out, values(numel=sum(sent)), received, sent, group=group)
    return out


def point_to_point(group: dist.ProcessGroup) -> list[torch.Tensor]:
    n, rank = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return []
    got = torch.empty(LARGE)
    right, left = (rank + 1) % n, (rank - 1) % n
    sends, receives = (dist.send, values(), right), (dist.recv, got, left)
    for call, tensor, peer in (sends, receives) if rank % 2 == 0 else (receives, sends):
        call(tensor, peer, group=group, tag=7)
    batch = torch.empty(LARGE)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, values(salt=1), right, group=group),
            dist.P2POp(dist.irecv, batch, left, group=group),
        ]
    )
    for work in works:
        work.wait()
    anybody = torch.zeros(1)
    if rank == 0:
        for _ in range(n - 1):
            one = torch.empty(1)
            dist.recv(one, group=group)
            anybody += one
    else:
        dist.send(torch.full((1,), float(rank)), 0, group=group)
    return [got, batch, anybody]


def objects(group: dist.ProcessGroup) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank()}, group=group)
    told = [("from", dist.get_rank())]
    dist.broadcast_object_list(told, src=0, group=group)
    return [gathered, told]


def barriers(group: dist.ProcessGroup) -> None:
    dist.barrier(group=group)
    work = dist.barrier(group=group, async_op=True)
    work.wait()
    group.monitored_barrier(timedelta(seconds=20), wait_all_ranks=True)


def coalesced(group: dist.ProcessGroup) -> list[torch.Tensor]:
    tensors, more = parts(3), parts(3)
    with dist._coalescing_manager(group=group):
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    group.allreduce_coalesced(more, dist.AllreduceCoalescedOptions()).wait()
    gathered = [whole(2), whole(3)]
    group.allgather_into_tensor_coalesced(gathered, parts(2)).wait()
    mine, options = parts(2), dist.ReduceScatterOptions()
    group.reduce_scatter_tensor_coalesced(mine, [whole(), whole(1)], options).wait()
    return tensors + more + gathered + mine


def functions(group: dist.ProcessGroup) -> list[torch.Tensor]:
    made = [
        functional.all_reduce(values(), "sum", group),
        functional.all_gather_tensor(values(), 0, group),
        functional.reduce_scatter_tensor(whole(), "sum", 0, group),
        functional.all_to_all_single(whole(), None, None, group),
        functional.broadcast(values(), 0, group),
    ]
    return [torch.ops._c10d_functional.wait_tensor(tensor) for tensor in made]


def sparse(group: dist.ProcessGroup) -> torch.Tensor:
    rank = dist.get_rank()
    tensor = torch.sparse_coo_tensor([[rank, rank + 1]], [1.0, 2.0], (20_000,))
    dist.all_reduce(tensor, group=group)
    return tensor.to_dense()


def in_every_spelling(group: dist.ProcessGroup) -> list[torch.Tensor]:
    one, two, three, four = parts(4)
    group.allreduce(one).wait()
    group.allreduce([two], dist.ReduceOp.MAX).wait()
    group.allreduce(three, op=dist.ReduceOp.AVG).wait()
    group.allreduce([four], opts=dist.AllreduceOptions()).wait()
    future = group.allreduce([values(salt=5)]).get_future()
    return [one, two, three, four, future.wait()[0]]


def wrong_sizes(group: dist.ProcessGroup) -> None:
    dist.reduce_scatter_tensor(torch.empty(7), torch.empty(LARGE), group=group)


OPERATIONS: dict[str, Op] = {name: partial(written, name=name) for name in WRITING} | {
    op.__name__: op
    for op in (
        reduce,
        all_to_all_single,
        point_to_point,
        objects,
        barriers,
        coalesced,
        functions,
        sparse,
        in_every_spelling,
        wrong_sizes,
    )
    # torch 2.9's gloo ends the process instead of raising.
    if op is not wrong_sizes or torch.__version__ >= (2, 13)
}


def during_backward(action: Callable[[], Any]) -> Any:
    """The result of `action` when autograd runs it."""
    made: list[Any] = []
    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(lambda gradient: made.append(action()))
    (leaf * 2).sum().backward()
    return made[0]


def outcome(op: Op, group: dist.ProcessGroup, where: Callable[[Callable[[], Any]], Any]) -> Any:
    """The result of `op`, or its error without addresses and file names."""
    try:
        return where(lambda: op(group))
    except Exception as error:
        return type(error).__name__, str(error).splitlines()[0].split("] ")[-1]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and same_bits(one, other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@on(3, backend="gradwire")
@on((1, 4), backend="gradwire", exhaustive=True)
def test_every_operation_has_the_outcome_of_gloo(rank: int) -> None:
    warnings.simplefilter("ignore")
    ours, gloo = dist.group.WORLD, dist.new_group(backend="gloo")
    assert ours is not None
    assert dist.get_backend() == "gradwire"
    differing = []
    for name, op in (REDUCTIONS | OPERATIONS).items():
        for where in (lambda action: action(), during_backward):
            before = ours.stats()["calls"]  # type: ignore[attr-defined]
            if not equal(outcome(op, ours, where), outcome(op, gloo, where)):
                differing.append(f"{name}, {where.__name__}")
            if ours.stats()["calls"] != before:  # type: ignore[attr-defined]
                differing.append(f"{name}, {where.__name__}: compressed")
    assert not differing, differing


def split_in_two() -> None:
    """Refused by a torch that splits groups of accelerators only, as before 2.15; else right."""
    try:
        child = dist.split_group(split_ranks=[[0, 1], [2]])
    except RuntimeError as error:
        if torch.__version__ >= (2, 15) or "split" not in str(error):
            raise
        return
    assert isinstance(child, type(dist.group.WORLD))
    assert child.size() == (2 if dist.get_rank() < 2 else 1)
    tensor = torch.ones(3)
    dist.all_reduce(tensor, group=child)
    assert tensor.tolist() == [child.size()] * 3
    dist.destroy_process_group(child)


@on(3, backend="gradwire")
def test_groups_of_some_ranks(rank: int) -> None:
    """Groups of some ranks, overlapping and nested, of both backends, used at once."""
    warnings.simplefilter("ignore")
    members = [[0, 1], [1, 2], [0, 2], [0, 1, 2]]
    made = [(dist.new_group(m), dist.new_group(m, backend="gloo")) for m in members]
    works = []
    for pair, ranks in zip(made, members, strict=True):
        if rank in ranks:
            for group in pair:
                tensor = values()
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
    for work, _ in works:
        assert work is not None
        work.wait()
    results = [tensor for _, tensor in works]
    assert len(results) >= 6
    for one, other in zip(results[::2], results[1::2], strict=True):
        assert same_bits(one, other)
    apart, groups = dist.new_subgroups_by_enumeration([[0], [1, 2]])
    assert isinstance(apart, type(dist.group.WORLD))
    assert [dist.get_world_size(g) for g in groups if g != dist.GroupMember.NON_GROUP_MEMBER]
    assert apart.size() == (1 if rank == 0 else 2)
    split_in_two()
    for group, _ in made:
        dist.destroy_process_group(group) if isinstance(group, dist.ProcessGroup) else None
    dist.barrier()
