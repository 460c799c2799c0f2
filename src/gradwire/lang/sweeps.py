"""The lowered form of a program: sweeps over memory, made of steps over one block.

Vocabulary
    sweep  one pass over memory; a whole-tensor reduction ends a sweep, and the next uses its result
    step   an operation of a sweep on a block that is in L1: loops, scalars, packing
    sink   what a loop does with a computed element
    entry  an element of a selection: staged by a sweep, then stored; or visited in a payload

`passes.lower` makes them; emitters turn them into source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from gradwire.lang.ir import Node


@dataclass(frozen=True)
class Sink:
    """What a loop does with a node.

    kind: "reduce", "keep", "rotate", "sample" (for an order statistic); "key" and "stage" (of a
    selection); "field" and "flag" (of kept codes; name of the field); "store" and "patch" (values
    or residual); "accumulate" (into the fold that `fold` names).
    """

    kind: str
    node: Node
    name: str = ""
    fold: Node | None = None
    selection: Node | None = None  # the received selection whose entries it handles

    @property
    def reads(self) -> tuple[Node, ...]:
        """The nodes that it reads."""
        return self.node.args if self.kind == "key" else (self.element,)

    @property
    def element(self) -> Node:
        """The element that it reads."""
        indirect = self.kind in ("reduce", "rotate", "stage", "sample")
        return self.node.args[0] if indirect else self.node


@dataclass(frozen=True)
class Loop:
    """Over the block's elements: compute `nodes` in order, then execute the sinks."""

    nodes: tuple[Node, ...]
    sinks: tuple[Sink, ...]

    @property
    def operands(self) -> list[Node]:
        """The nodes that its nodes and sinks read."""
        return operands(self.nodes, self.sinks)

    @cached_property
    def computes(self) -> frozenset[Node]:
        """Its nodes."""
        return frozenset(self.nodes)


@dataclass(frozen=True)
class Scalars:
    """Compute numbers of the block, the row or the call, in order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Recall:
    """Read the block results that an earlier sweep stored for tensor reduction `index`."""

    index: int
    node: Node


@dataclass(frozen=True)
class Unpack:
    """Unpack a field of codes from its planes into an array."""

    node: Node


@dataclass(frozen=True)
class Rotate:
    """Apply the Hadamard transform to the array that a loop has filled for this node."""

    node: Node


@dataclass(frozen=True)
class LookUp:
    """Fill an array with the numbers for the codes of another array.

    code: unpacked codes of a field, or codes that a loop has kept.
    numbers: arguments or constants, one per code.
    """

    node: Node
    code: Node
    numbers: tuple[Node, ...]


@dataclass(frozen=True)
class Stage:
    """Over the elements that may be selected: stage what the sinks of kind "stage" gather."""

    node: Node
    loop: Loop


@dataclass(frozen=True)
class Visit:
    """Over the entries of this block in a payload."""

    selection: Node
    loop: Loop


@dataclass(frozen=True)
class Fold:
    """For every rank in order: run `own` or, with a peer's payload, `body`; both accumulate."""

    node: Node
    own: Loop
    body: tuple[Step, ...]


@dataclass(frozen=True)
class Put:
    """Write a field of block or tensor scope."""

    name: str
    node: Node


@dataclass(frozen=True)
class Partial:
    """Store the block's partial result of tensor reduction `index` in the workspace."""

    index: int
    node: Node


Step = Loop | Scalars | Recall | Unpack | LookUp | Rotate | Stage | Visit | Fold | Put | Partial


@dataclass(frozen=True)
class Sweep:
    """Steps for every block, then operations on the whole row.

    Attributes:
        steps: for every block.
        completes: (index, kind) of the tensor reductions that are complete after it.
        ranks: (index, node) of the order statistics that are complete after it. They need no steps
            if their elements can be computed one by one from memory.
        entries: scalars of the row and the loop over entries, after a selection is staged.
        key: the selection, if its keys can be sampled before: then the sweep may be made twice.
        after: steps for every block that come after the sweep, since they overwrite what it reads.
        clears: whether to zero the memory of kept codes after it, when their flags are known.
    """

    steps: tuple[Step, ...]
    completes: tuple[tuple[int, str], ...] = ()
    ranks: tuple[tuple[int, Node], ...] = ()
    entries: tuple[Step, ...] = ()
    key: Node | None = None
    after: tuple[Step, ...] = ()
    clears: bool = False

    @property
    def loops(self) -> tuple[Loop, ...]:
        """The loops over the block's elements; for a fold, the one over the own elements."""
        steps = (s.own if isinstance(s, Fold) else s for s in self.steps)
        return tuple(s for s in steps if isinstance(s, Loop))

    @property
    def fills(self) -> bool:
        """Whether a step, or a step of a fold's body, fills an array."""
        peers = (inner for s in self.steps if isinstance(s, Fold) for inner in s.body)
        return any(isinstance(s, Rotate | LookUp) for s in (*self.steps, *peers))


def operands(nodes: Iterable[Node], sinks: Iterable[Sink]) -> list[Node]:
    """The nodes that these nodes and sinks read."""
    return [a for n in nodes for a in n.args] + [n for sink in sinks for n in sink.reads]
