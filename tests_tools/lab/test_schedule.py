"""Schedule: reading, writing, and what holds when; faults name their phase."""

from __future__ import annotations

from pathlib import Path

from command_line import refused
from gradwire_tools.lab import Network, Schedule
from gradwire_tools.lab.schedule import SHIPPED

EVENING = """
by: step
phases:
  - {from: 0, net: "1gbit,1ms"}
  - {from: 40, net: "100mbit,20ms"}
"""


def written(folder: Path, text: str) -> str:
    file = folder / "evening.yaml"
    file.write_text(text)
    return str(file)


def test_a_file_is_read_and_its_text_is_the_inverse(tmp_path: Path) -> None:
    made = Schedule.parse(written(tmp_path, EVENING))
    assert (made.name, made.unit, made.changes, made.delays) == ("evening", "step", True, True)
    assert str(made) == "evening(step: 0 1gbit,1ms; 40 100mbit,20ms)"
    assert Schedule.parse(str(made)) == made
    assert str(tmp_path) not in str(made)
    assert Schedule.parse(written(tmp_path, EVENING + "name: late.1")).name == "late.1"


def test_shipped_ones_are_known_by_name_and_by_their_phases() -> None:
    for name in SHIPPED:
        made = Schedule.parse(name)
        assert str(made) == name
        assert Schedule.parse(made.spelled()) == made


def test_a_network_is_a_schedule_of_one_phase() -> None:
    for text in ("1gbit,1ms", "none"):
        made = Schedule.parse(text)
        assert made == Schedule.fixed(Network.parse(text))
        assert (made.name, str(made), made.changes) == (text, text, False)
        assert made.at(7, 10, 3.0) == Network.parse(text)


def test_the_papers_schedules() -> None:
    """AR-Topk 3-E; by its epochs of 50 for the second."""

    def nets(name: str, steps: int) -> list[str]:
        return [str(SHIPPED[name].at(step, steps, 0.0)) for step in range(steps)]

    c1 = nets("c1", 4)
    assert c1 == ["25gbit,1ms", "1gbit,1ms", "1gbit,50ms", "25gbit,50ms"]
    assert nets("c1", 40)[9:11] == c1[:2]
    good, moderate, bad = "25gbit,1ms", "5gbit,7ms", "1gbit,50ms"
    assert nets("c2", 50) == [good] * 12 + [moderate] * 8 + [bad] * 8 + [moderate] * 8 + [good] * 14


def test_what_holds_by_step_second_and_share(tmp_path: Path) -> None:
    first, second = Network.parse("1gbit,1ms"), Network.parse("100mbit,20ms")
    by_step = Schedule.parse(written(tmp_path, EVENING))
    assert [by_step.at(step, 80, 1e9) for step in (0, 39, 40, 79)] == [first] * 2 + [second] * 2
    by_second = Schedule.parse(written(tmp_path, EVENING.replace("step", "second")))
    assert [by_second.at(79, 80, t) for t in (0, 39.9, 40, 1e9)] == [first] * 2 + [second] * 2
    assert by_second.in_seconds(None) == by_second
    small = SHIPPED["c1-small"].in_seconds(8)
    assert [str(small.at(0, 1, t)) for t in (1.9, 2, 4, 6)] == [
        *("1gbit,1ms", "100mbit,1ms", "100mbit,20ms", "1gbit,20ms")
    ]
    refused(by_step.in_seconds, [(10, "by step")])
    refused(SHIPPED["c1"].in_seconds, [(None, "give the run's length")])


FAULTS = [
    ("[1, 2]", "write the keys by and phases"),
    ("by: step", "write the keys by and phases"),
    (EVENING + "of: 3", "write the keys by and phases"),
    ("by: {step", "not YAML"),
    (EVENING.replace("step", "epoch"), "by is 'epoch': use one of step, second, share"),
    ("by: step\nphases: []", "no phases"),
    ("by: step\nphases: 3", "phases is not a list"),
    (EVENING.replace("from: 0", "from: 2"), "phase 1 starts at 2"),
    (EVENING.replace("from: 40", "from: 0"), "phase 2 starts at 0"),
    (EVENING.replace("from: 40", "from: 1.5"), "phase 2 starts at 1.5: steps are whole"),
    (EVENING.replace("step", "share"), "phase 2 starts at 40: give a share below 1"),
    (EVENING.replace("from: 40", "from: .inf"), "phase 2 starts at inf"),
    (EVENING.replace("from: 40", "from: soon"), "phase 2: from is 'soon'"),
    (EVENING.replace("from: 40, ", ""), "phase 2: write from and net"),
    (EVENING.replace("100mbit,20ms", "100mb"), "phase 2: network '100mb'"),
    (EVENING.replace('"100mbit,20ms"', "4"), "phase 2: net is 4"),
    (EVENING.replace("100mbit,20ms", "none"), "phase 2 has the network none"),
    (EVENING + "name: c1", "a name of gradwire's own"),
    (EVENING + "name: a b", "its name is 'a b'"),
]


def test_faults_are_named(tmp_path: Path) -> None:
    refused(lambda text: Schedule.parse(written(tmp_path, text)), FAULTS)
    texts = [
        ("c3", r"c1, c2, c1-small, c2-small or FILE\.yaml"),
        (str(tmp_path / "missing.yaml"), "cannot be read"),
        ("odd(step: 0 1gbit,1ms; x 1gbit,1ms)", "phase 2: from is 'x'"),
    ]
    refused(Schedule.parse, texts)
