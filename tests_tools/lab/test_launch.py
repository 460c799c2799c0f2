"""launch: each node's environment, the routing of output, and the end of a run."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from command_line import refused
from gradwire.errors import ConfigError
from gradwire_tools.lab import Lab, Network, available, client, launch, run_command
from leftovers import until

NETS = [
    pytest.param("none", id="none"),
    pytest.param("1gbit,1ms", id="shaped", marks=pytest.mark.lab),
]
SHOW = "import json, os, socket; print(json.dumps([socket.gethostname(), dict(os.environ)]))"


def run(argv: list[str], nodes: int, net: str, **options: object) -> tuple[list[int], str, str]:
    out, err = io.StringIO(), io.StringIO()
    codes = launch(argv, nodes, Network.parse(net), stdout=out, stderr=err, **options)  # type: ignore[arg-type]
    return codes, out.getvalue(), err.getvalue()


@pytest.mark.parametrize("net", NETS)
def test_nodes_see_what_torchrun_sets(net: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")  # torchrun has started this process
    nodes = 3
    argv = [sys.executable, "-c", SHOW]
    codes, out, err = run(argv, nodes, net, env={"EXTRA": "1", "PATH": os.environ["PATH"]})
    assert codes == [0] * nodes
    seen = {}
    for line in out.splitlines():
        prefix, text = line.split("] ", 1)
        seen[prefix] = json.loads(text)
    assert sorted(seen) == [f"[node {rank}" for rank in range(nodes)]
    for rank in range(nodes):
        name, env = seen[f"[node {rank}"]
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), str(nodes))
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == ("0", "1")
        assert (env["OMP_NUM_THREADS"], env["EXTRA"]) == ("1", "1")
        assert env["TORCHELASTIC_USE_AGENT_STORE"] == "False"  # else no rank hosts the store
        if net == "none":
            assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", "lo")
        else:
            assert (env["MASTER_ADDR"], env["GLOO_SOCKET_IFNAME"]) == ("198.18.0.1", "eth0")
            assert name == f"node{rank}"
    assert len({env["MASTER_PORT"] for _, env in seen.values()}) == 1
    # The implementation of latency is always reported.
    assert ("loopback" in err) if net == "none" else ("latency by" in err)


def test_threads_that_the_user_asked_for_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    _, out, _ = run(["sh", "-c", "echo $OMP_NUM_THREADS"], 1, "none")
    assert out == "[node 0] 3\n"


@pytest.mark.lab
def test_nodes_do_not_inherit_the_hosts_tcp() -> None:
    command = "cd /proc/sys/net/ipv4; echo $(cat tcp_congestion_control tcp_wmem)"
    _, out, _ = run(["sh", "-c", command], 2, "100mbit")
    assert sorted(out.splitlines()) == [f"[node {n}] reno 4096 16384 500000" for n in (0, 1)]


TALK = 'echo "out $RANK"; echo "err $RANK" >&2; printf tail'


def test_output_goes_where_it_is_asked_for(tmp_path: Path) -> None:
    command = ["sh", "-c", TALK]
    _, out, err = run(command, 2, "none")
    said = [f"[node {rank}] {text}" for rank in (0, 1) for text in (f"out {rank}", "tail")]
    assert sorted(out.splitlines()) == sorted(said)
    assert {"[node 0] err 0", "[node 1] err 1"} <= set(err.splitlines())
    _, out, err = run(command, 2, "none", output="rank0")
    assert out == "out 0\ntail"
    assert {"[node 0] err 0", "[node 1] err 1"} <= set(err.splitlines())
    _, out, _ = run(command, 2, "none", output="files", log_dir=tmp_path / "logs")
    assert out == ""
    assert (tmp_path / "logs/node1.out").read_text() == "out 1\ntail"
    assert (tmp_path / "logs/node0.err").read_text() == "err 0\n"


@pytest.mark.parametrize("net", NETS)
def test_exit_codes_of_all_and_what_becomes_of_survivors(net: str) -> None:
    script = "test $RANK = 1 && exit 7; test $RANK = 2 && kill -9 $$; exit 1"
    assert run(["sh", "-c", script], 3, net)[0] == [1, 7, -9]
    codes, _, err = run(["no-such-command"], 1, net)
    assert codes == [127]
    assert "no-such-command: No such file or directory" in err
    # They may use the grace; after it they are terminated.
    codes, _, _ = run(["sh", "-c", "test $RANK = 0 && exit 3; sleep 0.3"], 2, net, grace=100)
    assert codes == [3, 0]
    begun = time.monotonic()
    codes, _, _ = run(["sh", "-c", "test $RANK = 0 && exit 3; exec sleep 600"], 3, net, grace=0.5)
    assert codes == [3, -15, -15]
    assert time.monotonic() - begun >= 0.5


@pytest.mark.parametrize("net", NETS)
def test_timeout_names_the_nodes(net: str) -> None:
    # On a busy machine node 0 may not have ended either.
    with pytest.raises(TimeoutError, match=r"nodes (0, )?1, 2 were still running after 0\.5 s"):
        run(["sh", "-c", "test $RANK = 0 || exec sleep 600"], 3, net, timeout=0.5)


def test_run_command_gives_one_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["true"], 2, "none") == 0
    assert run_command(["sh", "-c", "exit $RANK"], 2, "none") == 1
    assert "node 1 ended with code 1" in capsys.readouterr().err
    assert run_command(["sh", "-c", "kill -9 $$"], 1, "none") == 137
    assert run_command(["sleep", "600"], 1, "none", timeout=0.3) == 124


def test_bad_arguments_are_named() -> None:
    net = Network.parse("none")
    true = partial(launch, ["true"])
    with Lab(1, net) as lab:
        cases = [
            (partial(true, 0, net), "1 to 1024 nodes, not 0"),
            (partial(true, 1, net, output="tee"), "prefix, rank0, files"),
            (partial(true, 1, net, output="files"), "go together"),
            (partial(Lab, 1, net, latency_by="magic"), "'netem' or 'line'"),
            (partial(lab.spawn, 1, ["true"]), "nodes 0 to 0, not 1"),
            (partial(lab.set_link, 0, up=False), "no link of their own"),
            (partial(run_command, [], 1, "none"), "nothing to run"),
        ]
        refused(lambda call: call(), cases)


@pytest.mark.parametrize("net", NETS)
def test_a_node_process_behaves_like_popen(net: str) -> None:
    with Lab(2, Network.parse(net)) as lab:
        process = lab.spawn(1, ["sleep", "600"])
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.05)
        process.send_signal(signal.SIGKILL)
        assert process.wait(60) == process.poll() == -9
        process.send_signal(signal.SIGKILL)  # no error: it has ended
        again = lab.spawn(1, ["sh", "-c", "exit 5"])
        assert again.wait(60) == 5


@pytest.mark.lab
def test_a_link_drops_and_comes_back() -> None:
    reach = (
        "import socket, sys\n"
        "try: socket.create_connection(('node0', 5000), timeout=float(sys.argv[1]))\n"
        "except OSError: sys.exit(1)"
    )
    serve = "import socket, time; server = socket.create_server(('', 5000)); time.sleep(600)"
    for net in ("1gbit,1ms", "1gbit"):
        with Lab(2, Network.parse(net)) as lab:
            server = lab.spawn(0, [sys.executable, "-c", serve])

            def reached(seconds: float, lab: Lab = lab) -> bool:
                return lab.spawn(1, [sys.executable, "-c", reach, str(seconds)]).wait(100) == 0

            # Refused at once until the server listens.
            assert until(lambda: reached(60))
            for rank in (0, 1):
                lab.set_link(rank, up=False)
                assert not reached(0.3)
                lab.set_link(rank, up=True)
                assert reached(60)
            assert server.poll() is None


def test_no_compiler_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    available()  # with a compiler
    monkeypatch.setenv("GRADWIRE_CACHE", str(tmp_path))
    monkeypatch.setenv("GRADWIRE_CC", "no-such-compiler")
    said = "no-such-compiler is not a program; install a C compiler"
    with pytest.raises(ConfigError, match=said):
        client.delay_line()
    if available() is None:
        with pytest.raises(ConfigError, match=said):
            Lab(2, Network.parse("1gbit,1ms"), latency_by="line").__enter__()
        assert capfd.readouterr().err == ""  # nothing of the supervisor, which ends there
