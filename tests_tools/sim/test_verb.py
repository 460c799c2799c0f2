"""`gradwire sim`: rows, sweeps, plots; --validate, at a point that is robust to other load."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import command_line
from gradwire.codecs import get
from gradwire.errors import ConfigError
from gradwire_tools.bench.paper import validate
from gradwire_tools.bench.rows import check
from gradwire_tools.predict.simulate_outer import KINDS
from gradwire_tools.report.rows import kind_of
from machines import USUAL, priced
from products import EXHAUSTIVE

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
    used += [get("randomshift", bits=8), get("qsgd", bits=8, block=1024)]  # of qsdp:w=8:g=8
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


def test_the_table_says_of_what_it_is_defaults_too(file: str) -> None:
    """What is swept is a column, and not in the title."""
    sharded = ["--sharded", "--methods", "qsdp:w=8:g=8", "--sweep", "latency=1ms,2ms"]
    for arguments, title, column in (
        ([], "resnet50, 4 ranks, 1 Gbit/s, 1 ms latency", "codec"),
        (["--net", "none", "--ranks", "2"], "resnet50, 2 ranks, loopback, no network emu", "codec"),
        (["--sweep", "ranks=2,4"], "resnet50, 1 Gbit/s, 1 ms latency", "ranks"),
        (["--sweep", "rate=1gbit,2gbit", "--model", "1e6"], "1e6, 4 ranks", "rate"),
        (["--sweep", "bits=2,4", "--ranks", "2"], "resnet50, 2 ranks, 1 Gbit/s, 1 ms", "bits"),
        (sharded, "resnet50, 4 ranks", "latency"),
    ):
        said, _, table = command_line.run("sim", "--curves", file, *arguments).out.partition("\n")
        assert said.startswith(title), arguments
        assert re.search(rf"^\W*{column}\b", table, re.MULTILINE), arguments


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


def test_steps_with_and_without_the_barrier(file: str, tmp_path: Path) -> None:
    small = ["--model", "256x256,256x256,256x256", "--backward", "1e-3", "--cross-barrier"]
    sizes = ["--sweep", "bucket_mb=0.25,25"]
    rows = rows_of(file, *small, *sizes, "--plot", str(tmp_path / "plot.svg"))
    of_steps = {"cross_barrier", "barrier_seconds", "forward_seconds"}
    assert [row.keys() for row in rows] == [KEYS | of_steps | {"sweep", "value"}] * 2
    assert [row["buckets"] for row in rows] == [3, 1]
    assert {row["forward_seconds"] for row in rows} == {5e-4}
    (row,) = rows_of(file, *small, "--bucket-mb", "0.25", "--forward", "2e-3")
    assert (row["forward_seconds"], row["buckets"]) == (2e-3, 3)
    assert row["barrier_seconds"] > row["seconds"]
    assert " barrier (ms) " in command_line.run("sim", "--curves", file, *small).out
    for wrong, told in (
        (["--cross-barrier"], "--cross-barrier: averages go on while the next forward computes"),
        (["--forward", "1"], "--forward: is of a whole step"),
        (["--bucket-mb", "0"], "bucket_mb=0: give MiB"),
        (["--sharded", "--cross-barrier"], "are for DDP: FSDP2 sends group by group"),
        (["--sharded", "--bucket-mb", "1"], "are for DDP: FSDP2 sends group by group"),
        (["--validate", "--bucket-mb", "1"], "--validate: leave --cross-barrier"),
        (["--codec", "qsgd:cross_barrier=true"], "are for `bench train`"),
    ):
        said = command_line.run("sim", "--curves", file, *wrong)
        assert (said.code, told in " ".join(said.err.split())) == (2, True), (wrong, said.err)


OF_SHARDED = {
    "sharded", "groups", "forward_seconds", "blocking", "weights_wire_bytes",
    "gradients_wire_bytes", "ratio",
}  # fmt: skip


OF_REPLICAS = {"replicas", "accumulate", "deferred", "replicas_wire_bytes"}


def test_a_step_under_fsdp2(file: str, tmp_path: Path) -> None:
    plot, methods = tmp_path / "plot.svg", ["fsdp-mixed", "qsdp:w=8:g=8"]
    given = ["--sharded", "--methods", ",".join(methods), "--backward", "0.2", "--model"]
    sweep = ["--sweep", "rate=100mbit,1gbit", "--plot", str(plot)]
    rows = rows_of(file, *given, "1e6,1e6", *sweep)
    assert [(row["method"], row["value"]) for row in rows] == [
        (method, rate) for rate in ("100mbit", "1gbit") for method in methods
    ]
    for row in rows:
        assert row.keys() == KEYS - {"codec", "buckets"} | OF_SHARDED | {"sweep", "value"}
        assert (row["forward_seconds"], row["backward_seconds"]) == (0.1, 0.2)
    assert rows[0]["seconds"] > rows[1]["seconds"] > rows[3]["seconds"] > 0.3
    assert "<svg" in plot.read_text()
    (alone, _) = rows_of(file, *given, "1e6", "--forward", "0.05")
    assert alone["forward_seconds"] == 0.05
    of = ["fsdp-bf16", "gradwire:g=qsgd:bits=8:block=1024:inside=full"]
    machines = ["--ranks", "4", "--per-node", "2", "--replicas", "2", "--accumulate", "3"]
    how = ["--sharded", "--methods", ",".join(of), "--model", "4e5,4e5", *machines]
    last, each = rows_of(file, *how), rows_of(file, *how, "--undeferred")
    for seldom, often in zip(last, each, strict=True):
        assert seldom.keys() == KEYS - {"codec", "buckets"} | OF_SHARDED | OF_REPLICAS
        assert often["replicas_wire_bytes"] == 3 * seldom["replicas_wire_bytes"]
        assert (seldom["deferred"], often["deferred"], often["accumulate"]) == (True, False, 3)
    inside = [row["gradients_wire_bytes"] - row["replicas_wire_bytes"] for row in last]
    assert inside[1] == pytest.approx(2 * inside[0], rel=0.01)  # uncompressed
    assert last[1]["replicas_wire_bytes"] == pytest.approx(
        last[0]["replicas_wire_bytes"] / 2, rel=0.03
    )


OF_MEETINGS = {"outer", "forward_seconds", "every", "exposed_seconds", "gain"}
OF_REPLICAS_THAT_MEET = {
    "delay", "needed_delay", "hidden_seconds", "meeting_seconds", "meeting_bytes",
}  # fmt: skip


def test_replicas_that_meet_beside_ddp(file: str, tmp_path: Path) -> None:
    plot, codecs = tmp_path / "plot.svg", ["identity", "qsgd"]
    meeting = ["outer:average:every=10:codec=none", "outer:streaming:every=12:fragments=2"]
    given = ["--methods", ",".join(meeting), "--codec", ",".join(codecs), "--backward", "0.2"]
    given += ["--model", "512x512,512x512"]
    sweep = ["--sweep", "ranks=2,64", "--plot", str(plot)]
    rows = rows_of(file, *given, *sweep)
    methods = [*(f"gradwire:{codec}" for codec in codecs), *meeting]
    assert [(row["method"], row["ranks"]) for row in rows] == [
        (method, ranks) for ranks in (2, 64) for method in methods
    ]
    for row in rows:
        of = OF_REPLICAS_THAT_MEET if row["outer"] else set()
        keys = KEYS - {"codec", "buckets"} | OF_MEETINGS | of | {"sweep", "value"}
        assert row.keys() == keys
        assert kind_of(row) is KINDS[0]
        check(row, KINDS[0], "here")
        first = rows[0] if row["ranks"] == 2 else rows[4]
        assert row["gain"] == pytest.approx(first["seconds"] / row["seconds"])
        computing = row["forward_seconds"] + row["backward_seconds"]
        assert computing == pytest.approx(0.3)
        waited = row["exposed_seconds"] / row["every"]
        assert row["seconds"] == pytest.approx(computing + waited)
        assert row["limit_seconds"] <= row["seconds"]
    assert [row["every"] for row in rows[:4]] == [1, 1, 10, 12]
    assert len(rows[3]["meeting_bytes"]) == 2
    (alone,) = rows_of(file, "--model", "512x512,512x512", "--codec", "identity", "--ranks", "2")
    assert rows[0]["wire_bytes"] == alone["wire_bytes"]
    assert rows[2]["wire_bytes"] == pytest.approx(alone["wire_bytes"], rel=1e-3)  # and one header
    assert "<svg" in plot.read_text()
    every = rows_of(file, *given[:1], meeting[0], *given[2:], "--sweep", "every=1,100")
    assert [row["every"] for row in every] == [1, 1, 1, 1, 1, 100]
    assert every[2]["seconds"] > every[5]["seconds"] > 0.3
    (*_, slow) = rows_of(file, *given, "--forward", "0.5", "--net", "1mbit,1ms")
    assert (slow["forward_seconds"], slow["hidden_seconds"]) == (0.5, pytest.approx(1.4))
    said = command_line.run("sim", "--curves", file, *given, "--ranks", "2").out
    assert re.search(r"gradwire:identity.* 1 .*1\.00×", said)
    assert re.search(r"outer:average:every=10.* 10 .*×", said)


def test_replicas_that_cannot_meet_are_refused(file: str) -> None:
    base = ["--model", "512x512,512x512", "--backward", "0.1", "--methods"]
    for given, told in (
        (["qsgd"], "--methods qsgd: write outer:PRESET:every=N, or give --sharded"),
        (["outer:dilocko"], "did you mean 'diloco'"),
        (["outer:every=7:fragments=2"], "not a multiple of fragments=2"),
        (["outer:every=9:fragments=9"], "the model has 2 numbered layers"),
        (["outer:average", "--backward", "0"], "give --backward or --forward, in seconds"),
        (["outer:average", "--forward", "-1"], "forward=-1"),
        (["outer:average", "--cross-barrier"], "--methods: leave --validate and --cross-barrier"),
        (["outer:average", "--sweep", "evry=1,2"], "--sweep evry: use one of ranks"),
        (["outer:average", "--sweep", "every=x"], "every='x' must be a whole number"),
    ):
        said = command_line.run("sim", "--curves", file, *base, *given)
        assert (said.code, told in " ".join(said.err.split())) == (2, True), (given, said.err)


OF_VALIDATION = {
    "ranks", "net", "method", "algorithm", "numel", "measured_seconds", "simulated_seconds",
    "error", "of_limit", "runs", "spread", "run",
}  # fmt: skip


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.parametrize("measured", [False, True])
def test_a_slow_link_takes_what_is_predicted(
    measured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bound is wide: docs/laboratory/simulator.md has the errors on a quiet machine, point by
    point.

    On such a link it makes little difference whether this machine's curves are measured.
    """
    if not measured:
        monkeypatch.setattr(validate.measuring, "measured", lambda *_, **__: USUAL)
    (row,) = validate.run([2], ["50mbit,5ms"], ["qsgd"], ["sra"], numel=1_000_000, runs=2)
    assert row.keys() == OF_VALIDATION
    assert row["error"] == pytest.approx(row["simulated_seconds"] / row["measured_seconds"] - 1)
    assert -0.35 < row["error"] < 0.2, row


def test_slow_runs_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least counts; a run that is as fast as simulated, or faster, is not repeated."""
    lab = iter([2.0, 1.3, 1.05, 0.7])

    def measured(*_: object) -> dict[str, float]:
        return {"seconds": next(lab), "of_limit": 0.5, "wire_bytes": 1}

    monkeypatch.setattr(validate, "available", lambda: None)
    monkeypatch.setattr(validate.measuring, "measured", lambda *_, **__: USUAL)
    monkeypatch.setattr(validate, "predict", lambda *_: {"seconds": 1.0, "wire_bytes": 1})
    monkeypatch.setattr(validate, "_measured", measured)
    first, second = validate.run([2], ["1gbit,1ms"], ["qsgd"], ["sra", "ring"])
    assert (first["runs"], first["measured_seconds"]) == (3, 1.05)
    assert first["spread"] == pytest.approx(2.0 / 1.05 - 1)
    assert (second["runs"], second["measured_seconds"]) == (1, 0.7)


def test_without_a_lab_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "available", lambda: "no namespaces")
    with pytest.raises(ConfigError, match="no namespaces"):
        next(validate.run())
