# ruff: noqa: C417, F405
"""An ill-formed codec gives a LanguageError that names the line in its own file."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from gradwire.codecs import TopK
from gradwire.errors import ConfigError
from gradwire.lang import Codec, LanguageError, decode, encode, layout, ops, show
from gradwire.lang.ops import *  # noqa: F403
from ranks import caught


def plain(**fields: Any) -> Any:
    return next(iter(fields.values())) * 1.0


def make(
    encode: Callable[..., Any], decode: Callable[..., Any] = plain, **more: Callable[..., Any]
) -> Codec:
    """A codec of these functions."""
    given = {"encode": encode, "decode": decode, **more}
    methods = {name: staticmethod(function) for name, function in given.items()}
    return dataclass(frozen=True)(type("Broken", (Codec,), methods))()


def one(g: Any) -> Any:
    return concat(code=uint(1, where(g > 0.0, 1, 0)))


def twice(code: Any) -> Any:
    return concat(a=code, b=code)


def largest(g: Any) -> Any:
    return topk(g, share(0.1))


def asserted(g: Any) -> Any:
    assert g is None
    return one(g)


def endless(g: Any) -> Any:
    return endless(-g)


def raising(error: BaseException) -> Callable[..., Any]:
    def encode(g: Any) -> Any:
        raise error

    return encode


# (part of the message, encode, decode); decode is `plain` by default
CASES: list[tuple[Any, ...]] = [
    ("must return concat", lambda g: g),
    ("needs a field", lambda g: concat()),
    ("use where", lambda g: one(g) if g > 0.0 else one(-g)),
    ("blocks of 8", lambda g: one(g.blocks(8) + g.blocks(16))),
    ("1 to 65536", lambda g: g.blocks(10**6)),
    ("min, max or sum", lambda g: concat(code=reduce(len, g))),
    ("not one value", lambda g: one(reduce(max, reduce(max, g)))),
    ("must be a condition", lambda g: concat(code=where(g, 1, 0))),
    ("must be a number", lambda g: concat(code=(g > 0.0) + 1)),
    ("cannot be iterated", lambda g: one(sum(x for x in g))),
    ("cannot be indexed", lambda g: one(g[0])),
    ("number of values", lambda g: one(g / len(g))),
    ("gradwire.lang.ops", lambda g: one(math.sqrt(g))),
    ("gradwire.lang.ops", lambda g: one(g + len(range(g)))),
    ("torch's abs", lambda g: one(torch.abs(g))),
    ("torch's relu", lambda g: one(torch.nn.functional.relu(g))),
    ("gradwire.lang.ops", lambda g: one(torch.ones(3) * g)),
    ("not str", lambda g: concat(code=g + "1")),
    ("1 to 8 bits", lambda g: concat(code=uint(9, g))),
    ("'nearest', 'down' or 'up'", lambda g: one(ops.bf16(g, toward="zero"))),
    ("'element' or", lambda g: one(g + random("row"))),
    ("payload has", lambda g: concat(sign=g), lambda code: code),
    ("return elements", one, lambda code: None),
    ("not conditions", one, lambda code: code > 0.0),
    ("one value per element", lambda g: concat(code=reduce(max, g)), lambda code: code),
    ("cannot reduce", one, lambda code: code - reduce(min, code * 1.0)),
    ("shared=NAME", one, lambda code: code + random()),
    ("one per block", lambda g: one(g + random()), lambda code: code + random("block")),
    (
        "random() number 2 of decode",
        lambda g: one(g + random()),
        lambda code: code + random() + random(),
    ),
    ("belongs in decode", lambda g: one(g - scatter(gather(g, largest(g)), largest(g)))),
    (
        "must come last",
        lambda g: concat(chosen=largest(g)),
        lambda chosen: scatter(1.0, chosen) * 2.0,
    ),
    (
        "send the rest as entries",
        lambda g: concat(code=uint(4, g), chosen=largest(g)),
        lambda code, chosen: scatter(gather(code, chosen), chosen),
    ),
    (
        "before its entries",
        lambda g: concat(value=fp16(gather(g, largest(g))), chosen=largest(g)),
        lambda value, chosen: scatter(value * 1.0, chosen),
    ),
    ("gather(x", lambda g: one(uint(4, largest(g)))),
    ("do not mix", lambda g: one(g + gather(g, largest(g)))),
    ("size is share", lambda g: concat(c=topk(g, 5))),
    ("at least 1", lambda g: one(g - sort(g)[share(0.1, 0)])),
    ("1 to 2147483647", lambda g: one(g - sort(g, 2**64)[share(0.1)])),
    ("1 to 2147483647", lambda g: one(g - sort(g, 10**400)[share(1)])),
    ("least=2147483648", lambda g: concat(c=topk(g, share(0.1, 2**31)))),
    ("columns=10000", lambda g: one(ops.elements(ops.matrix(g, 10**30)))),
    ("1 to 2147483647", lambda g: concat(p=ops.decomp(ops.matrix(g, 8), 10**30)[0])),
    ("use True or False", lambda g: one(ops.rotate(g, g))),
    ("inverse='no': use True", lambda g: one(ops.rotate(g, "no"))),
    ("full=array([0, 1, 2]): use", lambda g: one(ops.rotate(g, full=np.arange(3)))),
    ("not bool", lambda g: concat(c=topk(g, share(True)))),
    ("has two names", lambda g: twice(uint(4, g)), lambda a, b: a),
    ("factor of decomp", lambda g: concat(code=fp32(ops.matrix(g, 8)))),
    ("uint(1) of blocks", lambda g: concat(code=ops.keep(uint(2, g), g))),
    ("0 to 1", lambda g: concat(c=topk(g, share(2.0)))),
    ("blocks(8)", lambda g: concat(c=topk(g.blocks(8), share(0.1)))),
    (
        "before blocks()",
        lambda g: concat(c=topk(ops.abs(g - reduce(max, g) * g.blocks(8)), share(1))),
    ),
    ("blocks(8)", lambda g: concat(c=ops.filter(g.blocks(8) > 0.0, share(0.1)))),
    ("blocks(8)", lambda g: one(g - sort(g.blocks(8))[share(0.1)])),
    ("blocks(8)", lambda g: concat(code=ops.decomp(ops.matrix(g.blocks(8), 8), 2)[0])),
    ("write sqrt(x)", lambda g: one(g**0.5)),
    ("inverse(x)", lambda g: one(g**-1)),
    ("no operator **", lambda g: one(2**g)),
    ("no operator %", lambda g: one(g % 2)),
    ("no operator @", lambda g: one(g @ g)),
    ("no operator round", lambda g: one(round(g))),
    ("a symbol has no abs", lambda g: one(g.abs())),
    ("not bool", lambda g: one(True & (g > 0.0))),
    ("numpy's absolute", lambda g: one(np.abs(g))),
    ("not ndarray", lambda g: one(np.ones(3) * g)),
    ("too large", lambda g: one(g * 10**400)),
    ("not str", lambda g: one(table(["a"])[0] + g)),
    ("a tuple of 1 to", lambda g: one(table(3.0)[0] + g)),
    ("a tuple of 1 to", lambda g: one(table([])[0] + g)),
    ("a tuple of 1 to", lambda g: one(ops.lookup((), g))),
    ("a tuple of 1 to", lambda g: one(ops.lookup(None, g))),
    ("not str", lambda g: one(ops.lookup("a", g))),
    ("not a number", lambda g: one(g + ops.count(3))),
    ("codes of elements", lambda g: concat(code=ops.keep(3, g))),
    ("takes a function", lambda g: one(map(3, g))),
    ("min, max or sum", lambda g: one(g - reduce([], g))),
    ("'element' or", lambda g: one(g + random(np.arange(3)))),
    ("'parameter' or 'block'", lambda g: one(g + ops.index(g))),
    ("'nearest', 'down' or 'up'", lambda g: one(ops.bf16(g, toward=np.arange(3)))),
    ("a tuple of", lambda g: one(table(np.array(1.0))[0] + g)),
    ("a tuple", lambda g: one(ops.lookup(torch.tensor(1.0), g))),
    ("a tuple of", lambda g: one(ops.lookup({3: 1, 1: 2}, g))),
    ("a tuple of", lambda g: one(ops.lookup({3.0, 1.0}, g))),
    ("numbers, not more", lambda g: one(ops.lookup([g] * 257, g))),
    ("not str", lambda g: one(ops.lookup([1.0, 2.0], "0"))),
    ("not str", lambda g: one(ops.lookup([1.0], "0"))),
    ("must be a number", lambda g: one(ops.lookup([1.0], g > 0))),
    ("must be a number, not selection", lambda g: one(ops.lookup([1.0], largest(g)))),
    ("'element' or", lambda g: one(g + random([]))),
    ("is a name", lambda g: one(g + random(shared="\ud800"))),
    ("is a name", lambda g: one(g + random(shared=3))),
    ("no operator %", lambda g: one(pow(g, 2, 3))),
    ("not a number", lambda g: one(g + len(f"{g:.1f}"))),
    ("no operator x[...] =", lambda g: one(g.__setitem__(0, 1))),
    ("1 to 256 numbers", lambda g: one(ops.table([0.0] * 257)[0] + g)),
    ("uint1: holds 0 to 1, not the constant -1", lambda g: concat(c=uint(1, where(g > 0, -1, 7)))),
    ("not the constant 2", lambda g: concat(code=uint(1, where(g > 0, 1, where(g < 0, 2, g))))),
    ("trit: holds 0 to 2, not the constant nan", lambda g: concat(code=ops.trit(math.nan))),
    ("not the constant 5", lambda g: concat(code=uint(2, ops.lookup([1, 2, 5], g)))),
    (
        "uint2: holds 0 to 3, not the constant 9",
        lambda g: concat(code=uint(2, ops.lookup(table([0, 1, 2, 9]), where(g > 0, 3, 0)))),
    ),
    (
        "trit: holds 0 to 2, not the constant -1",
        lambda g: concat(code=ops.trit(ops.lookup(table([-1, 0, 1]), where(g > 0, 2, 0)))),
    ),
    ("not the constant 7", one, lambda code: code + uint(2, where(code > 0, *table([7, 0])))),
    ("not the constant 4", one, lambda code: code + uint(2, 4)),
    ("a division by 0", lambda g: one(g / 0)),
    ("a division by 0", lambda g: one(reduce(max, g) / np.float32(-0.0) + g)),
    ("NameError: name 'nothing' is not", lambda g: one(map(lambda v: v * nothing, g))),
    ("NameError: name 'nothing' is not", one, lambda code: code * nothing),
    ("TypeError: where() missing 2 required", lambda g: one(where(g))),
    ("ValueError: could not convert", lambda g: one(g * float("x"))),
    ("ValueError: ", lambda g: one(g * math.sqrt(-1))),
    (": AssertionError", asserted),
    ("a symbol has no mean", lambda g: one(g - np.mean(g))),
    ("LinAlgError: Singular matrix", lambda g: one(g * np.linalg.inv(np.zeros((2, 2)))[0, 0])),
    ("'int' object has no attribute 'dim'", lambda g: one(torch.nn.functional.dropout2d(3) + g)),
    ("takes min, max or sum, not <lambda>", lambda g: one(g - reduce(lambda a, b: a, g))),
]


def misplaced(
    cases: Iterable[tuple[Any, ...]], also: Iterable[Callable[..., Any]] = ()
) -> list[str]:
    """The cases whose error is another, or points to no line of the case's own functions.

    `also`: other functions to which it may point.
    """
    faults = []
    for message, *methods in cases:
        error = caught(lambda methods=methods: layout(make(*methods)))  # type: ignore[misc]
        if not isinstance(error, LanguageError) or message not in str(error):
            faults.append(f"{message!r}: {error!r}")
            continue
        file, line = error.location.rsplit(":", 1)
        codes = [f.__code__ for f in (*methods, *also) if f is not one]
        lines = {at for c in codes if c.co_filename == file for _, _, at in c.co_lines()}
        if int(line) not in lines or not str(error).startswith(error.location):
            faults.append(f"{message!r}: points to {error.location}")
    return faults


def test_errors_point_to_the_source() -> None:
    assert misplaced(CASES) == []


def test_errors_that_are_not_the_codecs_stay() -> None:
    for error in (KeyboardInterrupt(), MemoryError(), ConfigError("its own")):
        with pytest.raises(type(error)) as found:
            layout(make(raising(error)))
        assert found.value is error
    with pytest.raises(RecursionError):
        layout(make(endless))


def test_numbers_of_numpy_and_powers_work() -> None:
    def numpys(g: Any) -> Any:
        three, half = np.int64(3), np.float32(0.5)
        x = g.blocks(np.int32(8))
        return concat(
            a=half * x + np.float64(2.0), b=three - x, c=where(half < x, half, x), d=x**2,
            e=x ** np.int64(3), code=uint(np.uint8(4), x), top=reduce(max, x),
            chosen=topk(g, share(half, three)),
        )  # fmt: skip

    def pythons(g: Any) -> Any:
        x = g.blocks(8)
        return concat(
            a=0.5 * x + 2.0, b=3 - x, c=where(x > 0.5, 0.5, x), d=x * x, e=x * x * x,
            code=uint(4, x), top=reduce(max, x), chosen=topk(g, share(0.5, 3)),
        )  # fmt: skip

    def decoded(code: Any, **rest: Any) -> Any:
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


@dataclass(frozen=True)
class Named(Codec):
    def encode(self, g: Any) -> Any:
        return concat(self=g)

    def decode(self, **fields: Any) -> Any:
        return fields["self"]


def of(block: int) -> Callable[..., Any]:
    return lambda g: concat(low=reduce(min, g.blocks(block)), code=uint(1, g))


def test_names_and_blocks_must_agree() -> None:
    with pytest.raises(LanguageError, match="field self: decode has its codec by that name"):
        layout(Named())
    with pytest.raises(LanguageError, match="blocks of the same size"):
        layout(make(of(64), lambda low, code: low + code, encode_sum=of(128)))


def test_operators_work_inside_codecs_only() -> None:
    with pytest.raises(LanguageError, match="only inside") as caught:
        random()
    # as a process pool gives it to the process that waits
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.location) == (str(caught.value), caught.value.location)


def test_map_takes_constants_and_several_values() -> None:
    twice = make(
        lambda g: concat(a=map(lambda x, y: x + y, g, g)), lambda a: map(lambda x: x * 0.5, a)
    )
    assert layout(twice).nbytes(10) == 40


def test_all_traces_share_one_table() -> None:
    once = make(
        lambda g: concat(value=fp32(g * table([1.0, 2.0, 3.0])[2])),
        lambda value: map(lambda v: v, value),
        encode_sum=lambda g: concat(value=fp32(g)),
    )
    for target in ("eager", "c"):
        sent = encode(once, torch.ones(3), target=target)
        assert sent.view(torch.float32).tolist() == [3.0] * 3


def test_equal_nodes_of_another_codec_are_not_blamed() -> None:
    layout(TopK())

    def swapped(g: Any) -> Any:
        chosen = topk(ops.abs(g), share(0.01))
        return concat(value=fp16(gather(g, chosen)), chosen=chosen)

    with pytest.raises(LanguageError) as caught:
        layout(make(swapped, lambda value, chosen: scatter(value * 1.0, chosen)))
    assert caught.value.location.startswith(__file__)


def test_a_condition_of_a_block_applies_to_its_entries() -> None:
    def signed(g: Any) -> Any:
        chosen = topk(ops.abs(g), share(0.1))
        scale = fp32(reduce(max, g.blocks(64)))
        return concat(scale=scale, chosen=chosen, sign=uint(1, gather(g > 0.0, chosen)))

    def decoded(scale: Any, chosen: Any, sign: Any) -> Any:
        return scatter(where((scale > 0.0) & (sign > 0.0), scale, -scale), chosen)

    codec, values = make(signed, decoded), torch.randn(500)
    payloads = [encode(codec, values, target=t) for t in ("eager", "c")]
    assert torch.equal(*payloads)
    assert torch.equal(*(decode(codec, payloads[0], 500, target=t) for t in ("eager", "c")))
