"""An ill-formed codec gives a LanguageError that names the line in its own file."""

from __future__ import annotations

import linecache
import math
import pickle
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.codecs import TopK
from gradwire.errors import ConfigError
from gradwire.lang import Codec, LanguageError, decode, encode, layout, ops, show
from gradwire.lang.ops import (
    concat,
    fp16,
    fp32,
    gather,
    map,
    random,
    reduce,
    scatter,
    share,
    sort,
    table,
    topk,
    uint,
    where,
)
from ranks import caught


def make(encode: Callable[..., Any], decode: Callable[..., Any] | None = None) -> Codec:
    """A codec of these methods."""

    def plain(self: Any, code: Any) -> Any:
        return code * 1.0

    @dataclass(frozen=True)
    class Broken(Codec):
        pass

    Broken.encode = encode  # type: ignore[method-assign]
    Broken.decode = decode or plain  # type: ignore[method-assign]
    return Broken()


def one(g: Any) -> Any:
    return concat(code=uint(1, where(g > 0.0, 1, 0)))


def twice(code: Any) -> Any:
    return concat(a=code, b=code)


def largest(g: Any) -> Any:
    return topk(g, share(0.1))


# name -> (encode, decode, part of the message)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, str]] = {
    "no concat": (lambda self, g: g, None, "must return concat"),
    "no fields": (lambda self, g: concat(), None, "needs a field"),
    "truth value": (lambda self, g: one(g) if g > 0.0 else one(-g), None, "use where"),
    "two blocks": (lambda self, g: one(g.blocks(8) + g.blocks(16)), None, "blocks of 8"),
    "huge block": (lambda self, g: g.blocks(10**6), None, "1 to 65536"),
    "odd reduction": (lambda self, g: concat(code=reduce(len, g)), None, "min, max or sum"),
    "reduced twice": (lambda self, g: one(reduce(max, reduce(max, g))), None, "not one value"),
    "a number": (lambda self, g: concat(code=where(g, 1, 0)), None, "must be a condition"),
    "a condition": (lambda self, g: concat(code=(g > 0.0) + 1), None, "must be a number"),
    "a loop": (lambda self, g: one(sum(x for x in g)), None, "cannot be iterated"),
    "an item": (lambda self, g: one(g[0]), None, "cannot be indexed"),
    "its length": (lambda self, g: one(g / len(g)), None, "number of values"),
    "math": (lambda self, g: one(math.sqrt(g)), None, "gradwire.lang.ops"),
    "a range": (lambda self, g: one(g + len(range(g))), None, "gradwire.lang.ops"),
    "torch": (lambda self, g: one(torch.abs(g)), None, "torch's abs"),
    "torch in Python": (lambda self, g: one(torch.nn.functional.relu(g)), None, "torch's relu"),
    "a tensor": (lambda self, g: one(torch.ones(3) * g), None, "gradwire.lang.ops"),
    "a string": (lambda self, g: concat(code=g + "1"), None, "not str"),
    "width": (lambda self, g: concat(code=uint(9, g)), None, "1 to 8 bits"),
    "rounding": (
        lambda self, g: one(ops.bf16(g, toward="zero")),
        None,
        "'nearest', 'down' or 'up'",
    ),
    "scope": (lambda self, g: one(g + random("row")), None, "'element' or"),
    "names": (lambda self, g: concat(sign=g), lambda self, code: code, "payload has"),
    "nothing": (lambda self, g: one(g), lambda self, code: None, "return elements"),
    "decoded condition": (lambda self, g: one(g), lambda self, code: code > 0.0, "not conditions"),
    "one value": (
        lambda self, g: concat(code=reduce(max, g)),
        lambda self, code: code,
        "one value per element",
    ),
    "decoder reduces": (
        lambda self, g: one(g),
        lambda self, code: code - reduce(min, code * 1.0),
        "cannot reduce",
    ),
    "decoder draws alone": (
        lambda self, g: one(g),
        lambda self, code: code + random(),
        "shared=NAME",
    ),
    "decoder draws otherwise": (
        lambda self, g: one(g + random()),
        lambda self, code: code + random("block"),
        "one per block",
    ),
    "decoder draws more": (
        lambda self, g: one(g + random()),
        lambda self, code: code + random() + random(),
        "random() number 2 of decode",
    ),
    "scatter in encode": (
        lambda self, g: one(g - scatter(gather(g, largest(g)), largest(g))),
        None,
        "belongs in decode",
    ),
    "scatter before the end": (
        lambda self, g: concat(chosen=largest(g)),
        lambda self, chosen: scatter(1.0, chosen) * 2.0,
        "must come last",
    ),
    "gathered codes": (
        lambda self, g: concat(code=uint(4, g), chosen=largest(g)),
        lambda self, code, chosen: scatter(gather(code, chosen), chosen),
        "send the rest as entries",
    ),
    "entries first": (
        lambda self, g: concat(value=fp16(gather(g, largest(g))), chosen=largest(g)),
        lambda self, value, chosen: scatter(value, chosen),
        "before its entries",
    ),
    "a selection as a number": (lambda self, g: one(uint(4, largest(g))), None, "gather(x"),
    "elements and entries": (lambda self, g: one(g + gather(g, largest(g))), None, "do not mix"),
    "no size": (lambda self, g: concat(c=topk(g, 5)), None, "size is share"),
    "no rank": (lambda self, g: one(g - sort(g)[share(0.1, 0)]), None, "at least 1"),
    "a huge sample": (lambda self, g: one(g - sort(g, 2**64)[share(0.1)]), None, "1 to 2147483647"),
    "a huge window": (lambda self, g: one(g - sort(g, 10**400)[share(1)]), None, "1 to 2147483647"),
    "a huge share": (
        lambda self, g: concat(c=topk(g, share(0.1, 2**31))),
        None,
        "least=2147483648",
    ),
    "a huge matrix": (
        lambda self, g: one(ops.elements(ops.matrix(g, 10**30))),
        None,
        "columns=10000",
    ),
    "a huge rank": (
        lambda self, g: concat(p=ops.decomp(ops.matrix(g, 8), 10**30)[0]),
        None,
        "1 to 2147483647",
    ),
    "a value as inverse": (lambda self, g: one(ops.rotate(g, g)), None, "use True or False"),  # type: ignore[arg-type]
    "text as inverse": (lambda self, g: one(ops.rotate(g, "no")), None, "inverse='no': use True"),  # type: ignore[arg-type]
    "an array as full": (
        lambda self, g: one(ops.rotate(g, full=np.arange(3))),  # type: ignore[arg-type]
        None,
        "full=array([0, 1, 2]): use",
    ),
    "a truth as share": (lambda self, g: concat(c=topk(g, share(True))), None, "not bool"),
    "stored twice": (lambda self, g: twice(uint(4, g)), lambda self, a, b: a, "has two names"),
    "a matrix": (
        lambda self, g: concat(code=fp32(ops.matrix(g, 8))),
        None,
        "factor of decomp",
    ),
    "no flag": (lambda self, g: concat(code=ops.keep(uint(2, g), g)), None, "uint(1) of blocks"),
    "fraction": (lambda self, g: concat(c=topk(g, share(2.0))), None, "0 to 1"),
    "topk of blocks": (lambda self, g: concat(c=topk(g.blocks(8), share(0.1))), None, "blocks(8)"),
    "topk of results of blocks": (
        lambda self, g: concat(c=topk(ops.abs(g - reduce(max, g) * g.blocks(8)), share(1))),
        None,
        "before blocks()",
    ),
    "filter of blocks": (
        lambda self, g: concat(c=ops.filter(g.blocks(8) > 0.0, share(0.1))),
        None,
        "blocks(8)",
    ),
    "sort of blocks": (
        lambda self, g: one(g - sort(g.blocks(8))[share(0.1)]),
        None,
        "blocks(8)",
    ),
    "matrix of blocks": (
        lambda self, g: concat(code=ops.decomp(ops.matrix(g.blocks(8), 8), 2)[0]),
        None,
        "blocks(8)",
    ),
    "a root": (lambda self, g: one(g**0.5), None, "write sqrt(x)"),
    "a negative power": (lambda self, g: one(g**-1), None, "inverse(x)"),
    "a power of a number": (lambda self, g: one(2**g), None, "no operator **"),
    "a remainder": (lambda self, g: one(g % 2), None, "no operator %"),
    "a product of matrices": (lambda self, g: one(g @ g), None, "no operator @"),
    "Python's rounding": (lambda self, g: one(round(g)), None, "no operator round"),
    "a method": (lambda self, g: one(g.abs()), None, "a symbol has no abs"),
    "Python's truth": (lambda self, g: one(True & (g > 0.0)), None, "not bool"),
    "numpy": (lambda self, g: one(np.abs(g)), None, "numpy's absolute"),
    "an array": (lambda self, g: one(np.ones(3) * g), None, "not ndarray"),
    "a huge number": (lambda self, g: one(g * 10**400), None, "too large"),
    "a table of text": (lambda self, g: one(table(["a"])[0] + g), None, "not str"),
    "no table": (lambda self, g: one(table(3.0)[0] + g), None, "a tuple of 1 to"),
    "an empty table": (lambda self, g: one(table([])[0] + g), None, "a tuple of 1 to"),
    "looked up in nothing": (lambda self, g: one(ops.lookup((), g)), None, "a tuple of 1 to"),
    "looked up in None": (lambda self, g: one(ops.lookup(None, g)), None, "a tuple of 1 to"),  # type: ignore[arg-type]
    "looked up in text": (lambda self, g: one(ops.lookup("a", g)), None, "not str"),  # type: ignore[arg-type]
    "a number is counted": (lambda self, g: one(g + ops.count(3)), None, "not a number"),  # type: ignore[arg-type]
    "a number is kept": (lambda self, g: concat(code=ops.keep(3, g)), None, "codes of elements"),  # type: ignore[arg-type]
    "a number is mapped": (lambda self, g: one(map(3, g)), None, "takes a function"),  # type: ignore[arg-type]
    "reduced by a list": (lambda self, g: one(g - reduce([], g)), None, "min, max or sum"),
    "an array as scope": (lambda self, g: one(g + random(np.arange(3))), None, "'element' or"),  # type: ignore[arg-type]
    "a value as origin": (lambda self, g: one(g + ops.index(g)), None, "'parameter' or 'block'"),
    "an array as direction": (
        lambda self, g: one(ops.bf16(g, toward=np.arange(3))),  # type: ignore[arg-type]
        None,
        "'nearest', 'down' or 'up'",
    ),
    "a table of one number": (lambda self, g: one(table(np.array(1.0))[0] + g), None, "a tuple of"),  # type: ignore[arg-type]
    "looked up in a number": (
        lambda self, g: one(ops.lookup(torch.tensor(1.0), g)),
        None,
        "a tuple",
    ),  # type: ignore[arg-type]
    "looked up in a dict": (lambda self, g: one(ops.lookup({3: 1, 1: 2}, g)), None, "a tuple of"),  # type: ignore[dict-item]
    "looked up in a set": (lambda self, g: one(ops.lookup({3.0, 1.0}, g)), None, "a tuple of"),  # type: ignore[arg-type]
    "looked up in many": (lambda self, g: one(ops.lookup([g] * 257, g)), None, "numbers, not more"),
    "text among two": (lambda self, g: one(ops.lookup([1.0, 2.0], "0")), None, "not str"),  # type: ignore[arg-type,list-item]
    "text of one": (lambda self, g: one(ops.lookup([1.0], "0")), None, "not str"),  # type: ignore[arg-type,list-item]
    "a condition of one": (lambda self, g: one(ops.lookup([1.0], g > 0)), None, "must be a number"),  # type: ignore[list-item]
    "a selection of one": (
        lambda self, g: one(ops.lookup([1.0], largest(g))),  # type: ignore[list-item]
        None,
        "must be a number, not selection",
    ),
    "the codec's name": (
        lambda self, g: concat(self=g),
        lambda self, **fields: fields["self"],
        "field self: decode has its codec by that name",
    ),
    "a list as scope": (lambda self, g: one(g + random([])), None, "'element' or"),  # type: ignore[arg-type]
    "no text as name": (lambda self, g: one(g + random(shared="\ud800")), None, "is a name"),
    "no name": (lambda self, g: one(g + random(shared=3)), None, "is a name"),  # type: ignore[arg-type]
    "a power's remainder": (lambda self, g: one(pow(g, 2, 3)), None, "no operator %"),
    "a text of a symbol": (lambda self, g: one(g + len(f"{g:.1f}")), None, "not a number"),
    "an item is set": (lambda self, g: one(g.__setitem__(0, 1)), None, "no operator x[...] ="),
    "long table": (lambda self, g: one(ops.table([0.0] * 257)[0] + g), None, "1 to 256 numbers"),
}


