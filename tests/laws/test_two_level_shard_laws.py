"""The laws of DESIGN.md for reduce-scatter and all-gather of shards over ranks on several machines:
machines x inside x codec x world size x lengths.

tests/collectives/test_typed_shards.py has the default algorithm.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch

import gradwire as gw
from gradwire import QSGD, Codec, ConfigError, Identity, Options, TransportError, codecs
from gradwire.codecs import TBQ, RandomK
from gradwire.collectives import AllGather, ReduceScatter, Request, check_defined, prepare
from gradwire.collectives.calling import begin
from gradwire.collectives.legal import FLOATS, check_feedback
from gradwire.engine import Communicator
from gradwire.lang import layout
from gradwire.transport import Hub
from products import every_pair, in_turn, one_in
from ranks import WORLD_SIZES, as_threads, caught
from typed_values import DTYPES, check_reduced, generator, same_bits, values

# the machine of each of n ranks
MACHINES: dict[str, Any] = {
    "pairs": lambda n: tuple(rank // 2 for rank in range(n)),
    "in_turn": lambda n: tuple(rank % 3 for rank in range(n)),
    "one_and_the_rest": lambda n: tuple(min(rank, 1) for rank in range(n)),
    "two_and_alone": lambda n: tuple(max(rank, 1) for rank in range(n)),
    "one_machine": lambda n: (7,) * n,
}
INSIDE = ("codec", "full")
PATTERNS: dict[str, list[int]] = {
    "equal": [1025],
    "ragged": [1000, 0, 15, 1, 129],
    "one_has_all": [0, 3000, 0, 0, 0, 0, 0, 0],
}
# values between shards, whether the own shard is apart, segments
FORMS = {"adjacent": (0, False, 1), "apart": (37, True, 3)}
Found = list[tuple[torch.Tensor, torch.Tensor | None]]


def way(machines: str, n: int, inside: str = "codec", **how: Any) -> Options:
    return Options(algorithm="hierarchical", nodes=MACHINES[machines](n), inside=inside, **how)


def lengths_of(pattern: str, n: int) -> tuple[int, ...]:
    known = PATTERNS[pattern]
    return tuple(known[rank % len(known)] for rank in range(n))


def places(lengths: tuple[int, ...], stride: int) -> list[slice]:
    """The slice of each rank's shard."""
    begins = [r * stride if stride else sum(lengths[:r]) for r in range(len(lengths))]
    return [slice(b, b + length) for b, length in zip(begins, lengths, strict=True)]


def spread(whole: torch.Tensor, lengths: tuple[int, ...], stride: int) -> torch.Tensor:
    """The shards of `whole` at their offsets, with NaN between them."""
    where = places(lengths, stride)
    memory = torch.full((where[-1].stop,), torch.nan).to(whole.dtype)
    for at, shard in zip(where, whole.split(lengths), strict=True):
        memory[at] = shard
    return memory


def run(comm: Communicator, request: Request, options: Options) -> torch.Tensor:
    """The result of a single collective on this rank; checks law 5."""
    running, result = begin(comm, request, "w", 0, 7, options)
    sent = running.result(30).wire_bytes
    spec = request.spec("w", 0, comm.world_size)
    prepared = prepare(comm.calls, [spec], options, request.operation).prepared
    # where lengths depend on data, the formula uses the codec's expected length
    assert sent == prepared.wire_bytes or prepared.varies
    return result


def scatter(
    given: list[torch.Tensor],
    lengths: tuple[int, ...],
    codec: Codec | None,
    options: Options,
    kept: list[torch.Tensor] | None = None,
    stride: int = 0,
    home: bool = False,
    op: str = "sum",
    hub: Hub | None = None,
) -> Found:
    """(shard, residual) of each rank, after a reduce-scatter of `given`."""

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor | None]:
        memory = spread(given[comm.rank], lengths, stride)
        own = memory[places(lengths, stride)[comm.rank]].clone() if home else None
        residual = None if kept is None else kept[comm.rank].clone()
        request = ReduceScatter(memory, op, lengths, stride, residual, own, codec=codec)
        return run(comm, request, options).clone(), residual

    return as_threads(len(given), body, hub)


