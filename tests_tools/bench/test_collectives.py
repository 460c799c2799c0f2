"""`bench collectives`: the rows, their bytes and their limits."""

from __future__ import annotations

import pytest

from gradwire_tools.bench.network import collectives
from products import EXHAUSTIVE

KEYS = {
    "method", "algorithm", "transport", "ranks", "net", "numel", "per_node",
    "seconds", "seconds_quartiles", "run", "wire_bytes", "link_bytes", "limit_seconds",
    "of_limit", "nmse",
}  # fmt: skip


@pytest.mark.multiprocess
def test_every_default_method_has_a_row() -> None:
    rows = list(collectives.run(ranks=2, net="none", numel=40_000, quick=True))
    assert [row["method"] for row in rows] == list(collectives.DEFAULT_METHODS)
    by_method = {row["method"]: row for row in rows}
    for row in rows:
        assert row.keys() == KEYS
        assert row["seconds"] > 0
        assert row["limit_seconds"] is None
        assert row["of_limit"] is None
    assert by_method["torch-fp32"]["wire_bytes"] == 4 * 40_000
    assert by_method["torch-fp16-hook"]["wire_bytes"] == 2 * 40_000
    # 4 bits and two bf16 numbers for each 128 values; two messages with their headers
    assert by_method["gradwire-qsgd4"]["wire_bytes"] == pytest.approx(160_000 / 7.53, rel=0.02)
    assert by_method["torch-fp32"]["nmse"] < 1e-12
    assert by_method["torch-fp16-hook"]["nmse"] < 1e-6
    assert 1e-3 < by_method["gradwire-qsgd4"]["nmse"] < 0.1
    assert by_method["torch-powersgd"]["wire_bytes"] == 4 * 4 * (200 + 200)


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_a_method_names_its_algorithm() -> None:
    names = ["sra", "ring", "tree", "parameter_server", "all_gather", "hierarchical"]
    methods = [f"gradwire:qsgd:algorithm={name}" for name in names]
    rows = list(collectives.run(3, "none", methods, numel=38_400, quick=True))
    assert [row["algorithm"] for row in rows] == names
    sent = {row["algorithm"]: row["wire_bytes"] for row in rows}
    payload = 38_400 // 128 * 68
    # each rank has its own node, so hierarchical is SRA between all of them
    for name in names:
        share = 2 if name in ("all_gather", "tree") else 4 / 3
        assert sent[name] == pytest.approx(share * payload, rel=0.02)
    assert all(1e-3 < row["nmse"] < 0.1 for row in rows)


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
def test_on_a_network_the_limit_is_bytes_and_latency() -> None:
    methods = ["torch-fp16-hook", "gradwire-qsgd4"]
    rows = list(collectives.run(2, "50mbit,2ms", methods, numel=1_000_000, quick=True))
    for row in rows:
        rounds = 2  # of the ring of two ranks, and of SRA
        limit = row["wire_bytes"] * 8 / 50e6 + rounds * 2e-3
        assert row["limit_seconds"] == pytest.approx(limit)
        assert row["of_limit"] == pytest.approx(limit / row["seconds"])
