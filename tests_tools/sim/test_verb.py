"""`gradwire sim`: rows, sweeps, plots, mistakes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import command_line
from command_line import refusal, wrongly_refused
from gradwire.codecs import get
from machines import USUAL, priced

KEYS = {
    "method", "codec", "algorithm", "ranks", "per_node", "net", "model", "numel", "seconds",
    "compute_seconds", "wire_bytes", "limit_seconds", "of_limit", "backward_seconds", "buckets",
    "messages", "exact", "machine", "run",
}  # fmt: skip


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Curves of some codecs."""
    used = [get(name) for name in ("identity", "topk", "tbq")]
    used += [get("qsgd", bits=bits) for bits in (2, 4, 8)]
    prices = dict.fromkeys(used, (1e-5, 3e-10, 1e-10))
    path = tmp_path_factory.mktemp("curves") / "curves.json"
    known = priced(prices, engine=USUAL.engine, link=USUAL.link)
    computing = {"powersgd(rank=4), error feedback": [(1e-5, 5e-10, 1e-11)] * 3}
    replace(known, aggregators=computing).save(path)
    return str(path)


def rows_of(file: str, *arguments: str) -> list[dict[str, Any]]:
    return command_line.rows_of("sim", "--curves", file, *arguments)


def test_a_row_for_each_codec_and_algorithm(file: str) -> None:
    arguments = ["--codec", "qsgd,qsgd:bits=2,topk", "--algorithm", "sra,all_gather"]
    rows = rows_of(file, "--ranks", "4", "--model", "1e6", *arguments)
    assert [(row["codec"], row["algorithm"]) for row in rows] == [
        (codec, algorithm)
        for codec in ("qsgd", "qsgd:bits=2", "topk")
        for algorithm in ("sra", "all_gather")
    ]
    for row in rows:
        assert row.keys() == KEYS
        assert row["numel"] == 1_000_000
        assert row["method"] == f"gradwire:{row['codec']}"
        assert row["exact"] is True
        assert row["limit_seconds"] == pytest.approx(row["wire_bytes"] * 8e-9 + 1e-3, abs=1.1e-3)
        assert row["of_limit"] == pytest.approx(row["limit_seconds"] / row["seconds"])
    (low,) = rows_of(file, "--model", "1000x1000,64x64", "--codec", "powersgd:rank=4")
    assert (low.keys(), low["method"]) == (KEYS, "gradwire:powersgd:rank=4")
    # half the bits, except for the metadata
    assert rows[2]["wire_bytes"] == pytest.approx(rows[0]["wire_bytes"] * 36 / 68, rel=0.01)


def test_sweeps(file: str) -> None:
    ranks = rows_of(file, "--model", "1e6", "--sweep", "ranks=2,4,8")
    assert [(row["sweep"], row["value"], row["ranks"]) for row in ranks] == [
        ("ranks", n, n) for n in (2, 4, 8)
    ]
    rates = rows_of(file, "--model", "1e6", "--sweep", "rate=100mbit,1gbit,400gbit")
    assert [row["net"] for row in rates] == ["100mbit,1ms", "1gbit,1ms", "400gbit,1ms"]
    assert [row["value"] for row in rates] == ["100mbit", "1gbit", "400gbit"]
    assert rates[0]["seconds"] > rates[1]["seconds"] > rates[2]["seconds"]
    latencies = rows_of(file, "--model", "1e6", "--sweep", "latency=1ms,20ms")
    assert [row["net"] for row in latencies] == ["1gbit,1ms", "1gbit,20ms"]
    bits = rows_of(file, "--model", "1e6", "--codec", "qsgd:bits=8", "--sweep", "bits=2,4,8")
    assert bits[0]["wire_bytes"] < bits[1]["wire_bytes"] < bits[2]["wire_bytes"]
    for name, values in (("per_node", "1,2"), ("backward", "0,0.5"), ("segments", "1,4")):
        both = rows_of(file, "--model", "1e6", "--sweep", f"{name}={values}")
        assert both[0]["seconds"] != both[1]["seconds"], name
    cores = rows_of(file, "--model", "1e6", "--ranks", "8", "--sweep", "cores=0.1,64")
    assert cores[0]["seconds"] > cores[1]["seconds"]
    servers = ["--algorithm", "parameter_server", "--sweep", "partitions=1,4"]
    assert len(rows_of(file, "--model", "1e6", *servers)) == 2


def test_error_feedback_has_kernels_of_its_own(file: str, tmp_path: Path) -> None:
    data = json.loads(Path(file).read_text())
    for forms in data["codecs"].values():
        forms["encode_ef"] = forms["reduce_encode_ef"] = [1e-2, 0, 0]
    slow = tmp_path / "slow.json"
    slow.write_text(json.dumps(data))
    plain, kept = (
        rows_of(str(slow), "--model", "1e6", "--codec", codec)[0]
        for codec in ("qsgd", "qsgd:error_feedback=true")
    )
    assert kept["seconds"] > plain["seconds"] + 1e-2