def gather(
    shards: list[torch.Tensor],
    codec: Codec | None,
    options: Options,
    stride: int = 0,
    hub: Hub | None = None,
) -> list[torch.Tensor]:
    """All values on each rank, after an all-gather of `shards`."""
    lengths = tuple(shard.numel() for shard in shards)

    def body(comm: Communicator) -> torch.Tensor:
        request = AllGather(shards[comm.rank].clone(), lengths, stride, codec=codec)
        return run(comm, request, options)

    return as_threads(len(shards), body, hub)


def defined(codec: Codec) -> bool:
    """Whether the reduce-scatter allows the codec, with a residual."""
    try:
        check_defined("hierarchical", codec, "reduce_scatter")
        check_feedback(codec)
    except ConfigError:
        return False
    return True


SUMMED = [name for name in codecs.REGISTRY if defined(codecs.get(name))]
SUMMED.append("qsgd:rounding=stochastic")
FEW = ["identity", "qsgd", "dgc"]  # the last has payloads of any length


def test_most_codecs_are_here() -> None:
    assert set(codecs.REGISTRY) - set(SUMMED) <= {"tbq", "randomk", "lowrank"}


@pytest.mark.parametrize(
    ("name", "machines"), in_turn([*codecs.REGISTRY, "qsgd:rounding=stochastic"], list(MACHINES))
)
def test_a_gather_has_the_bits_of_sra(name: str, machines: str) -> None:
    """Through every codec, at five ranks."""
    made, codec = generator(), codecs.get(name)
    shards = [values(length, torch.float32, made) for length in lengths_of("ragged", 5)]
    (expected, *_) = gather(shards, codec, Options(segments=2))
    for found in gather(shards, codec, way(machines, 5, segments=2)):
        assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("machines", "name", "dtype", "pattern", "form", "n"),
    every_pair(MACHINES, ["none", *FEW[1:]], FLOATS, [*PATTERNS][1:], FORMS, WORLD_SIZES),
    ids=str,
)
def test_law_1_a_gather_has_the_bits_of_sra_on_any_machines(
    machines: str, name: str, dtype: torch.dtype, pattern: str, form: str, n: int
) -> None:
    made, lengths, (gap, _, segments) = generator(), lengths_of(pattern, n), FORMS[form]
    shards = [values(length, dtype, made) for length in lengths]
    codec = None if name == "none" else codecs.get(name)
    apart = gap and gap + max(lengths)
    (expected, *_) = gather(shards, codec, Options(segments=segments), apart)
    for found in gather(shards, codec, way(machines, n, segments=segments), apart):
        assert same_bits(found, expected)


@pytest.mark.parametrize(
    ("machines", "inside", "name", "pattern", "form", "n"),
    every_pair(MACHINES, INSIDE, FEW, PATTERNS, FORMS, WORLD_SIZES),
    ids=str,
)
def test_law_2_nothing_of_any_shard_is_lost(
    machines: str, inside: str, name: str, pattern: str, form: str, n: int
) -> None:
    """Nor does a result depend on the stride, or a home. The own shard's residual is unchanged."""
    made, lengths, (gap, home, segments) = generator(), lengths_of(pattern, n), FORMS[form]
    given = [values(sum(lengths), torch.float32, made) for _ in range(n)]
    kept = [values(sum(lengths), torch.float32, made) / 8 for _ in range(n)]
    options, codec = way(machines, n, inside, segments=segments), codecs.get(name)
    apart = gap and gap + max(lengths)
    found = scatter(given, lengths, codec, options, kept, apart, home)
    check_nothing_is_lost(found, given, kept, lengths)
    plain = scatter(given, lengths, codec, options, kept)
    for one, other in zip(found, plain, strict=True):
        assert all(map(same_bits, one, other))  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "inside"), in_turn(SUMMED, INSIDE))
