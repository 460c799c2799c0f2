"""The contract that a codec fulfils: two methods, run once each on symbols."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from gradwire.errors import ConfigError
from gradwire.lang.trace import Payload, Value

if TYPE_CHECKING:
    from typing_extensions import Self


class Codec:
    """Base of every codec: a frozen dataclass whose fields are its options.

    `encode` takes the elements as a symbol and returns `concat(...)`; `decode` takes the fields of
    that payload by name and returns the elements. Both are traced, so they run before any number
    exists, use the operators of `gradwire.lang.ops`, and may branch on the codec's own options.
    Where `encode` has a second parameter, `latest`, that is the new gradient alone, while the first
    has what error feedback added to it.
    Options are checked in `__post_init__`, which raises `ConfigError`. A class that is
    not decorated so raises it when its first codec is made.
    """

    def __new__(cls, *args: object, **options: object) -> Self:
        # Kernels are looked up by a codec, and ranks compare its text: both come of its options.
        made = vars(cls).get("__dataclass_params__")
        own = "__init__" in vars(cls) or bool(inspect.get_annotations(cls))
        by_options = cls.__hash__ not in (None, object.__hash__)
        if not by_options or (own and not (made and made.frozen)):
            raise ConfigError(
                f"{cls.__name__}: a codec is a frozen dataclass, its fields are its options: write "
                f"@dataclass(frozen=True) above class {cls.__name__}, fields in place of __init__"
            )
        return super().__new__(cls)

    def encode(self, g: Value) -> Payload:
        """The payload of the elements `g`."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode")

    def encode_sum(self, g: Value) -> Payload:
        """The payload of a sum of decoded payloads, at the rank that reduces them.

        As `encode` unless a codec says otherwise: one that scales what it picks must do so once.
        """
        return self.encode(g)

    def expected_entries(self, numel: int) -> float | None:
        """How many of `numel` values are selected, or stand in kept blocks, on average.

        None: as many as there is room for. Formulas and the simulator count bytes with it where
        that number depends on data; what is sent does not depend on it.
        """
        return None

    def decode(self, *args: Any, **fields: Any) -> Value:
        """The elements, from the payload's fields."""
        raise NotImplementedError(f"{type(self).__name__} defines no decode")


def check_codec(codec: object, otherwise: str = "") -> None:
    """Raises ConfigError unless `codec` is one: neither its name nor its class.

    `otherwise`: what else could be given.
    """
    if not isinstance(codec, Codec):
        remedy = "a codec object"
        if isinstance(codec, str):
            remedy += f", gradwire.codecs.get({codec!r})"
        elif isinstance(codec, type) and issubclass(codec, Codec):
            remedy += f", {codec.__name__}(...)"
        raise ConfigError(f"codec={codec!r}: give {remedy}{otherwise and f', or {otherwise}'}")


def source_lines(codec: Codec) -> int:
    """Lines of code of encode and decode together: no blank lines, comments or docstrings."""
    return sum(code_lines(getattr(type(codec), name)) for name in ("encode", "decode"))


def code_lines(function: Any) -> int:
    """Lines of code of a function: no blank lines, comments or docstring."""
    text = textwrap.dedent(inspect.getsource(function))
    definition = ast.parse(text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    skipped: set[int] = set()
    if ast.get_docstring(definition) is not None:
        docstring = definition.body[0]
        skipped.update(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    lines = enumerate(text.splitlines(), start=1)
    return sum(
        1 for number, line in lines
        if number not in skipped and line.strip() and not line.strip().startswith("#")
    )  # fmt: skip
