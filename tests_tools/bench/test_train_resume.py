"""`bench train` killed by SIGKILL at any point continues, and ends with the same rows but times."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from bench_runs import TINY, trained, without_times

from gradwire.errors import ConfigError
from gradwire_tools.bench import workers
from gradwire_tools.bench.train import state
from gradwire_tools.bench.train.config import TrainConfig
from products import EXHAUSTIVE

DDP = replace(
    TINY,
    nodes=3,  # torch's sums of three ranks depend on DDP's buckets
    methods=(
        "torch-fp32", "torch-powersgd", "qsgd:bits=2:error_feedback=true",
        "outer:every=4:fragments=2:delay=1:mix=0.5:codec=qsgd:bits=2",
        "outer:average:every=4:codec=radial:codec=qsgd:bits=4", "outer:demo",
    ),
    steps=9, evaluate_every=3, patience=15, save_seconds=0.0,
)  # fmt: skip
SHARDED = replace(
    TINY, sharded=True, methods=("fsdp-bf16", "qsdp:w=6:g=4:error_feedback=true"), steps=6,
    evaluate_every=2, save_seconds=0.0,
)  # fmt: skip


@pytest.mark.multiprocess
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("config", "kills"),
    [
        # The second turn is written by two ranks of three, or written and not whole.
        pytest.param(DDP, ["1 save 2"], id="DDP"),
        pytest.param(SHARDED, ["0 commit 2"], id="sharded", marks=EXHAUSTIVE),
        *(
            pytest.param(config, ["0 commit 2", "1 _train 4"], id=name, marks=EXHAUSTIVE)
            for name, config in (("DDP twice", DDP), ("sharded twice", SHARDED))
        ),
        *(
            pytest.param(
                replace(config, interleaved=False), ["0 _train 5", "0 commit 1", "1 save 1"],
                id=name, marks=EXHAUSTIVE,
            )
            for name, config in (("DDP in turn", DDP), ("sharded in turn", SHARDED))
        ),
    ],
)  # fmt: skip
def test_a_killed_run_ends_with_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: TrainConfig, kills: list[str]
) -> None:
    expected, folder = trained(config), tmp_path / "state"
    monkeypatch.setattr(workers, "_GRACE_SECONDS", 60.0)  # all end at once: their peer is gone
    for turn, kill in enumerate(kills):
        with monkeypatch.context() as patched:
            patched.setenv("KILLED", kill)
            patched.setattr(workers, "WORKER", "killed_worker")
            with pytest.raises(workers.WorkerError, match=f"rank {kill[0]} -9"):
                trained(config, folder=folder, resume=turn > 0)
        assert state.load(folder / "train", 0) is not None
    found = trained(config, folder=folder, resume=True)
    assert without_times(found.rows) == without_times(expected.rows)
    assert any("Continuing the run in" in line for line in found.said)
    assert not folder.exists()


RUN = """
import json, os, signal, sys
from pathlib import Path
from gradwire_tools.bench.train.config import TrainConfig
from gradwire_tools.bench.train.run import run
folder, kill_at, rows = Path(sys.argv[2]), int(sys.argv[3]), []
given = json.loads(sys.argv[1])
config = TrainConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})
for row in run(config, None, print, folder, resume=True):
    rows.append(row)
    if len(rows) == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
