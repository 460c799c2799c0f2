"""`gradwire probe`: what it finds of networks that are known, and what it keeps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from bench_runs import refused

from gradwire_tools import lab
from gradwire_tools.bench.network import probe
from gradwire_tools.cli.program import run
from gradwire_tools.report import page
from products import EXHAUSTIVE

Row = dict[str, Any]


def pairs(ranks: int, alpha: float, beta: float) -> list[Row]:
    costs = {"alpha": alpha, "beta": beta, "bandwidth": 8 / beta}
    return [
        {"part": "pair", "from": i, "to": j, **costs}
        for i in range(ranks)
        for j in range(ranks)
        if i != j
    ] + [{"part": "send", "bytes": 1024, "seconds": alpha + 1024 * beta}]


class NoCurves:
    codecs: dict[str, Any] = {}  # noqa: RUF012
    threads = 1


def probed(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, net: str) -> list[list[Row]]:
    """The rows of a network that is probed, and the rows of the next time."""
    monkeypatch.setattr(probe, "cache_file", lambda hosts, net: folder / "known.json")
    monkeypatch.setattr(probe.curves, "measured", lambda *args, **options: NoCurves())
    wanted = probe.plan(ranks, net, (), seconds=2.0 if net != "none" else 0.2, environment={})
    return [list(probe.run(wanted)) for _ in range(2)]


@pytest.mark.multiprocess
def test_rows_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = probed(tmp_path, monkeypatch, 3, "none")
    found = [row for row in first if row["part"] == "pair"]
    ends = [(row["from"], row["to"]) for row in found]
    assert sorted(ends) == [(i, j) for i in range(3) for j in range(3) if i != j]
    for row in found:
        assert row["alpha"] > 0
        assert row["bandwidth"] == pytest.approx(8 / row["beta"])
        assert (row["net"], row["ranks"], row["cached"]) == ("none", 3, False)
    sends = [row for row in first if row["part"] == "send"]
    assert len(sends) > 1
    assert sends[0]["bytes"] == 1024
    assert all(row["seconds"] > 0 for row in sends)
    assert [row["cached"] for row in again] == [True] * len(first)
    hidden = {"cached", "run"}
    kept = [[{k: v for k, v in r.items() if k not in hidden} for r in r_] for r_ in (first, again)]
    assert kept[0] == kept[1]


@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.timing
@pytest.mark.parametrize(
    ("ranks", "net"),
    [(2, "100mbit,2ms"), (3, "20mbit,5ms"), (2, "1gbit,20ms"), (2, "64kbit,20ms")],
)
def test_an_emulated_network_is_found(
    ranks: int, net: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, _ = probed(tmp_path, monkeypatch, ranks, net)
    known = lab.Network.parse(net)
    found = [row for row in rows if row["part"] == "pair"]
    assert len(found) == ranks * (ranks - 1)
    for row in found:
        assert row["alpha"] == pytest.approx(known.latency_s, rel=0.15)
        assert row["bandwidth"] == pytest.approx(known.rate_bits_per_s, rel=0.15)
        assert row["net"] == str(known)
    sends = [row for row in rows if row["part"] == "send"]
    assert all(row["seconds"] > 0.8 * known.latency_s for row in sends)


def test_what_makes_no_sense_is_refused() -> None:
    refused(
        lambda given: probe.plan(**{"environment": {}, **given}),
        [
            ({"ranks": 1}, "--ranks 1: one rank sends nothing"),
            ({"seconds": 0}, "--seconds 0: give seconds above 0"),
            ({"names": ["none such"]}, "none such"),
            ({"ranks": 3, "environment": {"RANK": "0", "WORLD_SIZE": "2"}}, "has started 2 ranks"),
        ],
    )


def test_hosts_and_networks_are_kept_apart(tmp_path: Path) -> None:
    known = probe.cache_file(["a", "b"], "none")
    assert known == probe.cache_file(["a", "b"], "none")
    others = [(["a", "c"], "none"), (["a", "b", "b"], "none"), (["a", "b"], "1gbit")]
    assert known not in [probe.cache_file(hosts, net) for hosts, net in others]
    # A broken cache is measured again.
    file = tmp_path / "known.json"
    assert probe.kept(file) is None
    made = probe.keep(file, pairs(2, 1e-3, 1e-8))
    assert probe.kept(file) == {**made, "cached": True}
    rows = ("[]", "5", "[5]", '[{"part": "send"}]', "[")
    for text in (*(f'{{"measured": "then", "rows": {row}}}' for row in rows), '{"rows": []'):
        file.write_text(text)
        assert probe.kept(file) is None


def test_a_cached_result_says_so_and_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(probe, "cache_file", lambda hosts, net: tmp_path / "known.json")
    probe.keep(tmp_path / "known.json", pairs(2, 1e-3, 1e-8))
    known = NoCurves()
    known.codecs = {
        str(c): {"encode": (1e-5, 1e-9, 0.0)} for c in probe.plan(names=["qsgd"]).codecs
    }
    monkeypatch.setattr(probe.curves, "measured", lambda *args, **options: known)
    rows = tmp_path / "rows.jsonl"
    for environment in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(environment, raising=False)
    arguments = ["probe", "--codec", "qsgd", "--json", str(rows)]
    assert run(arguments) == 0
    said = capsys.readouterr().out
    assert "from the cache, as measured at" in said
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    assert [row["part"] for row in found] == ["pair", "pair", "send", "curve"]
    assert found[0]["bandwidth"] == pytest.approx(8e8)
    assert found[-1]["value"] == 1e-9
    assert "What do codecs cost on this machine?" in page.render(found)


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
def test_it_joins_the_ranks_of_torchrun(tmp_path: Path) -> None:
    probing = [sys.executable, "-m", "gradwire_tools.cli", "probe", "--fresh", "--seconds", "2"]
    command = [sys.executable, "-m", "gradwire_tools.cli", "lab", "run", "--nodes", "2"]
    command += ["--net", "50mbit,3ms", "--", *probing, "--codec", "qsgd", "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    lines = [line.removeprefix("[node 0] ") for line in done.stdout.splitlines()]
    found = [json.loads(line) for line in lines]
    one = next(row for row in found if row["part"] == "pair")
    assert one["net"] == "as it is"
    assert one["alpha"] > 3e-3
