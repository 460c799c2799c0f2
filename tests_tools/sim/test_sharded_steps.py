"""`gradwire sim --sharded`: bytes by formula, FSDP2's order, rates; test_verb.py has its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from gradwire import Options, codecs
from gradwire.codecs import Identity
from gradwire.engine import HEADER_BYTES
from gradwire.errors import ConfigError
from gradwire.lang import layout
from gradwire.partition import Spec
from gradwire_tools.bench.train import sharded
from gradwire_tools.predict.simulate_sharded import sent_by
from gradwire_tools.sim import Curves, Net, models
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.sharded import ShardedScenario, predict_sharded
from gradwire_tools.sim.shards import SCATTER, Torch, codecs_of, lengths
from gradwire_tools.sim.training import Times, order
from machines import FREE, GBIT, USUAL, priced
from rooms.collectives import Capabilities, compile
from rooms.engine import Topology

# Rows that no number of ranks divides, fewer rows than ranks, small and flat parameters.
BLOCK: Shapes = ((103, 64), (103,), (3, 2048), (64, 10))
GROUPS: tuple[Shapes, ...] = (BLOCK, BLOCK, ((256, 64), (64,)))
W8 = codecs.get("randomshift", bits=8)


def curves_of(one: ShardedScenario, free: bool = True) -> Curves:
    base = FREE if free else USUAL
    curve = (0.0, 0.0, 0.0) if free else (1e-5, 3e-10, 1e-10)
    used = codecs_of(one.groups, one.weights, one.gradients, one.between)
    return priced(
        dict.fromkeys([*used, codecs.get("identity")], curve), engine=base.engine, link=base.link
    )


def row_of(
    method: str, ranks: int = 4, net: Net = GBIT, free: bool = True, **given: Any
) -> dict[str, Any]:
    parsed = sharded.parse(method)
    weights, gradients = sent_by(parsed)
    feedback = parsed.options.get("error_feedback", False)
    sent = {"weights": weights, "gradients": gradients, "groups": GROUPS, **given}
    one = ShardedScenario(ranks, net, feedback=feedback, **sent)
    return predict_sharded(one, curves_of(one, free))


def padded(group: Shapes, ranks: int) -> int:
    return sum(-(-shape[0] // ranks) * math.prod(shape[1:]) for shape in group)


def test_torchs_bytes_are_those_of_the_formula() -> None:
    """Blocks are gathered twice, the root once; see gradwire_tools.bench.train.sharded."""
    methods = {"fsdp-fp32": (4, 4), "fsdp-bf16": (2, 2), "fsdp-mixed": (4, 2)}
    for ranks, (method, (weight, gradient)) in product((2, 3, 4, 5), methods.items()):
        row = row_of(method, ranks)
        *blocks, root = (padded(group, ranks) for group in GROUPS)
        gathered, scattered = 2 * sum(blocks) + root, sum(blocks) + root
        assert row["weights_wire_bytes"] == (ranks - 1) * weight * gathered, (method, ranks)
        assert row["gradients_wire_bytes"] == (ranks - 1) * gradient * scattered, (method, ranks)
        assert row["wire_bytes"] == row["weights_wire_bytes"] + row["gradients_wire_bytes"]
        assert row["ratio"] == (ranks - 1) * 4 * (gathered + scattered) / row["wire_bytes"]


def payload(group: Shapes, ranks: int) -> int:
    """Bytes of rank 0's payloads of a group's weights in 8 bits."""
    total = 0
    for shape in group:
        own = lengths(shape, ranks)[0]
        coded = len(shape) > 1 and math.prod(shape) >= 4096
        total += layout(W8).nbytes(own) if coded else 4 * own
    return total


def scattered_bytes(group: Shapes, ranks: int, codec: Any) -> int:
    """What rank 0 sends, by the program that the engine runs."""
    specs = tuple(
        Spec(
            str(i), math.prod(shape), torch.float32,
            codec if len(shape) > 1 else codecs.get("identity"), lengths=lengths(shape, ranks),
        )
        for i, shape in enumerate(group)
    )  # fmt: skip
    topology = Topology(0, ranks, tuple(range(ranks)))
    made = compile(SCATTER, specs, topology, Capabilities(), Options())
    return made.wire_bytes


def test_our_bytes_are_those_of_payloads() -> None:
    gathers = {"none": 2, "redraw": 2, "payload": 1, "reference": 1}
    for ranks, (keep, times) in product((2, 3, 4, 5), gathers.items()):
        row = row_of(f"qsdp:w=8:g=8:keep={keep}", ranks)
        *blocks, root = (payload(group, ranks) + HEADER_BYTES for group in GROUPS)
        # Bytes of payloads are a tensor, whose messages are aligned.
        aligned = [-(-nbytes // 16) * 16 for nbytes in (*blocks, root)]
        expected = (ranks - 1) * (times * sum(aligned[:-1]) + aligned[-1])
        assert row["weights_wire_bytes"] == expected, (keep, ranks)
        gradients = codecs.get("qsgd", bits=8, block=1024)
        of_groups = sum(scattered_bytes(group, ranks, gradients) for group in GROUPS)
        assert row["gradients_wire_bytes"] == of_groups, (keep, ranks)


def test_what_has_no_codec_is_sent_in_fp32() -> None:
    full, left = row_of("fsdp-fp32"), row_of("gradwire:g=qsgd:bits=4")
    assert left["weights_wire_bytes"] == full["weights_wire_bytes"]
    assert left["gradients_wire_bytes"] < full["gradients_wire_bytes"] / 4
    dense = row_of("gradwire:w=bf16")["gradients_wire_bytes"]
    identity = codecs.get("identity")
    assert dense == sum(scattered_bytes(group, 4, identity) for group in GROUPS)


def test_a_faster_network_never_takes_longer() -> None:
    given = {"free": False, "groups": models.groups("gpt2"), "forward": 0.1, "backward": 0.2}
    for method, blocking in product(("fsdp-mixed", "qsdp:w=8:g=8"), (False, True)):
        rows = [
            row_of(method, net=Net("", rate, 1e-3), blocking=blocking, **given)
            for rate in (1e8, 3e8, 1e9, 1e10, 1e11)
        ]
        seconds = [row["seconds"] for row in rows]
        assert seconds == sorted(seconds, reverse=True), (method, blocking)
        assert seconds[0] > 10 * seconds[-1]
        for row in rows:
            assert row["seconds"] >= row["limit_seconds"] >= 0.3
        assert rows[0]["of_limit"] > 0.9  # the slowest network is what takes time


def test_computing_hides_sending_but_not_if_the_host_waits() -> None:
    """At a rate at which a step sends for as long as it computes."""
    groups = (((512, 512),),) * 8 + ((),)
    nbytes = row_of("fsdp-fp32", groups=groups)["wire_bytes"]
    net, pass_ = Net("", nbytes * 8 / 0.3, 0.0), {"forward": 0.1, "backward": 0.2}
    apart = row_of("fsdp-fp32", net=net, groups=groups, blocking=True, **pass_)
    assert apart["seconds"] == pytest.approx(0.6, rel=1e-3)
    # Only the first gather and the last reduce-scatter are not hidden, an eighth of a pass each.
    beside = row_of("fsdp-fp32", net=net, groups=groups, **pass_)
    assert 0.3 + 0.2 / 8 <= beside["seconds"] <= 0.3 + 3 * 0.1 / 8
    # Ours gathers ahead in backward, whoever waits for the rest.
    ours, host = (
        row_of("gradwire:w=identity:keep=none", net=net, groups=groups, blocking=blocking, **pass_)
        for blocking in (False, True)
    )
    assert ours["seconds"] == pytest.approx(beside["seconds"], rel=0.02)
    ahead = apart["seconds"] - host["seconds"]
    assert ahead == pytest.approx(7 / 8 * 0.1, rel=0.05)


def test_a_slower_network_hardly_slows_quantised_steps() -> None:
    """THESIS Fig. 5.3: with 200 ms of compute, from 10 to 1 Gbit/s."""
    groups, pass_ = (((1024, 1024),),) * 10 + ((),), {"forward": 0.067, "backward": 0.133}
    slow, fast = (
        Net(rate, rate_of * 1e9, 5e-5) for rate, rate_of in (("1gbit", 1), ("10gbit", 10))
    )
    slower = {
        method: row_of(method, net=slow, groups=groups, **pass_)["seconds"]
        / row_of(method, net=fast, groups=groups, **pass_)["seconds"]
        for method in ("fsdp-mixed", "qsdp:w=8:g=8", "qsdp:w=8:g=8:keep=none")
    }
    assert slower["fsdp-mixed"] > 2
    assert slower["qsdp:w=8:g=8"] < slower["qsdp:w=8:g=8:keep=none"] < 1.5


COSMOS: dict[str, Any] = {
    "ranks": 16, "per_node": 8, "replicas": 2, "accumulate": 4, "forward": 3.6, "backward": 7.2,
    "groups": (((1024, 1024),),) * 8 + ((),),
}  # fmt: skip


def test_what_4_bits_make_of_a_slow_hop() -> None:
    """NVIDIA's cosmos-framework, issue 161 and pull request 162: 10.8 s of computing and 11.4 s of
    the hop for each micro-batch of a step of four took 88.8 s, deferred 54.3 s."""
    numel, hop, computing = 8 << 20, 11.4, 4 * 10.8
    net = Net("", 4 * numel * 8 / hop, 0.0)  # a machine sends every value once
    four: dict[str, Any] = {"gradients": Identity(), "hop": codecs.get("qsgd", block=1024)}
    ways = {"fp32": {}, "bf16": {"hop": Torch(2)}, "4 bits": four}
    seconds, sent = dict[str, list[float]](), {}
    for name, how in ways.items():
        each, deferred, fast = (
            row_of("fsdp-fp32", **COSMOS, **how, **given)
            for given in (
                {"net": net, "blocking": True, "deferred": False},
                {"net": net, "blocking": True},
                {"net": Net("", 1e3 * net.rate_bits_per_s, 0.0)},
            )
        )
        assert each["replicas_wire_bytes"] == 4 * deferred["replicas_wire_bytes"]
        seconds[name] = [row["seconds"] for row in (each, deferred, fast)]
        sent[name] = deferred["replicas_wire_bytes"] / (4 * numel / 8)
        taken = sent[name] * hop
        assert seconds[name] == pytest.approx(
            [computing + 4 * taken, computing + taken, computing], rel=0.003
        ), name
    assert sent == pytest.approx({"fp32": 1, "bf16": 0.5, "4 bits": 4.03 / 32}, rel=0.01)
    assert seconds["fp32"][:2] == pytest.approx([88.8, 54.3], rel=0.01)
    assert seconds["4 bits"][:2] == pytest.approx([49.0, 44.6], rel=0.01)
    # Beside computing the hop of a fast fabric is hidden, and nothing is gained.
    assert max(of[2] for of in seconds.values()) < 1.001 * computing


def test_computing_hides_a_hop_of_replicas() -> None:
    """In the last micro-batch: but for the last block's, or what is longer than backward."""
    given = {**COSMOS, "net": Net("", 4 * (8 << 20) * 8 / 3.6, 0.0)}
    beside, apart = (row_of("fsdp-fp32", **given, blocking=waits) for waits in (False, True))
    assert apart["seconds"] == pytest.approx(4 * 10.8 + 3.6, rel=0.003)
    assert beside["seconds"] == pytest.approx(4 * 10.8 + 3.6 / 8, rel=0.003)


