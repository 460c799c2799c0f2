"""The private folder of compiled code, and how a file in it is made, checked and replaced.

Code is loaded from it, so it must belong to this user, and it and the folders above it must be
closed to writes of others. A file is written under another name and renamed, and ends with a digest
of what precedes: a file that a crash or a full disk cut short is made anew, not loaded. Therefore
nothing waits for the disk (fsync).

Where the folder cannot be used (no folder, read-only, full), the process goes on in a temporary
folder of its own, with one warning. GRADWIRE_CACHE sets another folder, for debugging.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from multiprocessing.util import Finalize
from pathlib import Path

from gradwire.errors import ConfigError

log = logging.getLogger("gradwire")

# What there is of kernels in the folder. It has measurements, too, and others' files if they like.
_DIGEST = 32 * "?"
_FILES = (
    f"{_DIGEST}.so", f"{_DIGEST}.lock", f"gradwire_{_DIGEST}.py",
    f"__pycache__/gradwire_{_DIGEST}.*.pyc", f"delay_line-{16 * '?'}*", "gradwire-scratch-*",
)  # fmt: skip
LOCK_SECONDS = 60.0  # a compilation takes one or two seconds; after this, compile without the lock
_SEAL_NBYTES = 16


def folder() -> Path:
    """The user's private folder for compiled code, created if needed; or a temporary one.

    Raises `ConfigError` if GRADWIRE_CACHE names a folder that others control, or a relative path;
    and if others control TMPDIR, and the temporary folder is needed.
    """
    named = os.environ.get("GRADWIRE_CACHE")
    if named and not os.path.isabs(named):
        raise ConfigError(
            f"GRADWIRE_CACHE={named}: a relative path is another folder in each working directory: "
            "give an absolute one"
        )
    # The XDG specification ignores relative paths; HOME may be one, empty or missing.
    home = os.path.expanduser("~/.cache") if os.environ.get("HOME", "~") else ""
    homes = os.environ.get("XDG_CACHE_HOME", ""), home
    own = [Path(home) / "gradwire" for home in homes if os.path.isabs(home)][:1]
    fallback = Path(tempfile.gettempdir()) / f"gradwire-{os.getuid()}"
    rejected: list[str] = []
    others: list[str] = []  # those that others control
    for path in [Path(named)] if named else [*own, fallback]:
        try:
            for one in (*reversed(path.parents), path):
                one.mkdir(mode=0o700, exist_ok=True)
            controlled = risk(path, (os.getuid(),))
            usable = os.access(path, os.W_OK | os.X_OK)
        except FileExistsError:
            rejected.append(f"{path}: not a folder")
            continue
        except OSError as error:
            rejected.append(f"{path}: {error.strerror}")
            continue
        if controlled is None and usable:
            if others:
                _tell_of_another("; ".join(others), path)
            return path.resolve()  # so that a link that changes later has no effect
        if named:
            refuse(f"GRADWIRE_CACHE={named}", controlled)
        rejected.append(f"{path}: {controlled or 'read-only'}")
        others += [rejected[-1]] if controlled else []
    return _temporary("; ".join(rejected))


def refuse(where: str, controlled: str | None) -> None:
    """Raise `ConfigError` if another user controls a place of code, as `risk` says."""
    if controlled is not None:
        raise ConfigError(
            f"{where}: {controlled}, and gradwire runs code from there: name a folder that belongs "
            "to you, and where others cannot write to it or to one above it"
        )


def risk(path: Path, owners: Sequence[int] = ()) -> str | None:
    """How another user controls what is read from this file or folder; None if none does.

    As sshd's StrictModes, but for links: all folders and links on the way from / must belong to
    this user or root, and be closed to writes of others. A folder above may be sticky instead (as
    /tmp), where others can rename and remove only what is theirs.

    Args:
        owners: of the file or folder itself; by default those of the folders above.
    """
    # Who owns / controls the interpreter, too. In a user namespace, as in the lab, it is not 0.
    known, end = {0, os.getuid(), Path("/").stat().st_uid}, path.stat()
    for at in _way(path.absolute()):
        status = at.lstat()
        last = os.path.samestat(status, end)
        if status.st_uid not in (owners if last and owners else known):
            return f"{at} belongs to user {status.st_uid}"
        sticky = status.st_mode & stat.S_ISVTX and not last
        if status.st_mode & 0o022 and not sticky and not at.is_symlink():
            return f"others can write to {at} (mend it by chmod go-w)"
    return None


def _way(path: Path) -> Iterator[Path]:
    """All folders and links from / to `path`, those to which links lead included."""
    for at in (*reversed(path.parents), path):
        yield at
        if at.is_symlink():
            yield from _way(at.parent / at.readlink())


def files() -> list[Path]:
    """The folder's files of compiled code. Raises as `folder`."""
    place = folder()
    return sorted(path for pattern in _FILES for path in place.glob(pattern) if path.is_file())


