"""The operation of a collective: its verb, operator and root."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.errors import ConfigError, use_one_of

OPS = ("sum", "avg", "min", "max")
REDUCING = ("all_reduce", "reduce_scatter")
VERBS = (*REDUCING, "all_gather", "broadcast")


@dataclass(frozen=True)
class Operation:
    """An operation, the same on every rank.

    Attributes:
        verb: "all_reduce", "reduce_scatter", "all_gather" or "broadcast", in torch's sense.
        op: for the first two, "sum", "avg", "min" or "max"; else "".
        root: for a broadcast, the rank whose values all ranks get.

    Raises:
        ConfigError: an unknown operator.
    """

    verb: str
    op: str = ""
    root: int = 0

    def __post_init__(self) -> None:
        assert self.verb in VERBS, self.verb
        if self.verb in REDUCING and self.op not in OPS:
            raise ConfigError(f"op={self.op!r}: {use_one_of(self.op, OPS)}")
        assert self.verb in REDUCING or not self.op, self

    @property
    def shards(self) -> bool:
        """Whether each rank has, or gets, its own shard of the values."""
        return self.verb in ("reduce_scatter", "all_gather")

    def __str__(self) -> str:
        if self.op:
            return f"{self.verb}({self.op})"
        return f"{self.verb}(root={self.root})" if self.verb == "broadcast" else self.verb


AVERAGE = Operation("all_reduce", "avg")
SUM = Operation("all_reduce", "sum")