def test_replicas_are_machines() -> None:
    for wrong, told in (
        ({"per_node": 4}, "each is a machine, so of 16 ranks per_node is 8, not 4"),
        ({"replicas": 3}, "per_node is 5.33333, not 8"),
        ({"replicas": 0}, "replicas=0: give a number of at least 1"),
        ({"accumulate": 0}, "accumulate=0"),
        ({"replicas": 1}, "are for steps with replicas"),
    ):
        with pytest.raises(ConfigError, match=told):
            row_of("fsdp-fp32", **{**COSMOS, **wrong})


def jobs_of(backward: str = "gather", **waits: Any) -> tuple[str, str]:
    """(jobs as lane and group, actions) of a step of three equal blocks."""
    times: Sequence[Times | None] = [Times(1.0, 2.0, 0.5, 0.25)] * 3 + [Times(0.0, 0.0)]
    jobs, actions = order(times, backward, **waits)
    names = [f"{'h' if job.hop else job.lane[0]}{job.group}" for job in jobs]
    marks = {"start": "+", "wait": "?"}
    told = [
        f"{one.seconds:g}" if one.do == "compute" else marks[one.do] + names[one.job]
        for one in actions
    ]
    return " ".join(names), " ".join(told)


FORWARD = "+g3 ?g3 0 +g0 ?g0 1 +g1 ?g1 1 +g2 ?g2 1"
ORDERS: list[tuple[dict[str, bool], str, str]] = [
    ({}, "+g3 +g0 ?g3 +g1 0 ?g0 +g2 1 ?g1 1 ?g2 1",
     "+g2 ?g2 +g1 2 +r2 ?g1 +g0 2 ?r2 +r1 ?g0 2 ?r1 +r0 0 ?r0 +r3 ?r3"),
    # On a CPU the host waits.
    ({"blocking": True}, FORWARD,
     "+g2 ?g2 +g1 2 +r2 ?r2 ?g1 +g0 2 +r1 ?r1 ?g0 2 +r0 ?r0 0 +r3 ?r3 ?r3"),
    ({"blocking": True, "prefetches": False}, FORWARD,
     "+g2 ?g2 2 +r2 ?r2 +g1 ?g1 2 +r1 ?r1 +g0 ?g0 2 +r0 ?r0 0 +r3 ?r3 ?r3"),
]  # fmt: skip