def misplaced(
    cases: Mapping[str, tuple[Any, Any, str]], path: str, also: Container[int] = ()
) -> list[str]:
    """The cases whose error is another, or does not point to the case's own lambdas in a file.

    `also`: other lines that errors may point to.
    """
    lines, faults = [line.lstrip() for line in linecache.getlines(path)], []
    for name, (*methods, message) in cases.items():
        codec = make(*methods)
        error = caught(lambda codec=codec: layout(codec))  # type: ignore[misc]
        if not isinstance(error, LanguageError) or message not in str(error):
            faults.append(f"{name}: {error!r}, not {message!r}")
            continue
        where, line = error.location.rsplit(":", 1)
        begin = next(i for i, text in enumerate(lines, 1) if text.startswith(f'"{name}":'))
        near = begin <= int(line) <= begin + 4 or int(line) in also
        if where != path or not near or not str(error).startswith(error.location):
            faults.append(f"{name}: points to {error.location}, not to line {begin}")
    return faults


def test_errors_point_to_the_source() -> None:
    assert misplaced(CASES, __file__) == []


def test_numbers_of_numpy_and_powers_work() -> None:
    def numpys(self: Any, g: Any) -> Any:
        three, half = np.int64(3), np.float32(0.5)
        x = g.blocks(np.int32(8))
        return concat(
            a=half * x + np.float64(2.0), b=three - x, c=where(half < x, half, x), d=x**2,
            e=x ** np.int64(3), code=uint(np.uint8(4), x), top=reduce(max, x),
            chosen=topk(g, share(half, three)),
        )  # fmt: skip

    def pythons(self: Any, g: Any) -> Any:
        x = g.blocks(8)
        return concat(
            a=0.5 * x + 2.0, b=3 - x, c=where(x > 0.5, 0.5, x), d=x * x, e=x * x * x,
            code=uint(4, x), top=reduce(max, x), chosen=topk(g, share(0.5, 3)),
        )  # fmt: skip

    def decoded(self: Any, code: Any, **rest: Any) -> Any:
        return code + 0.0

    a, b = (show(make(method, decoded), "ir") for method in (numpys, pythons))
    assert a == b


