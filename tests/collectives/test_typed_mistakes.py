"""Mistakes in calls of collectives: by all ranks alike, or by one rank."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed import ReduceOp

import gradwire as gw
from gradwire import QSGD, CodecError, ConfigError, Options
from gradwire.codecs import RandomK
from gradwire.collectives import AllGather, AllReduce, Broadcast, ReduceScatter, Request
from gradwire.engine import Communicator
from gradwire.lang import Codec, Exact, Payload, Value
from gradwire.lang.ops import concat
from gradwire.transport import Hub
from ranks import as_threads, caught
from rooms.collectives import begin
from typed_values import check_group

# ---- mistakes that all ranks make

Call = Callable[[Communicator], object]
X = torch.zeros


def on(function: Callable[..., object], *given: Any, **how: Any) -> Call:
    """A public function on the group."""
    return lambda comm: function(*given, group=comm, **how)


def asks(made: Callable[..., Request], *given: Any, **how: Any) -> Call:
    """A request of an aggregator's."""
    return lambda comm: begin(comm.calls, made(*given, **how), "w", Options())[0].result(20)


def options(**how: Any) -> Call:
    return lambda comm: Options(**how)


def quantised(comm: Communicator) -> object:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will leave them out some day
        return gw.broadcast(torch.empty(4, dtype=torch.quint8), group=comm)


VERBS: dict[str, list[Any]] = {
    "reduce": [gw.all_reduce, X(9)],
    "scatter": [gw.reduce_scatter, X(4), X(8)],
    "gather": [gw.all_gather, X(8), X(4)],
}