@pytest.mark.parametrize("machines", one_in(5, MACHINES))
def test_law_2_through_every_codec(name: str, inside: str, machines: str) -> None:
    made, lengths = generator(), (129, 1000, 17, 0, 3000)
    given = [values(sum(lengths), torch.float32, made) for _ in range(5)]
    kept = [values(sum(lengths), torch.float32, made) / 8 for _ in range(5)]
    found = scatter(given, lengths, codecs.get(name), way(machines, 5, inside), kept)
    check_nothing_is_lost(found, given, kept, lengths)


def check_nothing_is_lost(
    found: Found, given: list[torch.Tensor], kept: list[torch.Tensor], lengths: tuple[int, ...]
) -> None:
    """What was reduced, and residuals after, are gradients and residuals before, except the part of
    the owner's residual, which stays."""
    before, after = [k.clone() for k in kept], []
    for rank, own in enumerate(places(lengths, 0)):
        residual = found[rank][1]
        assert residual is not None
        assert same_bits(residual[own], kept[rank][own])
        before[rank][own] = 0
        after.append(residual.clone())
        after[rank][own] = 0
    brought = sum(x.double() + e.double() for x, e in zip(given, before, strict=True))
    reduced = torch.cat([shard for shard, _ in found]).double()
    left = sum(residual.double() for residual in after)
    torch.testing.assert_close(reduced + left, brought, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("machines", "inside", "pattern", "op", "n"),
    every_pair(MACHINES, INSIDE, PATTERNS, DTYPES, WORLD_SIZES),
)
def test_values_as_they_are_of_every_dtype(
    machines: str, inside: str, pattern: str, op: str, n: int
) -> None:
    """Beside an exact reference, or one in float64."""
    made, lengths = generator(), lengths_of(pattern, n)
    for dtype in DTYPES[op]:
        given = [values(sum(lengths), dtype, made) for _ in range(n)]
        found = scatter(given, lengths, None, way(machines, n, inside), op=op)
        check_reduced(op, given, torch.cat([shard for shard, _ in found]), str(dtype))


@pytest.mark.parametrize(("machines", "inside"), every_pair(MACHINES, INSIDE))
@pytest.mark.parametrize("n", [5, 8])
def test_beside_a_float64_reference(machines: str, inside: str, n: int) -> None:
    """Without a codec, fp32 rounds once per added rank; float64 has almost no error."""
    made, lengths = torch.Generator().manual_seed(1), lengths_of("equal", n)
    given = [torch.randn(sum(lengths), generator=made, dtype=torch.float64) for _ in range(n)]
    expected, scale = torch.stack(given).mean(0), torch.stack(given).abs().sum(0).max()
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        own = [values.to(dtype) for values in given]
        found = scatter(own, lengths, None, way(machines, n, inside), op="avg")
        error = (torch.cat([shard for shard, _ in found]).double() - expected).abs().max()
        assert error <= torch.finfo(dtype).eps * scale


