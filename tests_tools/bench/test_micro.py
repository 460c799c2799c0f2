"""`bench kernels`, `bench profile` and `bench aggregators`: rows, parts, traces and errors."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench_runs import keys_of

import forked
from gradwire import codecs, lang
from gradwire.aggregators import PowerSGD, registry
from gradwire.codecs import TopK
from gradwire.engine import Span
from gradwire.errors import ConfigError
from gradwire.lang import layout
from gradwire_tools.bench import interleaved, tasks
from gradwire_tools.bench.micro import aggregators, kernels, profile
from gradwire_tools.bench.micro.aggregators import _Measured
from gradwire_tools.bench.micro.profile import _had_to_wait
from gradwire_tools.bench.train import methods
from rooms.engine import WIRE


def test_rows() -> None:
    rows = list(kernels.run(["qsgd:bits=2", "fp16"], None, 5000, [1, 2], quick=True))
    assert len(rows) == 2 * 2 * 2 * len(kernels.OPS)
    for row in rows:
        assert set(row) == keys_of(row)
        assert row["seconds"] > 0
        assert row["of_limit"] == pytest.approx(row["limit_seconds"] / row["seconds"])
        assert row["gbps"] == pytest.approx(4 * 5000 / row["seconds"] / 1e9)
    assert [r["op"] for r in rows[:6]] == [
        "encode", "encode_ef", "decode", "decode_add", "decode_sum", "reduce_encode",
    ]  # fmt: skip
    assert rows[0]["options"]["bits"] == 2
    assert rows[0]["codec"] == "qsgd"


def test_sparse_codecs_have_a_row_of_torch_topk() -> None:
    rows = list(kernels.run(["topk:density=0.01"], ["c"], 20_000, [1], quick=True))
    assert [r["target"] for r in rows] == ["c"] * len(kernels.OPS) + ["torch-topk"]
    assert rows[-1]["op"] == "encode"
    add = next(r for r in rows if r["op"] == "decode_add")
    moved = add["limit_seconds"] * add["copy_gbps"] * 1e9  # of selected values only
    assert moved == pytest.approx(8 * 200 + layout(TopK(0.01)).nbytes(20_000))


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"device 'cuda': (there is no CUDA|triton is not)"):
        list(kernels.run(["qsgd"], device="cuda"))


def test_events_time_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = clock[0]

        def elapsed_time(self, later: Event) -> float:
            return later.at - self.at

    def takes(milliseconds: float) -> None:
        clock[0] += milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    leads: list[int] = []  # before each turn, and in no time
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: (leads.append(cycles), takes(10.0)))
    found = interleaved.medians([lambda: takes(3.0), lambda: takes(2.0)], 1, "triton", quick=True)
    assert found == pytest.approx([0.003, 0.002])
    assert len(leads) == interleaved.QUICK_EVENTS


def test_consecutive_calls_use_other_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[int] = []
    in_turn = kernels._in_turn

    def noting(function: Any, arguments: Any, *order: Any) -> Any:
        def noted(argument: Any) -> None:
            touched.append(next(i for i, a in enumerate(arguments) if a is argument))
            function(argument)

        return in_turn(noted, arguments, *order)

    monkeypatch.setattr(kernels, "_in_turn", noting)
    list(kernels.run(["topk"], ["eager"], numel=1000, threads=[1], quick=True))
    assert len(touched) >= 2 * (len(kernels.OPS) + 1)
    assert all(len({*touched[i : i + 4]}) == 4 for i in range(len(touched) - 3)), touched
    # As many arrays as fit into a cache.
    assert [kernels._sets(n) for n in (2**10, 2**24, 2**26, 2**30)] == [4, 4, 1, 1]


def test_limits_count_bytes_read_and_written() -> None:
    rows = {r["op"]: r for r in kernels.run(["identity"], ["c"], 4096, [1], quick=True)}
    moved = {op: r["limit_seconds"] * r["copy_gbps"] * 1e9 for op, r in rows.items()}
    n = 4 * 4096
    assert moved["encode"] == pytest.approx(2 * n)
    assert moved["encode_ef"] == pytest.approx(4 * n)
    assert moved["decode"] == pytest.approx(2 * n)
    assert moved["decode_add"] == pytest.approx(3 * n)
    # A statistic of the row takes another read.
    numel = 2**24
    for name, readings in (("qsgd", 1), ("onebit", 1), ("dgc", 1), ("terngrad", 2), ("threelc", 2)):
        codec = codecs.get(name)
        layout = lang.kernels(codec, torch.float32, "c").layout
        moved = kernels._moved(codec, "encode", layout, numel)
        assert moved == readings * 4 * numel + layout.nbytes(numel), name
        with_error = kernels._moved(codec, "encode_ef", layout, numel)
        assert with_error - moved == (readings + 1) * 4 * numel, name


PARTS = [
    *("hook", "compute", "inbound", "outbound", "python", "queueing", "wire", "kernels", "bucket"),
    *("overhead", "backward", "compile_1024"),
]
DIFFERENCES = ("compute", "inbound", "outbound", "python", "overhead")  # below 0 by chance


@pytest.mark.multiprocess
def test_every_part_has_a_row_and_a_step_is_traced(tmp_path: Path) -> None:
    trace = tmp_path / "trace.json"
    rows = list(profile.run(numel=200_000, trace=str(trace), quick=True))
    assert [row["part"] for row in rows] == PARTS
    for row in rows:
        assert (row["ranks"], row["net"], row["parameters"]) == (2, "none", 30)
        assert row["numel"] == pytest.approx(200_000, rel=0.02)
        assert row["seconds"] >= 0 or row["part"] in DIFFERENCES
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"compute", "inbound", "outbound"} <= {event["tid"] for event in events}
    assert any(event["name"].startswith("run kernel: merge") for event in events)


def test_only_waits_that_found_their_message_have_lost_time() -> None:
    for seconds, slept in ((2e-3, True), (1e-4, False)):
        step = Span("inbound", "borrow", begin=1.0, seconds=seconds + 1e-5, cpu_seconds=1e-4)
        wait = Span("inbound", f"{WIRE}receive", begin=1.0, seconds=seconds, cpu_seconds=9e-5)
        assert _had_to_wait(step, [wait]) is slept
        elsewhere = Span("outbound", f"{WIRE}send", begin=1.0, seconds=2e-3, cpu_seconds=0.0)
        before = Span("inbound", f"{WIRE}receive", begin=0.9, seconds=2e-3, cpu_seconds=0.0)
        assert not _had_to_wait(step, [elsewhere, before])


METHODS = ["torch-powersgd:rank=2", "powersgd:rank=2", "qsgd:bits=4", "torch-fp16-hook"]


SMALL = partial(tasks.get, data="digits", channels=8, hidden=128)


def with_small_tasks() -> None:
    tasks.get = SMALL  # type: ignore[assignment]


@pytest.mark.multiprocess
def test_a_row_per_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "get", SMALL)
    monkeypatch.setattr(forked, "prepare", with_small_tasks)
    rows = list(aggregators.run(METHODS, "image", quick=True))
    assert [row["method"] for row in rows] == METHODS
    for row in rows:
        assert (row["task"], row["ranks"]) == ("image", 2)
        assert row["ms_per_million"] == pytest.approx(1e9 * row["seconds"] / row["numel"])
        # Seconds are without those of an empty hook, so they may be below 0 by chance.
        known = row["seconds"] > 0
        expected = pytest.approx(row["limit_seconds"] / row["seconds"]) if known else None
        assert row["of_limit"] == expected
        assert row["limit_seconds"] > 0
        assert row["state_bytes_per_value"] == row["state_bytes"] / row["numel"]
    # What methods send and keep.
    theirs, ours, quantised, cast = rows
    assert [row["rounds"] for row in rows] == [3, 2, 1, 1]
    assert all(row["orthogonal_share"] or row["seconds"] <= 0 for row in (ours, theirs))
    assert quantised["orthogonal_share"] is None
    assert cast["wire_bytes"] == 2 * cast["numel"]  # 2 (N-1)/N of 16 bits
    assert ours["wire_bytes"] == pytest.approx(theirs["wire_bytes"], rel=0.1)
    assert 4 < theirs["state_bytes_per_value"] < 5
    assert 3 < ours["state_bytes_per_value"] < 5  # no residual of vectors
    assert quantised["state_bytes"] == 0
    assert theirs["peak_extra_bytes"] is None
    assert ours["peak_extra_bytes"] > ours["state_bytes"]


def test_a_time_within_that_of_an_empty_hook_has_no_shares() -> None:
    parameters = [torch.zeros(10)]
    made = SimpleNamespace(
        name="a", spent=[[0.1, 0.1, 0.025]], sent=[0, 8], steps=2,
        model=SimpleNamespace(parameters=lambda: parameters), _state=lambda: (0, 1),
        applied=SimpleNamespace(traffic=lambda steps: {"wire_bytes": 8, "peak_extra_bytes": None}),
    )  # fmt: skip
    for idle, shares in ((0.1, (None, None)), (0.2, (None, None)), (0.0, (0.5, 0.25))):
        row = _Measured.row(made, SimpleNamespace(spent=[[idle]]), 0.05, "gpt")  # type: ignore[arg-type]
        assert (row["of_limit"], row["orthogonal_share"]) == shares


def test_every_aggregator_is_measured_by_default() -> None:
    chosen = aggregators.default_methods([4, 32])
    theirs, *ours = chosen[:3]
    assert theirs == "torch-powersgd:rank=4"
    assert ours == ["powersgd:rank=4", "powersgd:rank=4:orthogonal=qr"]
    assert set(registry.REGISTRY) <= {name.partition(":")[0] for name in chosen}
    assert PowerSGD(4).orthogonal != "qr"
    for name in chosen:
        methods.parse(name).check()
