"""The state of a run of `bench train` on disk, from which a killed run continues.

    FOLDER/config.json     the run's configuration
    FOLDER/latest.json     which turn is whole: {"turn": 7, "ended": false}
    FOLDER/7/events.json   rank 0's events so far
    FOLDER/7/rankR.pt      of rank R: its position, and the state of its unfinished runs

A file is written under another name and renamed; `latest.json` names a turn once all of its files
are there. So a run that is killed at any point leaves a whole turn, or none.

`lease` keeps two runs, or the dying ranks of one that was killed, from using a folder at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gradwire.errors import ConfigError

State = dict[str, Any]

_DYING_SECONDS = 30.0


def write(path: Path, content: Any) -> None:
    """Write JSON to `path`, whole or not at all."""
    temporary = path.with_suffix(".new")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


class Turns:
    """The saved turns in a folder, of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.rank = rank
        found = latest(folder)
        self._turn = found["turn"] if found else 0
        self._known = found is not None

    def load(self, rank: int) -> State | None:
        """What `rank` saved in the last whole turn; None if there is none."""
        if not self._known:
            return None
        found: State = torch.load(self._folder() / f"rank{rank}.pt", weights_only=True)
        return found

    def write(self, own: State, events: list[State]) -> None:
        """Write this rank's file of the next turn; rank 0 its events, too."""
        self._turn += 1
        folder = self._folder()
        folder.mkdir(exist_ok=True)
        torch.save(own, folder / f"rank{self.rank}.pt")
        if self.rank == 0:
            write(folder / "events.json", events)

    def commit(self, ended: bool) -> None:
        """On rank 0, once all ranks have written: the turn is whole. Earlier ones are removed."""
        write(self.folder / "latest.json", {"turn": self._turn, "ended": ended})
        self._known = True
        for other in self.folder.iterdir():
            if other.is_dir() and other.name != str(self._turn):
                shutil.rmtree(other, ignore_errors=True)

    def _folder(self) -> Path:
        return self.folder / str(self._turn)


def latest(folder: Path) -> State | None:
    """{"turn", "ended"} of the last whole turn; None if there is none."""
    try:
        found: State = json.loads((folder / "latest.json").read_text())
    except FileNotFoundError:
        return None
    return found


def saved_events(folder: Path) -> list[State]:
    """The events of the last whole turn; none if there is none."""
    found = latest(folder)
    if found is None:
        return []
    events: list[State] = json.loads((folder / str(found["turn"]) / "events.json").read_text())
    return events


@contextlib.contextmanager
def lease(folder: Path) -> Iterator[None]:
    """Hold a folder for one run, once the ranks of an earlier one have ended.

    Raises:
        ConfigError: another run uses it, or ranks of a killed one still do after half a minute.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "run.lock", "w") as mine, open(folder / "ranks.lock", "w") as ranks:
        try:
            fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{folder}: another run uses this state; end it first") from None
        deadline = time.monotonic() + _DYING_SECONDS
        while True:
            try:
                fcntl.flock(ranks, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"{folder}: ranks of an earlier run still use this state; end them first"
                    ) from None
                time.sleep(0.1)
        fcntl.flock(ranks, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def used_by_rank(folder: Path) -> Iterator[None]:
    """Mark a folder as used by a rank of the run that holds it."""
    with open(folder.parent / "ranks.lock", "a") as ranks:
        fcntl.flock(ranks, fcntl.LOCK_SH)
        yield


def prepare(folder: Path, config: State, resume: bool) -> bool:
    """Make a run's folder; True if it holds a run of the same configuration to continue.

    Raises:
        ConfigError: `resume`, and the run in the folder has another configuration.
    """
    file = folder / "config.json"
    if resume and file.exists():
        before = json.loads(file.read_text())
        for name, value in json.loads(json.dumps(config)).items():
            if before.get(name) != value:
                raise ConfigError(
                    f"--resume: the run in {folder} has {name} {json.dumps(before.get(name))}, "
                    f"not {json.dumps(value)}: give its own options, or leave --resume out"
                )
        return True
    for old in folder.iterdir():
        if old.is_dir():
            shutil.rmtree(old)
        elif old.suffix != ".lock":
            old.unlink()
    write(file, config)
    return False
