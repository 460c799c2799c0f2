"""`launch`: one command on every node, torchrun-style, with its output in one place."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, TextIO

from gradwire.errors import ConfigError
from gradwire_tools.lab.client import Lab, NodeProcess
from gradwire_tools.lab.network import Network
from gradwire_tools.lab.output import Outputs
from gradwire_tools.lab.schedule import Schedule

_OUTPUTS = ("prefix", "rank0", "files")
# After SIGTERM (or SIGINT, on Ctrl-C), before SIGKILL.
_TERMINATION_S = 5.0
_POLL_S = 0.05


def launch(
    argv: Sequence[str],
    nodes: int,
    net: Network | Schedule,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    stdout: TextIO | None = None,
    stderr: TextIO | None = None,
    output: str = "prefix",
    log_dir: str | os.PathLike[str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    grace: float = 30.0,
    latency_by: str | None = None,
    per_node: int = 1,
    length: float | None = None,
) -> list[int]:
    """Run `argv` on each of `nodes` emulated machines, `per_node` times, and wait for all.

    Each process gets this process's environment, the variables that torchrun would set (RANK,
    WORLD_SIZE, MASTER_ADDR and so on, GLOO_SOCKET_IFNAME, and OMP_NUM_THREADS=1 unless set), and
    `env` on top. One line on `stderr` describes the lab. On Ctrl-C the nodes are interrupted, then
    killed, and KeyboardInterrupt is raised again.

    Args:
        net: on `none`, the same processes run on loopback, without namespaces. A schedule is
            followed by the seconds since the processes' start, with a line on `stderr` per change.
        timeout: limit for the whole run, in seconds.
        stdout, stderr: text streams; by default this process's own.
        output: "prefix": every line of every node with "[node 2] " before it;
            "rank0": node 0's standard output unchanged, that of the others discarded, standard
            error with prefixes;
            "files": `log_dir`/node2.out and node2.err, for each node.
        grace: seconds after a node has failed before the others are terminated.
        latency_by: as in `Lab`.
        per_node: processes per node; messages and output label each of them as a node.
        length: expected seconds of the run, for a schedule by share.

    Returns:
        The exit code of each process, in rank order; negative for a signal.

    Raises:
        ConfigError: a bad argument, or no lab works on this machine; the message has the reason.
        TimeoutError: `timeout` has passed; the message names the nodes that were still running.
    """
    if output not in _OUTPUTS:
        raise ConfigError(f"output is one of {', '.join(_OUTPUTS)}, not {output!r}")
    if (output == "files") != (log_dir is not None):
        raise ConfigError("output='files' and log_dir=FOLDER go together")
    if timeout is not None and not timeout > 0:
        raise ConfigError(f"timeout={timeout:g}: give a number of seconds above 0, or none")
    out = stdout if stdout is not None else sys.stdout
    err = stderr if stderr is not None else sys.stderr
    if isinstance(net, Schedule):
        net = net.in_seconds(length)
    processes: list[NodeProcess] = []
    # Exit order: first the lab, which ends every writer, then the readers of its output.
    with Outputs(output, log_dir, out, err) as outputs, Lab(nodes, net, latency_by) as lab:
        print(f"lab: {lab.describe()}", file=err, flush=True)
        begun = time.monotonic()
        try:
            for rank, torchrun in enumerate(lab.torchrun_env(per_node)):
                full = {**os.environ, **torchrun, **(env or {})}
                with ExitStack() as ends:
                    node_out = outputs.end(ends, rank, "out")
                    node_err = outputs.end(ends, rank, "err")
                    node = rank // per_node
                    processes.append(lab.spawn(node, argv, full, cwd, node_out, node_err))
            return _wait(processes, timeout, grace, lambda: _follow(lab, begun, err))
        except BaseException as error:
            # Not `processes`: a Ctrl-C may come before the newest process is appended to it.
            interrupted = isinstance(error, KeyboardInterrupt)
            _stop(lab.running(), signal.SIGINT if interrupted else signal.SIGTERM)
            raise


def run_command(
    argv: Sequence[str], nodes: int, net: str, length: float | None = None, **how: Any
) -> int:
    """`gradwire lab run`: `launch`, and one exit code for all nodes, by the shell's conventions.

    The exit code of the first node that failed by itself, 128 + the signal if one was killed, 124
    after a timeout, 130 after Ctrl-C, 0 on success. Raises ConfigError as `launch` does.

    Args:
        how: other arguments of `launch`.
    """
    if not argv:
        raise ConfigError("nothing to run: write the command after --")
    if length is not None and not length > 0:
        raise ConfigError(f"length={length:g}: give a number of seconds above 0")
    try:
        codes = launch(argv, nodes, Schedule.parse(net), length=length, **how)
    except TimeoutError as error:
        print(f"lab: {error}", file=sys.stderr, flush=True)
        return 124
    except KeyboardInterrupt:
        return 130
    for rank, code in enumerate(codes):
        if code:
            print(f"lab: node {rank} ended with code {code}", file=sys.stderr, flush=True)
    failed = [code for code in codes if code > 0] or [128 - code for code in codes if code < 0]
    return failed[0] if failed else 0


def _wait(
    processes: list[NodeProcess],
    timeout: float | None,
    grace: float,
    meanwhile: Callable[[], None],
) -> list[int]:
    """The exit codes, once all have ended by themselves or, after a failure, were terminated."""
    deadline = time.monotonic() + timeout if timeout is not None else None
    terminate_at = None
    while True:
        running = [p for p in processes if p.poll() is None]
        if not running:
            return [p.wait() for p in processes]
        meanwhile()
        now = time.monotonic()
        if deadline is not None and now > deadline:
            ranks = ", ".join(str(p.rank) for p in running)
            raise TimeoutError(f"the lab's nodes {ranks} were still running after {timeout:g} s")
        if terminate_at is None and any(p.poll() for p in processes):
            terminate_at = now + grace
        if terminate_at is not None and now > terminate_at:
            _stop(running, signal.SIGTERM)
            terminate_at = math.inf
        running[0].ended.wait(_POLL_S)


def _follow(lab: Lab, begun: float, err: TextIO) -> None:
    """Give the lab the network that its schedule has now."""
    seconds = time.monotonic() - begun
    net = lab.schedule.at(0, 1, seconds)
    if net != lab.net:
        lab.change(net)
        print(f"lab: {net} from {seconds:.1f} s on", file=err, flush=True)


def _stop(processes: list[NodeProcess], gently: signal.Signals) -> None:
    """Signal all running processes, wait for up to `_TERMINATION_S`, then kill them."""
    for process in processes:
        process.send_signal(gently)
    deadline = time.monotonic() + _TERMINATION_S
    for process in processes:
        if not process.ended.wait(deadline - time.monotonic()):
            process.send_signal(signal.SIGKILL)
