"""The Triton around the nodes: constants, planes, views, a row's fields, kernel headers."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field

from gradwire.lang import ir
from gradwire.lang.emit import stream_name
from gradwire.lang.forms import Field
from gradwire.lang.ir import Scope
from gradwire.lang.layout import COUNT_NBYTES, Layout, element_nbytes, planes

TILE_VALUES = 4096  # values per tile
PARTS = 4  # steps of a tile that is not full
ALIGNED = 16  # alignment in bytes of the memory of a row that has full tiles
VARYING = ("n", "steps", "ranks", "rank", "stride")  # arguments that must not be specialised
# `workspace` and `words` are the same memory, as floats and int32; `failed`: see
# triton_prelude.fail
CALL = ("ranks", "rank", "stride", "factor", "numbers", "workspace", "words", "failed")
ORIGINS = "origins"  # an argument of codecs that redraw: int64, of the payloads of a sum
STATISTICS = 2  # per codec, at most: encode and encode_sum may use one each
POINTER = {"fp32": "tl.float32", "fp16": "tl.uint16", "bf16": "tl.uint16"}

# dtype -> functions that load and store its bits
LOADS = {
    "fp32": "load32", "fp16": "load16", "bf16": "load16", "fp8": "load8", "int32": "load_int32",
}  # fmt: skip
STORES = {
    "fp32": "store32", "fp16": "store16", "bf16": "store16", "fp8": "store8",
    "int32": "store_int32",
}  # fmt: skip


@dataclass(frozen=True)
class Plane:
    """Digits of codes, `cells` per byte; `shift`: position in the code of the lowest bit."""

    cells: int
    base: int
    shift: int

    def digit(self, code: str) -> str:
        """This plane's part of a code."""
        if self.base == 3 or self.cells == 1:
            return code
        shifted = f"{code} >> {self.shift}" if self.shift else code
        return f"({shifted} & {self.base - 1})"

    def packed(self, digits: list[str]) -> str:
        """Bytes of digits, one of every cell."""
        if self.base == 3:
            return " + ".join(f"{d} * {3**k}" for k, d in enumerate(digits))
        return " | ".join(f"{d} << {8 // self.cells * k}" if k else d for k, d in enumerate(digits))

    def taken(self, byte: str, k: int | str) -> str:
        """The part of a code in cell k of a byte, a number or an expression."""
        if self.cells == 1:
            return byte
        if self.base == 3:
            return f"{byte} // {3**k if isinstance(k, int) else f'power3({k})'} % 3"
        shift = str(8 // self.cells * k) if isinstance(k, int) else f"{k} * {8 // self.cells}"
        digit = f"({byte} >> {shift} & {self.base - 1})"
        return f"{digit} << {self.shift}" if self.shift else digit


def planes_of(dtype: str) -> tuple[Plane, ...]:
    """The planes of codes, in wire order."""
    if dtype == "trit":
        return (Plane(5, 3, 0),)
    return tuple(Plane(8 // width, 2**width, at) for width, at in planes(ir.BITS[dtype]))


def main_view(layout: Layout) -> int:
    """The view of stores and block reductions: that of the first field of codes."""
    for f in layout.fields:
        if f.scope is Scope.ELEMENT and f.dtype in ir.CODES:
            return planes_of(f.dtype)[0].cells
    return 1


def power2(n: int) -> int:
    """The smallest power of two that is not less than n."""
    return 1 << max(0, n - 1).bit_length()


def group(layout: Layout) -> int:
    """Blocks of a full tile: a power of two."""
    return max(1, TILE_VALUES // power2(layout.block))


@dataclass
class Used:
    """What a kernel's first lines must define, beyond names that a compiler drops if unused."""

    streams: dict[ir.Stream, int] = field(default_factory=dict)  # which behind the table
    targets: set[str] = field(default_factory=set)  # values, residual
    loads: bool = False
    singly: bool = False  # a thread accesses values one by one, lest they change their layout
    totals: bool = False


def arguments(layout: Layout) -> str:
    """The names of a call's arguments, which all kernels of a codec have."""
    return ", ".join((*CALL, ORIGINS) if layout.redraws else CALL)


def head(layout: Layout) -> str:
    """The first lines of a generated file."""
    selects = layout.variable or layout.samples
    files = ("triton_selection", "triton_codes") if selects else ()
    entries = "".join(f"from gradwire.lang.emit.{file} import *\n" for file in files)
    return f"""\
import triton
import triton.language as tl

from gradwire.lang.emit.triton_numbers import *
from gradwire.lang.emit.triton_prelude import *
from gradwire.lang.emit.triton_reductions import *
{entries}
BLOCK = tl.constexpr({layout.block})
GROUP = tl.constexpr({group(layout)})  # blocks of a full tile
FEW = tl.constexpr({max(1, group(layout) // PARTS)})  # taken at once in others, to compile faster

"""


def kernel(
    name: str,
    layout: Layout,
    native: str,
    full: bool,
    used: Used,
    views: list[str],
    body: list[str],
) -> str:
    """The kernel of full tiles, whose sizes are constant and whose memory is aligned, or the one of
    the others. So code for other tiles takes no registers of the first.

    views: the definitions of the views' names.
    """
    lines = _rows(layout, native, full, used)
    start = "(tl.load(row + START) + block * BLOCK).to(tl.uint32)"
    lines.append(f"first = {start} + (g * BLOCK).to(tl.uint32)")
    for s, at in sorted(used.streams.items(), key=lambda item: item[1]):
        drawn = stream_name(s)
        lines += [
            f"{drawn}_low, {drawn}_high = halves(tl.load(row + tl.load(row + BEHIND) + {at}))",
            f"{drawn}_weyl = weyl(first + {drawn}_low)",
        ]
    lines += views
    call = arguments(layout)
    whole = [
        *_header(name, layout),
        "    row = find(table, n, steps, FULL_TILES)",
        "    block = full_tile(row, GROUP)",
        "    g = tl.arange(0, GROUP)[:, None]",
        "    here = tl.full((GROUP, 1), 1, tl.int1)",
    ]
    some = [
        "@triton.jit",
        f"def {name}_few(row, block, held, m, {call}):",
        "    g = tl.arange(0, FEW)[:, None]",
        "    here = g < held",
    ]
    others = [
        "",
        "",
        *_header(f"{name}_others", layout),
        "    row = find(table, n, steps, OTHER_TILES)",
        "    block, held, m = other_tile(row, BLOCK, GROUP)",
        "    for done in range(0, held, FEW):",
        f"        {name}_few(row, block + done, tl.minimum(held - done, FEW), m, {call})",
    ]
    text = [*(whole if full else some), *("    " + line for line in lines), *body]
    return "\n".join([*text, *([] if full else others), "", ""])


def _rows(layout: Layout, native: str, full: bool, used: Used) -> list[str]:
    """The names of a row: its memory, and where its fields begin."""
    names = ("blocks", "payload", "sources")
    lines = [f"{name} = tl.load(row + {name.upper()})" for name in names]
    for target in sorted(used.targets):
        dtype = native if target == "values" else "fp32"
        nbytes = layout.block * ir.BITS[dtype] // 8
        address = f"tl.load(row + {target.upper()}) + block * {nbytes}"
        align = alignment(layout, nbytes) if full and not (used.singly or used.totals) else 0
        lines.append(f"{target} = aligned({address}, {POINTER[dtype]}, {align})")
    if used.totals:
        lines.append("totals = workspace + tl.load(row + TOTALS) + block * BLOCK")
    return lines + _places(layout)


def _header(name: str, layout: Layout) -> list[str]:
    """The first lines of a kernel, which has the same arguments as all of its codec."""
    names = [*VARYING, *([ORIGINS] if layout.redraws else [])]
    return [
        f"@triton.jit(do_not_specialize={names})".replace("'", '"'),
        f"def {name}(table, n, steps, {arguments(layout)}):",
    ]


def alignment(layout: Layout, nbytes: int, field: int = 0) -> int:
    """The alignment of a full tile's part of a field, or of values, with `nbytes` per block."""
    return math.gcd(_known_alignment(layout, field), group(layout) * nbytes)


def _places(layout: Layout) -> list[str]:
    """The offsets of fields in a payload."""
    lines, size = [], "0"
    for number, f in enumerate(layout.fields):
        lines.append(f"at{number} = {size}  # {f.name}")
        if f.capacity is not None:
            size = f"at{number} + blocks * {COUNT_NBYTES}"
        elif f.scope is Scope.SELECTION or f.flag is not None:
            size = f"at{number}"
        elif f.scope is Scope.TENSOR:
            size = f"at{number} + {f.item_nbytes}"
        elif f.scope is Scope.BLOCK:
            size = f"at{number} + blocks * {f.item_nbytes}"
        else:
            size = f"at{number} + {_elements(f.dtype, layout.block)}"
    return lines


def _known_alignment(layout: Layout, number: int) -> int:
    """The alignment of a field in a payload that is ALIGNED, whatever the number of values."""
    once, per_block, per_value = 0, 0, 0
    for f in layout.fields[:number]:
        if f.scope is Scope.TENSOR:
            once += f.item_nbytes
        elif f.capacity is not None:
            per_block += COUNT_NBYTES
        elif f.scope is Scope.BLOCK:
            per_block += f.item_nbytes
        elif f.scope is Scope.ELEMENT and f.flag is None:
            per_value = math.gcd(per_value, 1 if f.dtype in ir.CODES else ir.BITS[f.dtype] // 8)
    return math.gcd(ALIGNED, once, per_block, per_value)


def _elements(dtype: str, block: int) -> str:
    """Bytes of all elements of a row."""
    numel = "tl.load(row + NUMEL)"
    if dtype not in ir.CODES:
        return f"{numel} * {ir.BITS[dtype] // 8}"
    rest = [f"({numel} % BLOCK + {p.cells - 1}) // {p.cells}" for p in planes_of(dtype)]
    return " + ".join([f"{numel} // BLOCK * {element_nbytes(dtype, block)}", *rest])


def literal(value: float) -> str:
    """A constant as exact float32; subnormals and NaN, which Triton would change, by their bits."""
    single = ir.single(value)
    if single in (math.inf, -math.inf) or abs(single) >= 2.0**-126 or repr(single) == "0.0":
        text = f'float("{single}")' if math.isinf(single) else repr(single)
        return f"({text})" if text.startswith("-") else text
    return bits_of(single)


def bits_of(value: float) -> str:
    """A constant as a tensor, by its bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", ir.single(value)))
    return f"number({bits:#x})"


def by_halves(x: str, numbers: list[str], first: int = 0) -> str:
    """The number that x stands for: literals are in no memory that could be indexed."""
    if len(numbers) == 1:
        return numbers[0]
    half = (len(numbers) + 1) // 2
    below = by_halves(x, numbers[:half], first)
    above = by_halves(x, numbers[half:], first + half)
    return f"tl.where({x} < {first + half}, {below}, {above})"


def streams(program: ir.Function) -> list[ir.Stream]:
    """The streams of a row: all but those of peers' payloads."""
    attrs = [n.attr for n in ir.walk(program.roots)]
    found = {s for a in attrs if isinstance(s := getattr(a, "stream", a), ir.Stream)}
    return sorted((s for s in found if not s.source), key=lambda s: (s.shared, s.number))


def fixed(program: ir.Function) -> dict[ir.Node, int]:
    """What is computed of the codec's table alone -> its place behind the table in `numbers`."""
    nodes = list(ir.walk(program.roots))
    params = {n for n in nodes if n.op == "param" and isinstance(n.attr, int)}
    known = set(params)
    for n in nodes:
        computed = n.op == "alu" and n.dtype == "fp32" and not known.isdisjoint(n.args)
        if computed and all(a in known or a.op == "const" for a in n.args):
            known.add(n)
    read = {a for n in nodes if n not in known for a in n.args}
    first = max((1 + int(str(n.attr)) for n in params), default=0)
    return {n: first + i for i, n in enumerate(n for n in nodes if n in (known & read) - params)}


# selections --------------------------------------------------------------------------------------


def statistics(programs: Iterable[ir.Function]) -> list[tuple[int, ir.Size]]:
    """(sampling interval, size) of all order statistics."""
    attrs = [n.attr for p in programs for n in ir.walk(p.roots)]
    return list(dict.fromkeys((a.every, a.size) for a in attrs if isinstance(a, ir.Rank)))


def code_bits(dtype: str) -> int:
    """The BITS argument for a dtype of codes in generated code; 0 for trits."""
    return 0 if dtype == "trit" else ir.BITS[dtype]


def tails(layout: Layout, entries: str) -> list[tuple[Field, str]]:
    """The fields with one value per entry, and the expressions for their bytes."""
    sizes = []
    for f in layout.fields:
        if f.capacity is not None:
            sizes.append((f, f"tail_nbytes({entries}, {code_bits(layout.position)})"))
        elif f.scope is Scope.SELECTION and f.dtype in ir.CODES:
            sizes.append((f, f"tail_nbytes({entries}, {code_bits(f.dtype)})"))
        elif f.scope is Scope.SELECTION:
            sizes.append((f, f"{entries} * {ir.BITS[f.dtype] // 8}"))
    return sizes


def packing(layout: Layout) -> str:
    """The kernel that packs staged codes in runs and zeros the unused part of a payload."""
    lines, at, columns = [], "payload", 0
    for number, (f, size) in enumerate(tails(layout, "entries")):
        dtype = layout.position if f.capacity is not None else f.dtype
        if dtype in ir.CODES or f.capacity is not None:
            staged = f"staged + {columns} * capacity" if columns else "staged"
            lines.append(f"pack_runs({staged}, {at}, part, parts, entries, {code_bits(dtype)})")
            columns += 1
        lines.append(f"after{number} = {at} + {size}")
        at = f"after{number}"
    most = " + ".join(size for _, size in tails(layout, "capacity"))
    lines.append(f"clear_bytes({at}, payload + {most}, part, parts)")
    return "\n".join(
        [
            *_header("pack", layout),
            "    row = find(table, n, steps)",
            "    part, parts = share_of(row, BLOCK, GROUP)",
            "    capacity = tl.load(row + CAPACITY).to(tl.int32)",
            "    entries = tl.load(words + tl.load(row + BEFORE) + tl.load(row + BLOCKS))",
            "    staged = words + tl.load(row + STAGED)",
            "    payload = tl.load(row + PAYLOAD) + tl.load(row + TAIL)",
            *(f"    {line}" for line in lines),
            "",
            "",
        ]
    )
