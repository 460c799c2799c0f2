"""`gradwire doctor --ranks N`: what is measured, and what it means."""

from __future__ import annotations

import random
import socket
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_runs import keys_of

import gradwire as gw
from command_line import rows_of, run
from gradwire.planner import Rules
from gradwire.planner.links import Links
from gradwire_tools.bench.network import network, surroundings
from gradwire_tools.bench.network.network_verdict import FULL, HALF, METHODS, OURS, OWN, verdict
from rooms.decide import Automatic, Pass, Passes, Tell, Use


def rows(
    full: float, half: float, own: float, ours: float, compute: float = 0.1, alone: float = 0.2
) -> list[Any]:
    """Rows of steps that take so long, with no spread over turns."""
    return [
        {
            "method": method, "step_seconds": step, "compute_seconds": compute,
            "exposed_seconds": max(0.0, step - compute), "turn_seconds": [step] * 4,
            "communication_seconds": alone if method == OURS else max(0.0, step - compute),
            "ranks": 2, "machines": 2, "transport": "torch_p2p", "load": 1.5, "cores": 2,
            "others": 0.04,
        }
        for method, step in zip(METHODS, (full, half, own, ours), strict=True)
    ]  # fmt: skip


CLEAR, HIDDEN = rows(1.0, 0.6, 0.5, 0.3), rows(0.30, 0.31, 0.31, 0.33, compute=0.29)
WRITE, PLAIN = 'Write: gw.attach(model, "qsgd:bits=4")', 'Write: gw.attach(model, "bf16")'
LEAVE, HALVE = "leave the script as it is.", "hook(None, default_hooks.fp16_compress_hook)"
TRY = 'gw.attach(model, "auto")'
IDLE = {"others": 0.0}


def test_the_verdict_says_what_pays_by_how_much_and_ends_in_the_line_to_write() -> None:
    for measured, begins, said, line in (
        (CLEAR, "4 bits pay here: a step at 4 bits is 2.0 times faster than with torch's fp16 hook",
         "fp32; 1.2 of the 2.0 times come from gradwire's transport, without 4 bits.\n", WRITE),
        (rows(1.0, 0.5, 0.52, 0.3), "4 bits pay here: ", " times faster than in fp32.\n", WRITE),
        (HIDDEN, "Compression does not pay here: ", "; computing hides the communication.", LEAVE),
        (rows(0.3, 0.31, 0.3, 0.4, alone=0.3), "Compression does not pay here: ",
         "a step in fp32 is 1.3 times faster than at 4 bits, as fast as with torch's", LEAVE),
        (rows(0.3, 0.31, 0.3, 0.4, alone=0.3), "Compression does not pay here: ",
         "as in gradwire's bf16; encoding and decoding cost more than fewer bytes save.", LEAVE),
        (rows(1.0, 0.5, 0.5, 0.49), "16 bits pay here, 4 bits do not: a step with torch's fp16 ",
         "hook is as fast as at 4 bits, 2.0 times faster than in fp32", HALVE),
        # faster than fp32, and slower than 16 bit
        (rows(1.0, 0.5, 0.5, 0.6), "16 bits pay here, ", "1.2 times faster than at 4 bits", HALVE),
        (rows(1.0, 0.5, 0.3, 0.29), "16 bits pay here, 4 bits do not: a step in gradwire's bf16 ",
         "1.7 times faster than with torch's fp16 hook, 3.3 times faster than in fp32", PLAIN),
    ):  # fmt: skip
        pays, text = verdict(measured)
        assert pays is (line == WRITE)
        assert text.startswith(begins), text
        assert said in text
        assert text.endswith(line)


