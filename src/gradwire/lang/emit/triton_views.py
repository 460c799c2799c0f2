"""The tensors of a Triton kernel: how the elements of a tile are cut.

Code k of byte j in a plane of `cells` codes per byte is element k * L + j of its block of m, where
L = ceil(m / cells). A *view* has the elements in this order: for every piece of the bytes, a tensor
[G, W] per cell. So codes are packed and unpacked by shifts of whole tensors. No tensor has an axis
of cells: a compiler could spread it over threads (Triton 3.6 does), and then every byte would
take shared memory.

In full tiles of most blocks all views *share* their tensors, of consecutive elements: an element is
computed once, and a reduction of its block begins in registers. Elsewhere every view has tensors of
its own, and in tiles that are not full, L is known only when the kernel runs.

Where a codec selects, there is a tensor of *candidates*: a piece of those of every block, at
positions that the kernel reads from memory (triton_entries.py).

Names in the generated code, for a tensor T: iT are positions in the block, oT offsets from the
tile's first element, inT whether there is such an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.lang.emit.triton_rows import planes_of, power2
from gradwire.lang.ir import CODES, Scope
from gradwire.lang.layout import Layout

SHARED = 8  # tensors of a block, if they are shared and the planes allow it
MOST = 16  # more take too long to compile
PIECES = 16  # of a block's candidates, at most
WEYL = 0x9E3779B1  # see triton_numbers.weyl


@dataclass(frozen=True)
class Tensor:
    """`width` elements of every block, from position `start` on; "" for candidates.

    limits: conditions that leave out what is not an element, if any.
    """

    name: str
    width: int
    start: str
    limits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def weyl(self) -> str:
        """The Weyl sequence at its positions; known constants are added last."""
        if not self.start.isdigit():
            return f"weyl(i{self.name})"
        ahead = int(self.start) * WEYL % 2**32
        return f"weyl(c{self.width})" + (f" + {ahead:#x}" if ahead else "")


@dataclass(frozen=True)
class View:
    """The tensors of all elements: of every piece, those of its cells.

    length: L. partial: whether the last piece has fewer than its width of bytes.
    """

    cells: int
    length: str
    partial: bool
    pieces: tuple[tuple[Tensor, ...], ...]

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of their elements."""
        return [piece[k] for k in range(self.cells) for piece in self.pieces]

    def place(self, tensor: Tensor) -> tuple[int, int] | None:
        """(piece, cell) of a tensor; None if it belongs to another view."""
        for p, piece in enumerate(self.pieces):
            if tensor in piece:
                return p, piece.index(tensor)
        return None

    def byte(self, piece: int) -> str:
        """The number of a byte in its plane."""
        width = self.pieces[piece][0].width
        return f"c{width} + {piece * width}" if piece else f"c{width}"

    def within(self, here: str) -> str:
        """The mask of the bytes of a piece."""
        return f"{here} & (c{self.pieces[0][0].width} < {self.length})" if self.partial else here


class Views:
    """The views that a kernel uses.

    Args:
        full: whether it is the kernel of full tiles.
        whole: whether the natural order must be one tensor, in which candidates are looked up.

    Attributes:
        candidates: their tensor; `lines` leaves it to the kernel.
    """

    def __init__(self, layout: Layout, full: bool, whole: bool) -> None:
        self.block, self.full = layout.block, full
        self.shared = shared_width(layout) if full and not whole else 0
        self.group = "GROUP" if full else "FEW"
        self.size = "BLOCK" if full else "m"  # values of a block
        self.candidates = Tensor("0", piece(layout), "")
        self.used: dict[int, View] = {}

    def view(self, cells: int) -> View:
        if cells not in self.used:
            self.used[cells] = self._shared(cells) if self.shared else self._own(cells)
        return self.used[cells]

    def siblings(self, tensor: Tensor) -> list[Tensor]:
        """All tensors of the view of a tensor, itself included."""
        return next((v.tensors for v in self.used.values() if tensor in v.tensors), [tensor])

    def lines(self) -> list[str]:
        """The definitions of all names of the views that are used."""
        tensors = dict.fromkeys(t for v in self.used.values() for t in v.tensors)
        lines = [
            f"c{width} = tl.arange(0, {width})[None, :]"
            for width in dict.fromkeys(t.width for t in tensors)
        ]
        if not self.full:
            lines += [f"L{c} = (m + {c - 1}) // {c}" for c in sorted(self.used)]
        for t in tensors:
            i = f"c{t.width}" if t.start == "0" else f"c{t.width} + {t.start}"
            every = f"tl.full(({self.group}, {t.width}), 1, tl.int1)"
            lines += [
                f"i{t.name} = {i}",
                f"in{t.name} = {' & '.join(('here', *t.limits)) if t.limits else every}",
                f"o{t.name} = g * BLOCK + i{t.name}",
            ]
        return lines

    def _shared(self, cells: int) -> View:
        length, width = self.block // cells, self.shared
        pieces = length // width
        return View(
            cells, str(length), False,
            tuple(
                tuple(self._consecutive(k * pieces + p) for k in range(cells))
                for p in range(pieces)
            ),
        )  # fmt: skip

    def _consecutive(self, number: int) -> Tensor:
        return Tensor(str(number + 1), self.shared, str(number * self.shared))  # 0: candidates

    def _own(self, cells: int) -> View:
        """One tensor per cell."""
        length = -(-self.block // cells)
        width = power2(length)
        known = str(length) if self.full else f"L{cells}"
        tensors = []
        for k in range(cells):
            name, limits = f"{cells}_{k}", []
            if not self.full or length < width:
                limits.append(f"(c{width} < {known})")
            if self.full and (k + 1) * length > self.block:
                limits.append(f"(i{name} < {self.block})")
            if not self.full and cells > 1:
                limits.append(f"(i{name} < m)")
            start = str(k * length) if self.full else f"{k} * {known}" if k else "0"
            tensors.append(Tensor(name, width, start, tuple(limits)))
        return View(cells, known, not self.full or length < width, (tuple(tensors),))


def shared_width(layout: Layout) -> int:
    """The width of tensors that all views of full tiles can share; 0 if there is none."""
    coded = [f for f in layout.fields if f.dtype in CODES and f.scope is Scope.ELEMENT]
    cells = {1, *(plane.cells for f in coded for plane in planes_of(f.dtype))}
    if any(layout.block % c for c in cells):
        return 0
    width = max(1, power2(layout.block) // SHARED)
    while any(layout.block // c % width for c in cells):
        width //= 2
    return width if layout.block // width <= MOST else 0


def piece(layout: Layout) -> int:
    """Candidates of a block that are taken at once, a power of two: mostly all there are."""
    share = max((f.capacity.fraction for f in layout.fields if f.capacity is not None), default=0)
    block = power2(layout.block)
    wanted = power2(max(16, int(2 * share * layout.block)))
    return min(block, max(block // PIECES, wanted))
