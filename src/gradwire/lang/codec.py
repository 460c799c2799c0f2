"""The interface of a codec: two methods, each traced once on symbols."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Hashable
from dataclasses import fields
from functools import cached_property
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ClassVar

from gradwire.errors import ConfigError
from gradwire.lang.trace import Payload, Value

if TYPE_CHECKING:
    from typing_extensions import Self


class _Signature:
    """`__signature__` of a codec's class: its options, where tools would take `Codec.__new__`'s."""

    def __get__(self, codec: Codec | None, of: type[Codec]) -> inspect.Signature:
        own = [*inspect.signature(of.__init__).parameters.values()][1:]
        return inspect.Signature(own if hasattr(of, "__dataclass_fields__") else [])


class Codec:
    """Base of every codec: a frozen dataclass whose fields are its options.

    `encode` takes the elements as a symbol and returns `concat(...)`; `decode` takes the fields of
    that payload by name and returns the elements. Both are traced: they run before any number
    exists, use the operators of `gradwire.lang.ops`, and may branch on the codec's own options. If
    `encode` has a second parameter, `latest`, it is the new gradient without the residual.

    Options are checked in `__post_init__`, which raises `ConfigError`. A subclass that is not a
    frozen dataclass raises it when it is first instantiated. Codecs are equal if they are of one
    class and their options have equal types and bits: 1, 1.0 and True differ, as 0.0 and -0.0 do.
    """

    __signature__ = _Signature()

    # What those who know codecs find out about one: forms.py and contraction.py set these.
    _operators: ClassVar[Callable[[Codec], tuple[str, ...]]]
    _worst_error: ClassVar[Callable[[Codec], float]]

    def __new__(cls, *args: object, **options: object) -> Self:
        # Kernels are cached by codec, and ranks compare its text: both must depend on options only.
        made = vars(cls).get("__dataclass_params__")
        own = "__init__" in vars(cls) or bool(inspect.get_annotations(cls))
        by_options = getattr(cls, "__dataclass_params__", None)
        if not (by_options and by_options.eq) or (own and not (made and made.frozen)):
            raise ConfigError(
                f"{cls.__name__}: a codec is a frozen dataclass, its fields are its options: write "
                f"@dataclass(frozen=True) above class {cls.__name__}, fields in place of __init__"
            )
        return super().__new__(cls)

    def __init_subclass__(cls, **options: Any) -> None:
        # Before the dataclass decorator, which keeps them: its own take -0.0 for 0.0, 1 for True.
        super().__init_subclass__(**options)
        for name in ("__eq__", "__hash__"):
            if name not in vars(cls):
                setattr(cls, name, vars(Codec)[name])

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Codec) or type(other) is not type(self):
            return NotImplemented
        return self._options == other._options

    def __hash__(self) -> int:
        try:
            return hash(self._options)
        except TypeError as error:
            raise ConfigError(
                f"{type(self).__name__}: {self!r} has an option that can change ({error}): give "
                "numbers, text and tuples, such as a tuple in place of a list"
            ) from None

    @cached_property
    def _options(self) -> tuple[Hashable, ...]:
        """The options as a key: equal if their types and bits are."""
        options = (getattr(self, f.name) for f in fields(self) if f.compare)  # type: ignore[arg-type]
        return type(self), *map(_exactly, options)

    def encode(self, g: Value) -> Payload:
        """The payload of the elements `g`."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode")

    def encode_sum(self, g: Value) -> Payload:
        """The payload of a sum of decoded payloads, at the reducing rank.

        The same as `encode` by default. A codec that scales its values overrides it to scale once.
        """
        return self.encode(g)

    def expected_entries(self, numel: int) -> float | None:
        """The average number of `numel` values that are selected, or that are in kept blocks.

        None: as many as there is room for. Cost formulas and the simulator use it for codecs whose
        payload size depends on the data; the payload itself does not depend on it.
        """
        return None

    @property
    def biased(self) -> bool:
        """Whether the mean of what is decoded, over random numbers, strays from the values by more
        than rounding to a 16-bit float does; then the codec needs error feedback.

        Derived from the operators: what stores the values themselves is unbiased, and what draws no
        random numbers is biased. A codec that draws some and is biased nevertheless says so by a
        property of its own.
        """
        operators = self._operators()
        return "random" not in operators and not {*operators} <= {"concat", "extract"}

    @property
    def contracts(self) -> bool:
        """Whether residuals stay bounded under error feedback, which encodes errors again.

        They do if the mean squared error of one encoding is at most the squared norm of what is
        encoded, for every input. That is measured, on inputs that quantisers are worst at. A codec
        that knows, or bounds them in another way, says so by a property or a class attribute.
        """
        return self._worst_error() <= 1 + 2**-8  # what rounding to bf16 adds

    def decode(self, *args: Any, **fields: Any) -> Value:
        """The elements, from the payload's fields."""
        raise NotImplementedError(f"{type(self).__name__} defines no decode")


def _exactly(option: Any) -> tuple[type, Hashable]:
    """An option as a key: of equal floats, -0.0 and 0.0 differ, and NaN equals itself."""
    if isinstance(option, tuple):
        return type(option), tuple(_exactly(each) for each in option)
    if isinstance(option, Real) and not isinstance(option, Integral):
        return type(option), float(option).hex()
    return type(option), option


def check_codec(codec: object, otherwise: str = "") -> None:
    """Raise `ConfigError` unless `codec` is a codec object, rather than a name or a class.

    `otherwise` describes what else the caller accepts, for the message.
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