def test_one_or_two_numbers_are_looked_up_as_more_are() -> None:
    @dataclass(frozen=True)
    class Looked(Codec):
        numbers: tuple[Any, ...]

        def encode(self, g: Any) -> Any:
            known: Any = 1.5
            return concat(a=ops.lookup(self.numbers, g), b=ops.lookup(self.numbers, known) * g)

        def decode(self, a: Any, b: Any) -> Any:
            return a + b

    values = torch.tensor([math.nan, -1.0, 0.5, 1.0, 7.0, math.inf])
    for numbers in ((3.0,), (3.0, 5.0)):
        few, many = (Looked(numbers), Looked(numbers + numbers[-1:] * 2))
        assert torch.equal(*(encode(codec, values, target="eager") for codec in (few, many)))


def test_a_list_is_no_option_and_a_key_has_64_bits() -> None:
    @dataclass(frozen=True)
    class Levels(Codec):
        levels: Any

        def encode(self, g: Any) -> Any:
            return concat(code=uint(1, g > self.levels[0]))

        def decode(self, code: Any) -> Any:
            return code + 0.0

    for use in (layout, hash, lambda codec: encode(codec, torch.ones(3))):
        with pytest.raises(ConfigError, match=r"^Levels: .*levels=\[1\.0\].* a tuple"):
            use(Levels([1.0]))
    codec = Levels((1.0,))
    payload = encode(codec, torch.ones(3), key=2**64 - 1, target="eager")
    for key in (-1, 2**64, 1.5, "a", None):
        with pytest.raises(ConfigError, match=r"^key=.*: give a whole number"):
            encode(codec, torch.ones(3), key=key)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"^key=.*: give a whole number"):
            decode(codec, payload, 3, key=key)  # type: ignore[arg-type]