def test_the_order_is_fsdp2s() -> None:
    for waits, forward, backward in ORDERS:
        assert jobs_of(**waits)[1] == f"{forward} {backward}"
    assert jobs_of()[0] == "g3 g0 g1 g2 g2 g1 g0 r2 r1 r0 r3"
    # Replicas are averaged in the second micro-batch.
    twice = {"hops": (False, True)}
    assert jobs_of(**twice)[1] == " ".join(
        [*ORDERS[0][1:], ORDERS[0][1], "+g2 ?g2 +g1 2 +r2 +h2 ?g1 +g0 2 ?r2 +r1 +h1 ?g0 2 ?r1",
         "+r0 +h0 0 ?r0 +r3 +h3 ?r3 ?h2 ?h1 ?h0 ?h3"]
    )  # fmt: skip
    waits = " ".join([FORWARD, *ORDERS[1][2:]])
    hopping = ORDERS[1][2]
    for group in range(4):
        hopping = hopping.replace(f"?r{group}", f"?r{group} +h{group} ?h{group}", 1)
    assert jobs_of(blocking=True, **twice)[1] == f"{waits} {FORWARD} {hopping}"
    # What is kept is not gathered again.
    names, told = jobs_of("decode")
    assert names == "g3 g0 g1 g2 r2 r1 r0 r3"
    assert told.split().count("2.25") == 3  # decoded, then computed
    assert jobs_of("")[1].split().count("2") == 3


