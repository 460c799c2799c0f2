"""`Lab`: emulated machines, as a context manager in the caller's process.

    with Lab(4, Network.parse("1gbit,1ms")) as lab:
        process = lab.spawn(0, ["hostname"])
        assert process.wait() == 0

The caller holds one end of a socket whose other end keeps the lab alive (see supervisor.py).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gradwire.errors import ConfigError, TransportError
from gradwire_tools.lab import links
from gradwire_tools.lab.network import Network
from gradwire_tools.lab.ports import free_port
from gradwire_tools.lab.schedule import Schedule
from gradwire_tools.lab.supervisor import MESSAGE_BYTES

# The supervisor must not import torch (it takes seconds and starts threads). So it bypasses the
# package's __init__ with an empty package of the same name and path.
_BOOTSTRAP = """
import sys
sys.path.append(sys.argv[1])
from gradwire_tools.lab.supervisor import main
main(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "isolated")
"""

_WHAT_TO_DO = (
    "run as root, or allow user namespaces (sysctl user.max_user_namespaces, and "
    "kernel.apparmor_restrict_unprivileged_userns=0 where it exists), or use --net none"
)
_PORT = 29500


class NodeProcess:
    """A process on a node, with the part of `subprocess.Popen`'s interface that applies here.

    Attributes:
        rank: the node that it runs on.
        argv: its command.
        pid: its process id inside the lab, not on the host.
        returncode: None while it runs; then its exit code, negative for a signal.
        ended: set once it has ended.
    """

    def __init__(self, lab: Lab, id: int, rank: int, argv: Sequence[str]) -> None:
        self.rank = rank
        self.argv = list(argv)
        self.pid = 0
        self.returncode: int | None = None
        self._lab = lab
        self._id = id
        self.ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; raises `subprocess.TimeoutExpired` after `timeout` seconds."""
        if not self.ended.wait(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.argv, timeout)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Signal it and its children, unless it has ended."""
        if self.returncode is None:
            self._lab._ask("kill", id=self._id, signal_number=int(number))

    def _end(self, code: int) -> None:
        self.returncode = code
        self.ended.set()


class Lab:
    """`nodes` emulated machines on `net`, from `__enter__` to `__exit__`.

    Args:
        nodes: number of nodes, 1 to 1024.
        net: the network between them; on `none` all nodes are processes on this machine's loopback.
            Of a schedule, the lab begins with the first phase, and can `change` to the others;
            its user does that.
        latency_by: "netem" or "line" (the delay line); by default netem where the kernel has it.

    Attributes:
        net: the present network.
        latency_by: once entered, what carries the packets: "netem", "line", "bridge" (no latency
            requested) or "loopback" (net none).

    Raises:
        ConfigError: a bad argument; or, on entering, the reason why no lab works on this machine.
    """

    def __init__(self, nodes: int, net: Network | Schedule, latency_by: str | None = None) -> None:
        if not 1 <= nodes <= links.MAX_NODES:
            raise ConfigError(f"a lab has 1 to {links.MAX_NODES} nodes, not {nodes}")
        if latency_by not in (None, "netem", "line"):
            raise ConfigError(f"latency_by is 'netem' or 'line', not {latency_by!r}")
        self.nodes = nodes
        self.schedule = net if isinstance(net, Schedule) else Schedule.fixed(net)
        self.net = self.schedule.first
        self.latency_by = latency_by
        self._ids = itertools.count()
        self._ports = itertools.count(_PORT)
        self._processes: dict[int, NodeProcess] = {}
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._asking = threading.Lock()

    def __enter__(self) -> Lab:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self._control, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MESSAGE_BYTES)
        packages = str(Path(__file__).parents[2])
        mode = "isolated" if self.net.shaped else "loopback"
        arguments = [packages, str(theirs.fileno()), str(os.getpid()), mode]
        self._supervisor = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _BOOTSTRAP, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # a Ctrl-C at the terminal is the caller's to handle
        )
        theirs.close()
        self._listener = threading.Thread(target=self._listen, name="gradwire-lab", daemon=True)
        self._listener.start()
        try:
            self.latency_by = self._build() if self.net.shaped else "loopback"
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all running processes and return once the lab is gone."""
        with contextlib.suppress(OSError):  # raised if the supervisor has ended before us
            self._control.shutdown(socket.SHUT_RDWR)
        self._supervisor.wait()
        self._listener.join()
        self._control.close()

    def describe(self) -> str:
        """One line for people: the number of nodes, the network and its implementation."""
        if self.latency_by == "loopback":
            return f"{self.nodes} nodes on loopback: one machine, no rate limit (net none)"
        means = {
            "netem": "latency by the kernel's netem",
            "line": "latency by the delay line",
            "bridge": "a bridge, no latency added",
        }[str(self.latency_by)]
        return f"{self.nodes} nodes on {self.schedule}: network namespaces, rate by htb, {means}"

    def spawn(
        self,
        rank: int,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> NodeProcess:
        """Start `argv` on node `rank`; standard input is empty.

        Args:
            env: the whole environment; by default this process's own. See `torchrun_env`.
            cwd: its working directory; by default this process's own.
            stdout, stderr: a file, a descriptor or `subprocess.DEVNULL`; by default this process's
                own.

        A command that cannot be run ends with code 127 or 126 and a message, as in a shell.
        """
        if not 0 <= rank < self.nodes:
            raise ConfigError(f"the lab has nodes 0 to {self.nodes - 1}, not {rank}")
        id = next(self._ids)
        process = self._processes[id] = NodeProcess(self, id, rank, argv)
        with open(os.devnull, "r+b") as null:
            fds = [null.fileno(), _descriptor(stdout, 1, null), _descriptor(stderr, 2, null)]
            process.pid = self._ask(
                "spawn",
                fds,
                id=id,
                rank=rank,
                argv=[str(word) for word in argv],
                env=dict(os.environ if env is None else env),
                cwd=os.fspath(cwd if cwd is not None else os.getcwd()),
            )
        return process

    def running(self) -> list[NodeProcess]:
        """The running processes, in the order of their start."""
        return [process for process in self._processes.values() if process.poll() is None]

    def set_link(self, rank: int, up: bool) -> None:
        """Set node `rank`'s link up or down; packets are lost while it is down."""
        if not self.net.shaped:
            raise ConfigError("nodes on loopback (net none) have no link of their own to drop")
        self._ask("link", rank=rank, up=up)

    def change(self, net: Network) -> None:
        """Give every link another rate and latency; returns once they hold.

        The links follow one another within some milliseconds per node. No packet is lost, and none
        overtakes another: those on their way keep the latency that they had.

        Raises:
            ConfigError: to or from `none`; or to a latency, in a lab that was built without one.
        """
        if not self.net.shaped or not net.shaped:
            raise ConfigError(
                "the network none has no links: a lab changes neither from it nor to it"
            )
        if net.latency_ns and self.latency_by == "bridge":
            raise ConfigError(
                f"the lab was built without latency and cannot change to {net}: begin with a "
                "latency, or give Lab a schedule"
            )
        self._ask("change", rate=round(net.rate_bits_per_s), latency_ns=net.latency_ns)
        self.net = net

    def torchrun_env(self, per_node: int = 1) -> list[dict[str, str]]:
        """The environment variables that torchrun would set, per rank, for `per_node` processes on
        each node. The port is fresh.

        On `net none` the nodes share loopback, so the port is one that is free at present.
        """
        shaped = self.net.shaped
        shared = {
            "WORLD_SIZE": str(self.nodes * per_node),
            "LOCAL_WORLD_SIZE": str(per_node),
            "MASTER_ADDR": links.address(0) if shaped else "127.0.0.1",
            "MASTER_PORT": str(next(self._ports) if shaped else free_port()),
            "GLOO_SOCKET_IFNAME": "eth0" if shaped else "lo",
            # Rank 0 hosts the store, also where torchrun hosts one for this process.
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
        if "OMP_NUM_THREADS" not in os.environ:
            shared["OMP_NUM_THREADS"] = "1"
        return [
            {
                "RANK": str(node * per_node + local),
                "LOCAL_RANK": str(local),
                "GROUP_RANK": str(node),
                **shared,
            }
            for node in range(self.nodes)
            for local in range(per_node)
        ]

    def _build(self) -> str:
        build = functools.partial(
            self._ask,
            "build",
            nodes=self.nodes,
            rate=round(self.net.rate_bits_per_s),
            latency_ns=self.net.latency_ns,
            latency_by=self.latency_by if self.schedule.delays else "bridge",
        )
        built = build(line=None)
        return str(build(line=delay_line()) if built == "compile" else built)

    def _ask(self, op: str, fds: Sequence[int] = (), **request: Any) -> Any:
        with self._asking:
            number = next(self._ids)
            message = json.dumps({"number": number, "op": op, **request}).encode()
            with contextlib.suppress(ConnectionError):  # the listener reports it as an answer
                socket.send_fds(self._control, [message], fds)
            answer = self._answers.get()
            # After a Ctrl-C the queue may still hold the answer to an earlier request.
            while answer is not None and answer.get("number", number) != number:
                answer = self._answers.get()
        if answer is None:
            self._answers.put(None)
            raise TransportError("the lab has ended; see its supervisor's message above")
        if "error" in answer:
            todo = f"; {_WHAT_TO_DO}" if op == "build" else ""
            raise ConfigError(f"the lab cannot {op}: {answer['error']}{todo}")
        return answer["ok"]

    def _listen(self) -> None:
        """Thread: receive the supervisor's answers and the exit codes of processes."""
        while True:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except ConnectionResetError:
                continue  # reported once; the supervisor's last messages follow it
            if not data:
                break
            message = json.loads(data)
            if "exited" in message:
                self._processes[message["exited"]]._end(message["code"])
            else:
                self._answers.put(message)
        self._answers.put(None)
        for process in self._processes.values():
            if process.returncode is None:
                process._end(-9)


def delay_line() -> str:
    """The path of the compiled delay line; compiles it unless the cache has this source's program.

    Raises:
        ConfigError: there is no C compiler, it fails, or others control the cache folder.
    """
    # Imported here since the supervisor imports this package and must not import torch.
    from gradwire.lang.native import cache
    from gradwire.lang.native.jit import CompileError, compiler, run

    source = Path(__file__).with_name("delay_line.c")
    name = f"delay_line-{hashlib.sha256(source.read_bytes()).hexdigest()[:16]}"
    try:
        gcc = compiler()
        program = cache.obtain(
            cache.folder() / name,
            lambda made: run([gcc, "-O2", "-o", str(made), str(source)]),
        )
    except (CompileError, OSError) as error:
        raise ConfigError(
            f"the lab cannot compile its delay line, which replaces netem: {error}; "
            "install a C compiler, or set no latency, as in '1gbit,0ms'"
        ) from None
    return str(program)


@functools.cache
def available() -> str | None:
    """None if this machine can emulate a shaped network; else the reason why it cannot.

    It builds a lab of two nodes with latency and closes it (0.3 s, once per process).
    """
    try:
        with Lab(2, Network.parse("1gbit,1ms")):
            return None
    except ConfigError as error:
        return str(error)


def _descriptor(target: int | IO[Any] | None, ours: int, null: IO[bytes]) -> int:
    if target is None:
        return ours
    if target == subprocess.DEVNULL:
        return null.fileno()
    return target if isinstance(target, int) else target.fileno()
