"""`bench collectives`, `bench transports` and `probe`: their ranks, rows and mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_runs import keys_of

from command_line import refused, run
from gradwire.transport import shm_library
from gradwire_tools import lab
from gradwire_tools.bench.network import collectives, probe, transports, world
from gradwire_tools.bench.network.world import World
from gradwire_tools.lab import Network
from gradwire_tools.report import page
from gradwire_tools.sim import Curves
from products import EXHAUSTIVE

Row = dict[str, Any]
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "3"}


def test_ranks_are_those_of_torchrun_else_as_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available", lambda: None)
    assert World.of(None, "none", TORCHRUN) == World.of(3, "none", TORCHRUN)
    assert World.of(3, "none", TORCHRUN) == World(3, Network.parse("none"), joins=True)
    assert World.of(None, "none", TORCHRUN).keys == {"ranks": 3, "net": "as it is"}
    alone = {"RANK": "0", "WORLD_SIZE": "1"}
    assert World.of(None, "1gbit,1ms", alone) == World(2, Network.parse("1gbit,1ms"), joins=False)
    assert World.of(5, "1000mbit,1ms", {"WORLD_SIZE": "3"}).keys["net"] == "1gbit,1ms"
    assert World.here(6, "1gbit,1ms", 3).nodes == 2


def test_ranks_that_cannot_be_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "available", lambda: "no namespaces")
    monkeypatch.setattr(shm_library, "unavailable", lambda: "no compiler")
    two, network = {"RANK": "0", "WORLD_SIZE": "two"}, Network.parse("1gbit")
    refused(
        lambda call: call(),
        [
            (lambda: World.of(2, "none", TORCHRUN), "has started 3 ranks"),
            (lambda: World.of(None, "1gbit", TORCHRUN), "under torchrun .* leave it out"),
            (lambda: World.of(None, "none", two), "WORLD_SIZE='two'"),
            (lambda: World.here(4, "1gbit", 4), "--per-node 4: .* nothing crosses --net 1gbit"),
            (lambda: probe.plan(ranks=2, environment=TORCHRUN), "has started 3 ranks"),
            (lambda: World.here(2, "1gbit"), "cannot emulate .*no namespaces.*; use --net none"),
            (lambda: world.emulable(network, instead="give --no-lab"), "give --no-lab"),
            (lambda: list(transports.run([64])), "no shared memory here: no compiler"),
        ],
    )
    assert not World.here(2, "none").network.shaped


@pytest.mark.multiprocess
def test_every_default_method_of_collectives_has_a_row() -> None:
    rows = list(collectives.run(ranks=2, net="none", numel=40_000, quick=True))
    assert [row["method"] for row in rows] == list(collectives.DEFAULT_METHODS)
    by_method = {row["method"]: row for row in rows}
    for row in rows:
        assert row.keys() == keys_of(row)
        assert (row["ranks"], row["per_node"], row["net"], row["numel"]) == (2, 1, "none", 40_000)
        assert row["seconds"] > 0
        assert row["limit_seconds"] is None
        assert row["of_limit"] is None
    assert by_method["torch-fp32"]["wire_bytes"] == 4 * 40_000
    assert by_method["torch-fp16-hook"]["wire_bytes"] == 2 * 40_000
    # 4 bits and two bf16 numbers for each 128 values; two messages with their headers
    assert by_method["qsgd:bits=4"]["wire_bytes"] == pytest.approx(160_000 / 7.53, rel=0.02)
    assert by_method["torch-fp32"]["nmse"] < 1e-12
    assert by_method["torch-fp16-hook"]["nmse"] < 1e-6
    assert 1e-3 < by_method["qsgd:bits=4"]["nmse"] < 0.1
    assert by_method["torch-powersgd"]["wire_bytes"] == 4 * 4 * (200 + 200)


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_a_method_names_its_algorithm() -> None:
    names = ["sra", "ring", "tree", "parameter_server", "all_gather", "hierarchical"]
    methods = [f"gradwire:qsgd:algorithm={name}" for name in names]
    rows = list(collectives.run(3, "none", methods, numel=38_400, quick=True))
    assert [row["algorithm"] for row in rows] == names
    payload = 38_400 // 128 * 68
    for row in rows:
        # each rank has its own node, so hierarchical is SRA between all of them
        share = 2 if row["algorithm"] in ("all_gather", "tree") else 4 / 3
        assert row["wire_bytes"] == pytest.approx(share * payload, rel=0.02)
        assert 1e-3 < row["nmse"] < 0.1


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
def test_on_a_network_the_limit_is_bytes_and_latency() -> None:
    methods = ["torch-fp16-hook", "gradwire-qsgd4"]
    for row in collectives.run(2, "50mbit,2ms", methods, numel=1_000_000, quick=True):
        rounds = 2  # of the ring of two ranks, and of SRA
        limit = row["wire_bytes"] * 8 / 50e6 + rounds * 2e-3
        assert row["limit_seconds"] == pytest.approx(limit)
        assert row["of_limit"] == pytest.approx(limit / row["seconds"])


@EXHAUSTIVE
@pytest.mark.multiprocess
def test_transports_have_a_row_for_each_size() -> None:
    rows = list(transports.run([64, 1 << 22], quick=True))
    assert all(row.keys() == keys_of(row) for row in rows)
    assert len({(row["transport"], row["bytes"]) for row in rows}) == len(rows) == 4
    assert all(row["latency_us"] > 0 < row["gbps"] for row in rows)


def probed(folder: Path, monkeypatch: pytest.MonkeyPatch, ranks: int, net: str) -> list[list[Row]]:
    """The rows of a network that is probed, and the rows of the next time."""
    monkeypatch.setattr(probe, "cache_file", lambda hosts, net: folder / "known.json")
    monkeypatch.setattr(probe.curves, "measured", lambda *args, **options: Curves("it", 1, {}))
    wanted = probe.plan(ranks, net, (), seconds=2.0 if net != "none" else 0.2, environment={})
    return [list(probe.run(wanted)) for _ in range(2)]


@pytest.mark.multiprocess
def test_links_are_measured_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = probed(tmp_path, monkeypatch, 3, "none")
    found = [row for row in first if row["part"] == "pair"]
    ends = Counter((row["from"], row["to"]) for row in found)
    assert ends == Counter((i, j) for i in range(3) for j in range(3) if i != j)
    for row in found:
        assert row["alpha"] > 0
        assert row["bandwidth"] == pytest.approx(8 / row["beta"])
        assert (row["net"], row["ranks"], row["cached"]) == ("none", 3, False)
    sends = [row for row in first if row["part"] == "send"]
    assert len(sends) > 1
    assert sends[0]["bytes"] == 1024
    assert all(row["seconds"] > 0 for row in sends)
    assert [row | {"cached": False, "run": None} for row in again] == [
        row | {"run": None} for row in first
    ]
    assert all(row["cached"] for row in again)


@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.timing
@pytest.mark.parametrize(
    ("ranks", "net"), [(2, "100mbit,2ms"), (3, "20mbit,5ms"), (2, "1gbit,20ms"), (2, "64kbit,20ms")]
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


def test_hosts_and_networks_are_kept_apart_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = probe.cache_file(["a", "b"], "none")
    assert known == probe.cache_file(["a", "b"], "none")
    others = [(["a", "c"], "none"), (["a", "b", "b"], "none"), (["a", "b"], "1gbit")]
    assert known not in [probe.cache_file(hosts, net) for hosts, net in others]
    # A broken cache is measured again.
    file = tmp_path / "known.json"
    assert probe.kept(file) is None
    rows = ("[]", "5", "[5]", '[{"part": "send"}]', "[")
    for text in (*(f'{{"measured": "then", "rows": {row}}}' for row in rows), '{"rows": []'):
        file.write_text(text)
        assert probe.kept(file) is None
    costs = {"alpha": 1e-3, "beta": 1e-8, "bandwidth": 8e8}
    links = [{"part": "pair", "from": i, "to": 1 - i, **costs} for i in range(2)]
    links.append({"part": "send", "bytes": 1024, "seconds": 1e-3})
    file.write_text(json.dumps({"rows": links}))
    assert probe.kept(file) is None, "it does not say when that was"
    made = {"measured": "a day in May", "rows": links}
    file.write_text(json.dumps(made))
    assert probe.kept(file) == made
    # What is kept says so, and is drawn.
    monkeypatch.setattr(probe, "cache_file", lambda hosts, net: file)
    (codec,) = probe.plan(names=["qsgd"], environment={}).codecs
    kernels = Curves("it", 1, {repr(codec): {"encode": (1e-5, 1e-9, 0.0)}})
    monkeypatch.setattr(probe.curves, "measured", lambda *args, **options: kernels)
    for environment in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(environment, raising=False)
    shown = tmp_path / "rows.jsonl"
    assert (
        "from the cache, as measured at a day in May"
        in run("probe", "--codec", "qsgd", "--json", str(shown)).out
    )
    found = [json.loads(line) for line in shown.read_text().splitlines()]
    assert [row["part"] for row in found] == ["pair", "pair", "send", "curve"]
    assert found[0]["bandwidth"] == 8e8
    assert found[-1]["value"] == 1e-9
    assert "What do codecs cost on this machine?" in page.render(found)


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "words",
    ["probe --fresh --seconds 2 --codec qsgd", "doctor --numel 200000 --quick"],
    ids=["probe", "doctor"],
)
def test_it_joins_the_ranks_of_torchrun(words: str) -> None:
    command = [sys.executable, "-m", "gradwire_tools.cli"]
    lab_run = [*command, "lab", "run", "--nodes", "2", "--net", "20mbit,3ms", "--"]
    measuring = [*lab_run, *command, *words.split(), "--json", "-"]
    done = subprocess.run(measuring, capture_output=True, text=True, check=True, timeout=280)
    found = [json.loads(line.removeprefix("[node 0] ")) for line in done.stdout.splitlines()]
    assert {row["net"] for row in found if "net" in row} == {"as it is"}
    if words.startswith("probe"):
        assert next(row for row in found if row["part"] == "pair")["alpha"] > 3e-3
    else:
        assert len([row for row in found if "method" in row]) == 4
        (link,) = [row for row in found if row["part"] == "network"]
        assert link["alpha"] > 3e-3
        assert link["card"] not in (None, "lo", "loopback", "shared memory")
        assert found[-1]["part"] == "verdict"


def test_errors_are_those_of_the_whole_gradient() -> None:
    for numel in (1, 5, (1 << 20) + 1, 5 << 20):
        found = collectives.sampled(torch.arange(numel, dtype=torch.float32))
        assert found.numel() <= 1 << 20
        assert found[0] == 0
        assert found[-1] > 0.8 * (numel - 1) or numel == 1
