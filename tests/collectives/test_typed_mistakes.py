"""Mistakes in calls of typed collectives: by all ranks alike, or by one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import QSGD, ConfigError, Options
from gradwire.collectives import (
    AllGather,
    AllReduce,
    Broadcast,
    ReduceScatter,
    Request,
)
from gradwire.engine import Communicator
from gradwire.lang import Exact
from gradwire.transport import Hub
from ranks import as_threads, caught
from rooms.collectives import begin
from typed_values import check_group

# ---- mistakes that all ranks make

X = torch.zeros


def quantised() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will leave them out some day
        return torch.empty(4, dtype=torch.quint8)


def request(made: Callable[[], Request]) -> Callable[[Communicator], object]:
    return lambda comm: begin(comm, made(), "w", 0, None, Options())[0].result(20)


MISTAKES: dict[str, tuple[Callable[[Communicator], object], str]] = {
    "op": (
        lambda c: gw.all_reduce(X(4), None, op="mean", group=c),
        "op='mean': use one of sum, avg, min, max",
    ),
    "op of another type": (
        lambda c: gw.all_reduce(X(4), None, op=["sum"], group=c),  # type: ignore[arg-type]
        "op=['sum']: give one of 'sum'",
    ),
    "root above": (
        lambda c: gw.broadcast(X(4), 2, group=c),
        "tensor: broadcast(root=2) has no such root: use one of the ranks 0 to 1",
    ),
    "root below": (
        lambda c: gw.broadcast(X(4), -1, group=c, algorithm="tree"),
        "tensor: broadcast(root=-1) has no such root: use one of the ranks 0 to 1",
    ),
    "root of bool": (lambda c: gw.broadcast(X(4), True, group=c), "root=True: give a rank"),
    "root of float": (request(lambda: Broadcast(X(4), 1.0)), "root=1.0: give a rank"),  # type: ignore[arg-type]
    "root of text": (request(lambda: Broadcast(X(4), "0")), "root='0': give a rank"),  # type: ignore[arg-type]
    "codec options": (
        lambda c: gw.broadcast(X(4), 0, None, bits=4, group=c),
        "options bits go with a codec's name, not with codec=None",
    ),
    "codec's name": (
        request(lambda: AllReduce(X(4), codec="qsgd")),  # type: ignore[arg-type]
        "codec='qsgd': give a codec object, gradwire.codecs.get('qsgd'), or None",
    ),
    "algorithm": (
        lambda c: gw.all_reduce(X(4), None, algorithm="rings", group=c),
        "unknown algorithm 'rings': did you mean 'ring'? Else use one of all_gather",
    ),
    "algorithm of another type": (
        lambda c: gw.all_reduce(X(4), None, algorithm=["sra"], group=c),  # type: ignore[arg-type]
        "algorithm=['sra']: give a name",
    ),
    "coordinated": (
        lambda c: gw.broadcast(X(4), group=c, options=Options(coordinated=True)),
        "tensor: broadcast(root=0) has no coordinated rounds",
    ),
    "Exact of another operator": (
        lambda c: gw.all_reduce(X(4), Exact("max"), op="sum", group=c),
        "tensor: all_reduce(sum) of torch.float32 through Exact(op='max') is not defined",
    ),
    "Exact that only copies": (
        lambda c: gw.all_reduce(X(4), Exact(""), op="sum", group=c),
        "through Exact(op='') is not defined",
    ),
    "quantised": (
        lambda c: gw.broadcast(quantised(), group=c),
        "tensor: broadcast(root=0) of torch.quint8 is not defined",
    ),
    "lengths of another world": (
        request(lambda: ReduceScatter(X(4), lengths=(1, 1, 2))),
        "w: 4 values cannot be cut into shards of (1, 1, 2): give lengths= for each of 2 ranks",
    ),
    "negative lengths": (
        request(lambda: ReduceScatter(X(4), lengths=(-1, 5))),
        "w: 4 values cannot be cut into shards of (-1, 5)",
    ),
    "lengths of another sum": (
        request(lambda: ReduceScatter(X(4), lengths=(1, 1))),
        "w: `values` holds 4 x torch.float32 on cpu, contiguous; it must hold 2 x",
    ),
    "lengths of another type": (
        request(lambda: ReduceScatter(X(4), lengths=[1, 3])),  # type: ignore[arg-type]
        "lengths=[1, 3]: give a tuple",
    ),
    "no lengths": (
        request(lambda: ReduceScatter(X(5))),
        "w: 5 values cannot be cut into 2 shards: give lengths=",
    ),
    "a short stride": (
        request(lambda: ReduceScatter(X(5), lengths=(1, 3), stride=2)),
        "w: shards of (1, 3) overlap at stride=2: give a stride= of at least 3",
    ),
    "a stride of another type": (
        request(lambda: ReduceScatter(X(5), lengths=(1, 3), stride=3.0)),  # type: ignore[arg-type]
        "stride=3.0: give a number of values",
    ),
    "memory of another stride": (
        request(lambda: ReduceScatter(X(5), lengths=(1, 3), stride=3)),
        "w: `values` holds 5 x torch.float32 on cpu, contiguous; it must hold 6 x",
    ),
    "a stride that does not fit": (
        request(lambda: ReduceScatter(X(9), stride=3)),
        "w: 9 values cannot be 2 equal shards with stride 3",
    ),
    "a home of another length": (
        request(lambda: ReduceScatter(X(4), home=X(1))),
        "w: `shard` holds 1 x torch.float32 on cpu, contiguous; it must hold 2 x",
    ),
    "a residual of another length": (
        request(lambda: ReduceScatter(X(4), residual=X(1))),
        "w: `residual` holds 1 x torch.float32 on cpu, contiguous; it must hold 4 x",
    ),
    "lengths of other ranks": (
        request(lambda: AllGather(X(4), lengths=(3, 3))), "has 4 values; lengths["
    ),
    "little room": (
        request(lambda: AllGather(X(4), into=X(7))),
        "w: `into` holds 7 x torch.float32 on cpu, contiguous; it must hold 8 x",
    ),
    "room of another dtype": (
        request(lambda: AllGather(X(4), into=X(8).half())),
        "w: `into` holds 8 x torch.float16 on cpu, contiguous; it must hold 8 x torch.float32",
    ),
    "room in rows": (
        request(lambda: AllGather(X(4), into=X(8, 1))), "w: `into` has 2 dimensions, not 1"
    ),
    "a conjugated view": (
        request(lambda: Broadcast(X(4, dtype=torch.complex64).conj())),
        "a view that negates its imaginary part",
    ),
}  # fmt: skip


def test_a_mistake_of_all_ranks_leaves_the_group_whole() -> None:
    def body(comm: Communicator) -> list[str]:
        faults = []
        for mistake, (act, text) in MISTAKES.items():
            error = caught(lambda act=act: act(comm))
            if not isinstance(error, ConfigError) or text not in str(error):
                faults.append(f"{mistake}: {error!r}")
            check_group(comm)
        return faults

    assert as_threads(2, body) == [[], []]


# ---- ranks that differ


def reduces(**how: Any) -> Callable[[Communicator], object]:
    codec = how.pop("codec", None)
    return lambda comm: gw.all_reduce(X(300), codec, group=comm, **how)


def broadcasts(root: int, **how: Any) -> Callable[[Communicator], object]:
    return lambda comm: gw.broadcast(X(300), root, group=comm, **how)


def scatters(lengths: tuple[int, ...]) -> Callable[[Communicator], object]:
    lengths += (0,)
    return lambda comm: begin(
        comm, ReduceScatter(X(4), lengths=lengths[: comm.world_size]), "w", 0, 0, Options()
    )[0].result(30)


# The call of most ranks, the call of rank 1, what the error must say, and whether every rank waits
# for the others even if all have agreed on both calls before. On links whose sends end at once, a
# root does not wait; over gloo and shared memory it does (test_typed_processes.py).
DIFFERENCES: dict[str, tuple[Any, Any, list[str], bool]] = {
    "op": (reduces(op="min"), reduces(op="max"), ["all_reduce(min)", "all_reduce(max)"], True),
    "codec": (reduces(), reduces(codec=QSGD()), ["Identity()", "QSGD("], True),
    "verb": (reduces(), scatters((2, 2)), ["all_reduce(sum)", "reduce_scatter(avg)"], True),
    "lengths": (scatters((1, 3)), scatters((3, 1)), ["(1, 3", "(3, 1"], False),
    "root": (broadcasts(0), broadcasts(1), ["root=0", "root=1"], False),
    "root of a tree": (
        broadcasts(0, algorithm="tree"), broadcasts(1, algorithm="tree"), ["root=0", "root=1"],
        False,
    ),
    "a broadcast's codec": (broadcasts(1), broadcasts(1, codec="qsgd"), ["QSGD("], False),
    "a broadcast": (broadcasts(0), reduces(), ["broadcast(root=0)", "all_reduce(sum)"], False),
    "algorithm": (
        broadcasts(0), broadcasts(0, algorithm="tree"), ["algorithm sra", "algorithm tree"], False
    ),
}  # fmt: skip


@pytest.mark.parametrize("n", [2, 3])
def test_ranks_that_differ_are_told(n: int) -> None:
    """By an error that names the difference, and not since messages are missing."""

    def faults_of(what: str, known: bool) -> list[str]:
        most, other, words, _ = DIFFERENCES[what]

        def body(comm: Communicator) -> BaseException | None:
            if known:
                most(comm)
                other(comm)
            return caught(lambda: (other if comm.rank == 1 else most)(comm))

        return [
            f"{what}, {known=}: {error!r}"
            for error in as_threads(n, body, Hub(n, timeout=60), timeout=120)
            if not isinstance(error, ConfigError)
            or not all(word in str(error) for word in [*words, "rank 1"])
        ]

    given = [
        (what, known) for what, d in DIFFERENCES.items() for known in (False, True)[: 1 + d[3]]
    ]
    with ThreadPoolExecutor(len(given)) as pool:  # they wait most of the time
        faults = [fault for of in pool.map(lambda g: faults_of(*g), given) for fault in of]
    assert not faults, faults
