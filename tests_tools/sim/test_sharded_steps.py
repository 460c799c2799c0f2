"""`gradwire sim --sharded`: bytes by formula, FSDP2's order, rates; test_verb.py has its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch

from gradwire import Options, codecs
from gradwire.engine import HEADER_BYTES
from gradwire.lang import layout
from gradwire.partition import Spec
from gradwire_tools.bench.train import sharded
from gradwire_tools.predict.simulate_sharded import sent_by
from gradwire_tools.sim import Curves, Net, models
from gradwire_tools.sim.models import Shapes
from gradwire_tools.sim.sharded import ShardedScenario, predict_sharded
from gradwire_tools.sim.shards import SCATTER, codecs_of, lengths
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
    used = codecs_of(one.groups, one.weights, one.gradients)
    return priced(
        dict.fromkeys([*used, codecs.get("identity")], curve), engine=base.engine, link=base.link
    )


def row_of(
    method: str, ranks: int = 4, net: Net = GBIT, free: bool = True, **given: Any
) -> dict[str, Any]:
    parsed = sharded.parse(method)
    weights, gradients = sent_by(parsed)
    feedback = parsed.options.get("error_feedback", False)
    groups = given.pop("groups", GROUPS)
    one = ShardedScenario(ranks, net, weights, gradients, groups, feedback=feedback, **given)
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


def jobs_of(backward: str = "gather", **waits: bool) -> tuple[str, str]:
    """(jobs as lane and group, actions) of a step of three equal blocks."""
    times: Sequence[Times | None] = [Times(1.0, 2.0, 0.5, 0.25)] * 3 + [Times(0.0, 0.0)]
    jobs, actions = order(times, backward, **waits)
    names = [f"{job.lane[0]}{job.group}" for job in jobs]
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
    known[str(W8)] = {**known[str(W8)], "encode": (0.0, 1.0, 0.0), "decode": (0.0, 1e3, 0.0)}
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
