"""Laws of shards on several machines that take many draws, count what crosses, or kill a rank.

test_shard_laws.py has the laws that every single run meets.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import QSGD, Codec, ConfigError, Identity, Options, TransportError, codecs
from gradwire.codecs import TBQ, RandomK
from gradwire.collectives import AllGather, ReduceScatter
from gradwire.engine import Communicator
from gradwire.lang import layout
from gradwire.transport import Hub
from laws.shards import (
    INSIDE,
    run,
    way,
)
from products import EXHAUSTIVE
from ranks import as_threads, caught
from typed_values import values


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(s, marks=EXHAUSTIVE) for s in range(4, 36))]
)
def test_law_5_what_crosses_machines_at_random(seed: int) -> None:
    """Every payload once per other machine, and every sum of a machine once."""
    draw = random.Random(seed)
    n = (2, 3, 5, 8)[seed % 4]
    nodes = tuple(draw.randrange(4) for _ in range(n))
    inside, segments = draw.choice(INSIDE), draw.choice([1, 3])
    lengths = tuple(draw.choice([0, 1, 129, 3000]) for _ in range(n))
    codec = draw.choice([Identity(), QSGD(), codecs.get("topk", density=0.05)])
    crossed: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()

    def count(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if nodes[source] != nodes[destination]:
            with lock:
                crossed[nodes[source], nodes[destination]] += message.numel()

    made = torch.Generator().manual_seed(seed)
    given = [values(sum(lengths), torch.float32, made) for _ in range(n)]

    def two_levels(**how: Any) -> Options:
        return Options(algorithm="hierarchical", nodes=nodes, segments=segments, **how)

    def scatter(comm: Communicator) -> torch.Tensor:
        request = ReduceScatter(given[comm.rank].clone(), "sum", lengths, codec=codec)
        return run(comm, request, two_levels(inside=inside)).clone()

    shards = as_threads(n, scatter, Hub(n, 30, count))
    of_sums = dict(crossed)
    crossed.clear()
    as_threads(
        n,
        lambda comm: run(comm, AllGather(shards[comm.rank], lengths, codec=codec), two_levels()),
        Hub(n, 30, count),
    )
    spec = AllGather(shards[0], lengths, codec=codec).spec("w", 0, n)
    sizes = payloads(spec, n, segments)
    expected = {
        (one, other): sum(sizes[rank] for rank in range(n) if nodes[rank] == one)
        for one in {*nodes}
        for other in {*nodes} - {one}
    }
    assert dict(crossed) == {ends: nbytes for ends, nbytes in expected.items() if nbytes}
    assert of_sums == {(b, a): nbytes for (a, b), nbytes in expected.items() if nbytes}


def payloads(spec: Any, n: int, segments: int) -> list[int]:
    """Bytes of each shard's messages, headers included, from the layout of its codec alone."""
    from gradwire.algorithms.protocol import message
    from gradwire.partition import partition

    sizes = partition([spec], n, segments, shards=True).sizes
    if segments == 1:
        lay = layout(spec.codec, spec.dtype)
        assert sizes[0] == tuple(-(-lay.nbytes(m) // 16) * 16 if m else 0 for m in spec.lengths)
    return [sum(message(segment[c]) for segment in sizes) for c in range(n)]


def averaged(
    given: list[torch.Tensor], lengths: tuple[int, ...], codec: Codec, options: Options
) -> torch.Tensor:
    def body(comm: Communicator) -> torch.Tensor:
        request = ReduceScatter(given[comm.rank].clone(), "avg", lengths, codec=codec)
        return run(comm, request, options).clone()

    return torch.cat(as_threads(len(given), body)).double()


@pytest.mark.parametrize(("machines", "inside"), [("pairs", "codec"), ("one_and_the_rest", "full")])
def test_law_3_unbiased_means_unbiased(machines: str, inside: str) -> None:
    """QSGD: over 20 000 draws the mean of each of ten values is within 5 standard errors."""
    n, pattern, draws = 5, 10, 20_000
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(pattern, generator=made) for _ in range(n)]
    lengths = (pattern * draws, *(0,) * (n - 1))
    codec = QSGD(bits=2, block=pattern * 8, rounding="stochastic")
    repeated = [x.repeat(draws) for x in given]
    found = averaged(repeated, lengths, codec, way(machines, n, inside)).view(draws, pattern)
    standard = found.std(0) / draws**0.5
    assert (standard > 0).all()
    expected = torch.stack(given).double().mean(0)
    assert ((found.mean(0) - expected).abs() < 5 * standard).all()


def test_error_is_that_of_the_encodings() -> None:
    """docs/reference/algorithms.md: 4 machines of 2, QSGD, in encodings of one rank's values."""
    n, made = 8, torch.Generator().manual_seed(0)
    lengths = (20_000,) * n
    given = [torch.randn(sum(lengths), generator=made) for _ in range(n)]
    mean = torch.stack(given).double().mean(0)
    found = {}
    for units, options in {
        7: Options(),
        6: way("pairs", n, "full"),  # 3 encodings of two ranks' sums
        10: way("pairs", n, "codec"),  # in addition the locals of 4 ranks
    }.items():
        error = averaged(given, lengths, QSGD(bits=4, block=128), options) - mean
        found[units] = float(error.square().sum() / mean.square().sum())
    for units, error in found.items():
        assert error / found[7] == pytest.approx(units / 7, rel=0.06)


def test_codecs_that_allow_no_sum_say_what_to_use() -> None:
    def body(comm: Communicator) -> None:
        whole = torch.randn(200)
        for codec in (TBQ(), RandomK(density=0.1, unbiased=True)):

            def call(algorithm: str, codec: Codec = codec) -> None:
                gw.reduce_scatter(torch.empty(100), whole, codec, group=comm, algorithm=algorithm)

            gw.all_gather(torch.empty(400), whole, codec, group=comm, algorithm="hierarchical")
            call("sra")
            refused = caught(lambda call=call: call("hierarchical"))
            assert isinstance(refused, ConfigError)
            assert "not defined in the algorithm 'hierarchical'" in str(refused)
            assert "Use algorithm 'sra'" in str(refused)

    as_threads(2, body)


def test_law_10_a_dead_peer_is_named_by_every_survivor() -> None:
    n = 5

    def faults_of(verb: str, machines: str, dead: int) -> list[str]:
        hub, agreed = Hub(n, timeout=20), threading.Barrier(n)

        def body(comm: Communicator) -> BaseException | None:
            def call() -> None:
                part, whole = torch.randn(1000), torch.randn(5000)
                how: dict[str, Any] = {"group": comm, "options": way(machines, n)}
                if verb == "all_gather":
                    gw.all_gather(whole, part, "qsgd", **how)
                else:
                    gw.reduce_scatter(part, whole, "qsgd", **how)

            call()
            agreed.wait()  # all ranks have agreed, and this rank has everything
            if comm.rank == dead:
                hub.kill(dead)
                return None
            return caught(call)

        return [
            f"{verb}, {machines}: rank {rank} tells of {error!r}, not of rank {dead}"
            for rank, error in enumerate(as_threads(n, body, hub))
            if rank != dead and not (isinstance(error, TransportError) and error.peer == dead)
        ]

    given = [
        (verb, machines, dead)
        for verb in ("reduce_scatter", "all_gather")
        for machines, dead in (("sra", 1), ("pairs", 0), ("pairs", 4), ("in_turn", 2))
    ]
    with ThreadPoolExecutor(len(given)) as pool:  # they wait most of the time
        faults = [fault for of in pool.map(lambda g: faults_of(*g), given) for fault in of]
    assert not faults, faults