def test_the_verdict_says_what_was_measured_and_what_would_make_it_surer() -> None:
    """Shared memory is no network."""
    shared = {"ranks": 2, "machines": 1, "transport": "shm"}
    for change, said, unsaid in (
        ({}, [], ["share this machine", "busy", "idle"]),
        (shared, ["No network was measured: the 2 ranks share this machine", "shared memory"],
         ["busy"]),
        (shared | {"transport": "torch_p2p"}, ["gradwire over loopback, too"], ["shared memory"]),
        ({"ranks": 4, "transport": "shm+torch_p2p"}, ["4 ranks are on 2 machines"], ["No network"]),
        ({"load": 9.0}, ["\nTo be surer: ask me.\n"], ["busy"]),  # of what has ended
    ):  # fmt: skip
        for measured in (CLEAR, HIDDEN):
            pays, text = verdict([row | change for row in measured], ["ask me"])
            assert [one for one in said if one not in text] == [], text
            assert [one for one in unsaid if one in text] == [], text
            assert text.endswith(WRITE if measured is CLEAR else LEAVE)
            assert pays is (measured is CLEAR)
            assert "surer" not in verdict([row | change for row in measured])[1]


def test_a_busy_machine_withholds_only_a_verdict_that_idling_could_turn() -> None:
    """Beside others a step takes 1 + `others` times as long at most, so they turn a gain of 1.7
    over bf16, less the margin, at 0.6 of the cores. A full machine's load average counts."""
    for others, load, turned in (
        (0.09, 9.0, False), (0.3, 9.0, False), (0.55, 9.0, False), (0.6, 0.0, True),
        (1.0, 0.0, True), (1.0, 9.0, True),
    ):  # fmt: skip
        for machines, who in ((1, "The"), (2, "A")):
            change = {"others": others, "load": load, "machines": machines}
            pays, text = verdict([row | change for row in CLEAR], ["ask me"])
            busy = (
                f"{who} machine is busy: other processes take {100 * others:.3g} % of its 2 cores"
            )
            assert pays is not turned
            assert text.endswith(TRY if turned else WRITE)
            assert (
                text.startswith(f"{busy}, which may turn the answer: by the medians a step ")
                is turned
            )
            assert (f"\n{busy}, too little to turn the answer.\n" in text) is (0.1 < others < 0.6)
            assert ("To be surer: let the machines idle; ask me.\n" in text) is turned
    # A gain of 5.4 holds beside a busy core of two; as little as one of 1.1 beside no others.
    large, small = rows(5.4, 2.7, 2.7, 1.0), rows(1.0, 0.6, 0.33, 0.3)
    assert verdict([row | {"others": 0.5} for row in large])[0]
    assert verdict([row | {"others": 1.0, "load": 2.0} for row in large])[0]
    assert not verdict([row | {"others": 1.0, "load": 6.0} for row in large])[0]
    assert verdict([row | {"others": 0.09} for row in small])[0]
    assert not verdict([row | {"others": 0.2} for row in small])[0]
    # One that does not pay might, were the computing that hides it shorter.
    assert verdict([row | {"others": 0.5} for row in HIDDEN])[1].endswith(TRY)


def test_on_slow_links_it_names_powersgd() -> None:
    for measured, bandwidth, named in (
        (CLEAR, 4e8, True),
        (CLEAR, 6e8, False),
        (HIDDEN, 1e8, False),
    ):
        *_, before, last = verdict(measured, ["ask me"], bandwidth)[1].splitlines()
        assert before.startswith("Below 500 Mbit/s powersgd:rank=8 may be faster still ") is named
        assert before.endswith("gradwire plan --model MODEL --net RATE,LATENCY") is named
        assert last.endswith(WRITE if measured is CLEAR else LEAVE)


