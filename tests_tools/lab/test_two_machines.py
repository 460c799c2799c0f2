"""docs/how-to/two-machines.md: its lines start its script on two nodes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from gradwire_tools.lab import Lab, Network, links
from products import EXHAUSTIVE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "two-machines.md").read_text("utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
SAID = re.search(r"^```text\n(.*?)\n```$", PAGE, re.M | re.S)
COMMANDS = re.findall(r"^torchrun .*$", PAGE, re.M)
(CARD,) = re.findall(r"^export .*$", PAGE, re.M)

# Runs a command of the page on a node of the given host name.
NAMED = "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execvp('sh', sys.argv[2:])"


def on_both(command: str, names: tuple[str, str], folder: Path) -> list[str]:
    """What a command of the page, and its twin for the second machine, write to standard output."""
    program = str(Path(sys.executable).parent)  # of torchrun and gradwire
    environment = {
        **os.environ,
        "PATH": f"{program}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = command.replace("10.0.0.1", links.address(0))
    outputs = [folder / f"out{node}" for node in range(2)]
    with Lab(2, Network.parse("1gbit")) as lab:
        nodes = []
        for node, name in enumerate(names):
            shell = f"{CARD}\n{command}".replace("--node-rank 0", f"--node-rank {node}")
            argv = [sys.executable, "-c", NAMED, name, "sh", "-ec", shell]
            with outputs[node].open("w") as out:
                nodes.append(lab.spawn(node, argv, environment, folder, stdout=out))
        assert [node.wait(240) for node in nodes] == [0, 0]
    return [output.read_text() for output in outputs]


@pytest.mark.lab
@pytest.mark.multiprocess
def test_the_page_trains_on_two_machines(tmp_path: Path) -> None:
    """Though the first one's host name resolves to loopback, as it does on many systems."""
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    first, second = on_both(COMMANDS[0], ("localhost", "node1"), tmp_path)
    assert SAID is not None
    figures = re.compile(r"\d+\.\d+")
    assert figures.sub("#", first.strip()) == figures.sub("#", SAID[1])
    assert second == ""


@EXHAUSTIVE
@pytest.mark.lab
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_the_other_lines_of_the_page_do_what_it_says(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, "utf-8")
    said = []
    for command in COMMANDS[1:]:
        quick = {"doctor": " --quick --numel 20000", "probe": " --fresh --seconds 1"}
        shorter = quick.get(command.split()[-1], "")
        said.append("".join(on_both(command + shorter, ("node0", "node1"), tmp_path)))
    trained, probed, examined = said
    assert "with 4 bits" in trained
    assert "latency" in probed
    assert "gw.attach" in examined or "hook(" in examined or "leave the script" in examined
    assert "share this machine" not in examined