def test_kernels_take_time() -> None:
    slow = {"free": False, "groups": models.groups("gpt2")}
    ours, torchs = row_of("qsdp:w=8:g=8", **slow), row_of("fsdp-bf16", **slow)
    assert torchs["compute_seconds"] == 0
    assert ours["compute_seconds"] > 0.05
    fast = Net("none", math.inf, 0.0)
    unlimited = row_of("qsdp:w=8:g=8", net=fast, **slow)
    assert unlimited["limit_seconds"] is None
    assert ours["seconds"] > unlimited["seconds"] > 0.05


def test_weights_are_encoded_before_and_decoded_after_every_gather() -> None:
    """Curves in which a value takes a second to encode, and a thousand to decode."""
    weights, gradients = sent_by(sharded.parse("qsdp:w=8:g=8:keep=none"))
    one = ShardedScenario(4, GBIT, weights, gradients, GROUPS)
    known = {**curves_of(one).codecs}
    known[repr(W8)] = {**known[repr(W8)], "encode": (0.0, 1.0, 0.0), "decode": (0.0, 1e3, 0.0)}
    row = predict_sharded(one, Curves("a test", 1, known))
    coded = [[s for s in group if len(s) > 1 and math.prod(s) >= 4096] for group in GROUPS]
    times = (2, 2, 1)  # the root's once
    own = sum(n * sum(lengths(s, 4)[0] for s in g) for n, g in zip(times, coded, strict=True))
    every = sum(n * models.numel(tuple(g)) for n, g in zip(times, coded, strict=True))
    assert row["compute_seconds"] == pytest.approx(own + 1e3 * every, rel=1e-9)


def test_one_node_stands_for_all_of_many_ranks() -> None:
    groups = (((4096, 1024),),) * 3 + ((),)
    exact, one = (
        row_of("qsdp:w=8:g=8", 16, groups=groups, forward=0.01, exact=exact)
        for exact in (True, False)
    )
    assert (exact["exact"], one["exact"]) == (True, False)
    for key in ("seconds", "weights_wire_bytes", "gradients_wire_bytes", "limit_seconds"):
        assert one[key] == pytest.approx(exact[key], rel=1e-6), key


def test_in_two_levels_a_node_sends_less() -> None:
    groups = (((4096, 1024),),) * 3 + ((),)
    flat, levels = (
        row_of("qsdp:w=8:g=8", 8, groups=groups, per_node=4, options=Options(algorithm=name))
        for name in ("sra", "hierarchical")
    )
    assert levels["limit_seconds"] == pytest.approx(flat["limit_seconds"] / 4, rel=0.01)
    assert levels["seconds"] < flat["seconds"] / 2


def test_groups_are_a_models_parameters_blocks_and_the_root() -> None:
    for name in (*models.MODELS, "1e6,4096x1024"):
        groups = models.groups(name)
        shapes = models.shapes(name)
        assert models.numel([s for group in groups for s in group]) == models.numel(shapes), name
        assert len(groups) > 2
        assert all(groups[:-1])
    blocks = models.groups("gpt2")
    assert [len(group) for group in blocks] == [1, *[12] * 12, 3]  # positions; the embedding, norm
    assert models.groups("7,4096x1024") == (((7, 1),), ((4096, 1024),), ())
