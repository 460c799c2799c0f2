"""How a collective runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gradwire import algorithms
from gradwire.algorithms.hierarchical import BETWEEN, INSIDE
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang.kernels import TARGETS

_MOST = 1 << 12  # each is a task, or a thread, of its own


@dataclass(frozen=True)
class Options:
    """How a collective runs; the same on every rank, except `target`, `threads` and `batched`.

    Attributes:
        algorithm: a name of `gradwire.algorithms.REGISTRY`, which has the all-reduce algorithms;
            other collectives have fewer.
        segments: pipeline units per chunk; None chooses by size: more of them over a network.
        checksum: whether messages carry one; None: if any message leaves the memory of its
            machine. Messages over NCCL have none.
        target: which kernels ("auto", "c", "eager"); all produce the same bytes. Without a compiler
            "auto" lets `attach` send bf16 in place of codecs, and "eager" interprets them.
        threads: per kernel; None: torch.get_num_threads().
        partitions: for parameter_server: the number of partitions; None: one per rank.
        nodes: for hierarchical: the machine of each rank, any numbers; None: from host names and
            LOCAL_WORLD_SIZE.
        inside: for hierarchical: how values travel to the rank that sums them inside a machine,
            through the "codec" or in "full" precision. An all_gather sums nothing, and has no such
            option.
        between: for hierarchical: how machines exchange, "sra", "grid", or "auto": a grid of rows
            and columns from about 32 machines on. For all_reduce only.
        coordinated: for sra and parameter_server: send in rounds in which every rank has one
            receiver and one sender (docs/reference/algorithms.md).
        batched: one kernel call for all tensors of a task; False: one call per tensor, to measure
            the effect of batching.
        seed: for attach: of random numbers; not negative, below 2^64; None: 0.
        coalesce_bytes: for attach: DDP's buckets are combined until they hold at least as many
            bytes, or the pass ends; 0 sends each bucket by itself. None: 256 KiB, or 0 for modules
            with skip_all_reduce_unused_params.
        keep: for attach: what a rank keeps of weights that it gathered for forward. "payload", the
            default: the payloads of all ranks, so that backward gathers nothing, in the memory of
            the compressed model; payloads of groups that are not trained are kept on, until
            somebody changes them. "none", the default if that would take more than a quarter of the
            memory that is free on any rank: backward gathers the same payloads again. "redraw":
            nothing, and backward encodes the weights anew (THESIS Alg. C.1), with other random
            numbers. "reference": the decoded weights, the whole model on every rank in the dtype in
            which it is gathered: then each new version of the weights is sent as the difference to
            them, for which 4 bits suffice ("randomshift:bits=4"), backward gathers nothing, and
            errors do not add up.

    Raises:
        ConfigError: an unknown algorithm or target, a number out of range, or an option of another
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
    seed: int | None = None
    coalesce_bytes: int | None = None
    keep: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, str):
            raise ConfigError(f"algorithm={self.algorithm!r}: give a name, as text")
        algorithms.get(self.algorithm)
        if self.target not in TARGETS:
            raise ConfigError(f"target={self.target!r}: {use_one_of(self.target, TARGETS)}")
        for name in ("segments", "threads", "partitions"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"{name}={value!r}: give an integer of at least 1, or None for the default"
                )
            if value is not None and value > _MOST:
                raise ConfigError(f"{name}={value!r}: give {_MOST} at most")
        nodes = self.nodes
        if nodes is not None and not (
            isinstance(nodes, tuple) and all(isinstance(node, int) for node in nodes)
        ):
            raise ConfigError(
                f"nodes={nodes!r}: give a tuple of the machine of each rank, as numbers"
            )
        for name, known in (("inside", INSIDE), ("between", BETWEEN)):
            if (given := getattr(self, name)) not in known:
                raise ConfigError(f"{name}={given!r}: {use_one_of(given, known)}")
        if self.checksum not in (True, False, None):
            raise ConfigError(f"checksum={self.checksum!r}: use True, False, or None")
        for name in ("coordinated", "batched"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={getattr(self, name)!r}: use True or False")
        if self.seed is not None:
            check_seed(self.seed)
        held = self.coalesce_bytes
        if held is not None and (type(held) is not int or held < 0):
            raise ConfigError(f"coalesce_bytes={held!r}: give a number of bytes, 0 or more")
        for name, default, owners in _OWNED:
            if getattr(self, name) != default and self.algorithm not in owners:
                raise ConfigError(
                    f"{name} is an option of the algorithm {' and '.join(owners)}, "
                    f"not of {self.algorithm}"
                )

    @property
    def of_collectives(self) -> Options:
        """Without those that are for attach."""
        return replace(self, seed=None, coalesce_bytes=None, keep=None)

    def through(self, algorithm: str) -> Options:
        """These options with another algorithm, without options of specific algorithms."""
        defaults: dict[str, Any] = {name: default for name, default, _ in _OWNED}
        return replace(self, algorithm=algorithm, **defaults)

    def __str__(self) -> str:
        """The options that all ranks must share."""
        text = f"algorithm {self.algorithm}, segments {self.segments}, checksum {self.checksum}"
        given = [f", {n} {getattr(self, n)}" for n, _, owners in _OWNED if self.algorithm in owners]
        return text + "".join(given)


OF_ATTACH = ("seed", "coalesce_bytes", "keep")


def check_seed(seed: int) -> None:
    """Raise ConfigError unless `seed` is an integer from 0 to below 2^64."""
    if type(seed) is not int or not 0 <= seed < 1 << 64:
        raise ConfigError(f"seed={seed!r:.60}: give an integer that is not negative, below 2^64")


# (option, its default, the algorithms that have it)
_OWNED = (
    ("partitions", None, ("parameter_server",)),
    ("nodes", None, ("hierarchical",)),
    ("inside", "codec", ("hierarchical",)),
    ("between", "auto", ("hierarchical",)),
    ("coordinated", False, ("sra", "parameter_server")),
)
