"""Prebuilt kernels: found by source, chosen by CPU, with the same results on every level."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from codec_calls import differing, fixed, table
from gradwire import codecs
from gradwire.codecs import variants
from gradwire.errors import ConfigError
from gradwire.lang import KernelCall, Series
from gradwire.lang.emit import c
from gradwire.lang.forms import FORMS
from gradwire.lang.kernels import Library
from gradwire.lang.native import build, isa, jit, prebuilt
from products import EXHAUSTIVE

pytestmark = pytest.mark.xdist_group("prebuilt")  # one worker builds the libraries, once

# copies, sums and planes, tensor reductions, selections
FEW = ["identity", "qsgd:bits=7:scale=l2:block=50"]
LABELS = [*FEW, "terngrad:bits=2", "topk:density=0.1", "qsgd:rounding=stochastic"]
CODECS = dict(variants.prebuilt(LABELS))
HALVED = FEW[1]  # also built for bf16


# GRADWIRE_ISA may forbid the CPU's highest levels: libraries for these would not be loaded.
LEVELS = isa.allowed()
BEST = [LEVELS[-1]]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with a library per allowed level, or with few codecs for the highest only."""
    folder = tmp_path_factory.mktemp("libraries")
    exhaustive = pytestconfig.getoption("exhaustive")
    levels, labels = (LEVELS, LABELS) if exhaustive else (BEST, FEW)
    units = build.units([(label, CODECS[label]) for label in labels], ["fp32"])
    units += build.units([(HALVED, CODECS[HALVED])], ["bf16"] if exhaustive else [])
    rows = list(build.build(units, levels, folder))
    assert [row["isa"] for row in rows] == [level.name for level in levels]
    return folder


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make kernels for each test, since they depend on the environment here."""
    module = sys.modules["gradwire.lang.kernels"]
    monkeypatch.setattr(module, "_made", module._made.__wrapped__)
    prebuilt._loaded.cache_clear()
    yield
    prebuilt._loaded.cache_clear()


@pytest.fixture
def installed(libraries: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None) -> Path:
    """The libraries in use, and no compiler to fall back on."""
    monkeypatch.setenv("GRADWIRE_KERNELS", str(libraries))
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    return libraries


@pytest.mark.parametrize(
    "level",
    [pytest.param(v, marks=[] if v in BEST else [EXHAUSTIVE]) for v in LEVELS],
    ids=lambda level: level.name,
)
def test_every_level_equals_the_interpreter(
    level: isa.Level,
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    pytestconfig: pytest.Config,
) -> None:
    monkeypatch.setenv("GRADWIRE_ISA", level.name)
    exhaustive = pytestconfig.getoption("exhaustive")
    cases = [(label, torch.float32) for label in (LABELS if exhaustive else FEW)]
    cases += [(HALVED, torch.bfloat16)] if exhaustive else []
    assert Library(CODECS[HALVED], torch.float32, "c").prebuilt
    assert prebuilt.loaded()[1] == str(installed / f"kernels-{level.name}.so")
    for label, dtype in cases:
        for form in FORMS:
            given = (fixed(numel, dtype) for numel in (0, 1, 130, 5003))
            assert differing(CODECS[label], [form], given, threads=2) == []
            # A kernel that uses MMX registers without emms breaks x87, which LAPACK uses.
            assert np.longdouble(1) + np.longdouble(1) == 2, (label, form)


def test_the_highest_available_level_is_used(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lowest, highest = (f"kernels-{LEVELS[at].name}.so" for at in (0, -1))
    library = (installed / highest).read_bytes()  # its level is only in the file name
    for number, names in enumerate(([lowest], [lowest, highest])):
        folder = tmp_path / str(number)  # of its own: a loaded library must not be overwritten
        folder.mkdir()
        for name in {*names}:
            (folder / name).write_bytes(library)
        monkeypatch.setenv("GRADWIRE_KERNELS", str(folder))
        assert prebuilt.loaded()[1] == str(folder / names[-1])
    assert prebuilt.listing()[0] == "identity fp32"
    assert f"{HALVED} fp32" in prebuilt.listing()


def test_kernels_of_other_code_are_never_used(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS["identity"]
    assert Library(codec, torch.float32, "c").prebuilt
    changed = c.prelude() + "\n/* changed */\n"
    for owner, name, value in [
        (c, "prelude", lambda: changed),
        (jit, "FLAGS", (*jit.FLAGS, "-frounding-math")),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            with pytest.raises(jit.CompileError, match="not among them"):
                Library(codec, torch.float32, "c").ready(["encode"])


def test_a_series_runs_without_a_compiler(installed: Path) -> None:
    values = torch.randn(300)
    payload = torch.zeros(1200, dtype=torch.uint8)
    rows = table([values], [payload])
    made = Library(CODECS["identity"], torch.float32, "c")
    series = Series([KernelCall(made, "encode", 0, 1)], rows["numel"])
    assert series.bind(rows, torch.empty(0, dtype=torch.uint8)).run(0, 1) == 1
    assert torch.equal(payload.view(torch.float32), values)


def test_low_rank_products_run_without_a_compiler(installed: Path) -> None:
    functions, _ = prebuilt.find(c.lowrank(), c.LOWRANK)
    assert functions is not None
    assert set(functions) == set(c.LOWRANK)


def test_kernels_that_are_not_prebuilt_are_compiled(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_CC")
    assert not Library(codecs.get("fp16"), torch.float32, "c").prebuilt
    assert not Library(codecs.get("identity"), torch.float16, "c").prebuilt


def test_no_library_and_a_broken_one_are_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_cache: None
) -> None:
    monkeypatch.setenv("GRADWIRE_KERNELS", str(tmp_path))
    assert prebuilt.loaded() == (None, "none came with this installation")
    assert prebuilt.listing() == []
    prebuilt._loaded.cache_clear()
    for level in isa.supported():
        (tmp_path / f"kernels-{level.name}.so").write_text("not a library")
    library, reason = prebuilt.loaded()
    assert library is None
    assert "cannot be loaded" in reason
    assert str(tmp_path) in reason
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    with pytest.raises(jit.CompileError, match="cannot be loaded"):
        Library(codecs.get("identity"), torch.float32, "c").ready(["encode"])


def test_torchs_openmp_runtime_is_the_only_one(libraries: Path) -> None:
    code = """
        import torch
        from gradwire import codecs, lang
        from gradwire.lang.kernels import Library
        from gradwire.lang.native import prebuilt

        def runtimes():
            with open("/proc/self/maps") as maps:
                paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
            return {p for p in paths if p.rsplit("/")[-1].startswith(prebuilt.RUNTIMES)}

        before = runtimes()
        x = torch.randn(100_000)
        payload = lang.encode(codecs.get("identity"), x, target="c")
        assert torch.equal(payload, x.view(torch.uint8))
        assert Library(codecs.get("identity"), torch.float32, "c").prebuilt
        assert runtimes() == before, runtimes()
    """
    environment = {"GRADWIRE_KERNELS": str(libraries), "GRADWIRE_CC": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@EXHAUSTIVE
def test_sources_are_generated_without_torch_and_numpy() -> None:
    code = """
        import json, sys

        class Refused:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in ("torch", "numpy"):
                    raise ModuleNotFoundError(f"{name} is refused", name=name.split(".")[0])

        if sys.argv[1] == "without":
            sys.meta_path.insert(0, Refused())
        from gradwire import wheel
        units = wheel.units()
        assert ("torch" in sys.modules) == (sys.argv[1] == "with")
        print(json.dumps({unit.label: unit.text for unit in units}))
    """
    texts = [
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), how],
            capture_output=True, text=True, timeout=120, check=True,
        ).stdout
        for how in ("without", "with")
    ]  # fmt: skip
    assert texts[0] == texts[1]
    names = {re.split("[: ]", label)[0] for label in json.loads(texts[0])}
    assert names - {"shm"} <= {*codecs.REGISTRY}
    assert {"identity", "qsgd", "topk", "shm"} <= names


def test_the_same_sources_give_the_same_bytes_and_a_broken_one_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "_ALWAYS", ())  # they take seconds to compile
    text = c.prelude() + c.source(codecs.get("identity"), "fp32", ["encode"])
    units, made = [build.Unit("identity fp32", text, ("encode",))], []
    for folder in (tmp_path / "a", tmp_path / "deeper" / "b"):
        (row,) = build.build(units, isa.supported()[:1], folder, jobs=1)
        made.append(Path(row["file"]).read_bytes())
        assert os.listdir(folder) == [f"kernels-{row['isa']}.so"]
        assert row["bytes"] == len(made[-1])
        assert row["kernels"] == 1
    assert made[0] == made[1]
    (tmp_path / "c").mkdir()
    broken = build.Unit("broken fp32", c.prelude() + "unknown_type answer;\n")
    with pytest.raises(jit.CompileError, match="unknown_type"):
        list(build.build([broken], isa.supported()[:1], tmp_path / "c"))
    assert os.listdir(tmp_path / "c") == []


def test_levels_depend_on_the_cpus_features() -> None:
    first, second, third = (level.features for level in isa.LEVELS[:3])
    cases: list[tuple[str, set[str] | frozenset[str], int]] = [
        ("x86_64", set(), 0),
        ("x86_64", first, 1),
        ("x86_64", first | second, 2),
        ("x86_64", first | third, 1),  # without the second level
        ("x86_64", first | second | {"avx512f"}, 2),
        ("x86_64", first | second | third, 3),
        ("aarch64", {"fp", "asimd", "sve"}, 1),
        ("riscv64", {"fp", "asimd"}, 0),
    ]
    for machine, features, levels in cases:
        found = isa.within(machine, frozenset(features))
        assert len(found) == levels, (machine, features)
        assert all(level.machine == machine for level in found)


def test_a_level_above_the_cpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa, "supported", lambda: isa.LEVELS[:2])
    for level, said in (
        ("x86-64-v4", "x86-64-v4: this CPU supports x86-64-v2, x86-64-v3"),
        ("sse9", "unknown instruction set 'sse9': use one of x86-64-v2"),
    ):
        monkeypatch.setenv("GRADWIRE_ISA", level)
        with pytest.raises(ConfigError, match=said):
            prebuilt.loaded()
    monkeypatch.setenv("GRADWIRE_ISA", "x86-64-v2")
    assert isa.allowed() == isa.LEVELS[:1]


def test_a_wheel_contains_every_codec() -> None:
    labels = [label for label, _ in variants.prebuilt()]
    assert {*codecs.REGISTRY} <= {*labels}
    assert len(set(labels)) == len(labels)
    made = [codec for _, codec in variants.prebuilt()]
    assert codecs.get("qsgd", bits=8, block=1024) in made
    assert {*variants.VARIANTS} <= {*codecs.REGISTRY}


def test_levels_that_the_compiler_cannot_build_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [level for level in isa.LEVELS if level.machine != isa.machine()]
    with pytest.raises(ConfigError, match=f"has no {others[0].name}: set GRADWIRE_CC"):
        build.levels([others[0].name])
    assert {level.machine for level in build.levels()} == {isa.machine()}
    other = tmp_path / "cc"
    other.write_text("#!/bin/sh\necho '#define __clang__ 1'; echo '#define __GNUC__ 4'\n")
    other.chmod(0o755)
    monkeypatch.setenv("GRADWIRE_CC", str(other))
    with pytest.raises(jit.CompileError, match="prebuilt kernels need gcc"):
        build.levels()


@EXHAUSTIVE
def test_the_command_builds_and_doctor_reports(tmp_path: Path) -> None:
    def gradwire(*command: str) -> list[dict[str, object]]:
        done = subprocess.run(
            [sys.executable, "-m", "gradwire_tools.cli", *command, "--json", "-"],
            env={**os.environ, "GRADWIRE_KERNELS": str(tmp_path), "GRADWIRE_ISA": level},
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    level = isa.supported()[0].name
    (row,) = gradwire("codec", "build", "--codec", "identity", "--isa", level)
    assert (row["isa"], row["kernels"]) == (level, 3)
    parts = {row["part"]: row for row in gradwire("doctor")}
    assert parts["prebuilt kernels"]["available"]
    assert parts["prebuilt kernels"]["detail"] == f"3 in {row['file']}"
