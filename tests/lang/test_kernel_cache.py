"""The folder of compiled kernels: private, and no state of it gives a crash or slow kernels."""

from __future__ import annotations

import errno
import multiprocessing as mp
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from gradwire.errors import ConfigError
from gradwire.lang import gpu
from gradwire.lang.native import cache, isa, jit, prebuilt

SOURCE = "int answer(void) { return 42; }\n"


def answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The result of a kernel that is compiled into, or loaded from, this cache."""
    monkeypatch.setenv("GRADWIRE_CACHE", str(folder))
    return int(jit.load(SOURCE).answer())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that the cache has for SOURCE."""
    with pytest.MonkeyPatch.context() as patch:
        assert answer(tmp_path_factory.mktemp("first"), patch) == 42
        (file,) = cache.folder().glob("*.so")
    return file


def broken(change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    """The library there is another."""

    def spoil(folder: Path, library: Path) -> None:
        folder.mkdir()
        (folder / library.name).write_bytes(change(library.read_bytes()))

    return spoil


# what is done to a cache before SOURCE is compiled, and of what its one warning speaks, if any
SPOILED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "empty": (broken(lambda whole: b""), ""),
    "truncated": (broken(lambda whole: whole[: len(whole) // 2]), ""),
    "last byte lost": (broken(lambda whole: whole[:-1]), ""),
    "zeros": (broken(lambda whole: bytes(len(whole))), ""),
    "one bit": (broken(lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:]), ""),
    "a folder for the lock": (
        lambda folder, library: (folder / library.with_suffix(".lock").name).mkdir(parents=True),
        "",
    ),
    "a file for the folder": (lambda folder, library: folder.write_text("no folder"), "{folder}"),
    "a folder for the library": (
        lambda folder, library: (folder / library.name / "full").mkdir(parents=True),
        "{library} is a folder: remove it",
    ),
    # the last step of writing a file there fails: see `replaced` below
    "full": (lambda folder, library: (folder / "full").mkdir(parents=True), "{folder}"),
}


@pytest.mark.parametrize("how", SPOILED)
def test_no_state_of_the_cache_does_harm(
    how: str, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is broken is compiled anew; a cache that cannot be used is replaced by another."""
    folder, replace = tmp_path / "cache", os.replace
    spoil, told = SPOILED[how]
    spoil(folder, library)

    def replaced(source: str, target: Path) -> None:
        if (folder / "full").exists() and folder in Path(target).parents:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(source, target)

    monkeypatch.setattr(os, "replace", replaced)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert answer(folder, monkeypatch) == 42
            jit._load.cache_clear()
    said = " ".join(str(warning.message) for warning in caught)
    assert said.count("compiled kernels are not kept") == len(caught) == bool(told)
    assert told.format(folder=folder, library=folder / library.name) in said
    assert told or cache.is_whole(folder / library.name)
    if folder.is_dir():  # nothing is left behind
        assert {path.suffix for path in folder.iterdir()} <= {".so", ".lock", "" if told else ".so"}


def test_a_broken_source_of_target_triton_is_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    text = "first = 1\nsecond = 2\n"
    (tmp_path / f"gradwire_{jit.digest(text)}.py").write_text(text[:10])
    assert gpu.load(text).second == 2


def test_a_forked_worker_removes_its_temporary_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(cache, "_announce", lambda reason: None)

    def work() -> None:
        cache.put(tmp_path / "none" / "kernel", b"code")
        assert len(list(tmp_path.glob("*/kernel"))) == 1

    worker = mp.get_context("fork").Process(target=work)
    worker.start()
    worker.join(60)
    worker.kill()
    assert worker.exitcode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_is_never_released_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "LOCK_SECONDS", 0.1)
    with cache._locked(tmp_path / "a.lock"), cache._locked(tmp_path / "a.lock"):
        pass


def test_the_cache_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, link = tmp_path / "cache", tmp_path / "link"
    link.symlink_to(place)
    monkeypatch.setenv("GRADWIRE_CACHE", str(place))
    assert cache.folder().stat().st_mode & 0o077 == 0
    monkeypatch.setenv("GRADWIRE_CACHE", str(link))
    assert cache.folder() == place.resolve()  # one's own link to one's own folder

    def refused(why: str) -> None:
        for name in (place, link):
            with pytest.raises(ConfigError, match=f"GRADWIRE_CACHE=.*/{name.name}: .*{why}"):
                answer(name, monkeypatch)

    for unsafe in (0o777, 0o1777, 0o770):
        place.chmod(unsafe)
        refused(f"others can write to {place} .*, and gradwire runs code from there")
    place.chmod(0o700)
    me = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: me + 1)
    refused(f"belongs to user {me}, ")


@pytest.mark.parametrize("through", ["path", "link", "links"])
def test_the_folders_above_are_closed_to_others(
    through: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who may write to one of them may put a folder of theirs in the place of ours."""
    above, linked = tmp_path / "above", tmp_path / "linked"
    (above / "mine").mkdir(parents=True)
    linked.mkdir()
    (linked / "link").symlink_to("../above/mine")
    (tmp_path / "links").symlink_to(linked / "link" / "..")
    named = {"path": above / "mine", "link": linked / "link", "links": tmp_path / "links" / "mine"}
    cache, open_to_all = named[through] / "cache", [above, *([linked] if "li" in through else [])]
    for folder in open_to_all:
        for mode in (0o777, 0o775, 0o1777, 0o755):
            folder.chmod(mode)
            if mode in (0o1777, 0o755):  # sticky, such as /tmp: others rename only what is theirs
                assert answer(cache, monkeypatch) == 42
                continue
            said = rf"^GRADWIRE_CACHE=.*/cache: others can write to .*/{folder.name} \(mend it by "
            with pytest.raises(ConfigError, match=said + r"chmod go-w\), and gradwire runs code"):
                answer(cache, monkeypatch)


def test_what_else_is_code_is_not_where_others_can_write(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compilations beside the cache, and prebuilt libraries of another folder."""
    (level,) = isa.allowed()[-1:]
    (tmp_path / "open" / "mine").mkdir(parents=True)
    shutil.copy(library, tmp_path / "open" / "mine" / prebuilt.file_name(level.name))
    monkeypatch.setenv("GRADWIRE_KERNELS", str(tmp_path / "open" / "mine"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "open" / "mine"))
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "cache"))
    assert prebuilt.loaded()[0] is not None
    assert jit.load(f"{SOURCE}// in a safe folder").answer() == 42
    (tmp_path / "open").chmod(0o777)
    prebuilt._loaded.cache_clear()
    with pytest.raises(ConfigError, match=r"^GRADWIRE_KERNELS=.*: others can write to .*/open "):
        prebuilt.loaded()
    assert jit.load(f"{SOURCE}// beside what is kept").answer() == 42
    (tmp_path / "file").touch()
    cache._folder_of.cache_clear()
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path / "file"))  # so a temporary folder is needed
    with (
        pytest.warns(RuntimeWarning, match="not a folder"),
        pytest.raises(ConfigError, match=r"^TMPDIR=.*: others can write to .*/open "),
    ):
        jit.load(f"{SOURCE}// in an unsafe one")


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link that belongs to another")
def test_the_link_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.lchown(tmp_path / "link", 12345, -1)
    with pytest.raises(ConfigError, match=r"/link: .*/link belongs to user 12345, "):
        answer(tmp_path / "link", monkeypatch)


def test_without_a_named_cache_the_folders_of_others_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRADWIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    assert cache.folder() == (tmp_path / "home" / "gradwire").resolve()
    (tmp_path / "home" / "gradwire").chmod(0o777)
    second = cache.folder()
    assert second == (tmp_path / "tmp" / f"gradwire-{os.getuid()}").resolve()
    second.chmod(0o777)
    with pytest.warns(RuntimeWarning, match="home/gradwire: others can write to .*; .*others can"):
        third = cache.folder()
    assert third.stat().st_mode & 0o077 == 0


def test_no_cache_depends_on_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work, temporary = (tmp_path / name for name in ("home", "work", "tmp"))
    for path in (home, work, temporary):
        path.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.delenv("GRADWIRE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(home))
    assert cache.folder() == (home / ".cache" / "gradwire").resolve()
    for relative in (".", ""):  # an empty one gives /.cache where root may write
        monkeypatch.setenv("HOME", relative)
        assert cache.folder() == (temporary / f"gradwire-{os.getuid()}").resolve()
    monkeypatch.setenv("GRADWIRE_CACHE", "cache")
    with pytest.raises(ConfigError, match=r"^GRADWIRE_CACHE=cache: .*: give an absolute one"):
        jit.load(SOURCE)
    assert list(work.iterdir()) == []
