"""Legal combinations of operation, dtype, codec and algorithm: one table, and its checks.

docs/reference/algorithms.md prints `LEGAL`. Every all-reduce algorithm except all_gather encodes
sums, and so does a reduce-scatter in two levels; `RESTRICTIONS` lists the codecs that do not allow
this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gradwire.algorithms import OF
from gradwire.codecs import TBQ, Identity, RandomK
from gradwire.collectives.operation import Operation
from gradwire.collectives.options import Options
from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import Codec, Exact
from gradwire.partition import Spec

FLOATS = (torch.float32, torch.float16, torch.bfloat16)  # the dtypes that codecs take
WHOLE = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
DOUBLE = (torch.float64,)
ORDERED = (*FLOATS, *DOUBLE, *WHOLE, torch.bool)
REDUCED = "sra, ring, tree, parameter_server, all_gather, hierarchical"


@dataclass(frozen=True)
class Legal:
    """One row: what a collective's operators accept.

    Attributes:
        verb, ops: of the operation.
        dtypes: of the values; (): any.
        codecs: whether a codec may compress the values; else they travel uncompressed.
        feedback: whether a residual is allowed.
        algorithms: the algorithms, as text.
    """

    verb: str
    ops: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    codecs: bool
    feedback: bool
    algorithms: str

    def columns(self) -> tuple[str, ...]:
        """The row in docs/reference/algorithms.md."""
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        travels = "through a codec, or as they are" if self.codecs else "as they are"
        feedback = "yes" if self.feedback else "no"
        return (
            self.verb, ", ".join(self.ops) or "-", dtypes or "any", travels, feedback,
            self.algorithms,
        )  # fmt: skip


LEGAL = (
    Legal("all_reduce", ("sum", "avg"), FLOATS, True, True, REDUCED),
    Legal("all_reduce", ("min", "max"), ORDERED, False, False, REDUCED),
    Legal("all_reduce", ("sum", "avg"), DOUBLE, False, False, REDUCED),
    Legal("all_reduce", ("sum",), WHOLE, False, False, REDUCED),
    Legal("reduce_scatter", ("sum", "avg"), FLOATS, True, True, "sra, hierarchical"),
    Legal("reduce_scatter", ("min", "max"), ORDERED, False, False, "sra, hierarchical"),
    Legal("reduce_scatter", ("sum", "avg"), DOUBLE, False, False, "sra, hierarchical"),
    Legal("reduce_scatter", ("sum",), WHOLE, False, False, "sra, hierarchical"),
    Legal("all_gather", (), FLOATS, True, False, "sra, hierarchical"),
    Legal("all_gather", (), (), False, False, "sra, hierarchical"),
    Legal("broadcast", (), FLOATS, True, False, "sra, tree"),
    Legal("broadcast", (), (), False, False, "sra, tree"),
)  # fmt: skip


def uncompressed(operation: Operation, dtype: torch.dtype) -> Codec:
    """The codec that carries values uncompressed."""
    if dtype in FLOATS and operation.op in ("", "sum", "avg"):
        return Identity()
    return Exact("sum" if operation.op == "avg" else operation.op)


def check_legal(operation: Operation, spec: Spec, options: Options, world_size: int) -> None:
    """Check a tensor's collective on `world_size` ranks.

    Raises:
        ConfigError: it is not legal; the message says why, and what is.
    """
    rows = [row for row in LEGAL if row.verb == operation.verb]
    rows = [row for row in rows if not row.ops or operation.op in row.ops]
    of_dtype = [row for row in rows if not row.dtypes or spec.dtype in row.dtypes]
    what = f"{spec.name}: {operation} of {spec.dtype}"
    if not of_dtype:
        known = ", ".join(str(dtype) for row in rows for dtype in row.dtypes)
        raise ConfigError(f"{what} is not defined: it takes {known}")
    as_they_are = uncompressed(operation, spec.dtype)
    if isinstance(as_they_are, Exact):
        try:
            as_they_are.itemsize(spec.dtype)
        except ConfigError as error:  # of a quantised tensor
            raise ConfigError(f"{what} is not defined: {error}") from None
    if isinstance(spec.codec, Exact) and spec.codec != as_they_are:
        raise ConfigError(
            f"{what} through {spec.codec} is not defined: that codec is internal; give codec=None"
        )
    if spec.codec != as_they_are and not any(row.codecs for row in of_dtype):
        raise ConfigError(
            f"{what} through {spec.codec} is not defined: these values travel uncompressed; give "
            "codec=None"
        )
    if spec.feedback and not any(row.feedback for row in of_dtype):
        raise ConfigError(f"{what} has no error feedback: leave the residual out")
    if operation.op:
        check_defined(options.algorithm, spec.codec, operation.verb)
    if spec.feedback:
        check_feedback(spec.codec)
    check_algorithm(operation, options, world_size, f"{spec.name}: {operation}")
    if operation.shards:
        spec.shard_lengths(world_size)


def check_algorithm(operation: Operation, options: Options, world_size: int, what: str) -> None:
    """Check an operation's algorithm, options and root on `world_size` ranks; `what` names it.

    Raises:
        ConfigError: the operation does not have the algorithm or option, or the root is not a rank;
            the message says what it has.
    """
    known = OF[operation.verb]
    if options.algorithm not in known:
        raise ConfigError(
            f"{what} has no algorithm {options.algorithm!r}: {use_one_of(options.algorithm, known)}"
        )
    if operation.shards and options.between == "grid":
        raise ConfigError(
            f"{what} has no grid: machines exchange directly; leave out between='grid'"
        )
    if operation.verb == "all_gather" and options.inside != "codec":
        raise ConfigError(
            f"{what} forwards payloads, and sums no values inside machines: leave out "
            f"inside={options.inside!r}"
        )
    if operation.verb != "broadcast":
        return
    if options.coordinated:
        raise ConfigError(f"{what} has no coordinated rounds: leave out coordinated=True")
    if not 0 <= operation.root < world_size:
        raise ConfigError(f"{what} has no such root: use one of the ranks 0 to {world_size - 1}")


@dataclass(frozen=True)
class _Restriction:
    applies: Callable[[Codec], bool]
    algorithms: tuple[str, ...]
    reason: str


RESTRICTIONS = (
    _Restriction(
        lambda codec: isinstance(codec, RandomK) and codec.scale > 1,
        ("all_gather",),
        "it scales what it sends, but a rank that adds its own values to received ones does not "
        "scale them, so the average would be biased; or use unbiased=False with error feedback",
    ),
    _Restriction(
        lambda codec: isinstance(codec, TBQ),
        ("sra", "parameter_server", "all_gather"),
        "a payload holds at most one threshold per value, and would have to carry the sum of "
        "several ranks",
    ),
)


def check_defined(algorithm: str, codec: Codec, verb: str = "all_reduce") -> None:
    """Check that `codec` allows sums in a verb's `algorithm`.

    Raises:
        ConfigError: it does not; the message says why, and names algorithms that it allows.
    """
    for restriction in RESTRICTIONS:
        # The first half of SRA encodes no sum.
        names = ("sra",) if verb == "reduce_scatter" else restriction.algorithms
        if restriction.applies(codec) and algorithm not in names:
            allowed = " or ".join(repr(name) for name in names)
            raise ConfigError(
                f"{codec} is not defined in the algorithm {algorithm!r}: {restriction.reason}. "
                f"Use algorithm {allowed}"
            )


def check_feedback(codec: Codec) -> None:
    """Check that error feedback compensates for what `codec` does not send.

    Raises:
        ConfigError: it does not; the message says why, and what to use.
    """
    if isinstance(codec, RandomK) and codec.scale > 1:
        raise ConfigError(
            f"{codec} is not defined with error feedback: it sends {codec.scale:g} times the "
            f"values that it picks, so the residual is {1 - codec.scale:g} times these values, and "
            "grows from step to step. Use unbiased=False with error feedback, or unbiased=True "
            "without"
        )
