"""The process that owns a lab: it holds every namespace, builds the links and runs the nodes.

It is the first process (pid 1) of a pid namespace, and its descriptors hold every other namespace.
So nothing of a lab has a name on the host: when this process ends, for any reason, the kernel kills
all processes of the lab and frees the rest. It ends when its control socket closes or its caller
dies, whichever comes first.

On `--net none` the same supervisor runs without namespaces. Each process that it starts asks the
kernel to be killed with the supervisor, which inherits their orphans and kills them when it ends.

The control socket carries one JSON object per datagram. Requests: `build`, `change`, `spawn` (with
three descriptors: the new process's standard input, output and error), `kill`, `link`. Each request
has a number and gets one answer with the same number, `{"ok": value}` or `{"error": text}`. The
supervisor also sends `{"exited": id, "code": code}` when a node's process ends.

`client.py` starts it as a bare interpreter that imports only the standard library: it must have one
thread, and start within a tenth of a second.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from gradwire_tools.lab import links, namespaces

MESSAGE_BYTES = 1 << 20
_SYSTEM_PATH = "/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin"


def main(control_fd: int, caller_pid: int, isolated: bool) -> None:
    """Serve the control socket until it closes or `caller_pid`, the parent, dies."""
    caller = os.pidfd_open(caller_pid)
    if os.getppid() != caller_pid:
        return
    control = socket.socket(fileno=control_fd)
    if isolated:
        try:
            namespaces.leave_host()
        except OSError as error:
            _send(control, {"error": _reason(error)})
            return
        if inner := os.fork():
            # This outer process stays, so that its end tells the caller that the lab is gone.
            control.close()
            os.waitpid(inner, 0)
            return
    Supervisor(control, caller, isolated).serve()


class Supervisor:
    """The loop and the five requests. Instance attributes are the state of the lab."""

    def __init__(self, control: socket.socket, caller: int, isolated: bool) -> None:
        self.control = control
        self.caller = caller
        self.isolated = isolated
        self.nodes: list[namespaces.LabNode] = []
        # pid -> the caller's id of a running node process, and the process
        self.running: dict[int, tuple[int, subprocess.Popen[bytes]]] = {}
        self.line: subprocess.Popen[bytes] | None = None
        self.latency_by = ""

    def serve(self) -> None:
        namespaces.inherit_orphans()
        # Handlers that do nothing: SIGCHLD's has the wake-up descriptor written to, and nodes'
        # processes inherit no handlers, while they would inherit that a signal is ignored.
        for name in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(name, lambda *_: None)
        wake_up, wake_up_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake_up_end, warn_on_full_buffer=False)
        try:
            while True:
                ready, _, _ = select.select([self.control.fileno(), self.caller, wake_up], [], [])
                if self.caller in ready:
                    break
                if wake_up in ready:
                    os.read(wake_up, 4096)
                    self._reap()
                if self.control.fileno() in ready and not self._serve_one():
                    break
        except (BrokenPipeError, ConnectionResetError):
            pass  # the caller has ended, so the supervisor ends too
        if not self.isolated:  # with pid 1 of a namespace the kernel kills all others
            namespaces.kill_descendants()

    def _serve_one(self) -> bool:
        """Answer one request; False once the caller has closed its end."""
        data, fds, _, _ = socket.recv_fds(
            self.control, MESSAGE_BYTES, 3, flags=socket.MSG_CMSG_CLOEXEC
        )
        if not data:
            return False
        request = json.loads(data)
        operation = getattr(self, request.pop("op"))
        number = request.pop("number")
        try:
            _send(self.control, {"number": number, "ok": operation(*fds, **request)})
        except Exception as error:
            _send(self.control, {"number": number, "error": _reason(error)})
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def build(
        self,
        nodes: int,
        rate: int,
        latency_ns: int,
        latency_by: str | None,
        line: str | None,
    ) -> str:
        """Make the nodes and their links; returns what carries the latency.

        `latency_by` requests "netem" or "line", or "bridge", where there is never a latency; None
        takes netem where the kernel has it. The answer "compile" means that nothing was built: the
        caller must repeat the request with `line`, the path of the delay line's program.
        """
        if latency_by is None:
            latency_by = "netem" if self._has_netem() else "line"
        if latency_by == "line" and line is None:
            return "compile"
        self.latency_by = latency_by
        namespaces.settle(links.hosts(nodes))
        settings = links.settings(rate, latency_ns)
        for rank in range(nodes):
            node = namespaces.LabNode(links.hostname(rank))
            node.set(settings)
            self.nodes.append(node)
            self._run("ip", links.ip_node(rank, nodes, os.getpid()), node)
        self._run("ip", links.ip_switch(nodes, bridge=latency_by != "line"))
        self._shape(rate, latency_ns, "add")
        if latency_by != "line":
            self._await_bridge()
        else:
            assert line is not None
            self.line = subprocess.Popen(
                [line, str(latency_ns), *self._ports()],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            self._await_line()
        return latency_by

    def change(self, rate: int, latency_ns: int) -> None:
        """Give all links another rate and latency. Packets in the queues stay there."""
        settings = links.settings(rate, latency_ns)
        for node in self.nodes:
            node.set(settings)
        self._shape(rate, latency_ns, "change")
        if self.line is not None:
            assert self.line.stdin is not None
            self.line.stdin.write(f"{latency_ns}\n".encode())
            self.line.stdin.flush()
            self._await_line()

    def _shape(self, rate: int, latency_ns: int, verb: str) -> None:
        """Set the rates of both ends of every link, and netem's latency."""
        for node in self.nodes:
            self._run("tc", links.tc_shape(["eth0"], rate, verb=verb), node)
        netem_ns = latency_ns if self.latency_by == "netem" else None
        self._run("tc", links.tc_shape(self._ports(), rate, netem_ns, verb))

    def _ports(self) -> list[str]:
        return [f"port{rank}" for rank in range(len(self.nodes))]

    def _await_line(self) -> None:
        """Wait until the delay line has its latency."""
        assert self.line is not None
        assert self.line.stdout is not None
        if not self.line.stdout.readline():
            raise RuntimeError("the delay line has ended; see its message above")

    def spawn(
        self, stdin: int, stdout: int, stderr: int, id: int, rank: int, argv: list[str], **how: Any
    ) -> int:
        """Run `argv` on node `rank` as the leader of a new session; returns its pid in the lab.

        Args:
            how: its `env` and `cwd`.
        """
        supervisor = os.getpid()

        def enter() -> None:
            if self.isolated:
                self.nodes[rank].enter()
            else:
                namespaces.die_with_parent(supervisor)

        how |= {"stdin": stdin, "stdout": stdout, "stderr": stderr}
        how |= {"preexec_fn": enter, "start_new_session": True}
        try:
            process = subprocess.Popen(argv, **how)
        except OSError as error:
            # As in a shell: 127 if the command does not exist, 126 if it cannot be executed.
            os.write(stderr, f"{argv[0]}: {error.strerror}\n".encode())
            code = 127 if isinstance(error, FileNotFoundError) else 126
            _send(self.control, {"exited": id, "code": code})
            return 0
        self.running[process.pid] = id, process
        return process.pid

    def kill(self, id: int, signal_number: int) -> None:
        """Signal the process group of a node's process."""
        for pid, (owner, _) in self.running.items():
            if owner == id:
                os.killpg(pid, signal_number)

    def link(self, rank: int, up: bool) -> None:
        self._run("ip", links.ip_link(rank, up))

    def _await_bridge(self) -> None:
        question = [_program("ip"), "-json", "-details", "link", "show", "master", "lab"]
        for _ in range(1000):
            if links.bridge_open(subprocess.check_output(question, text=True)):
                return
            time.sleep(0.005)
        raise RuntimeError("the bridge's ports do not come up")

    def _reap(self) -> None:
        """Report every child that has ended; inherited orphans are reaped without a report."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self.line is not None and pid == self.line.pid:
                print("lab: the delay line died, and the lab with it", file=sys.stderr, flush=True)
                os._exit(1)
            if pid in self.running:
                id, process = self.running.pop(pid)
                process.returncode = os.waitstatus_to_exitcode(status)
                _send(self.control, {"exited": id, "code": process.returncode})

    def _has_netem(self) -> bool:
        try:
            self._run("tc", links.tc_try_netem())
        except RuntimeError:
            return False
        return True

    def _run(self, tool: str, batch: list[str], node: namespaces.LabNode | None = None) -> None:
        """Run a batch of `ip` or `tc` commands in `node`, or in the switch."""
        done = subprocess.run(
            [_program(tool), "-batch", "-"],
            input="\n".join(batch) + "\n",
            text=True,
            capture_output=True,
            check=False,
            preexec_fn=node.enter if node is not None else None,
        )
        if done.returncode:
            said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
            raise RuntimeError(f"{tool}: {said}")


def _program(tool: str) -> str:
    """The path of `ip` or `tc`, whose folder is often missing from a user's PATH."""
    path = shutil.which(tool, path=_SYSTEM_PATH)
    if path is None:
        raise RuntimeError(f"the program {tool} is missing (package iproute2)")
    return path


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error)


def _send(control: socket.socket, message: dict[str, Any]) -> None:
    control.send(json.dumps(message).encode())
