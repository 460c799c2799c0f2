"""Triton rules that join elements of a block, or of payloads: reductions, rotations, sums.

Tensors come first: most of a reduction joins whole tensors, in registers, and only the last one is
reduced along its axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from gradwire.lang import ir
from gradwire.lang.emit import stream_name
from gradwire.lang.emit.triton_nodes import Nodes
from gradwire.lang.emit.triton_rows import literal, power2
from gradwire.lang.emit.triton_views import Tensor
from gradwire.lang.ir import Node, Scope


class Joins(Nodes):
    """The rules of `Nodes`, and those that join elements."""

    def node_reduce(self, n: Node, t: Tensor | None) -> str:
        if n.scope is Scope.TENSOR:
            index = self.reductions.index(n)
            if n.attr in ("min", "max"):
                return f'extreme_of(row, {index}, "{n.attr}")'
            return f"float_of(tl.load(result(row, {index})))"
        x = n.args[0]
        if n.attr == "sum":
            width = self.natural[0].width
            halves = added([f"tl.where(in{t}, {self.value(x, t)}, 0.0)" for t in self.natural])
            function = "tree_sum_spread" if n in self.spread else "tree_sum"
            return f"{function}({halves}, {self.views.group}, {width}, {width.bit_length() - 1})"
        if n.attr == "count":
            ones = [f"({self.value(x, t)} & in{t}).to(tl.int32)" for t in self.tensors]
            return f"count({' + '.join(ones)})"
        low, high = self.extremes(x)
        return low if n.attr == "min" else high

    def extremes(self, x: Node) -> tuple[str, str]:
        """The minimum and the maximum, which are computed together."""
        i = f"{self.number[x]}{self.suffix}"
        low, high, key = f"low{i}", f"high{i}", (x, "extremes")
        if key not in self.memo:
            self.memo[key] = low
            words = {t: f"word{i}_{t}" for t in self.tensors}
            for t, word in words.items():
                self.put(f"{word} = int_of({self.operand(x, t)})")
            least = [f"tl.where(in{t}, {word}, MOST)" for t, word in words.items()]
            most = [f"tl.where(in{t}, {word}, LEAST)" for t, word in words.items()]
            unsigned = [f"tl.where(in{t}, bits_of({word}), 0)" for t, word in words.items()]
            self.put(f"least{i} = {nested('tl.minimum', least)}")
            self.put(f"most{i} = {nested('tl.maximum', most)}")
            self.put(f"unsigned{i} = {nested('tl.maximum', unsigned)}")
            self.put(f"{low}, {high} = extremes(least{i}, most{i}, unsigned{i})")
        return low, high

    def node_rotate(self, n: Node, t: Tensor) -> str | None:
        assert isinstance(n.attr, ir.Rotation)
        natural = self.natural
        if t not in natural:
            (whole,) = natural
            sizes = f"{self.views.group}, {t.width}"
            return f"elements({self.value(n, whole)}, i{t}, in{t}, {sizes})"
        stream = self.stream(n.attr.stream)
        signs, mixed = {}, {}
        for t in natural:
            i = f"{self.number[n]}_{t}{self.suffix}"
            signs[t], mixed[t] = f"sign{i}", f"mixed{i}"
            self.put(f"{signs[t]} = sign(drawn({stream}_weyl + {t.weyl}, {stream}_high))")
            x = self.value(n.args[0], t)
            x = x if n.attr.inverse else f"{x} * {signs[t]}"
            part = str(t.width) if self.views.shared else f"i{t} ^ {self.views.size}"
            sizes = f"{self.views.group}, {t.width}, {t.width.bit_length() - 1}"
            self.put(f"{mixed[t]} = hadamard(tl.where(in{t}, {x}, 0.0), {part}, {sizes})")
        for run in binary_parts(natural):
            self.mix([mixed[t] for t in run])
            scale = f"scale_of(i{run[0]} ^ {self.views.size})"
            if self.views.shared:
                scale = literal(1 / math.sqrt(len(run) * run[0].width))
            for t in run:
                back = f" * {signs[t]}" if n.attr.inverse else ""
                self.put(f"{self.name(n, t)} = {mixed[t]} * {scale}{back}")
        self.memo.update({(n, t): self.name(n, t) for t in natural})
        return None

    def mix(self, names: Sequence[str]) -> None:
        """Sums and differences of whole tensors, at distances 1, 2, 4, ..."""
        distance = 1
        while distance < len(names):
            for k, low in enumerate(names):
                if not k & distance:
                    high = names[k + distance]
                    self.put(f"{low}, {high} = {low} + {high}, {low} - {high}")
            distance *= 2

    def node_fold(self, n: Node, t: Tensor) -> str | None:
        """The sum starts at -0, since -0 + x is x for every x."""
        totals = {t: self.name(n, t) for t in self.views.siblings(t)}
        for t, total in totals.items():
            self.put(f"{total} = tl.where(in{t}, number(0x80000000), 0.0)")

        def add(term: Node) -> None:
            for t, total in totals.items():
                self.put(f"{total} = {total} + {self.value(term, t)}")

        self.over_ranks(lambda: add(n.args[0]), lambda: add(n.args[1]))
        self.memo.update({(n, t): total for t, total in totals.items()})
        return None

    def over_ranks(self, own: Callable[[], None], peer: Callable[[], None]) -> None:
        """A loop over ranks: what the own elements do in it, and a peer's payload."""
        self.put("for k in range(ranks):")
        with self.nested():
            self.put("if k == rank:")
            with self.nested():
                own()
            self.put("else:")
            with self.nested():
                self.put("behind = (rank >= 0) & (rank < k)")
                self.put("peer = k - behind.to(tl.int64)")
                self.put("source = sources + peer * stride")
                self.redraw()
                peer()

    def redraw(self) -> None:
        """The streams of the encoder of a peer's payload."""
        for s in (n.attr for n in self.number if isinstance(n.attr, ir.Stream)):
            if s.source:
                name = stream_name(s)
                key = "stream_key(tl.load(row + SHARED), tl.load(origins + peer))"
                self.put(f"{name}_low, {name}_high = halves(stream_key({key}, {s.number}))")
                self.put(f"{name}_weyl = weyl(first + {name}_low)")


def added(terms: list[str]) -> str:
    """A sum of terms: the upper half is added to the lower one until one is left."""
    while len(terms) > 1:
        half = power2(len(terms)) // 2
        pairs = zip(terms, terms[half:], strict=False)
        terms = [f"({a} + {b})" for a, b in pairs] + terms[len(terms) - half : half]
    return terms[0]


def nested(function: str, terms: list[str]) -> str:
    """A function of two arguments, of all terms."""
    whole = terms[0]
    for term in terms[1:]:
        whole = f"{function}({whole}, {term})"
    return whole


def binary_parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Runs of tensors whose lengths are the powers of two in their number, the largest first."""
    parts: list[list[Tensor]] = []
    at = 0
    while at < len(tensors):
        size = 1 << (len(tensors) - at).bit_length() - 1
        parts.append(list(tensors[at : at + size]))
        at += size
    return parts