def test_plots(file: str, tmp_path: Path) -> None:
    for ending, sweep in (
        ("png", []),
        ("svg", ["--sweep", "rate=1gbit,10gbit"]),
        ("svg", ["--sweep", "ranks=2,4"]),
    ):
        plot = tmp_path / f"plot.{ending}"
        rows_of(file, "--model", "1e6", "--algorithm", "sra,ring", *sweep, "--plot", str(plot))
        written = plot.read_bytes()
        assert written[:4] == b"\x89PNG" if ending == "png" else b"<svg" in written


def test_limits_and_many_ranks(file: str) -> None:
    """Without a network there is no limit; of a thousand ranks one node is simulated, in seconds
    (test_symmetry.py compares with all)."""
    (row,) = rows_of(file, "--net", "none", "--model", "1e6")
    assert (row["limit_seconds"], row["of_limit"]) == (None, None)
    assert row["seconds"] > 0
    (row,) = rows_of(file, "--ranks", "1024", "--model", "resnet50")
    assert row["exact"] is False
    assert row["seconds"] > row["limit_seconds"]


MISTAKES = [
    (["--model", "resnet51"], "resnet51"),
    (["--model", "0"], "at least 1"),
    (["--model", "1e999"], "--model '1e999': more than 1e+13 values"),
    (["--ranks", "0"], "--ranks 0"),
    (["--ranks", "1"], "--ranks 1: one rank sends nothing; use 2 ranks or more"),
    (["--sweep", "ranks=1,2"], "--sweep ranks=1: one rank sends nothing"),
    (["--per-node", "0"], "per_node=0"),
    (["--cores", "0"], "cores"),
    (["--backward", "-1"], "backward"),
    (["--codec", "qsdg"], "qsdg"),
    (["--codec", "qsgd:algorithm=ring"], "--algorithm"),
    (["--codec", "none"], "leave it out here"),
    (["--codec", "powersgd", "--model", "64x64"], "no curves for powersgd(rank=2), error feedback"),
    (["--codec", "powersgd"], "rank=2 does not shrink a matrix of 1 x 10000"),
    (["--codec", "topkc", "--model", "llama-7b"], "a scope of more than 1073741824 values"),
    (["--codec", "qsgd:error_feedback=3"], "error_feedback"),
    (["--codec", ""], "--codec is empty"),
    (["--algorithm", "star"], "star"),
    (["--codec", "tbq", "--algorithm", "ring"], "not defined in the algorithm 'ring'"),
    (
        ["--codec", "randomk:unbiased=true:error_feedback=true", "--algorithm", "all_gather"],
        "not defined with error feedback",
    ),
    (["--net", "1gbyte"], "1gbyte"),
    (["--net", "0gbit"], "zero"),
    (["--sweep", "ranks"], "NAME=VALUE"),
    (["--sweep", "ranks=two"], "two"),
    (["--sweep", "colour=red"], "colour"),
    (["--sweep", "rank=2"], "--sweep rank: did you mean 'ranks'? Else use one of ranks, rate, lat"),
    (["--sweep", "rate=1gbit", "--net", "none"], "needs a network"),
    (["--segments", "0"], "segments"),
    (["--partitions", "2"], "parameter_server"),
    (["--plot", "plot.pdf"], "plot.pdf"),
    (["--plot", "no such folder/plot.png"], "existing folder"),
    (["--codec", "terngrad"], "no curve"),
    (["--sharded", "--methods", "gradwire:w=bf16:g=powersgd"], "FSDP2 scatters through a single"),
    (["--sharded", "--codec", "qsgd"], "give --methods, as in qsdp:w=8:g=8"),
    (["--sharded", "--methods", "torch-fp32"], "unknown method 'torch-fp32'"),
    (["--sharded", "--methods", "qsdp:w=8"], "write qsdp:w=BITS:g=BITS"),
    (["--sharded", "--methods", ""], "--methods is empty"),
    (["--sharded", "--algorithm", "ring"], "ring"),
    (["--sharded", "--ranks", "1"], "--ranks 1: one rank sends nothing"),
    (["--sharded", "--sweep", "bits=2,4"], "sweep one of ranks, rate"),
    (["--sharded", "--forward", "-1"], "forward=-1"),
    (["--sharded", "--coordinated"], "leave --validate, --partitions and --coordinated out"),
    (["--methods", "fsdp-fp32"], "--methods: is for a step under FSDP2: give --sharded"),
    (["--forward", "1"], "--forward: is for a step under FSDP2"),
    (["--blocking"], "--blocking: is for a step under FSDP2"),
]


def test_mistakes_are_named(file: str, tmp_path: Path) -> None:
    common = ["sim", "--model", "1e4", "--curves", file]
    faults = wrongly_refused(([*common, *words], said) for words, said in MISTAKES)
    assert not faults, "\n".join(faults)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"a": 1}\n')
    complaint, _ = refusal("sim", "--model", "1e4", "--curves", str(rows))
    assert "it has no key 'codecs'" in complaint
    rows.write_text("null\n")
    complaint, _ = refusal("sim", "--model", "1e4", "--curves", str(rows))
    assert "a JSON object is needed, with codecs, not NoneType" in complaint
