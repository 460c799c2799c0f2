"""`gradwire plan`: the rows, the verdict, bad input, and plans that `attach` reads."""

from __future__ import annotations

import itertools
import json
import logging
import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire as gw
from command_line import refusal, rows_of, run
from gradwire.aggregators import PowerSGD
from gradwire.codecs import QSGD, Cast, Identity
from gradwire.planner import Rules, make_plan
from gradwire.planner.files import PlanFile, differences
from gradwire.planner.links import Links
from gradwire_tools.predict import planning
from gradwire_tools.sim import Curves, Net
from gradwire_tools.sim.choice import Situation
from gradwire_tools.sim.curves import Software
from gradwire_tools.sim.rank import Overheads
from machines import priced
from ranks import as_processes, refuses

MODEL = "256x1024,4096x512,64x64"
LOW = "powersgd:rank=8"  # the last of the default methods


@pytest.fixture
def file(tmp_path: Path) -> Path:
    seconds = {QSGD(bits=4): 1e-9, Cast("bf16"): 3e-10, Identity(): 1e-10}
    prices = {codec: (2e-6, value, value) for codec, value in seconds.items()}
    engine, link = Overheads(start=1e-4, task=5e-6), Software(overhead=2e-5)
    known = priced(prices, engine=engine, link=link)
    computing = {"powersgd(rank=8), error feedback": [(2e-5, 5e-10, 0.0)] * 3}
    replace(known, aggregators=computing).save(tmp_path / "curves.json")
    return tmp_path / "curves.json"


def test_a_slow_network_and_a_fast_one(file: Path) -> None:
    for net, pays in (("100mbit,1ms", True), ("10000gbit,1us", False)):
        given = ["--model", MODEL, "--net", net, "--curves", str(file), "--ranks", "2"]
        found = rows_of("plan", *given)
        layers, settings, (verdict,) = (
            [row for row in found if row["part"] == part]
            for part in ("layer", "setting", "verdict")
        )
        assert [row["numel"] for row in layers] == [4096, 1 << 18, 1 << 21]
        assert layers[-1]["compress"] is pays
        assert {row["method"] for row in settings} == {"none", "bf16", "qsgd:bits=4", LOW}
        assert {row["method"] for row in layers} == {"qsgd:bits=4"}
        times = [row["seconds"] for row in settings]
        assert times == sorted(times)
        assert verdict["compress"] is pays
        assert (verdict["method"] == LOW) is pays
        assert ("best:" in verdict["detail"]) is not pays
        gains = [1 / (1 - row["saves"]) for row in settings if row["method"] == LOW]
        assert (f", {gains[0]:.3g} times faster than " in verdict["detail"]) is pays
        line = 'Write: gw.attach(model, "' if pays or verdict["method"] == "bf16" else "leave the"
        assert line in verdict["detail"].splitlines()[-1]
        assert all(row["ranks"] == 2 and row["net"] == net for row in found)
    told = run("plan", *given).err
    assert told.startswith("simulating none by sra; codec: 1 of 4\n")


def test_a_default_that_shrinks_no_matrix_is_left_out(file: Path) -> None:
    found = rows_of("plan", "--model", "1e6", "--net", "1gbit", "--curves", str(file))
    methods = {row["method"] for row in found if row["part"] == "setting"}
    assert methods == {"none", "bf16", "qsgd:bits=4"}


def test_the_table_tells_settings_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """And above it are the model, the ranks and the network, defaults, too."""
    context = {"model": "1e6", "ranks": 4, "net": "1gbit,1ms"}
    row = {"part": "setting", **context, "algorithm": "sra", "coordinated": True}
    found = [row | {"method": "it", "saves": 0.75}, row | {"method": "bf16", "saves": 0.0}]
    found += [
        row | {"method": "none", "saves": -1.0},
        {"part": "verdict", "detail": "it", **context},
    ]
    monkeypatch.setattr(planning, "run", lambda *_: found)
    said = run("plan", "--model", "1e6", "--net", "1gbit,1ms").out
    assert said.startswith("1e6, 4 ranks, 1 Gbit/s, 1 ms latency\n")
    assert "coordinated" in said
    columns = dict(re.findall(r"^\W*(method|it|bf16|none)\b.* ([\w.×]+)\W*$", said, re.MULTILINE))
    assert columns == {"method": "bf16", "it": "4.00×", "bf16": "1.00×", "none": "0.500×"}, said
    assert re.search(r"faster\b.*\n.*\bthan\b|faster than", said)


