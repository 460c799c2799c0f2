"""The compile cache: private, atomic, safe under races; and the fallback without a compiler."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from gradwire.codecs import QSGD, Identity
from gradwire.errors import ConfigError
from gradwire.lang import isa, jit, kernels, native
from products import EXHAUSTIVE

SOURCE = "int answer(void) { return 42; }\n"

PROGRAM = """
    import warnings, torch, numpy as np
    from gradwire import lang
    from gradwire.codecs import QSGD
    from gradwire.errors import ConfigError
"""

NOTHING_PREBUILT = {**os.environ, "GRADWIRE_KERNELS": "no-such-folder"}


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(code)],
        env={**NOTHING_PREBUILT, **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_a_library_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    assert jit.load(SOURCE).answer() == 42
    (library,) = (tmp_path / "cache").glob("*.so")
    made = library.stat().st_mtime_ns
    jit._load.cache_clear()
    assert jit.load(SOURCE).answer() == 42
    assert library.stat().st_mtime_ns == made
    assert jit.load(SOURCE.replace("42", "43")).answer() == 43
    assert len(list((tmp_path / "cache").glob("*.so"))) == 2


def test_racing_processes_compile_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    compiler = tmp_path / "cc"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo run >> {log}\nexec gcc "$@"\n')
    compiler.chmod(0o755)
    code = textwrap.dedent(PROGRAM) + "print(lang.kernels(QSGD()).target)"
    environment = {
        **NOTHING_PREBUILT, "GRADWIRE_CACHE": str(tmp_path / "cache"), "GRADWIRE_CC": str(compiler),
    }  # fmt: skip
    racing = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    assert [process.communicate(timeout=120)[0] for process in racing] == ["c\n"] * 3
    assert log.read_text() == "run\n"
    assert not [p for p in (tmp_path / "cache").iterdir() if p.suffix not in (".so", ".lock")]


def test_more_flags_make_another_library_of_the_same_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_KERNELS", "no-such-folder")
    for number, flags in enumerate(("", "-O1", "-O1 -fno-such-optimisation")):
        monkeypatch.setenv("GRADWIRE_KERNEL_FLAGS", flags)
        library = native.Library(Identity(), torch.float32)
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


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    assert jit.cache_folder().stat().st_mode & 0o077 == 0
    (tmp_path / "cache").chmod(0o777)
    with pytest.raises(jit.CompileError, match="others can write"):
        jit.cache_folder()


def test_the_error_of_a_broken_source_has_the_compilers_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    with pytest.raises(jit.CompileError, match="unknown_type"):
        jit.load("unknown_type answer;\n")
    assert not list(tmp_path.glob("*.so"))


def test_a_lock_that_is_never_released_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jit, "LOCK_SECONDS", 0.1)
    with jit._locked(tmp_path / "a.lock"), jit._locked(tmp_path / "a.lock"):
        pass


def test_a_missing_compiler_falls_back_with_one_warning() -> None:
    done = python(
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            dtypes = (torch.float32, torch.float16)
            made = [lang.kernels(QSGD(bits=b), d) for b in (2, 4) for d in dtypes]
        assert {k.target for k in made} == {"eager"}
        assert len(caught) == 1, caught
        print(caught[0].message)
        """,
        GRADWIRE_CC="no-such-compiler",
    )
    assert done.returncode == 0, done.stderr
    assert "GRADWIRE_CC=no-such-compiler" in done.stdout
    assert "eager" in done.stdout


@EXHAUSTIVE
def test_a_missing_compiler_is_an_error_for_target_c() -> None:
    done = python(
        """
        try:
            lang.kernels(QSGD(), target="c")
        except ConfigError as error:
            print(error)
        """,
        GRADWIRE_CC="no-such-compiler",
    )
    assert "target 'c'" in done.stdout, done.stderr
    assert "no-such-compiler" in done.stdout


@EXHAUSTIVE
def test_a_compiler_that_fails_falls_back(tmp_path: Path) -> None:
    done = python(
        'print(lang.kernels(QSGD()).target)',
        GRADWIRE_CC="false", GRADWIRE_CACHE=str(tmp_path),
    )  # fmt: skip
    assert done.stdout == "eager\n", done.stderr
    assert "false" in done.stderr


FAILS_THE_SECOND_TIME = """\
#!/bin/sh
if [ "$1" != --version ]; then
  [ -e {once} ] && exit 1
  touch {once}
fi
exec gcc "$@"
"""


def test_forms_are_compiled_on_first_use(tmp_path: Path) -> None:
    done = python(
        f"""
        from pathlib import Path

        def compiled():
            return len(list(Path({str(tmp_path)!r}).glob("*.so")))

        x = torch.randn(1000)
        payload = lang.encode(QSGD(), x)
        print(compiled())
        y = lang.decode(QSGD(), payload, 1000)
        print(compiled())
        lang.kernels(QSGD(), forms=["decode", "reduce_encode", "encode_ef"])
        print(compiled())
        assert torch.equal(lang.encode(QSGD(), x, target="eager"), payload)
        assert torch.equal(lang.decode(QSGD(), payload, 1000, target="eager"), y)
        """,
        GRADWIRE_CACHE=str(tmp_path),
    )
    assert done.stdout.split() == ["1", "2", "4"], done.stderr


def test_a_form_that_fails_to_compile_falls_back_or_is_an_error(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text(FAILS_THE_SECOND_TIME.format(once=tmp_path / "once"))
    compiler.chmod(0o755)
    done = python(
        """
        made = lang.kernels(QSGD())
        payload = lang.encode(QSGD(), torch.randn(1000))
        print(made.target, lang.kernels(QSGD(), forms=["encode", "decode"]).target)
        lang.decode(QSGD(), payload, 1000)
        for run in (
            lambda: lang.decode(QSGD(), payload, 1000, target="c"),
            lambda: made.run("decode", np.zeros(0, lang.ROW)),
        ):
            try:
                run()
            except ConfigError as error:
                print(error)
        """,
        GRADWIRE_CC=str(compiler), GRADWIRE_CACHE=str(tmp_path / "cache"),
    )  # fmt: skip
    first, *errors = done.stdout.splitlines()
    assert first == "c eager", done.stderr
    assert len(errors) == 2
    assert all("target 'c'" in e and "exit 1" in e and "prebuilt kernels" in e for e in errors)
    assert done.stderr.count("no compiled kernels") == 1


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown form 'encoed': use one of encode, "):
        kernels(QSGD(), forms=["encode", "encoed"])