MISTAKES: list[tuple[Call, str]] = [
    # options
    (options(algorithm="rings"), "unknown algorithm 'rings': did you mean 'ring'? Else use one of"),
    (options(target="cuda"), "target='cuda': use one of"),
    (options(segments=0), "segments=0"),
    (options(segments=2.5), "segments=2.5"),
    (options(threads=-1), "threads=-1"),
    (options(partitions=2), "an option of the algorithm parameter_server, not of sra"),
    (options(algorithm="parameter_server", partitions=0), "partitions=0"),
    (options(algorithm="ring", nodes=(0, 0)), "an option of the algorithm hierarchical"),
    (options(algorithm="hierarchical", nodes=[0, 0]), "give a tuple of the machine of each rank"),
    (
        options(algorithm="hierarchical", between="ring"),
        "between='ring': use one of auto, sra",
    ),
    (options(algorithm="hierarchical", inside="half"), "use one of codec, full"),
    (
        lambda comm: gw.all_reduce(t := X(8), residual=t, group=comm),
        "residual: it shares memory with a tensor of the call",
    ),
    (
        lambda comm: gw.reduce_scatter((t := X(12))[8:], t[:8], residual=t[4:], group=comm),
        "residual: it shares memory with a tensor of the call",
    ),
    (on(gw.all_reduce, X(9), options="ring"), "options='ring': give a gradwire.Options"),
    (
        on(gw.all_reduce, X(9), options={"algorithm": "ring"}),
        "options={'algorithm': 'ring'}: give a gradwire.Options",
    ),
    *(
        (on(*VERBS[verb], options=Options(algorithm="hierarchical", **how)), text)
        for verbs, how, texts in (
            (VERBS, {"nodes": (0, 0, 1)}, ["a machine for each of the 2 ranks"]),
            (
                ["scatter", "gather"],
                {"between": "grid"},
                ["has no grid: ", "leave out between='grid'"],
            ),
            (["gather"], {"inside": "full"}, ["sums no values ", "leave out inside='full'"]),
        )
        for verb in verbs
        for text in texts
    ),
    (
        on(gw.all_reduce, X(4), None, algorithm="rings"),
        "unknown algorithm 'rings': did you mean 'ring'? Else use one of all_gather",
    ),
    (on(gw.all_reduce, X(4), None, algorithm=["sra"]), "algorithm=['sra']: give a name"),
    (
        on(gw.broadcast, X(4), options=Options(coordinated=True)),
        "tensor: broadcast(root=0) has no coordinated rounds",
    ),
    (
        on(gw.all_gather, X(8), X(4), options=Options(algorithm="ring")),
        "all_gather has no algorithm 'ring': use one of sra",
    ),
    # steps, seeds and saved states
    (on(gw.all_gather, X(8), X(4), step=-1), "step is -1"),
    *((on(gw.all_reduce, X(3), step=step), "step is") for step in (-1, 1.0, True, 1 << 62, "one")),
    *((on(gw.all_reduce, X(3), seed=seed), "seed=") for seed in (-5, "a")),
    *(
        (on(gw.collectives.load_state_dict, state), "gradwire.state_dict()")
        for state in (
            {},
            {"calls": -1},
            {"calls": True},
            {"calls": 1, "x": 2},
            {"calls": 1 << 62},
            None,
        )
    ),
    # operators
    *(
        (on(function, *given, None, op=op), text)
        for op, text in [
            ("mean", "op='mean': use one of sum, avg, min, max"),
            ("SUM", "op='SUM': did you mean 'sum'? Else use one of sum, avg, min, max"),
            *((other, "avg") for other in (ReduceOp.PRODUCT, ReduceOp.BAND, None, 3)),
        ]
        for function, given in ((gw.all_reduce, [X(4)]), (gw.reduce_scatter, [X(4), X(8)]))
    ),
    (on(gw.all_reduce, X(4), None, op=["sum"]), "op=['sum']: give one of 'sum'"),
    # roots
    *(
        (
            on(gw.broadcast, X(4), root, **how),
            f"tensor: broadcast(root={root}) has no such root: use one of the ranks 0 to 1",
        )
        for root, how in ((2, {}), (-1, {"algorithm": "tree"}))
    ),
    (on(gw.broadcast, X(4), True), "root=True: give a rank"),
    (asks(Broadcast, X(4), 1.0), "root=1.0: give a rank"),
    (asks(Broadcast, X(4), "0"), "root='0': give a rank"),
    # codecs
    (
        on(gw.broadcast, X(4), 0, None, bits=4),
        "options bits go with a codec's name, not with codec=None",
    ),
    (
        asks(AllReduce, X(4), codec="qsgd"),
        "codec='qsgd': give a codec object, gradwire.codecs.get('qsgd'), or None",
    ),
    (
        on(gw.all_reduce, X(4), Exact("max"), op="sum"),
        "tensor: all_reduce(sum) of torch.float32 through Exact(op='max') is not defined",
    ),
    (on(gw.all_reduce, X(4), Exact(""), op="sum"), "through Exact(op='') is not defined"),
    (on(gw.all_gather, X(8).long(), X(4).long()), "all_gather of torch.int64 through qsgd:bits=4"),
    (
        on(
            gw.reduce_scatter,
            X(50),
            X(100),
            RandomK(density=0.1, unbiased=True),
            residual=X(100),
        ),
        "unbiased=False with error feedback",
    ),
    # tensors
    (quantised, "tensor: broadcast(root=0) of torch.quint8 is not defined"),
    (on(gw.all_reduce, [1.0]), "tensor: a dense torch.Tensor is needed, not list"),
    (on(gw.all_reduce, X(3).to_sparse()), "tensor: a dense torch.Tensor is needed"),
    (on(gw.all_reduce, torch.arange(3)), "int64"),
    (on(gw.all_reduce, torch.ones(1).expand(9)), "elements share memory"),
    (on(gw.all_reduce, X(3), residual=X(4)), "residual: 4"),
    (on(gw.all_reduce, X(3), residual=X(3).double()), "residual"),
    (on(gw.all_reduce, X(3), residual=[0]), "residual"),
    (on(gw.reduce_scatter, X(4), X(8), residual=X(4)), "residual: 4"),
    (
        on(gw.reduce_scatter, X(4), [X(8)]),
        "input: a dense torch.Tensor is needed, not list",
    ),
    (
        on(gw.reduce_scatter, X(4), X(9)),
        "input has 9 values; with 2 ranks it must have 8 values: 2 x output's",
    ),
    (
        on(gw.reduce_scatter, X(4), X(8).half()),
        "input is torch.float16 and output is torch.float32",
    ),
    (on(gw.all_gather, X(9), X(4)), "output has 9 values"),
    # shards
    (
        asks(ReduceScatter, X(4), lengths=(1, 1, 2)),
        "w: 4 values cannot be cut into shards of (1, 1, 2): give lengths= for each of 2 ranks",
    ),
    (
        asks(ReduceScatter, X(4), lengths=(-1, 5)),
        "w: 4 values cannot be cut into shards of (-1, 5)",
    ),
    (
        asks(ReduceScatter, X(4), lengths=(1, 1)),
        "w: `values` holds 4 x torch.float32 on cpu, contiguous; it must hold 2 x",
    ),
    (asks(ReduceScatter, X(4), lengths=[1, 3]), "lengths=[1, 3]: give a tuple"),
    (asks(ReduceScatter, X(5)), "w: 5 values cannot be cut into 2 shards: give lengths="),
    (
        asks(ReduceScatter, X(5), lengths=(1, 3), stride=2),
        "w: shards of (1, 3) overlap at stride=2: give a stride= of at least 3",
    ),
    (
        asks(ReduceScatter, X(5), lengths=(1, 3), stride=3.0),
        "stride=3.0: give a number of values",
    ),
    (
        asks(ReduceScatter, X(5), lengths=(1, 3), stride=3),
        "w: `values` holds 5 x torch.float32 on cpu, contiguous; it must hold 6 x",
    ),
    (
        asks(ReduceScatter, X(9), stride=3),
        "w: 9 values cannot be 2 equal shards with stride 3",
    ),
    (
        asks(ReduceScatter, X(4), home=X(1)),
        "w: `shard` holds 1 x torch.float32 on cpu, contiguous; it must hold 2 x",
    ),
    (
        asks(ReduceScatter, X(4), residual=X(1)),
        "w: `residual` holds 1 x torch.float32 on cpu, contiguous; it must hold 4 x",
    ),
    (asks(AllGather, X(4), lengths=(3, 3)), "has 4 values; lengths["),
    (
        asks(AllGather, X(4), into=X(7)),
        "w: `into` holds 7 x torch.float32 on cpu, contiguous; it must hold 8 x",
    ),
    (
        asks(AllGather, X(4), into=X(8).half()),
        "w: `into` holds 8 x torch.float16 on cpu, contiguous; it must hold 8 x torch.float32",
    ),
    (asks(AllGather, X(4), into=X(8, 1)), "w: `into` has 2 dimensions, not 1"),
    (
        asks(Broadcast, X(4, dtype=torch.complex64).conj()),
        "a view that negates its imaginary part",
    ),
]


