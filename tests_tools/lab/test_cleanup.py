"""However a lab ends, no process, network namespace or device remains."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradwire
import gradwire_tools.lab
from gradwire.errors import ConfigError, TransportError
from gradwire_tools.lab import Lab, Network
from leftovers import marked, network_namespaces, until

LAB = Path(gradwire_tools.lab.__file__).parent
LIBRARY = Path(gradwire.__file__).parent
NETS = [
    pytest.param("none", id="none"),
    pytest.param("1gbit,1ms", id="shaped", marks=pytest.mark.lab),
]
# Two nodes, each with a grandchild in its own session that ignores SIGTERM: hard to clean up.
STUBBORN = 'setsid sh -c "trap : TERM INT; while :; do sleep 1; done" & trap : TERM; echo up; wait'
# Background processes of a shell, such as these tests, ignore SIGINT; those of nohup ignore
# SIGHUP.
LAUNCH = """
import signal, sys
from gradwire_tools.lab import run_command
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
sys.exit(run_command(["sh", "-c", sys.argv[2]], 2, sys.argv[1]))
"""


@pytest.fixture(scope="module")
def open_folder() -> Iterator[Path]:
    """A folder accessible to all users, unlike pytest's own."""
    with tempfile.TemporaryDirectory(prefix="gradwire-lab-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture(scope="module")
def sources(open_folder: Path) -> str:
    """A folder for importing `gradwire_tools.lab`, readable by all users, without torch."""
    folder = open_folder / "sources"
    shutil.copytree(LAB, folder / "gradwire_tools" / "lab")
    (folder / "gradwire" / "lang" / "native").mkdir(parents=True)
    for module in ("errors.py", *(f"lang/native/{name}.py" for name in ("isa", "jit", "cache"))):
        shutil.copy(LIBRARY / module, folder / "gradwire" / module)
    for package in ("gradwire", "gradwire/lang", "gradwire/lang/native", "gradwire_tools"):
        (folder / package / "__init__.py").touch()
    return str(folder)


@pytest.fixture
def mark() -> Iterator[str]:
    """Identifies a test's processes; kills those that a failed test leaves running."""
    name = f"lab-test-{uuid.uuid4().hex}"
    yield name
    for process in marked(name):
        with contextlib.suppress(ProcessLookupError):  # the others end with the first
            os.kill(process, signal.SIGKILL)


def start(sources: str, net: str, mark: str, command: str = STUBBORN) -> subprocess.Popen[str]:
    """A new process that runs `command` on two nodes; returns once both have printed "up"."""
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, net, command],
        env={**os.environ, "PYTHONPATH": sources, "MARK": mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(2)) == ["[node 0] up\n", "[node 1] up\n"]
    return process


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("killer", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_killing_the_launcher_leaves_nothing(
    sources: str, net: str, killer: signal.Signals, mark: str
) -> None:
    ours = os.readlink("/proc/self/ns/net")
    devices = set(os.listdir("/sys/class/net"))
    launcher = start(sources, net, mark)
    assert until(
        lambda: len(marked(mark)) >= 5, 60
    )  # launcher, supervisor, a shell and more on each node
    made = network_namespaces(marked(mark)) - {ours}
    assert len(made) == (0 if net == "none" else 3)  # two nodes and the switch
    launcher.send_signal(killer)
    launcher.wait(60)
    assert until(lambda: not marked(mark))
    assert until(lambda: not made & network_namespaces())
    assert set(os.listdir("/sys/class/net")) == devices


@pytest.mark.parametrize("net", NETS)
def test_ctrl_c_interrupts_the_nodes_and_ends(sources: str, net: str, mark: str) -> None:
    polite = 'trap "echo bye; exit 9" INT; echo up; while :; do sleep 0.1; done'
    launcher = start(sources, net, mark, polite)
    launcher.send_signal(signal.SIGINT)
    assert launcher.stdout is not None
    assert sorted(launcher.stdout.readlines()) == ["[node 0] bye\n", "[node 1] bye\n"]
    assert launcher.wait(60) == 130
    assert until(lambda: not marked(mark))


@pytest.mark.parametrize("net", NETS)
def test_killing_the_supervisor_ends_the_lab(
    net: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MARK", mark)
    with Lab(2, Network.parse(net)) as lab:
        process = lab.spawn(1, ["sleep", "600"])
        outer = lab._supervisor.pid
        children = Path(f"/proc/{outer}/task/{outer}/children").read_text().split()
        os.kill(int(children[0]) if net != "none" else outer, signal.SIGKILL)
        assert process.wait(60) == -9
        with pytest.raises(TransportError, match="the lab has ended"):
            lab.spawn(0, ["true"])
    assert until(lambda: not (marked(mark) - {os.getpid()}))


@pytest.mark.lab
def test_killing_the_delay_line_ends_the_lab(sources: str, mark: str) -> None:
    launcher = start(sources, "1gbit,1ms", mark, "echo up; exec sleep 600")
    lines = [p for p in marked(mark) if "delay_line-" in Path(f"/proc/{p}/cmdline").read_text()]
    if not lines:
        pytest.skip("this kernel has netem, so there is no delay line")
    os.kill(lines[0], signal.SIGKILL)
    assert launcher.wait(60) != 0
    assert until(lambda: not marked(mark))


@pytest.mark.lab
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_works_without_root(sources: str, open_folder: Path) -> None:
    """The same as user nobody: through a user namespace, in which the process is root."""
    program = (
        "import os, sys; from gradwire_tools.lab import *\n"
        "assert os.geteuid() == 65534\n"
        "assert available() is None, available()\n"
        "sys.exit(max(launch(['hostname'], 2, Network.parse('1gbit,1ms'))))"
    )
    home = open_folder / "home"
    home.mkdir()
    shutil.chown(home, 65534, 65534)
    # Other users may have no access to a virtual environment's interpreter; use the system's.
    python = shutil.which("python3", path="/usr/bin:/bin")
    if python is None:
        pytest.skip("no python3 in /usr/bin that everybody may run")
    done = subprocess.run(
        [python, "-c", program],
        env={"PYTHONPATH": sources, "HOME": str(home), "PATH": "/usr/bin:/bin"},
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[node 0] node0", "[node 1] node1"]


@pytest.mark.lab
def test_a_machine_that_forbids_it_says_why(sources: str) -> None:
    """A user namespace that may have no network namespaces emulates such a machine."""
    program = (
        "from gradwire.errors import ConfigError; from gradwire_tools.lab import *\n"
        "reason = available(); print(reason); assert reason\n"
        "try: launch(['true'], 2, Network.parse('1gbit,1ms'))\n"
        "except ConfigError as error: assert str(error) == reason\n"
        "else: raise AssertionError\n"
        "assert launch(['true'], 2, Network.parse('none')) == [0, 0]"
    )
    user_namespace = ["unshare", "--user", "--map-root-user"]
    forbid = 'echo 0 > /proc/sys/user/max_net_namespaces && exec "$@"'
    done = subprocess.run(
        [*user_namespace, "sh", "-c", forbid, "sh", sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "the lab cannot build: unshare (user, net" in done.stdout
    assert "run as root, or allow user namespaces" in done.stdout
    assert "--net none" in done.stdout


@pytest.mark.lab
def test_asking_for_what_the_kernel_lacks_says_so() -> None:
    with Lab(1, Network.parse("1gbit,1ms")) as lab:
        if lab.latency_by == "netem":
            pytest.skip("this kernel has netem")
    with pytest.raises(ConfigError, match=r"tc: .*kind is unknown"):
        Lab(1, Network.parse("1gbit,1ms"), latency_by="netem").__enter__()
