"""Linux namespaces for Python 3.10, whose `os` has no `unshare` and no `setns` yet.

These functions change the calling *process*, and only a process with one thread may enter a user
namespace. So they are for the supervisor (`supervisor.py`), never for a training process. Every
function raises OSError whose text names the failed step.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import tempfile
from collections.abc import Iterator, Mapping

_NEWNS, _NEWUTS, _NEWUSER, _NEWPID, _NEWNET = 0x20000, 0x4000000, 0x10000000, 0x20000000, 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36

_libc = ctypes.CDLL(None, use_errno=True)


def leave_host() -> None:
    """Give this process its own mounts, network and host name, and its children a pid namespace.

    As root, no user namespace is needed. Without root, or where that is forbidden, the process
    enters a user namespace in which it is root.
    """
    private = _NEWNS | _NEWUTS | _NEWNET | _NEWPID
    if os.geteuid() == 0 and _libc.unshare(private) == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEWUSER | private), "unshare (user, net, pid, mount and uts namespaces)")
    # The kernel accepts a gid map from an unprivileged process only once setgroups is off.
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def settle(hosts: str) -> None:
    """Called by the first process of the new pid namespace: mount its /proc, and `hosts` as
    /etc/hosts.

    The hosts file is a bind mount of a file that is deleted at once, so it needs no cleanup.
    """
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    _mount("proc", "/proc", "proc", 0)
    if os.path.exists("/etc/hosts"):
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(hosts)
            file.flush()
            os.chmod(file.name, 0o644)
            _mount(file.name, "/etc/hosts", None, _MS_BIND)


class LabNode:
    """A network namespace with its own host name, kept alive by two descriptors alone."""

    def __init__(self, hostname: str) -> None:
        with _returning():
            _check(_libc.unshare(_NEWNET | _NEWUTS), "unshare (net and uts namespaces of a node)")
            socket.sethostname(hostname)
            self._fds = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]

    def enter(self) -> None:
        """Move this process (a fresh child, before exec) into the node."""
        for fd in self._fds:
            _setns(fd)

    def set(self, settings: Mapping[str, str]) -> None:
        """Set its network, by paths under /proc/sys/net."""
        with _returning():
            self.enter()
            for name, value in settings.items():
                with open(f"/proc/sys/net/{name}", "w") as file:
                    file.write(value)


@contextlib.contextmanager
def _returning() -> Iterator[None]:
    """Return to the present network and host name when the block ends."""
    homes = [os.open(f"/proc/self/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts")]
    try:
        yield
    finally:
        for fd in homes:
            _setns(fd)
            os.close(fd)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, its parent's pid, dies."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl (PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before prctl took effect
        os.kill(os.getpid(), signal.SIGKILL)


def inherit_orphans() -> None:
    """Become the parent of every descendant whose own parent dies."""
    _check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl (PR_SET_CHILD_SUBREAPER)")


def kill_descendants() -> None:
    """Kill this process's children, and their orphans as they are inherited, until none is left."""
    me = os.getpid()
    with contextlib.suppress(ChildProcessError):
        while True:
            with open(f"/proc/{me}/task/{me}/children") as file:
                for pid in file.read().split():
                    os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def _setns(fd: int) -> None:
    _check(_libc.setns(fd, 0), "setns")


def _mount(source: str, target: str, kind: str | None, flags: int) -> None:
    encoded = kind.encode() if kind is not None else None
    failed = _libc.mount(source.encode(), target.encode(), encoded, ctypes.c_ulong(flags), None)
    _check(failed, f"mount ({source} on {target})")


def _check(failed: int, step: str) -> None:
    if failed:
        error = ctypes.get_errno()
        raise OSError(error, f"{step}: {os.strerror(error)}")
