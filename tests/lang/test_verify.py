"""An ill-formed codec gives a LanguageError that names the line of its own file."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from gradwire.lang import Codec, LanguageError, layout, ops
from gradwire.lang.ops import concat, map, random, reduce, uint, where


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


# name -> (encode, decode, what the message says)
CASES: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, str]] = {
    "no concat": (lambda self, g: g, None, "must return concat"),
    "no fields": (lambda self, g: concat(), None, "needs a field"),
    "truth value": (lambda self, g: one(g) if g > 0.0 else one(-g), None, "use where"),
    "two blocks": (lambda self, g: one(g.blocks(8) + g.blocks(16)), None, "blocks of 8"),
    "huge block": (lambda self, g: g.blocks(10**6), None, "1 to 65536"),
    "odd reduction": (lambda self, g: concat(code=reduce(len, g)), None, "min, max or sum"),
    "reduced twice": (lambda self, g: one(reduce(max, reduce(max, g))), None, "nothing to reduce"),
    "a number": (lambda self, g: concat(code=where(g, 1, 0)), None, "must be a condition"),
    "a condition": (lambda self, g: concat(code=(g > 0.0) + 1), None, "must be a number"),
    "a string": (lambda self, g: concat(code=g + "1"), None, "not str"),
    "width": (lambda self, g: concat(code=uint(9, g)), None, "1 to 8 bits"),
    "rounding": (lambda self, g: one(ops.bf16(g, toward="zero")), None, "nearest, down"),
    "scope": (lambda self, g: one(g + random("row")), None, "'element' or"),
    "names": (lambda self, g: concat(sign=g), lambda self, code: code, "payload has"),
    "nothing": (lambda self, g: one(g), lambda self, code: None, "return elements"),
    "decoded condition": (lambda self, g: one(g), lambda self, code: code > 0.0, "not conditions"),
    "one value": (
        lambda self, g: concat(code=reduce(max, g)),
        lambda self, code: code,
        "one value an element",
    ),
    "decoder reduces": (
        lambda self, g: one(g),
        lambda self, code: code - reduce(min, code * 1.0),
        "cannot reduce",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_errors_point_to_the_source(name: str) -> None:
    encode, decode, message = CASES[name]
    with pytest.raises(LanguageError, match=re.escape(message)) as caught:
        layout(make(encode, decode))
    path, line = caught.value.location.rsplit(":", 1)
    assert path == __file__
    assert str(caught.value).startswith(caught.value.location)
    # the line lies within the case's own lambdas
    begin = next(
        i for i in range(1, 400) if linecache.getline(path, i).lstrip().startswith(f'"{name}":')
    )
    assert begin <= int(line) <= begin + 3


def test_operators_work_inside_codecs_only() -> None:
    with pytest.raises(LanguageError, match="only inside"):
        random()


def test_map_takes_constants_and_several_values() -> None:
    @dataclass(frozen=True)
    class Twice(Codec):
        def encode(self, g: Any) -> Any:
            return concat(a=map(lambda x, y: x + y, g, g))

        def decode(self, a: Any) -> Any:
            return map(lambda x: x * 0.5, a)

    assert layout(Twice()).nbytes(10) == 40