folder.with_suffix(".rows").write_text(json.dumps(rows))
"""


@EXHAUSTIVE
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_a_killed_command_ends_with_the_same_rows(tmp_path: Path) -> None:
    """The command itself is killed, while its ranks train on."""
    folder = tmp_path / "state"
    for kill_at, code in ((4, -signal.SIGKILL), (8, -signal.SIGKILL), (0, 0)):
        command = [sys.executable, "-c", RUN, json.dumps(asdict(DDP)), str(folder), str(kill_at)]
        assert subprocess.run(command, timeout=300, check=False).returncode == code
    rows = json.loads(folder.with_suffix(".rows").read_text())
    assert without_times(rows) == without_times(trained(DDP).rows)


RUN_OF_TWO = {"steps": 3, "seeds": (0, 1), "nodes": 2}  # a configuration
TURN = {"position": {}, "steps": 3, "runs": {}, "events": [], "ended": False}


def saved(folder: Path) -> None:
    """Make the state of a run of two ranks that was killed after its first turn."""
    state.prepare(folder, RUN_OF_TWO, False)
    for rank in range(2):
        state.save(folder / "train", rank, TURN)
    state.commit(folder / "train")
    assert state.prepare(folder, RUN_OF_TWO, True)


def test_another_configuration_is_not_continued(tmp_path: Path) -> None:
    assert not state.prepare(tmp_path, RUN_OF_TWO, True)
    saved(tmp_path)
    with pytest.raises(ConfigError, match="has steps 3, not 4: give its own options"):
        state.prepare(tmp_path, RUN_OF_TWO | {"steps": 4}, True)


CONTENTS = [None, b"", b"{", b"3", b"[1]", b"{}", b"\xff", b"PK\x03\x04", b"[" * 100_000]
TOLD = r"leave --resume out to start again|give its own options, or another --json FILE"


def test_a_damaged_state_is_told_in_one_line(tmp_path: Path) -> None:
    names = ("config.json", "train/1/rank0.pt", "train/1/rank1.pt")
    for name in names:
        for content in CONTENTS:
            if content is None and name == "config.json":
                continue  # without it there is no run
            saved(tmp_path)
            file = tmp_path / name
            file.unlink() if content is None else file.write_bytes(content)
            with pytest.raises(ConfigError, match=TOLD) as error:
                state.prepare(tmp_path, RUN_OF_TWO, True)
            assert "\n" not in str(error.value)
            assert not state.prepare(tmp_path, RUN_OF_TWO, False)
            assert [one.name for one in tmp_path.iterdir()] == ["config.json"], (name, content)
    # A truncated rank is told.
    saved(tmp_path)
    file = tmp_path / "train" / "1" / "rank0.pt"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"rank0.pt is damaged \(RuntimeError\)"):
        state.prepare(tmp_path, RUN_OF_TWO, True)
    torch.save({"steps": 3}, file)
    with pytest.raises(ConfigError, match="no rank's state of this version"):
        state.prepare(tmp_path, RUN_OF_TWO, True)


def test_what_is_no_state_is_not_deleted(tmp_path: Path) -> None:
    file, folder = tmp_path / "rows.jsonl.state", tmp_path / "thesis"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"file exists.*: move it away"), state.lease(file):
        pass
    folder.mkdir()
    (folder / "chapter").write_text("mine")
    for resume in (False, True):
        with (
            state.lease(folder),
            pytest.raises(ConfigError, match=r"is not a state of bench train .*: move it away"),
        ):
            state.prepare(folder, {"steps": 3}, resume)
    assert file.read_text() == (folder / "chapter").read_text() == "mine"


def test_a_killed_deletion_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a run that has ended is no run to continue, and may be deleted."""
    saved(tmp_path)

    def killed(folder: Path) -> None:
        assert not (folder / "config.json").exists()

    with monkeypatch.context() as patched, state.lease(tmp_path):
        patched.setattr(state.shutil, "rmtree", killed)
        state.remove(tmp_path)
    with state.lease(tmp_path):
        assert not state.prepare(tmp_path, RUN_OF_TWO, True)
        assert not (tmp_path / "train").exists()
        state.remove(tmp_path)
    assert not tmp_path.exists()


def test_two_runs_do_not_share_a_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a run share it with the dying ranks of another."""
    monkeypatch.setattr(state, "_DYING_SECONDS", 0.1)
    for other, told in (
        (state.lease(tmp_path), "another run uses this state"),
        (state.used_by_rank(tmp_path / "train"), "ranks of an earlier run"),
    ):
        with other, pytest.raises(ConfigError, match=told), state.lease(tmp_path):
            pass
    with state.lease(tmp_path):
        pass


def test_a_turn_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    before = None
    for turn in (TURN | {"events": [{"event": "row"}] * number} for number in (1, 2)):
        state.save(tmp_path, 0, turn)
        assert state.load(tmp_path, 0) == before
        state.commit(tmp_path)
        before = turn
    assert state.load(tmp_path, 0) == before
    assert [one.name for one in tmp_path.iterdir()] == ["2"]