def test_the_shapes_of_a_saved_plan(file: Path, tmp_path: Path) -> None:
    sizes = {"a": [256, 1024], "b": [4096, 512], "c": [64, 64], "bias": [64], "none": [0, 4]}
    rows = {name: {"gradient": "qsgd", "shape": shape} for name, shape in sizes.items()}
    saved = tmp_path / "plan.json"
    saved.write_text(json.dumps({"gradwire_plan": 1, "parameters": rows}))
    given = ["--net", "100mbit,1ms", "--curves", str(file)]
    found = rows_of("plan", "--shapes", str(saved), *given)
    assert [row["numel"] for row in found if row["part"] == "layer"] == [4096, 1 << 18, 1 << 21]
    assert {row["model"] for row in found} == {str(saved)}
    nowhere = run("plan", "--shapes", str(saved), *given, "--save", str(tmp_path / "no" / "plan"))
    assert "not a file in an existing folder" in nowhere.err
    saved.write_text(json.dumps({"gradwire_plan": 1, "parameters": {"a": {"gradient": "qsgd"}}}))
    assert "parameter a has no 'shape'" in run("plan", "--shapes", str(saved), *given).err
    both = run("plan", "--shapes", str(saved), "--model", "1e6", *given)
    assert "plan: --model and --shapes are both given: leave one of them out" in both.err