def test_what_others_take_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the kernel's counters before and after a rest: low priority and waits for disks count as
    free, and the time of another virtual machine does not."""
    file = tmp_path / "stat"
    monkeypatch.setattr(surroundings, "_STAT", file)
    monkeypatch.setattr(surroundings.dist, "barrier", lambda: None)
    before = "cpu  1000 2000 3000 4000 500 60 70 80 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n"
    for after, share in (
        ("cpu  1010 2000 3005 4080 500 61 72 82 0 0", 0.2),
        ("cpu  1000 2050 3000 4020 530 60 70 80 0 0", 0.0),
        ("cpu  1100 2000 3000 4000 500 60 70 80 100 0", 1.0),
        (before, 0.0),
    ):
        file.write_text(before)
        monkeypatch.setattr(surroundings.time, "sleep", lambda _, now=after: file.write_text(now))
        assert surroundings.others() == share


def test_gains_are_of_the_median_steps() -> None:
    measured = rows(0.09, 0.0436, 0.0436, 0.0328, 0.01)
    for row in measured[1:3]:
        row["turn_seconds"] = [0.0401, 0.0401, 0.0436, 0.06, 0.06]
    measured[0]["turn_seconds"] = [0.09] * 5
    measured[3]["turn_seconds"] = [0.0318, 0.0328, 0.0328, 0.04, 0.05]
    pays, text = verdict(measured)
    assert pays
    assert "at 4 bits is 1.3 times faster than with torch's fp16 hook, 2.7 times" in text


def test_a_verdict_is_sure_if_three_turns_of_four_choose_the_same() -> None:
    for turns, agreed in (
        ([0.3, 0.42, 0.7, 0.7], 2),
        ([0.3, 0.5, 0.58, 0.59], 2),  # the others are faster by less than the margin
        ([0.3, 0.3, 0.3, 0.7], 3),
        ([0.1, 0.3, 0.4, 0.5], 4),
    ):
        measured = rows(1.0, 0.6, 0.6, 0.3)
        measured[3] |= {"turn_seconds": turns, "step_seconds": statistics.median(turns)}
        pays, text = verdict(measured)
        assert pays is (agreed >= 3)
        assert text.endswith(WRITE if pays else TRY)
        unsure = f"Not clear: {agreed} of 4 turns choose as the medians do, by which a step "
        assert text.startswith("4 bits pay here" if pays else unsure), text
    # One that seems not to pay, and yet pays in two turns.
    measured = rows(0.3, 0.31, 0.31, 0.25, 0.1, 0.3)
    measured[3] |= {"turn_seconds": [0.2, 0.24, 0.31, 0.36], "step_seconds": 0.29}
    assert verdict(measured)[1].startswith("Not clear: 2 of 4 ")


def automatic(seconds: dict[str, float]) -> str:
    """What "auto" uses, where a pass with each of its candidates takes so long."""
    on: Any = SimpleNamespace(
        plan=SimpleNamespace(rules=Rules()), runner=SimpleNamespace(passes=0), adaptation=None,
        place=SimpleNamespace(first=False), decided=lambda row: None,
    )  # fmt: skip
    mode = Automatic(gw.Auto(policy=None, trial=1, watch=0), on)
    script, given, version, method = mode.script(), None, 0, "bf16"
    while True:
        try:
            command: Any = script.send(given)
        except StopIteration:
            return mode.setting
        if isinstance(command, Use):
            version, method = version + 1, command.make.args[0]
        ended = Pass(1, version, seconds[method], seconds[method])
        given = {Use: ended, Passes: [ended] * getattr(command, "count", 0)}.get(type(command))
        if isinstance(command, Tell):
            given = [command.value] * 2


def test_it_never_contradicts_auto() -> None:
    """Of equal seconds; torch's fp16 hook and gradwire's bf16 are 16 bits both."""
    draw, seen = random.Random(0), set()
    says = {"none": "Compression does not pay", "bf16": "16 bits pay", OURS: "4 bits pay"}
    for _ in range(300):
        steps = [draw.uniform(0.8, 1.0), draw.uniform(0.8, 1.0), draw.uniform(0.7, 1.0)]
        uses = automatic(dict(zip(says, steps, strict=True)))
        full, half, ours = steps
        pays, text = verdict(rows(full, half, half, ours))
        assert text.startswith(says[uses]), (steps, uses, text)
        assert pays is (uses == OURS)
        seen.add(uses)
    assert seen == {*says}


@pytest.mark.parametrize("measured", [CLEAR, HIDDEN], ids=["pays", "hidden"])
def test_all_is_on_one_screen(measured: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict first, and the line to write last; whole words in 80 columns."""
    change = {"ranks": 4, "transport": "shm+torch_p2p", "load": 12.5, "others": 1.0}
    known = {"slowest": [2, 3], "bandwidth": 2.97e8, "alpha": 1.1e-3, "card": "enp0s31f6"}
    known["card_bits_per_s"] = 1e10
    of = {row["method"]: row | change for row in measured}
    times = {"computing": [0.1], "communicating": [0.2], "kernels": 0.0121}
    found = [known, *({**row, **times, "steps": row["turn_seconds"]} for row in of.values())]
    monkeypatch.setattr(network.MeasuredStep, "measured", lambda _: found)
    for net in ("none", "300mbit,1ms"):
        monkeypatch.setattr("gradwire_tools.bench.network.world.available", lambda: None)
        lines = run("doctor", "--ranks", "4", "--net", net, "--quick").out.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 80
        text = " ".join(" ".join(lines).split())
        parts = [
            "A machine is busy: other processes take 100 % of its 2 cores, ",
            "network: 297 Mbit/s and 1.10 ms of latency between ranks 2 and 3",
            "the slowest pair, over enp0s31f6", "a card of 10.0 Gbit/s", "computing: ",
            "kernels: 12.1 ms per step", "step (ms)", HALF, OURS, "The 4 ranks are on 2 machines",
            "To be surer: let the machines idle; start it by torchrun on the real machines; ",
            "give --model, or --compute of your own step; leave --quick out.",
            *(["Below 500 Mbit/s powersgd"] if measured is CLEAR else []), TRY,
        ]  # fmt: skip
        places = [text.find(part) for part in parts]
        assert places == sorted(places), text
        assert places[0] == 0
        assert text.endswith(TRY)
        assert ("(emulated)" in text) is (net != "none")
        assert "target eager" not in text
        assert "┏" not in text, "a frame takes lines"
    told = [row["part"] for row in rows_of("doctor", "--ranks", "4")]  # programs get all
    assert {"gradwire", "target eager"} < {*told}
    parts = ["network", "computing", "kernels", *(f"step {name}" for name in METHODS), "verdict"]
    assert told[-len(parts) :] == parts


