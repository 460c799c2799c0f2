"""`bench train` killed by SIGKILL at any point continues, and ends with the same rows but times."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gradwire.bench import train, train_state
from gradwire.bench.train_config import TrainConfig
from gradwire.errors import ConfigError
from products import EXHAUSTIVE

pytestmark = pytest.mark.multiprocess

CONFIG = TrainConfig(
    task="gpt",
    task_options={"layers": 1, "width": 32, "heads": 2, "validation_sequences": 16},
    nodes=3,  # three ranks: torch's sums depend on DDP's buckets
    net="none",
    methods=("torch-fp32", "torch-powersgd", "gradwire-qsgd4", "qsgd:bits=2:error_feedback=true"),
    steps=60,
    evaluate_every=3,
    ideal_steps=2,
    patience=15,
    save_seconds=0.0,
    timeout_seconds=300,
)
TIMES = {"run", "peak_extra_bytes", "time_to_target", "time_to_target_by_seed", "utility"}
TIMES |= {"utility_against"}

RUN = """
import json, sys
from pathlib import Path
from gradwire.bench import train
from gradwire.bench.train_config import TrainConfig
config = TrainConfig.from_json(sys.argv[1])
folder, resume = Path(sys.argv[2]), sys.argv[3] == "resume"
rows = train.run(config, announce=lambda text: None, state=folder, resume=resume)
Path(sys.argv[4]).write_text("\\n".join(json.dumps(row) for row in rows))
"""


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in TIMES and "seconds" not in key}
        for row in rows
    ]


def start(config: TrainConfig, folder: Path, resume: bool) -> subprocess.Popen[bytes]:
    rows = str(folder.with_suffix(".rows"))
    arguments = [config.to_json(), str(folder), "resume" if resume else "anew", rows]
    return subprocess.Popen([sys.executable, "-c", RUN, *arguments])


def turn_of(folder: Path) -> int:
    found = train_state.latest(folder / "train")
    return found["turn"] if found else 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("interleaved", [True, pytest.param(False, marks=EXHAUSTIVE)])
def test_a_killed_run_ends_with_the_same_rows(tmp_path: Path, interleaved: bool) -> None:
    config = replace(CONFIG, interleaved=interleaved)
    expected = list(train.run(config, announce=lambda text: None))
    folder, draw = tmp_path / "state", random.Random(0)
    kills = 0
    for turn in (1, 9):
        process = start(config, folder, resume=kills > 0)
        deadline = time.monotonic() + 240
        while turn_of(folder) < turn and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(draw.uniform(0, 0.05))
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    assert kills >= 1
    assert start(config, folder, resume=True).wait(120) == 0
    rows = [json.loads(line) for line in folder.with_suffix(".rows").read_text().splitlines()]
    assert without_times(rows) == without_times(json.loads(json.dumps(expected)))
    assert not folder.exists()


def test_another_configuration_is_not_continued(tmp_path: Path) -> None:
    with train_state.lease(tmp_path):
        assert not train_state.prepare(tmp_path, {"steps": 3, "seeds": (0, 1)}, True)
        assert train_state.prepare(tmp_path, {"steps": 3, "seeds": (0, 1)}, True)
        with pytest.raises(ConfigError, match="has steps 3, not 4: give its own options"):
            train_state.prepare(tmp_path, {"steps": 4, "seeds": (0, 1)}, True)


def saved(folder: Path) -> dict[str, Any]:
    """Make the state of a run of two ranks that was killed after its first turn."""
    config = {"steps": 3, "nodes": 2}
    train_state.prepare(folder, config, False)
    ranks = [train_state.Turns(folder / "train", rank) for rank in range(2)]
    for turns in ranks:
        turns.write({"position": {}, "steps": 3, "runs": {}}, [{"event": "setup"}])
    ranks[0].commit(ended=False)
    assert train_state.prepare(folder, config, True)
    return config


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{",
        "3",
        "[1]",
        "{}",
        b"\xff",
        b"PK\x03\x04",
        pytest.param("[" * 100_000, id="nested"),
    ],
)
@pytest.mark.parametrize(
    "name", ["config.json", "train/latest.json", "train/1/events.json", "train/1/rank1.pt"]
)
def test_a_damaged_state_is_told_in_one_line(
    tmp_path: Path, name: str, content: str | bytes | None
) -> None:
    config = saved(tmp_path)
    file = tmp_path / name
    if content is None:
        if file.suffix == ".json" and file.parent.name != "1":
            return  # without it there is no run, or no turn
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    told = "leave --resume out to start again|give its own options, or leave --resume out"
    with pytest.raises(ConfigError, match=told) as error:
        train_state.prepare(tmp_path, config, True)
    assert "\n" not in str(error.value)
    assert not train_state.prepare(tmp_path, config, False)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["config.json"]


def test_a_truncated_rank_is_told(tmp_path: Path) -> None:
    config = saved(tmp_path)
    file = tmp_path / "train" / "1" / "rank0.pt"
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ConfigError, match=r"rank0.pt is damaged \(RuntimeError\)"):
        train_state.prepare(tmp_path, config, True)


def test_a_state_that_is_a_plain_file_is_told(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl.state"
    file.write_text("mine")
    with pytest.raises(ConfigError, match=r"file exists.*: move it away"), train_state.lease(file):
        pass
    assert file.read_text() == "mine"


@pytest.mark.parametrize("resume", [False, True])
def test_what_is_no_state_is_not_deleted(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    with (
        train_state.lease(tmp_path),
        pytest.raises(ConfigError, match=r"is not a state of bench train .*: move it away"),
    ):
        train_state.prepare(tmp_path, {"steps": 3}, resume)
    assert (tmp_path / "thesis" / "chapter").read_text() == "mine"


def test_a_killed_deletion_leaves_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of a run that has ended is no run to continue, and may be deleted."""
    config = saved(tmp_path)

    def killed(folder: Path) -> None:
        assert not (folder / "config.json").exists()

    with monkeypatch.context() as patched, train_state.lease(tmp_path):
        patched.setattr(train_state.shutil, "rmtree", killed)
        train_state.remove(tmp_path)
    with train_state.lease(tmp_path):
        assert not train_state.prepare(tmp_path, config, True)
        assert not (tmp_path / "train").exists()
        train_state.remove(tmp_path)
    assert not tmp_path.exists()


def test_two_runs_do_not_share_a_state(tmp_path: Path) -> None:
    with (
        train_state.lease(tmp_path),
        pytest.raises(ConfigError, match="another run uses this state"),
        train_state.lease(tmp_path),
    ):
        pass


def test_a_dying_rank_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_state, "_DYING_SECONDS", 0.3)
    with (
        train_state.used_by_rank(tmp_path / "train"),
        pytest.raises(ConfigError, match="ranks of an earlier run"),
        train_state.lease(tmp_path),
    ):
        pass


def test_a_turn_that_is_not_whole_does_not_count(tmp_path: Path) -> None:
    turns = train_state.Turns(tmp_path, 0)
    turns.write({"n": 1}, [{"event": "one"}])
    assert train_state.Turns(tmp_path, 0).load(0) is None
    turns.commit(ended=False)
    turns.write({"n": 2}, [{"event": "one"}, {"event": "two"}])
    assert train_state.Turns(tmp_path, 0).load(0) == {"n": 1}
    assert train_state.saved_events(tmp_path) == [{"event": "one"}]
    turns.commit(ended=True)
    assert train_state.Turns(tmp_path, 0).load(0) == {"n": 2}
    assert not (tmp_path / "1").exists()