def test_operators_work_inside_codecs_only() -> None:
    with pytest.raises(LanguageError, match="only inside") as caught:
        random()
    # as a process pool gives it to the process that waits
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.location) == (str(caught.value), caught.value.location)


def test_map_takes_constants_and_several_values() -> None:
    @dataclass(frozen=True)
    class Twice(Codec):
        def encode(self, g: Any) -> Any:
            return concat(a=map(lambda x, y: x + y, g, g))

        def decode(self, a: Any) -> Any:
            return map(lambda x: x * 0.5, a)

    assert layout(Twice()).nbytes(10) == 40


def test_encode_sum_must_agree_with_encode() -> None:
    @dataclass(frozen=True)
    class Blocks(Codec):
        def encode(self, g: Any) -> Any:
            return concat(low=reduce(min, g.blocks(64)), code=uint(1, g))

        def encode_sum(self, g: Any) -> Any:
            return concat(low=reduce(min, g.blocks(128)), code=uint(1, g))

        def decode(self, low: Any, code: Any) -> Any:
            return low + code

    with pytest.raises(LanguageError, match="blocks of the same size"):
        layout(Blocks())


def test_all_traces_share_one_table() -> None:
    @dataclass(frozen=True)
    class Once(Codec):
        def encode(self, g: Any) -> Any:
            return concat(value=fp32(g * table([1.0, 2.0, 3.0])[2]))

        def encode_sum(self, g: Any) -> Any:
            return concat(value=fp32(g))

        def decode(self, value: Any) -> Any:
            return map(lambda v: v, value)

    for target in ("eager", "c"):
        assert (
            encode(Once(), torch.ones(3), target=target).view(torch.float32).tolist() == [3.0] * 3
        )