def obtain(path: Path, make: Callable[[Path], object]) -> Path:
    """A file of compiled code: `path` if it is whole, else as `make` writes it to another path.

    Processes that want it at the same time make it once. The result is in a temporary folder if
    `path` cannot be written. Raises `OSError` if that fails, too.
    """
    if is_whole(path):
        return path
    with _locked(path.with_suffix(".lock")):
        if is_whole(path):
            return path
        with _scratch(path.parent) as scratch:
            made = scratch / path.name
            make(made)
            data = made.read_bytes()
        return put(path, data + _seal(data))


def put(path: Path, data: bytes) -> Path:
    """Write a file of the folder at once; in a temporary folder if it cannot be written there."""
    try:
        return _put(path, data)
    except IsADirectoryError:
        reason = f"{path} is a folder: remove it"
    except OSError as error:
        reason = f"{path.parent}: {error.strerror}"
    return _put(_temporary(reason) / path.name, data)


def _put(path: Path, data: bytes) -> Path:
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix="gradwire-scratch-")
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o700)  # programs, too
            file.write(data)
        os.replace(scratch, path)
    except OSError:
        Path(scratch).unlink(missing_ok=True)
        raise
    return path


def _seal(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_SEAL_NBYTES).digest()


def is_whole(path: Path) -> bool:
    """Whether there is a file whose end is the digest of the rest: some 0.1 ms."""
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return False
    content = memoryview(data)[:-_SEAL_NBYTES]
    return len(content) > 0 and data.endswith(_seal(content))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the file's lock, or go on without it: compiling twice is safe.

    That happens after LOCK_SECONDS, and where there can be no lock. The operating system releases
    the lock of a process that dies.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # a full or read-only disk, or a folder of this name
        yield
        return
    try:
        give_up = time.monotonic() + LOCK_SECONDS
        while time.monotonic() < give_up:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.02)
            except OSError:  # a file system without locks
                break
        yield
    finally:
        os.close(descriptor)


_mutex = threading.Lock()  # forms are compiled in parallel, and what is said is said once


def tell_of_compiling(place: Path) -> None:
    """Log, once per process, that kernels are compiled into a folder.

    Of ranks that torchrun or another launcher started on a machine the first says it, whichever of
    them compiles: all wait.
    """
    with _mutex:
        _tell_of_compiling(place)


@cache
def _tell_of_compiling(place: Path) -> None:
    if os.environ.get("LOCAL_RANK", "0") == "0":
        log.warning("gradwire: compiling kernels that are not yet in %s", place)


def _temporary(reason: str) -> Path:
    """A folder that this process removes at its exit; warns, once for each reason."""
    with _mutex:
        _announce(reason)
        return _folder_of(os.getpid())


@cache
def _announce(reason: str) -> None:
    warnings.warn(
        f"gradwire: compiled kernels are not kept, each process makes its own: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )


@contextmanager
def _scratch(beside: Path) -> Iterator[Path]:
    """A folder to compile in: in TMPDIR, or `beside` what is kept where others control TMPDIR."""
    with ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-"))
        if risk(Path(made)) is not None:
            another = tempfile.TemporaryDirectory(prefix="gradwire-scratch-", dir=beside)
            made = stack.enter_context(another)
        yield Path(made)


@cache
def _tell_of_another(rejected: str, place: Path) -> None:
    log.warning("gradwire: compiled kernels are kept in %s: %s", place, rejected)


@cache
def _folder_of(process: int) -> Path:
    path = Path(tempfile.mkdtemp(prefix="gradwire-"))
    refuse(f"TMPDIR={path.parent}", risk(path))  # if it lets others replace the folder
    # not by atexit: workers that multiprocessing forks skip it; other forked children leave it be
    Finalize(None, shutil.rmtree, (path, True), exitpriority=-1)
    return path
