"""The state of a run of `bench train` on disk, from which a killed run continues.

    FOLDER/config.json         the run's configuration
    FOLDER/train/7/rankR.pt    of rank R, after turn 7: its position, the state of its unfinished
                               runs, the events so far, and whether the run has ended
    FOLDER/train/writing/...   a turn that is not whole
    FOLDER/timing-NET/...      of a composed run, the same of its other trainings
    FOLDER/ends/METHOD-R.pt    and of rank R the last state of a method to time at the end

A turn is renamed to its number once all ranks have written: a run that is killed at any point
leaves a whole turn, or none. Before a folder is deleted, its `config.json` is renamed to `ended`: a
deletion that is killed leaves nothing that looks like a run to continue. A folder with neither is
not of a run, and is not touched.

`lease` keeps two runs, or the dying ranks of one that was killed, from using a folder at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

import torch

from gradwire.errors import ConfigError
from gradwire.planner.files import write_whole

State = dict[str, Any]

_DYING_SECONDS = 30.0
_CONFIG, _ENDED = "config.json", "ended"  # the marker of a run, and what it becomes
_WRITING = "writing"
_KEYS = {"position", "steps", "runs", "events", "ended"}  # of a rank's state


def save(folder: Path, rank: int, state: State) -> None:
    """Write a rank's state after a turn; it counts once rank 0 calls `commit`."""
    (folder / _WRITING).mkdir(parents=True, exist_ok=True)
    torch.save(state, folder / _WRITING / f"rank{rank}.pt")


def commit(folder: Path) -> None:
    """On rank 0, once all ranks have written: the turn is whole. Earlier ones are removed."""
    before = _turns(folder)
    (folder / _WRITING).rename(folder / str(max(before, default=0) + 1))
    for turn in before:
        shutil.rmtree(folder / str(turn), ignore_errors=True)


def load(folder: Path, rank: int, look: bool = False) -> State | None:
    """What a rank has saved in the last whole turn; None if there is none.

    Args:
        look: leave tensors on disk.

    Raises:
        ConfigError: the file is damaged.
    """
    turn = max(_turns(folder), default=None)
    if turn is None:
        return None
    file = folder / str(turn) / f"rank{rank}.pt"
    try:
        found: State = torch.load(file, "cpu", weights_only=True, mmap=look)
    except Exception as error:  # of many types: what is truncated may be anything
        raise _damaged(file, type(error).__name__) from error
    if not isinstance(found, dict) or not found.keys() >= _KEYS:
        raise _damaged(file, "it is no rank's state of this version")
    return found


def _turns(folder: Path) -> list[int]:
    return [int(one.name) for one in folder.glob("*") if one.name.isdigit()]


def _damaged(file: Path, reason: str) -> ConfigError:
    return ConfigError(f"--resume: {file} is damaged ({reason}): leave --resume out to start again")


def end_of(folder: Path, method: str, rank: int) -> Path:
    """The file with a rank's last state of a method."""
    return folder / f"{quote(method, safe='')}-{rank}.pt"


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Hold a folder for one run, once the ranks of an earlier one have ended.

    Raises:
        ConfigError: another run uses it, or ranks of a killed one still do after half a minute, or
            the folder cannot be made or written.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            mine = stack.enter_context(open(folder / "run.lock", "w"))
            ranks = stack.enter_context(open(folder / "ranks.lock", "w"))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ConfigError(
                f"{folder} cannot hold the state of this run ({reason}): move it away, or give "
                "another --json FILE"
            ) from error
        # without a name, the run that held it has just removed it
        if not _locked(mine, 0.0) or os.fstat(mine.fileno()).st_nlink == 0:
            raise ConfigError(f"{folder}: another run uses this state; end it first")
        if not _locked(ranks, _DYING_SECONDS):
            raise ConfigError(
                f"{folder}: ranks of an earlier run still use this state; end them first"
            )
        fcntl.flock(ranks, fcntl.LOCK_UN)
        yield


def _locked(file: TextIO, seconds: float) -> bool:
    """Whether the file could be locked within this time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.1)


@contextlib.contextmanager
def used_by_rank(folder: Path) -> Iterator[None]:
    """Mark a folder as used by a rank of the run that holds it."""
    with open(folder.parent / "ranks.lock", "a") as ranks:
        fcntl.flock(ranks, fcntl.LOCK_SH)
        yield


def prepare(folder: Path, config: Mapping[str, Any], resume: bool) -> bool:
    """Make a run's folder; True if it holds a run of the same configuration to continue.

    Raises:
        ConfigError: `resume`, and the run in the folder has another configuration, or what it has
            saved is damaged; or the folder is not one of `bench train`.
    """
    file = folder / _CONFIG
    if not (resume and file.exists()):
        _clear(folder)
        write_whole(file, json.dumps(config))
        return False
    try:
        before = json.loads(file.read_text())
    except OSError as error:
        raise _damaged(file, (error.strerror or str(error)).lower()) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(file, "it is not JSON") from error
    if not isinstance(before, dict):
        raise _damaged(file, "it is no configuration")
    for name, value in json.loads(json.dumps(config)).items():
        if before.get(name) != value:
            raise ConfigError(
                f"--resume: the run in {folder} has {name} {json.dumps(before.get(name))}, "
                f"not {json.dumps(value)}: give its own options, or another --json FILE; without "
                "--resume the saved run is dropped"
            )
    for training in sorted(folder.iterdir()):
        for rank in range(config["nodes"]):
            load(training, rank, look=True)
    return True


def remove(folder: Path) -> None:
    """Remove the folder of a run that has ended; within its lease."""
    os.replace(folder / _CONFIG, folder / _ENDED)
    shutil.rmtree(folder)


def _clear(folder: Path) -> None:
    """Delete what an earlier run has left; its marker last, so that this can be repeated.

    Raises:
        ConfigError: the folder has something, and no marker of a run.
    """
    ours = {_CONFIG, _ENDED, "run.lock", "ranks.lock"}
    others = [
        one
        for one in folder.iterdir()
        if one.name not in ours and not one.name.startswith("config.")  # of a write that was killed
    ]
    marked = [folder / name for name in (_CONFIG, _ENDED) if (folder / name).exists()]
    if others and not marked:
        raise ConfigError(
            f"{folder} is not a state of bench train (it has {others[0].name}, and no {_CONFIG}): "
            "move it away, or give another --json FILE"
        )
    for old in others:
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        else:
            old.unlink()
    for marker in marked:
        marker.unlink()