def network(*widths: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


@pytest.fixture
def shapes(tmp_path: Path) -> Path:
    """Of a model with a large and a small matrix, before training: any plan of it has them."""
    named = network(256, 256, 8).named_parameters()
    make_plan(named, Rules(), 2).save(tmp_path / "shapes.json")
    return tmp_path / "shapes.json"


class Told(logging.Handler):
    """Lines of the log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def it_is_attached(rank: int, path: str) -> None:
    told, log = Told(), logging.getLogger("gradwire")
    log.addHandler(told)
    log.setLevel(logging.INFO)
    file, model = PlanFile.read(path), DDP(network(256, 256, 8))
    handle = gw.attach(model, plan=path)
    expects = f"the plan expects {1e3 * file.planned['seconds']:.4g} ms a pass, "
    assert [expects in line for line in told.lines if "expects" in line] == [True] * (rank == 0)
    assert not [*differences(PlanFile.of(handle.plan), file)]
    for name in ("algorithm", "segments", "coordinated"):
        assert getattr(handle.plan.options, name) == file.planned[name]
    assert handle.plan.coalesce_bytes == file.planned["coalesce_bytes"]
    assert "measured: " not in str(handle)
    for step in range(2):
        model(torch.randn(4, 256, generator=torch.Generator().manual_seed(rank))).sum().backward()
        assert handle.stats()["steps"] == step + 1
    assert f"{expects}" in str(handle)
    assert " of them exposed; measured: " in str(handle)
    mine = model.module[0].weight.grad
    first = mine.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, mine)
    handle.update("bf16").wait()
    for _ in range(3):
        model(torch.ones(4, 256)).sum().backward()
    assert "the plan expects" not in str(handle)  # of another plan
    handle.detach()
    told.lines.clear()
    other = replace(file, planned={**file.planned, "ranks": 3})
    handle, said = gw.attach(model, plan=other), "the plan was made for 3 ranks, and there are 2"
    assert told.lines == [f"attach: {said}"] * (rank == 0)
    assert f"  {said}" in str(handle).splitlines()
    assert "expects" not in str(handle)
    handle.detach()
    given = gw.attach(model, plan=path, options=gw.Options(algorithm="tree", coalesce_bytes=5))
    assert (given.plan.options.algorithm, given.plan.coalesce_bytes) == ("tree", 5)
    for widths, said in (
        ((256, 256, 8, 8), "plan: the file has no parameter 2.weight"),
        ((256, 256), "1.weight"),
        ((256, 512, 8), "plan: parameter 0.weight has the shape (512, 256), and (256, 256) in the"),
    ):
        refuses(said, partial(gw.attach, DDP(network(*widths)), plan=path))


def they_are_attached(rank: int, *paths: str) -> None:
    for path in paths:
        it_is_attached(rank, path)


@pytest.mark.multiprocess
def test_plans_for_a_given_network_and_for_that_of_torchrun_are_attached(
    shapes: Path, file: Path, tmp_path: Path
) -> None:
    given, torchrun, rows = (str(tmp_path / name) for name in ("given", "torchrun", "rows"))
    words = ["plan", "--shapes", str(shapes), "--curves", str(file), "--save"]
    network = ["--net", "1mbit,5ms", "--ranks", "2", "--backward", "0.01"]
    found = rows_of(*words, given, *network)
    best = min((row for row in found if row["part"] == "setting"), key=lambda row: row["seconds"])
    assert best["method"] == LOW
    saved = PlanFile.read(given)
    assert saved.planned == {
        **{key: best[key] for key in ("algorithm", "segments", "coordinated", "coalesce_bytes")},
        "seconds": best["seconds"],
        "backward_seconds": 0.01,
        "ranks": 2,
        "net": "1mbit,5ms",
    }
    assert "planned for 2 ranks on 1mbit,5ms\n" in run("plan", "show", given).out
    least = max(best["least"], 1)
    assert {name: row["gradient"] for name, row in saved.rows.items()} == {
        name: LOW if math.prod(shape) >= least and PowerSGD(8).shrinks(shape) else "none"
        for name, shape in PlanFile.read(shapes).every_shape(shapes).items()
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "gradwire", *words, torchrun, "--json", rows]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=280)
    found = [json.loads(line) for line in Path(rows).read_text().splitlines()]
    assert {(row["net"], row["ranks"]) for row in found} == {("as it is", 2)}
    assert done.stdout.count(found[-1]["detail"][:20]) == 1  # of one rank
    as_processes(2, they_are_attached, given, torchrun)


def test_measured_links_become_a_network() -> None:
    """Between machines by the worst link; inside of one they are its memory, and share cores."""
    pairs = [(i, j, 1e-3 * (1 + j), 1e-8, 2e-8) for i in range(4) for j in range(i + 1, 4)]
    links = Links.of(4, pairs)
    where = Situation(((8, 8),), 4, Net("as it is"), Curves("", 1, {}))
    known = Curves("", 1, {}, link=Software(overhead=1e-4, stack=1e-9))
    two = planning.measured(where, known, links, [0, 0, 1, 1])
    assert (two.per_node, two.cores, two.net.text) == (2, math.inf, "as it is")
    assert two.net.rate_bits_per_s == pytest.approx(8 / 2e-8)
    assert two.net.latency_s == pytest.approx(4e-3 - 1e-4)
    assert two.curves.link.stack == 1e-9
    assert planning.measured(where, known, links, [0, 0, 0, 1]).per_node == 1
    one = planning.measured(where, known, links, [0] * 4)
    assert (one.per_node, one.net) == (4, where.net)
    assert 1 <= one.cores < math.inf
    software = one.curves.link
    assert software.memory == pytest.approx(1 / links.typical_beta)
    assert (software.overhead, software.stack) == (links.typical_alpha, 0.0)


def test_machines_are_known_under_torchrun(shapes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    complaint, fault = refusal("plan", "--shapes", str(shapes), "--per-node", "2")
    assert not fault
    assert "--per-node 2: under torchrun the ranks' machines are known" in complaint


def test_without_arguments_it_helps() -> None:
    ran = run("plan")
    assert ran.code == 0
    assert "diff" in ran.out
