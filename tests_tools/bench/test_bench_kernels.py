"""The rows of `gradwire bench kernels`, and its errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradwire import codecs, lang
from gradwire.codecs import TopK
from gradwire.errors import ConfigError
from gradwire.lang import layout
from gradwire_tools.bench import interleaved
from gradwire_tools.bench.micro import kernels

KEYS = {
    "codec", "options", "target", "device", "threads", "numel", "op", "seconds", "gbps",
    "limit_seconds", "of_limit", "copy_gbps", "run",
}  # fmt: skip


def test_rows() -> None:
    rows = list(kernels.run(["qsgd:bits=2", "fp16"], None, 5000, [1, 2], quick=True))
    assert len(rows) == 2 * 2 * 2 * len(kernels.OPS)
    for row in rows:
        assert set(row) == KEYS
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