def test_a_mistake_of_all_ranks_leaves_the_group_whole() -> None:
    def body(comm: Communicator) -> list[str]:
        faults = []
        for act, text in MISTAKES:
            error = caught(lambda act=act: act(comm))
            if not isinstance(error, ConfigError) or text not in str(error):
                faults.append(f"{text}: {error!r}")
            check_group(comm)
        return faults

    assert as_threads(2, body) == [[], []]


# ---- ranks that differ


def reduces(codec: Any = None, **how: Any) -> Call:
    return on(gw.all_reduce, X(300), codec, **how)


def broadcasts(root: int, **how: Any) -> Call:
    return on(gw.broadcast, X(300), root, **how)


def scatters(lengths: tuple[int, ...]) -> Call:
    lengths += (0,)
    return lambda comm: asks(ReduceScatter, X(4), lengths=lengths[: comm.world_size])(comm)


def doubling(by: float) -> Codec:
    """A codec whose code differs between ranks under one name: an old file on one of them."""

    @dataclass(frozen=True)
    class Stale(Codec):
        def encode(self, g: Value) -> Payload:
            return concat(value=g * 0.5)

        def decode(self, value: Value) -> Value:
            return value * by

    return Stale()


# The call of most ranks, the call of rank 1, what the error must say, and whether every rank waits
# for the others even if all have agreed on both calls before. On links whose sends end at once, a
# root does not wait; over gloo and shared memory it does (test_typed_processes.py).
DIFFERENCES: dict[str, tuple[Any, Any, list[str], bool]] = {
    "op": (reduces(op="min"), reduces(op="max"), ["all_reduce(min)", "all_reduce(max)"], True),
    "codec": (reduces(), reduces(codec=QSGD()), ["identity", "qsgd:bits=4"], True),
    "verb": (reduces(), scatters((2, 2)), ["all_reduce(sum)", "reduce_scatter(avg)"], True),
    "lengths": (scatters((1, 3)), scatters((3, 1)), ["(1, 3", "(3, 1"], False),
    "root": (broadcasts(0), broadcasts(1), ["root=0", "root=1"], False),
    "root of a tree": (
        broadcasts(0, algorithm="tree"), broadcasts(1, algorithm="tree"), ["root=0", "root=1"],
        False,
    ),
    "a broadcast's codec": (broadcasts(1), broadcasts(1, codec="qsgd"), ["qsgd:bits=4"], False),
    "a broadcast": (broadcasts(0), reduces(), ["broadcast(root=0)", "all_reduce(sum)"], False),
    "algorithm": (
        broadcasts(0), broadcasts(0, algorithm="tree"), ["algorithm sra", "algorithm tree"], False
    ),
    "a reduction's algorithm": (
        reduces(QSGD(), algorithm="hierarchical"), reduces(QSGD(), algorithm="ring"),
        ["algorithm hierarchical", "algorithm ring"], False,
    ),
    "a codec's code": (
        reduces(doubling(3.0)), reduces(doubling(2.0)), ["Stale(): program"], False
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


@pytest.mark.parametrize("codec", ["randomk", "rotated", "qsgd"])
def test_a_call_that_differs_is_refused(codec: str) -> None:
    alike = {"op": "avg", "seed": 0, "step": 7}
    for differs in ({"seed": 1}, {"step": 8}):

        def reduce(comm: Communicator, differs: dict[str, Any] = differs) -> BaseException | None:
            gw.all_reduce(torch.randn(3000), codec, group=comm, **alike)  # agreed by both
            mine = alike | (differs if comm.rank == 1 else {})
            return caught(lambda: gw.all_reduce(torch.randn(3000), codec, group=comm, **mine))

        errors = as_threads(2, reduce)
        assert any(isinstance(error, CodecError) for error in errors)
        assert all(error is not None for error in errors)
        assert any("seed or step differs" in str(error) for error in errors), differs