def test_the_slowest_link_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(0, 1, 9e-3, 1e-9, 1e-9), (0, 2, 2e-3, 1e-9, 5e-9), (1, 2, 3e-3, 2e-9, 2e-9)]
    monkeypatch.setattr(surroundings, "measure_links", lambda *_: Links.of(3, pairs))
    known: Any = None
    slowest = {"slowest": [0, 2], "alpha": 2e-3, "bandwidth": pytest.approx(8 / 5e-9)}
    assert surroundings.slowest_link(known) == slowest


def test_the_card_that_leads_to_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    names = {name for _, name in socket.if_nameindex()}
    assert surroundings.card_to("127.0.0.1") == "lo"
    assert surroundings.card_to("no such host") is None
    for speed, known in (("10000", 1e10), ("-1", None), ("", None), (None, None)):
        monkeypatch.setattr(surroundings, "_DEVICES", tmp_path / str(speed))
        for name in names:  # of which the kernel tells the speed of a card
            (tmp_path / str(speed) / name / "device").mkdir(parents=True)
            if speed is not None:
                (tmp_path / str(speed) / name / "speed").write_text(f"{speed}\n")
        assert surroundings.speed_of("lo") == known
    (tmp_path / "10000" / "lo" / "device").rmdir()
    monkeypatch.setattr(surroundings, "_DEVICES", tmp_path / "10000")
    assert surroundings.speed_of("lo") is None, "a pair of veth says 10 Gbit/s, whatever it can"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7,eth8")
    assert surroundings.card_to("127.0.0.1") == "eth7"