@pytest.mark.parametrize(("machines", "inside"), every_pair(MACHINES, INSIDE))
@pytest.mark.parametrize("codec", one_in(2, [QSGD(), Identity()]), ids=str)
def test_law_4_non_finite_travels(machines: str, inside: str, codec: Codec) -> None:
    n, lengths, at = 5, (600,) * 5, 700
    given = [torch.randn(sum(lengths)) for _ in range(n)]
    given[n - 1][at] = float("inf")
    kept = [torch.full((sum(lengths),), 0.5) for _ in range(n)]
    found = scatter(given, lengths, codec, way(machines, n, inside), kept)
    for rank, (shard, residual) in enumerate(found):
        assert bool(torch.isfinite(shard).all()) == (rank != at // 600)
        assert residual is not None
        assert torch.isfinite(residual).all()
    gathered = gather([shard for shard, _ in found], codec, way(machines, n))
    for whole in gathered:
        assert not torch.isfinite(whole[600:1200]).all()
        assert torch.isfinite(whole[1200:]).all()


@pytest.mark.parametrize("n", WORLD_SIZES)
@pytest.mark.parametrize("seed", one_in(3, range(6)))
def test_law_5_what_crosses_machines_at_random(n: int, seed: int) -> None:
    """Every payload once per other machine, and every sum of a machine once."""
    drawn = random.Random(100 * n + seed)
    nodes = tuple(drawn.randrange(4) for _ in range(n))
    inside, segments = drawn.choice(INSIDE), drawn.choice([1, 3])
    lengths = tuple(drawn.choice([0, 1, 129, 3000]) for _ in range(n))
    codec = drawn.choice([Identity(), QSGD(), codecs.get("topk", density=0.05)])
    options = Options(algorithm="hierarchical", nodes=nodes, inside=inside, segments=segments)
    crossed: Counter[tuple[int, int]] = Counter()

    def count(source: int, destination: int, tag: int, message: torch.Tensor) -> None:
        if nodes[source] != nodes[destination]:
            crossed[nodes[source], nodes[destination]] += message.numel()

    made = generator()
    given = [values(sum(lengths), torch.float32, made) for _ in range(n)]
    shards = [part for part, _ in scatter(given, lengths, codec, options, hub=Hub(n, 30, count))]
    of_sums = dict(crossed)
    crossed.clear()
    options = Options(algorithm="hierarchical", nodes=nodes, segments=segments)
    gather(shards, codec, options, hub=Hub(n, 30, count))
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


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("machines", "inside"), one_in(3, product(MACHINES, INSIDE)))
def test_laws_6_and_8_targets_and_segments_change_nothing(
    name: str, machines: str, inside: str
) -> None:
    made, lengths, codec = generator(), (129, 1000, 17, 0, 3000), codecs.get(name)
    given = [values(sum(lengths), torch.float32, made) for _ in range(5)]
    kept = [torch.zeros(sum(lengths)) for _ in range(5)]
    found = []
    for segments, target in ((3, "auto"), (1, "eager")):
        options = way(machines, 5, inside, segments=segments, target=target)
        scattered = scatter(given, lengths, codec, options, kept)
        options = way(machines, 5, segments=segments, target=target)
        gathered = gather([shard for shard, _ in scattered], codec, options)
        found.append([tensor for rank in scattered for tensor in rank] + gathered)
    for one, other in zip(*found, strict=True):
        assert one is not None
        assert other is not None
        assert same_bits(one, other)


@pytest.mark.parametrize("inside", INSIDE)
@pytest.mark.parametrize("machines", one_in(2, ["pairs", "in_turn", "one_and_the_rest"]))
def test_law_3_unbiased_means_unbiased(machines: str, inside: str) -> None:
    """QSGD: over 20 000 draws the mean of each of ten values is within 5 standard errors."""
    n, pattern, draws = 5, 10, 20_000
    made = torch.Generator().manual_seed(0)
    given = [torch.randn(pattern, generator=made) for _ in range(n)]
    lengths = (pattern * draws, *(0,) * (n - 1))
    codec = QSGD(bits=2, block=pattern * 8, rounding="stochastic")
    repeated = [x.repeat(draws) for x in given]
    shard, _ = scatter(repeated, lengths, codec, way(machines, n, inside), op="avg")[0]
    found = shard.view(draws, pattern).double()
    standard = found.std(0) / draws**0.5
    assert (standard > 0).all()
    expected = torch.stack(given).double().mean(0)
    assert ((found.mean(0) - expected).abs() < 5 * standard).all()


def test_error_is_that_of_the_encodings() -> None:
    """docs/reference/algorithms.md: 4 machines of 2, QSGD, in encodings of one rank's values."""
    n, made = 8, torch.Generator().manual_seed(0)
    lengths = (40_000,) * n
    given = [torch.randn(sum(lengths), generator=made) for _ in range(n)]
    mean = torch.stack(given).double().mean(0)
    found = {}
    for units, options in {
        7: Options(),
        6: way("pairs", n, "full"),  # 3 encodings of two ranks' sums
        10: way("pairs", n, "codec"),  # in addition the locals of 4 ranks
    }.items():
        scattered = scatter(given, lengths, QSGD(bits=4, block=128), options, op="avg")
        error = torch.cat([shard for shard, _ in scattered]).double() - mean
        found[units] = float(error.square().sum() / mean.square().sum())
    for units, error in found.items():
        assert error / found[7] == pytest.approx(units / 7, rel=0.06)


