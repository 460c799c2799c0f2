"""Replicas that meet, simulated: by hand, as a bucket of DDP, and with the bytes of a run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gradwire as gw
from gradwire.aggregators import Aggregator
from gradwire.collectives import Options
from gradwire.errors import ConfigError
from gradwire.lang import Codec
from gradwire.outer_loop.homes import fragments_of
from gradwire.outer_loop.meeting import WORD
from gradwire.outer_loop.settings import settings_of
from gradwire_tools.bench import tasks
from gradwire_tools.sim import Curves, Net, models, predict
from gradwire_tools.sim.meetings import OuterScenario, predict_outer
from machines import FREE, GBIT, IDENTITY, USUAL, priced, scenario
from ranks import on

LATENCY = 1e-3
WIRE = (4 * 512 * 512 + 48) * 8e-9  # of one matrix, at 1gbit,1ms, by all_gather between two
COMPUTING = {"forward": 0.01, "backward": 0.02}


def words(ranks: int, net: Net = GBIT) -> float:
    """Seconds in which replicas tell each other that they have the averages."""
    told = 8 * (WORD + 48) * (ranks - 1) / net.rate_bits_per_s
    return 2 * net.latency_s + told if ranks > 1 else 0.0


WORDS = words(2)


def meets(ranks: int, model: str, preset: str | None = None, **given: Any) -> OuterScenario:
    """At 1gbit,1ms; `given` are settings, or fields of OuterScenario."""
    fields = OuterScenario.__dataclass_fields__
    own = {name: given.pop(name) for name in list(given) if name in fields}
    settings = settings_of(preset, given)
    return OuterScenario(ranks, own.pop("net", GBIT), settings=settings, model=model, **own)


def free(one: OuterScenario, *stages: float) -> Curves:
    """Nothing takes time but what aggregators compute in these stages, in seconds per value."""
    codecs = [of for of in one.priced if isinstance(of, Codec)]
    of_stage = [(0.0, value, 0.0) for value in stages] or [(0.0, 0.0, 0.0)] * 2
    others = {of.recorded(): of_stage for of in one.priced if isinstance(of, Aggregator)}
    return replace(priced(dict.fromkeys([*codecs, IDENTITY], (0.0,) * 3)), aggregators=others)


@pytest.mark.parametrize(
    ("delay", "exposed"),
    [
        (0, 2 * LATENCY + WIRE + WORDS),
        (1, WORDS),  # 30 ms of computing hide 10 ms
    ],
)
def test_times_are_those_computed_by_hand(delay: int, exposed: float) -> None:
    by = {"options": Options(algorithm="all_gather"), **COMPUTING}
    one = meets(2, "512x512", every=8, codec="none", delay=delay, **by)
    row = predict_outer(one, FREE)
    assert row["meeting_seconds"] == [pytest.approx(2 * LATENCY + WIRE + WORDS, rel=1e-9)]
    assert row["exposed_seconds"] == pytest.approx(exposed, rel=1e-9, abs=1e-12)
    assert row["hidden_seconds"] == pytest.approx(2 * LATENCY + WIRE + WORDS - exposed, abs=1e-12)
    assert row["seconds"] == pytest.approx(0.03 + exposed / 8, rel=1e-9)
    nbytes = 4 * 512 * 512 + 48 + WORD + 48
    assert (row["wire_bytes"], row["meeting_bytes"]) == (nbytes, [nbytes])
    assert row["needed_delay"] == 1
    limit = 0.03 + (WORDS + (0 if delay else LATENCY + WIRE)) / 8
    assert row["limit_seconds"] == pytest.approx(limit, rel=1e-9)
    assert (row["every"], row["delay"], row["forward_seconds"]) == (8, delay, 0.01)


@pytest.mark.parametrize("algorithm", ["sra", "ring", "tree"])
def test_a_meeting_takes_what_a_bucket_of_ddp_takes(algorithm: str) -> None:
    slow = Net("50mbit,50ms", 5e7, 0.05)
    for ranks, net in ((2, GBIT), (4, slow), (5, Net("none"))):
        for codec, of in (("none", "identity"), ("qsgd", "qsgd")):
            by = Options(algorithm=algorithm)
            row = predict_outer(meets(ranks, "1e6", codec=codec, net=net, options=by), USUAL)
            made = gw.codecs.get(of)
            ddp = predict(scenario(ranks, "1e6", algorithm, codec=made, net=net), USUAL)
            assert ddp["buckets"] == 1
            assert row["meeting_seconds"] == [ddp["seconds"] + words(ranks, net)], (ranks, codec)
            others = {"wire_bytes": (WORD + 48) * (ranks - 1), "messages": ranks - 1}
            for key in ("wire_bytes", "messages", "compute_seconds", "exact"):
                assert row[key] == ddp[key] + others.get(key, 0), (ranks, codec, key)


def test_what_is_hidden_grows_with_the_delay_up_to_all() -> None:
    of: dict[str, Any] = {"every": 30, "codec": "none", "forward": 0.003, "backward": 0.006}
    seconds = sum(predict_outer(meets(4, "1e6", **of), FREE)["meeting_seconds"])
    rows = [predict_outer(meets(4, "1e6", delay=delay, **of), FREE) for delay in range(8)]
    for delay, row in enumerate(rows):
        assert row["hidden_seconds"] == pytest.approx(min(seconds - words(4), delay * 0.009))
        assert row["exposed_seconds"] + row["hidden_seconds"] == pytest.approx(seconds)
        assert row["limit_seconds"] <= row["seconds"]
    needed = rows[0]["needed_delay"]
    assert rows[needed]["exposed_seconds"] == pytest.approx(words(4))
    assert rows[needed - 1]["exposed_seconds"] > words(4) * 1.01


def test_the_training_thread_computes_before_the_first_round_itself() -> None:
    one = meets(2, "512x512", "sparseloco", delay=20, **COMPUTING)
    computing = 512 * 512 * 1e-7
    for stages, exposed in (((1e-7, 0.0), computing), ((0.0, 1e-7), 0.0)):
        row = predict_outer(one, free(one, *stages))
        assert row["exposed_seconds"] == pytest.approx(exposed + words(2))
        assert row["compute_seconds"] == pytest.approx(computing)
        assert row["meeting_seconds"][0] > computing


def test_fragments_have_the_bytes_of_the_whole_and_a_lower_peak() -> None:
    given: dict[str, Any] = {"every": 30, "codec": "none", **COMPUTING}
    whole, parts = (
        predict_outer(meets(4, ",".join(["512x512"] * 6), fragments=n, **given), FREE)
        for n in (1, 3)
    )
    assert len(parts["meeting_bytes"]) == 3
    assert parts["wire_bytes"] == pytest.approx(whole["wire_bytes"], rel=1e-3)
    assert max(parts["meeting_bytes"]) == pytest.approx(whole["wire_bytes"] / 3, rel=1e-3)


def test_fragments_are_those_of_the_model() -> None:
    """Of a model with embeddings and a head, by the names that it has."""
    named = tasks.shapes(tasks.get("gpt"))
    sizes = {name: math.prod(shape) for name, shape in named}
    assert list(models.named("gpt").values()) == [shape for _, shape in named]
    for fragments in (None, 1, 3, 7):
        given = {} if fragments is None else {"fragments": fragments}
        one = meets(2, "gpt", "streaming", every=42, **given)
        parts = fragments_of([*sizes], 42, fragments)
        found = [sum(p.numel for p in scope.members) for scope in one.scopes]
        assert found == [sum(sizes[name] for name in part) for part in parts]
    for name in models.MODELS:
        assert tuple(models.named(name).values()) == models.shapes(name)
    layers = {"gpt2": 12, "bert-large": 24, "resnet50": 16, "vgg16": 16, "llama-7b": 32}
    for name, count in layers.items():
        assert len({n.split(".")[0] for n in models.named(name) if n[0].isdigit()}) == count


def test_what_cannot_be_is_refused() -> None:
    for given, told in (
        ({"fragments": 9, "every": 9}, "fragments=9: the model has 2 numbered layers"),
        ({"forward": -1.0}, "forward=-1"),
        ({"codec": "topk", "residual": 0.0}, "residual=0"),
        ({"codec_options": {"bitz": 2}}, "bitz"),
    ):
        with pytest.raises(ConfigError, match=told):
            meets(2, "512x512,512x512", **given)


SIZES = ((96, 80), (32, 48), (80, 96), (128, 64))  # of which the second travels in bf16


@pytest.mark.multiprocess
@on(
    (2, 3),
    ("outer", {"codec": "qsgd:bits=4"}),
    ("sparseloco", {}),
    ("average", {"delay": 1}),
    ("streaming", {"fragments": 2}),
    ("outer", {"codec": "powersgd:rank=2", "residual": 1.0}),
    ("outer", {"codec": "none", "fragments": 4}),
)
def test_bytes_are_those_of_a_run(rank: int, preset: str, given: dict[str, Any]) -> None:
    """Of three rounds of ranks that share a machine."""
    ranks, named = dist.get_world_size(), None if preset == "outer" else preset
    model = nn.Sequential(*(nn.Linear(into, out, bias=False) for out, into in SIZES))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    how = {"every": 4, **given}
    handle = gw.outer(model, optimizer, named, **how)
    for step in range(3 * 4 + handle._reductions.settings.delay):
        for p in model.parameters():
            made = torch.Generator().manual_seed(100 * step + rank)
            p.grad = torch.randn(p.shape, generator=made)
        optimizer.step()
    stats = handle.stats()
    handle.detach()
    assert stats["rounds"] == 3
    text = ",".join(f"{out}x{into}" for out, into in SIZES)
    one = meets(ranks, text, named, per_node=ranks, **how)
    row = predict_outer(one, free(one, 0.0, 0.0, 0.0))
    if not rank:  # the others may have other shares of what no number of ranks divides
        assert row["wire_bytes"] == stats["wire_bytes"] / 3
