"""Times computed by hand, bytes from formulas, and bounds; the clock, shared cores, and threads."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from gradwire import Options, algorithms
from gradwire.collectives import Operation
from gradwire.lang import layout
from gradwire.partition import Spec
from gradwire_tools.sim import Net, predict
from gradwire_tools.sim.clock import Clock, Cores, Thread
from gradwire_tools.sim.curves import Software
from gradwire_tools.sim.fabric import Link
from gradwire_tools.sim.rank import Overheads
from gradwire_tools.sim.run import Machines, simulate
from gradwire_tools.sim.task_times import algorithm_on, bucket_contents, timed_graph
from machines import FREE, GBIT, GRADDROP, IDENTITY, QSGD, USUAL, curves, scenario

ALGORITHMS = ("sra", "ring", "tree", "parameter_server", "all_gather", "hierarchical")
BYTE, LATENCY = 8e-9, 1e-3  # at 1gbit,1ms
VALUES = 1 << 18
MESSAGE = 4 * VALUES + 48


def seconds(*args: object, machine: object = FREE, **given: object) -> float:
    return float(predict(scenario(*args, **given), machine)["seconds"])  # type: ignore[arg-type]


# ---- by hand ------------------------------------------------------------------------------------

HALF = 4 * VALUES // 2 + 48
WIRE, HALF_WIRE = MESSAGE * BYTE, HALF * BYTE
CALL = 5e-3  # longer than the latency until messages may leave
VALUE = 20 * 8e-9  # kernels are what takes time
SLOW = curves(value=VALUE)
WHOLE = {"codec": IDENTITY, "segments": 1}
# (what, ranks, options, machine, seconds), of VALUES
BY_HAND = [
    # A latency until both know that the receive is posted; the message; its latency.
    ("gather", 2, {"algorithm": "all_gather", "codec": IDENTITY}, FREE, 2 * LATENCY + WIRE),
    # Two rounds of half the values each; the second finds its receive posted.
    ("scatter and gather", 2, WHOLE, FREE, 3 * LATENCY + 2 * HALF_WIRE),
    # Encode, merge, decode: the decode of the peer's result follows this rank's merge.
    ("kernels wait for messages, which wait for kernels", 2, WHOLE, curves(call=CALL),
     3 * CALL + 2 * LATENCY + 2 * HALF_WIRE),
    # While one segment is on the wire, the kernel of the other runs.
    ("one segment", 2, {**WHOLE, "algorithm": "all_gather"}, SLOW,
     2 * VALUE * VALUES + LATENCY + WIRE),
    ("two segments", 2, {**WHOLE, "algorithm": "all_gather", "segments": 2}, SLOW,
     2 * VALUE * VALUES),
    # The ingress of one server serves all payloads, then its egress all results.
    ("a server", 5, {**WHOLE, "algorithm": "parameter_server", "partitions": 1}, FREE,
     3 * LATENCY + 2 * 4 * WIRE),
    # Each of a node's two ranks sends to two ranks of other nodes; alone, to three.
    ("alone", 4, {"algorithm": "all_gather", "codec": IDENTITY}, FREE, 2 * LATENCY + 3 * WIRE),
    ("ranks of a node share its link", 4,
     {"algorithm": "all_gather", "codec": IDENTITY, "per_node": 2}, FREE, 2 * LATENCY + 4 * WIRE),
    ("one node needs no network", 4, {"per_node": 4}, FREE, 0.0),
    # One after the other.
    ("over memory", 2, {"algorithm": "all_gather", "codec": IDENTITY, "per_node": 2},
     curves(link=replace(USUAL.link, overhead=0.0, stack=0.0, memory=1e9)), 2 * MESSAGE / 1e9),
    ("one rank does nothing", 1, {}, FREE, 0.0),
    # Rank 1 leaves the barrier a latency after rank 0, which waits for it, and for its sum.
    ("barrier", 2, {**WHOLE, "barrier": True}, FREE, 4 * LATENCY + 2 * HALF_WIRE),
]  # fmt: skip


def test_times_are_those_computed_by_hand() -> None:
    faults = []
    for what, ranks, options, machine, expected in BY_HAND:
        row = predict(scenario(ranks, str(VALUES), **options), machine)
        if row["seconds"] != pytest.approx(expected):
            faults.append(f"{what}: {row['seconds']}, not {expected}")
        if not expected and row["limit_seconds"]:
            faults.append(f"{what}: a limit of {row['limit_seconds']}")
    assert faults == []
    alone = predict(scenario(1, "resnet50"), FREE)
    assert (alone["seconds"], alone["wire_bytes"], alone["of_limit"]) == (0.0, 0, None)


def test_a_message_whose_length_depends_on_data_has_the_expected_one() -> None:
    body = -(-layout(GRADDROP).expected_nbytes(VALUES) // 16) * 16
    given = {"codec": GRADDROP, "segments": 1}
    row = predict(scenario(2, str(VALUES), "all_gather", **given), FREE)
    assert row["wire_bytes"] == 48 + 16 + body
    assert row["seconds"] == pytest.approx(2 * LATENCY + row["wire_bytes"] * BYTE)
    # Ranks of one node read it in place: no table, no latency.
    beside = predict(scenario(2, str(VALUES), "all_gather", **given, per_node=2), FREE)
    assert (beside["wire_bytes"], beside["seconds"]) == (48 + body, 0.0)


def test_one_node_stands_for_all_where_lengths_depend_on_data() -> None:
    both = [
        predict(scenario(8, "1048576x8", codec=GRADDROP, exact=exact), USUAL)
        for exact in (True, False)
    ]
    assert [row["exact"] for row in both] == [True, False]
    assert both[1]["seconds"] == pytest.approx(both[0]["seconds"], rel=0.02)
    assert both[1]["wire_bytes"] == pytest.approx(both[0]["wire_bytes"], rel=0.01)


def test_connections_that_begin_to_share_a_link_lose_time() -> None:
    for ranks, connections in ((2, 1), (4, 3)):
        settling = 1e-5
        slow = curves(link=Software(settling=settling))
        found = seconds(ranks, str(VALUES), "all_gather", codec=IDENTITY, machine=slow)
        wire = 2 * LATENCY + connections * WIRE
        assert found == pytest.approx(wire + (settling if connections > 1 else 0.0))
        # A small transfer loses only a part of it.
        long = curves(link=Software(settling=1.0))
        found = seconds(ranks, str(VALUES), "all_gather", codec=IDENTITY, machine=long)
        assert found <= wire + 0.3 * connections * WIRE


def test_receives_are_awaited_in_order() -> None:
    """Checks run on one thread: N - 1 messages that arrive together are checked one by one."""
    check = 1e-2
    slow = curves(engine=Overheads(check=check))
    found = seconds(4, str(VALUES), "all_gather", codec=IDENTITY, machine=slow)
    # One seal, then three checks, of which at most all but the last overlap with the wire.
    assert 4 * check <= found <= 4 * check + 2 * LATENCY + 3 * WIRE + 1e-9


def test_the_last_of_eight_ranks_leaves_a_barrier_three_hops_later() -> None:
    """And each of two rounds waits for it."""
    plain, late = (seconds(8, str(VALUES), **WHOLE, barrier=barrier) for barrier in (False, True))
    assert plain < late <= plain + 2 * 3 * LATENCY


# ---- bytes --------------------------------------------------------------------------------------


def test_bytes_are_the_algorithms_formula() -> None:
    """Law 5, for ragged sizes and more than one bucket."""
    faults = []
    for codec, ranks, algorithm in product((QSGD, GRADDROP), (1, 2, 3, 5, 8), ALGORITHMS):
        wanted = scenario(ranks, "77x1234,513,1000001", algorithm, exact=True, codec=codec)
        parts = [part for scope in wanted.scopes for (part,) in scope.rounds]
        assert len(parts) > 1
        built = algorithm_on(wanted.options, ranks, 1)
        contents = [bucket_contents(p.specs, built, wanted.options, ranks) for p in parts]
        expected = sum(built.wire_bytes(0, ranks, of.sizes) for of in contents)
        found = predict(wanted, USUAL)["wire_bytes"]
        if found != expected:
            faults.append(f"{codec}, {algorithm}, {ranks} ranks: {found}, not {expected} bytes")
    assert not faults, "\n".join(faults)


# ---- bounds -------------------------------------------------------------------------------------


def test_nothing_is_faster_than_its_limit() -> None:
    faults = []
    nets = [Net("", 1e8, 5e-3), GBIT, Net("", 1e11, 1e-5)]
    many = product((16,), ALGORITHMS, [GBIT])
    for ranks, algorithm, net in (*product((2, 5), ALGORITHMS, nets), *many):
        row = predict(scenario(ranks, "1e6,1e5", algorithm, net=net), USUAL)
        limits = row["limit_seconds"], row["compute_seconds"]
        share = row["limit_seconds"] / row["seconds"]
        if not row["seconds"] >= max(limits) >= min(limits) > 0 or row["of_limit"] != share:
            faults.append(f"{algorithm}, {ranks} ranks, {net}: {row}")
    assert not faults, "\n".join(faults)


def test_a_better_network_or_more_cores_are_not_slower() -> None:
    faults = []
    for algorithm, ranks in product(ALGORITHMS, (5,)):
        rates = [
            seconds(ranks, "3e6", algorithm, net=Net("", rate, 1e-3), machine=USUAL)
            for rate in (1e8, 3e8, 1e9, 1e10)
        ]
        latencies = [
            seconds(ranks, "3e6", algorithm, net=Net("", 1e9, latency), machine=USUAL)
            for latency in (0.0, 1e-4, 1e-3, 1e-2)
        ]
        if rates != sorted(rates, reverse=True) or latencies != sorted(latencies):
            faults.append(f"{algorithm}, {ranks} ranks: {rates}, {latencies}")
    slow = curves(value=1e-7)
    for algorithm in ALGORITHMS:
        own, two, one = (
            predict(scenario(8, "1e6", algorithm, cores=cores), slow)
            for cores in (float("inf"), 2.0, 1.0)
        )
        if not own["seconds"] < two["seconds"] < one["seconds"]:
            faults.append(f"{algorithm}: shared cores")
        assert own["compute_seconds"] == two["compute_seconds"], algorithm
    assert not faults, "\n".join(faults)


def test_processor_time_of_messages_counts_on_shared_cores() -> None:
    """64 MB through stacks that take 10 ns per byte at each end, on one core."""
    stack = curves(link=replace(USUAL.link, overhead=0.0, stack=1e-8))
    row = predict(scenario(2, "8e6", "all_gather", codec=IDENTITY, cores=1.0), stack)
    assert row["seconds"] >= 4 * 32e6 * 1e-8


def test_processor_time_of_each_message_counts_on_shared_cores() -> None:
    """On one core, 2 messages of 64 KB at both ends; over memory at the receiving end alone."""
    for message, per_node, ends in ((0.1, 1, 4), (0.1, 2, 2)):
        cost = curves(link=replace(USUAL.link, message=message))
        of = scenario(2, "16384", "all_gather", codec=IDENTITY, cores=1.0, per_node=per_node)
        more = predict(of, cost)["seconds"] - predict(of, USUAL)["seconds"]
        assert more == pytest.approx(ends * message, rel=0.02)


def test_backward_hides_what_is_ready_early() -> None:
    plain = predict(scenario(4, "resnet50"), USUAL)
    row = predict(scenario(4, "resnet50", backward=1.0), USUAL)
    assert 1.0 < row["seconds"] < 1.0 + plain["seconds"]
    assert row["limit_seconds"] == 1.0
    # The last bucket is ready at the end, and is then sent alone.
    assert row["seconds"] > 1.0 + 2 * LATENCY


def test_two_collectives_are_in_flight() -> None:
    """Buckets overlap: many take less than one after the other, and not less than the wire."""
    one = seconds(4, "2048x4096", machine=USUAL)
    row = predict(scenario(4, ",".join(["2048x4096"] * 6)), USUAL)
    assert row["buckets"] == 6
    assert row["limit_seconds"] < row["seconds"] < 6 * one


def test_sra_of_coordinated_rounds_runs() -> None:
    found = predict(scenario(4, "1e6", coordinated=True), USUAL)
    plain = predict(scenario(4, "1e6"), USUAL)
    assert found["wire_bytes"] == plain["wire_bytes"]
    assert found["seconds"] >= found["limit_seconds"]
    assert algorithms.get("sra").rounds(4) == 2


@pytest.fixture
def _collector() -> Iterator[None]:
    yield
    gc.enable()


@pytest.mark.usefixtures("_collector")
def test_the_collector_is_left_as_it_was() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        seconds(2, "1e4")
        assert gc.isenabled() is enabled


def test_messages_that_have_arrived_wake_no_thread() -> None:
    """An encode, the first of many receives, and a merge are noticed; nothing else takes time."""
    machine = curves(engine=Overheads(task=1.0, post=1e-3))
    for ranks in (2, 3, 8):
        found = seconds(ranks, "1e3", "all_gather", net=Net("", float("inf")), machine=machine)
        assert found == pytest.approx(3.0, abs=0.1)


# ---- shards: reduce-scatter and all-gather -------------------------------------------------------


MANY = 1 << 22
OPERATIONS = [Operation("all_gather"), Operation("reduce_scatter", "avg")]


def simulated(
    operation: Operation, n: int, per_node: int, **how: str
) -> tuple[list[int], float, list[int], list[int]]:
    """Of a run of QSGD at 1 Gbit/s and 1 ms: bytes that left each node, seconds, and each rank's
    bytes, also by the formula."""
    options = Options(segments=4, **how)  # type: ignore[arg-type]
    algorithm = algorithm_on(options, n, per_node, operation)
    bucket = (Spec("w", MANY // n * n, torch.float32, QSGD),)
    contents = bucket_contents(bucket, algorithm, options, n, operation=operation)
    jobs = [[timed_graph(contents, algorithm, rank, n, FREE)] for rank in range(n)]
    link = Link(rate=GBIT.rate_bits_per_s / 8, latency=GBIT.latency_s)
    machines = Machines(n, per_node, link, FREE.engine)
    ranks, fabric = simulate(machines, jobs, lambda rank, mine: rank.submit(0, [mine]))
    formula = [algorithm.wire_bytes(rank, n, contents.sizes) for rank in range(n)]
    sent = [rank.sent_bytes[0] for rank in ranks]
    return fabric.moved, max(rank.ended[0] for rank in ranks), sent, formula


def test_compressed_bytes_cross_once() -> None:
    """A node sends less by the number of ranks per node, and takes so much less time."""
    for operation, (n, per_node) in product(OPERATIONS, [(4, 2), (8, 4), (5, 2), (16, 4)]):
        flat, flat_ended, *_ = simulated(operation, n, per_node)
        levels, ended, sent, formula = simulated(operation, n, per_node, algorithm="hierarchical")
        assert sent == formula
        nodes = [range(first, min(first + per_node, n)) for first in range(0, n, per_node)]
        crossings = sum(len(node) * (n - len(node)) for node in nodes), n * (len(nodes) - 1)
        expected = sum(flat) * crossings[1] / crossings[0]
        assert sum(levels) == pytest.approx(expected, rel=0.01)
        if n % per_node == 0:
            assert max(levels) * per_node == pytest.approx(max(flat), rel=0.01)
            rounds = 2 * GBIT.latency_s
            wire = max(levels) * 8 / GBIT.rate_bits_per_s
            assert wire < ended < wire + 2 * rounds
            assert ended < flat_ended


def ends_of(count: float, works: dict[str, tuple[float, float]]) -> dict[str, float]:
    """When each piece of work, given as (begin, seconds), ends on `count` cores."""
    clock = Clock()
    cores = Cores(clock, count)
    ends: dict[str, float] = {}
    for name, (begin, seconds) in works.items():
        clock.at(
            begin,
            lambda name=name, seconds=seconds: cores.work(
                seconds, lambda: ends.setdefault(name, clock.now)
            ),
        )
    clock.run()
    return ends


def test_callbacks_run_in_order_of_time_then_of_scheduling() -> None:
    clock = Clock()
    seen: list[str] = []
    clock.at(2.0, lambda: seen.append("late"))
    clock.at(1.0, lambda: seen.append("first"))
    clock.at(1.0, lambda: seen.append("second"))
    clock.run()
    assert seen == ["first", "second", "late"]
    assert clock.now == 2.0


def test_enough_cores_slow_no_thread() -> None:
    works = {"a": (0.0, 1.0), "b": (0.25, 2.0)}
    for count in (2, 3, float("inf")):
        assert ends_of(count, works) == pytest.approx({"a": 1.0, "b": 2.25})


def test_threads_share_cores_equally() -> None:
    # Alone for 1 s, then at half speed: b's 1 s takes 2, and a's last 2 s take 2 and 1.
    assert ends_of(1, {"a": (0.0, 3.0), "b": (1.0, 1.0)}) == pytest.approx({"b": 3.0, "a": 4.0})
    # Three on two cores go at 2/3 until the shortest has ended.
    ends = ends_of(2, {"a": (0.0, 2.0), "b": (0.0, 2.0), "c": (0.0, 1.0)})
    assert ends == pytest.approx({"c": 1.5, "a": 2.5, "b": 2.5})
    # Less than one core: a node that represents others gets its share.
    assert ends_of(0.5, {"a": (0.0, 1.0)}) == pytest.approx({"a": 2.0})


def test_work_that_ends_together_ends_once() -> None:
    works = {str(i): (0.0, 1.0) for i in range(50)}
    ends = ends_of(2, works)
    assert ends == pytest.approx(dict.fromkeys(works, 25.0))


@pytest.mark.parametrize("count", [1, float("inf")])
def test_a_thread_does_one_thing_at_a_time_and_its_own_first(count: float) -> None:
    clock = Clock()
    thread = Thread(Cores(clock, count))
    seen: list[tuple[str, float]] = []

    def note(name: str) -> None:
        seen.append((name, clock.now))
        if name == "a":
            thread.do_first(0.5, lambda: note("a's own"))

    thread.do(1.0, lambda: note("a"))
    thread.do(1.0, lambda: note("b"))
    clock.run()
    assert seen == [("a", 1.0), ("a's own", 1.5), ("b", 2.5)]
    assert thread.seconds == 2.5
