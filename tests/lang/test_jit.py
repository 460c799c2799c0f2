"""Compilation on first use: once, also under races; and the fallback without a compiler."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
import warnings
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from ends import ends, finished
from gradwire.codecs import QSGD, Identity
from gradwire.errors import ConfigError
from gradwire.lang import ROW, decode, encode, kernels
from gradwire.lang.kernels import Library
from gradwire.lang.native import cache, isa, jit

SOURCE = "int answer(void) { return 42; }\n"

RANKS = 3
PATIENCE = 120.0  # seconds; ends a hang, and no test on a busy machine


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, no prebuilt kernels, and none in memory; forms are compiled one by one, as
    for users. Returns the cache's folder."""
    monkeypatch.setattr(jit, "optimises", lambda: True)
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    module = sys.modules["gradwire.lang.kernels"]  # the package also has a function of this name
    for name in ("_made", "_missing"):
        monkeypatch.setattr(module, name, lru_cache(getattr(module, name).__wrapped__))
    monkeypatch.setattr(module, "_announced", set())
    return tmp_path / "cache"


def program(folder: Path, text: str) -> str:
    """The path of a compiler: a shell script."""
    path = folder / "cc"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def made_once_all_are_ready(rank: int, folder: str) -> tuple[int, list[str]]:
    """Compile SOURCE at the same time as the other ranks; its answer, and what was logged."""
    os.environ["LOCAL_RANK"] = str(rank)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    Path(folder, f"ready-{rank}").touch()
    until = time.monotonic() + PATIENCE
    while len(list(Path(folder).glob("ready-*"))) < RANKS and time.monotonic() < until:
        time.sleep(0.001)
    answer = int(jit.load(SOURCE).answer())
    jit.load(f"{SOURCE}// another").answer()
    return answer, said


def test_a_library_is_compiled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    assert jit.load(SOURCE).answer() == 42
    (library,) = (tmp_path / "cache").glob("*.so")
    made = library.stat().st_mtime_ns
    assert "compiling kernels" in caplog.text
    caplog.clear()
    jit._load.cache_clear()
    cache._tell_of_compiling.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(jit, "run", None)
        assert jit.load(SOURCE).answer() == 42
    assert caplog.text == ""  # of a warm cache nothing is said
    assert library.stat().st_mtime_ns == made
    assert jit.load(SOURCE.replace("42", "43")).answer() == 43
    with pytest.raises(jit.CompileError, match="unknown_type"):
        jit.load("unknown_type answer;\n")
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


@pytest.mark.multiprocess
def test_racing_processes_compile_once(tmp_path: Path) -> None:
    log, cache = tmp_path / "log", tmp_path / "cache"
    compiler = program(tmp_path, f'[ "$1" = --version ] || echo run >> {log}\nexec gcc "$@"')
    found = ends(
        RANKS, made_once_all_are_ready, str(tmp_path), backend=None, deadline=2 * PATIENCE,
        environment={"GRADWIRE_CACHE": str(cache), "GRADWIRE_CC": compiler},
    )  # fmt: skip
    finished(found)
    line = f"gradwire: compiling kernels that are not yet in {cache}"
    assert [end.value for end in found] == [(42, [line]), (42, []), (42, [])]
    assert log.read_text() == 2 * "run\n"
    assert not [path for path in cache.iterdir() if path.suffix not in (".so", ".lock")]


def test_more_flags_make_another_library_of_the_same_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    for number, flags in enumerate(("", "-O1", "-O1 -fno-such-optimisation")):
        monkeypatch.setenv("GRADWIRE_KERNEL_FLAGS", flags)
        library = Library(Identity(), torch.float32, "c")
        if "such" in flags:
            with pytest.raises(jit.CompileError, match="no-such-optimisation"):
                library.ready(["encode"])
        else:
            library.ready(["encode"])
            assert len(list(tmp_path.glob("*.so"))) == number + 1
    assert jit.load(SOURCE).answer() == 42  # GRADWIRE_KERNEL_FLAGS is only for kernels


@pytest.mark.skipif(not isa.supported(), reason="no level of this CPU is known")
def test_a_forced_level_is_compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def vector_bytes() -> int:
        return int(jit.load("int width(void) { return __BIGGEST_ALIGNMENT__; }\n").width())

    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    native = vector_bytes()
    monkeypatch.setenv("GRADWIRE_ISA", isa.supported()[0].name)
    assert vector_bytes() == 16 <= native
    monkeypatch.setenv("GRADWIRE_ISA", isa.supported()[-1].name)
    assert vector_bytes() == {"x86-64-v3": 32, "x86-64-v4": 64}.get(isa.supported()[-1].name, 16)


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_that_works_one_warning_is_given(
    compiler: str, fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CC", compiler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dtypes = (torch.float32, torch.float16)
        made = [kernels(QSGD(bits=b), d) for b in (2, 4) for d in dtypes]
    assert {k.target for k in made} == {"eager"}
    (said,) = [str(warning.message) for warning in caught]
    assert re.search(f"GRADWIRE_CC={compiler}.*eager|eager.*{compiler}", said)
    for use, *given in ((kernels,), (encode, torch.ones(3))):
        with pytest.raises(ConfigError, match=f"target 'c'.*{compiler}"):
            use(QSGD(), *given, target="c")


def test_forms_are_compiled_on_first_use(fresh: Path) -> None:
    def compiled() -> int:
        return len(list(fresh.glob("*.so")))

    values = torch.randn(1000)
    payload = encode(QSGD(), values)
    assert compiled() == 1
    decoded = decode(QSGD(), payload, 1000)
    assert compiled() == 2
    kernels(QSGD(), forms=["decode", "reduce_encode", "encode_ef"])
    assert compiled() == 4
    assert torch.equal(encode(QSGD(), values, target="eager"), payload)
    assert torch.equal(decode(QSGD(), payload, 1000, target="eager"), decoded)


def test_a_form_that_fails_to_compile_falls_back_or_is_an_error(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    fails = f'[ "$1" = --version ] || {{ [ -e {once} ] && exit 1; touch {once}; }}'
    monkeypatch.setenv("GRADWIRE_CC", program(tmp_path, f'{fails}\nexec gcc "$@"'))
    made = kernels(QSGD())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        payload = encode(QSGD(), torch.randn(1000))
        assert made.target == "c"
        assert kernels(QSGD(), forms=["encode", "decode"]).target == "eager"
        decode(QSGD(), payload, 1000)
    assert ["no compiled kernels" in str(warning.message) for warning in caught] == [True]
    for run in (
        lambda: decode(QSGD(), payload, 1000, target="c"),
        lambda: made.run("decode", np.zeros(0, ROW)),
    ):
        with pytest.raises(ConfigError, match=r"target 'c'.*exit 1.*prebuilt kernels"):
            run()
