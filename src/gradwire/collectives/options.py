"""How a collective runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradwire import algorithms
from gradwire.algorithms.hierarchical import BETWEEN, INSIDE
from gradwire.errors import ConfigError
from gradwire.lang.kernels import TARGETS


@dataclass(frozen=True)
class Options:
    """How a collective runs; the same on every rank, but for `target`, `threads` and `batched`.

    Attributes:
        algorithm: a name of `gradwire.algorithms.REGISTRY`, those of an all-reduce; other
            collectives have fewer.
        segments: pipeline units a chunk; None chooses by size: more of them over a network.
        checksum: whether messages carry one; None: if any leaves the memory of its machine. Over
            NCCL none does.
        target: which kernels ("auto", "c", "eager"); all make the same bytes.
        threads: of a kernel; None takes torch's number.
        partitions: of the algorithm parameter_server; None: as many as there are ranks.
        nodes: of the algorithm hierarchical: the machine of each rank, any numbers; None finds out
            by host names and LOCAL_WORLD_SIZE.
        inside: of the algorithm hierarchical: how values travel to who sums them inside a machine,
            through the "codec" or in "full" precision.
        between: of the algorithm hierarchical: how machines exchange, "sra", "grid", or "auto": a
            grid of rows and columns from about 32 machines on.
        coordinated: of the algorithms sra and parameter_server: send in rounds in which every rank
            has one receiver and one sender (docs/reference/algorithms.md).
        batched: one kernel call for all tensors of a task; False makes one for each, to show what
            batching is worth.

    Raises:
        ConfigError: an unknown algorithm or target, a number below one, an option of another
            algorithm.
    """

    algorithm: str = "sra"
    segments: int | None = None
    checksum: bool | None = None
    target: str = "auto"
    threads: int | None = None
    partitions: int | None = None
    nodes: tuple[int, ...] | None = None
    inside: str = "codec"
    between: str = "auto"
    coordinated: bool = False
    batched: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str):
            raise ConfigError(f"algorithm={self.algorithm!r}: give a name, as text")
        algorithms.get(self.algorithm)
        if self.target not in TARGETS:
            raise ConfigError(f"target {self.target!r}; known: {', '.join(TARGETS)}")
        for name in ("segments", "threads", "partitions"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: a whole number, at least 1, or None to let gradwire choose"
                )
        nodes = self.nodes
        if nodes is not None and not (
            isinstance(nodes, tuple) and all(isinstance(node, int) for node in nodes)
        ):
            raise ConfigError(f"nodes={nodes!r}: a tuple of the machine of each rank, as numbers")
        for name, known in (("inside", INSIDE), ("between", BETWEEN)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name}={getattr(self, name)!r}: use one of {', '.join(known)}")
        if self.checksum not in (True, False, None):
            raise ConfigError(f"checksum={self.checksum!r}: use True, False, or None")
        for name in ("coordinated", "batched"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: use True or False")
        for name, default, owners in _OWNED:
            if getattr(self, name) != default and self.algorithm not in owners:
                raise ConfigError(
                    f"{name} is an option of the algorithm {' and '.join(owners)}, "
                    f"not of {self.algorithm}"
                )

    def through(self, algorithm: str) -> Options:
        """The same by an algorithm, without what is an option of some algorithms alone."""
        defaults: dict[str, Any] = {name: default for name, default, _ in _OWNED}
        return replace(self, algorithm=algorithm, **defaults)

    def __str__(self) -> str:
        """What all ranks must share."""
        text = f"algorithm {self.algorithm}, segments {self.segments}, checksum {self.checksum}"
        given = [f", {n} {getattr(self, n)}" for n, _, owners in _OWNED if self.algorithm in owners]
        return text + "".join(given)


# option, its default, the algorithms whose it is
_OWNED = (
    ("partitions", None, ("parameter_server",)),
    ("nodes", None, ("hierarchical",)),
    ("inside", "codec", ("hierarchical",)),
    ("between", "auto", ("hierarchical",)),
    ("coordinated", False, ("sra", "parameter_server")),
)