def test_what_is_measured_follows_from_the_environment() -> None:
    assert network.plan(environment={}) is None
    assert network.plan(environment={"RANK": "0", "WORLD_SIZE": "1"}) is None
    joined = network.plan(environment={"RANK": "1", "WORLD_SIZE": "4"}, model="resnet50")
    assert joined is not None
    assert (joined.world.count, joined.world.joins, joined.surer) == (4, True, ())
    for numel in (1, 7, 8, 1000, 5_000_000):
        started = network.plan(ranks=2, numel=numel, environment={})
        assert started is not None
        assert network.models.numel(started.shapes) == numel


@pytest.mark.multiprocess
def test_rows_of_measured_steps_and_their_verdict() -> None:
    wanted = network.plan(ranks=2, numel=20_000, quick=True, environment={})
    assert wanted is not None
    found = list(network.run(replace(wanted, turns=3)))
    link, _, kernels, *steps, last = found
    assert [row["part"] for row in found[:3]] == ["network", "computing", "kernels"]
    for row in (link, kernels):
        assert row.keys() == keys_of(row)
    assert (link["card"], link["card_bits_per_s"]) == ("shared memory", None)
    assert (link["ranks"], link["net"], link["slowest"]) == (2, "none", [0, 1])
    assert min(link["bandwidth"], link["alpha"], kernels["kernel_seconds"]) > 0
    assert (kernels["codec"], kernels["numel"]) == (OURS, 20_000)
    assert [row["method"] for row in steps] == [FULL, HALF, OWN, OURS]
    for row in steps:
        assert row.keys() == keys_of(row)
        assert (row["ranks"], row["net"], row["numel"]) == (2, "none", 20_000)
        assert min(row["step_seconds"], row["compute_seconds"], row["communication_seconds"]) > 0
        assert row["step_seconds"] == statistics.median(row["turn_seconds"])
        assert row["exposed_seconds"] == max(0.0, row["step_seconds"] - row["compute_seconds"])
        assert len(row["turn_seconds"]) == 3
        assert (row["machines"], row["transport"]) == (1, "shm")
        assert row["load"] >= 0 < row["cores"]
        assert 0 <= row["others"] <= 1
    assert last.keys() == {"part", "available", "detail", "run"}
    told = verdict(steps, wanted.surer, link["bandwidth"])
    assert (last["part"], (last["available"], last["detail"])) == ("verdict", told)


@pytest.mark.multiprocess
@pytest.mark.timing
def test_long_computing_hides_the_network() -> None:
    wanted = network.plan(ranks=2, numel=200_000, compute=0.5, quick=True, environment={})
    assert wanted is not None
    steps = [row | IDLE for row in network.run(wanted) if "method" in row]
    assert min(row["compute_seconds"] for row in steps) >= 0.5
    pays, text = verdict(steps)
    assert not pays
    assert "computing hides the communication" in text


@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.timing
def test_on_a_slow_network_it_pays() -> None:
    options: dict[str, Any] = {"net": "20mbit,1ms", "numel": 200_000, "quick": True}
    wanted = network.plan(ranks=2, environment={}, **options)
    assert wanted is not None
    link, *measured = network.run(wanted)
    by_method = {row["method"]: row for row in measured if "method" in row}
    wire_seconds = 200_000 * 16 / 20e6  # of 16 bit: the ring of two sends each value once
    assert by_method[HALF]["communication_seconds"] > 0.8 * wire_seconds
    assert link["bandwidth"] == pytest.approx(20e6, rel=0.15)
    assert link["alpha"] == pytest.approx(1e-3, rel=0.5)
    assert link["card"] not in (None, "shared memory", "loopback")
    pays, text = verdict([row | IDLE for row in by_method.values()])
    assert pays
    assert text.startswith("4 bits pay here: ")