def test_equal_nodes_of_another_codec_are_not_blamed() -> None:
    layout(TopK())

    @dataclass(frozen=True)
    class Swapped(Codec):
        def encode(self, g: Any) -> Any:
            chosen = topk(ops.abs(g), share(0.01))
            return concat(value=fp16(gather(g, chosen)), chosen=chosen)

        def decode(self, value: Any, chosen: Any) -> Any:
            return scatter(value, chosen)

    with pytest.raises(LanguageError) as caught:
        layout(Swapped())
    assert caught.value.location.startswith(__file__)


def test_a_condition_of_a_block_applies_to_its_entries() -> None:
    @dataclass(frozen=True)
    class Signed(Codec):
        def encode(self, g: Any) -> Any:
            chosen = topk(ops.abs(g), share(0.1))
            scale = fp32(reduce(max, g.blocks(64)))
            return concat(scale=scale, chosen=chosen, sign=uint(1, gather(g > 0.0, chosen)))

        def decode(self, scale: Any, chosen: Any, sign: Any) -> Any:
            return scatter(where((scale > 0.0) & (sign > 0.0), scale, -scale), chosen)

    values = torch.randn(500)
    payloads = [encode(Signed(), values, target=t) for t in ("eager", "c")]
    assert torch.equal(*payloads)
    assert torch.equal(*(decode(Signed(), payloads[0], 500, target=t) for t in ("eager", "c")))


def test_a_name_or_a_class_is_not_a_codec() -> None:
    payload = torch.zeros(4, dtype=torch.uint8)
    remedies: dict[Any, str] = {
        "topk": r"gradwire\.codecs\.get\('topk'\)",
        TopK: r"TopK\(\.\.\.\)",
        3: "a codec object",
    }
    for codec, remedy in remedies.items():
        for call, *more in ((encode, torch.ones(4)), (decode, payload, 4), (layout,), (show, "ir")):
            with pytest.raises(ConfigError, match=f"^codec=.*: give .*{remedy}"):
                call(codec, *more)


def test_memory_of_another_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="meta"):
        encode(TopK(), torch.ones(4, device="meta"), target="c")