@pytest.mark.parametrize("codec", [TBQ(), RandomK(density=0.1, unbiased=True)], ids=str)
def test_codecs_that_allow_no_sum_say_what_to_use(codec: Codec) -> None:
    def body(comm: Communicator) -> list[BaseException | None]:
        whole = torch.randn(200)

        def call(algorithm: str) -> None:
            gw.reduce_scatter(torch.empty(100), whole, codec, group=comm, algorithm=algorithm)

        gw.all_gather(torch.empty(400), whole, codec, group=comm, algorithm="hierarchical")
        return [caught(lambda: call("sra")), caught(lambda: call("hierarchical"))]

    for allowed, refused in as_threads(2, body):
        assert allowed is None
        assert isinstance(refused, ConfigError)
        assert "not defined in the algorithm 'hierarchical'" in str(refused)
        assert "Use algorithm 'sra'" in str(refused)


@pytest.mark.parametrize("inside", INSIDE)
def test_the_functions_leave_their_input_unchanged(inside: str) -> None:
    def body(comm: Communicator) -> None:
        whole, options = torch.randn(5, 400), way("pairs", 5, inside)
        before, shard = whole.clone(), torch.empty(400)
        gw.reduce_scatter(shard, whole, "qsgd", group=comm, options=options)
        assert same_bits(whole, before)
        gw.reduce_scatter(whole[comm.rank], whole, "qsgd", group=comm, options=options, step=1)
        others = [rank for rank in range(5) if rank != comm.rank]
        assert same_bits(whole[others], before[others])
        gw.reduce_scatter(shard, before, "qsgd", group=comm, options=options, step=1)
        assert same_bits(shard, whole[comm.rank])

    as_threads(5, body)


@pytest.mark.parametrize("verb", ["reduce_scatter", "all_gather"])
@pytest.mark.parametrize("dead", one_in(2, [0, 2, 4]))
def test_law_10_a_dead_peer_is_named_by_every_survivor(verb: str, dead: int) -> None:
    n, hub, agreed = 5, Hub(5, timeout=20), threading.Barrier(5)

    def body(comm: Communicator) -> BaseException | None:
        def call() -> None:
            part, whole = torch.randn(1000), torch.randn(5000)
            how: dict[str, Any] = {"group": comm, "options": way("pairs", n)}
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

    errors = as_threads(n, body, hub)
    for rank in set(range(n)) - {dead}:
        assert isinstance(errors[rank], TransportError)
        assert errors[rank].peer == dead


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize(("machines", "inside"), one_in(3, product(MACHINES, INSIDE)))
def test_staged_and_borrowed_messages_change_no_bit(
    name: str, machines: str, inside: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With separate memory for kernels, as on a GPU, and with messages that are read in place."""
    made, lengths, codec = generator(), (129, 1000, 17, 0, 3000), codecs.get(name)
    given = [values(sum(lengths), torch.float32, made) for _ in range(5)]
    kept = [torch.zeros(sum(lengths)) for _ in range(5)]

    def found(**how: Any) -> list[Any]:
        scattered = scatter(
            given, lengths, codec, way(machines, 5, inside, segments=2), kept, hub=Hub(5, **how)
        )
        shards = [shard for shard, _ in scattered]
        options = way(machines, 5, segments=2)
        return [t for rank in scattered for t in rank] + gather(
            shards, codec, options, hub=Hub(5, **how)
        )

    plain = found()
    with monkeypatch.context() as changed:
        changed.setattr("gradwire.collectives.placement.BORROWED_BYTES", 0)
        assert all(map(same_bits, found(lends=True), plain))
    with monkeypatch.context() as changed:
        changed.setattr("gradwire.collectives.job.is_staged", lambda device: True)
        assert all(map(same_bits, found(), plain))
