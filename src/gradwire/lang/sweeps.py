"""What a program is lowered to: sweeps over memory, made of steps over one block.

Vocabulary
    sweep  one pass over memory; a whole-tensor reduction ends one and the next uses its result
    step   what a sweep does to a block while it lies in L1: loops, scalars, packing
    sink   what a loop does with an element besides computing it
    entry  an element of a selection: staged by a sweep, then stored; or visited in a payload

`passes.lower` makes them, emitters turn them into source.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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
    selection: Node | None = None  # received, whose entries it is served for

    @property
    def reads(self) -> tuple[Node, ...]:
        """What it needs of an element."""
        return self.node.args if self.kind == "key" else (self.element,)

    @property
    def element(self) -> Node:
        """The one node that it reads."""
        indirect = self.kind in ("reduce", "rotate", "stage", "sample")
        return self.node.args[0] if indirect else self.node


@dataclass(frozen=True)
class Loop:
    """Over the block's elements: compute `nodes` in order, then serve the sinks."""

    nodes: tuple[Node, ...]
    sinks: tuple[Sink, ...]

    @property
    def operands(self) -> list[Node]:
        """What its nodes and sinks read."""
        return operands(self.nodes, self.sinks)


@dataclass(frozen=True)
class Scalars:
    """Numbers of the block, the row or the call, in order."""

    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Recall:
    """Read what an earlier sweep left of the blocks for tensor reduction number `index`."""

    index: int
    node: Node


@dataclass(frozen=True)
class Unpack:
    """Bring a field of uint codes from its planes into an array."""

    node: Node


@dataclass(frozen=True)
class Rotate:
    """Transform the array that a loop has filled for this node."""

    node: Node


@dataclass(frozen=True)
class LookUp:
    """Fill an array with the numbers that codes, which lie in another, stand for.

    code: a field of codes that was unpacked, or codes that a loop has kept.
    numbers: of the call, as many as there are codes.
    """

    node: Node
    code: Node
    numbers: tuple[Node, ...]


@dataclass(frozen=True)
class Stage:
    """Over the elements that may be selected: what the sinks of kind "stage" gather."""

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
    """Leave the block's share of tensor reduction number `index` in the workspace."""

    index: int
    node: Node


Step = Loop | Scalars | Recall | Unpack | LookUp | Rotate | Stage | Visit | Fold | Put | Partial


@dataclass(frozen=True)
class Sweep:
    """Steps for every block, then what needs all of them.

    Attributes:
        steps: for every block.
        completes: (index, kind) of the tensor reductions that are complete after it.
        ranks: (index, node) of order statistics of a sample, complete after it. Those of elements
            that can be computed one at a time, from memory alone, need no steps.
        entries: after a selection is staged: numbers of the row, and the loop over its entries.
        clears: the flags of kept codes are known after it: their memory is zeroed.
    """

    steps: tuple[Step, ...]
    completes: tuple[tuple[int, str], ...] = ()
    ranks: tuple[tuple[int, Node], ...] = ()
    entries: tuple[Step, ...] = ()
    clears: bool = False

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Those over a block's elements; of a fold, that over the own ones."""
        steps = (s.own if isinstance(s, Fold) else s for s in self.steps)
        return tuple(s for s in steps if isinstance(s, Loop))

    @property
    def fills(self) -> bool:
        """Whether numbers of a block, or of a peer's in a fold, come to lie in an array."""
        peers = (inner for s in self.steps if isinstance(s, Fold) for inner in s.body)
        return any(isinstance(s, Rotate | LookUp) for s in (*self.steps, *peers))


def operands(nodes: Iterable[Node], sinks: Iterable[Sink]) -> list[Node]:
    """What nodes and sinks read."""
    return [a for n in nodes for a in n.args] + [n for sink in sinks for n in sink.reads]
