"""Random codecs: one per seed, of the operators on numbers, with the constants that go wrong."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gradwire.lang import Codec, LanguageError, ops
from gradwire.lang.ir import Scope
from gradwire.lang.trace import Value, lift

CONSTANTS = (
    0.0, -0.0, 1.0, -1.0, 0.5, 3, 255, 0.1, -2.5, 1e-40, -1e-45, 1.1754943508222875e-38, 3.4e38,
    1e39, 1 - 1e-12, 2.0**24 + 1, math.inf, -math.inf, math.nan,
)  # fmt: skip
NUMBERS = (
    lambda a, b, c: a + b, lambda a, b, c: a - b, lambda a, b, c: a * b, lambda a, b, c: a / b,
    lambda a, b, c: -a, lambda a, b, c: ops.abs(a), lambda a, b, c: ops.floor(a),
    lambda a, b, c: ops.sqrt(a), lambda a, b, c: ops.inverse(a), ops.clamp,
    lambda a, b, c: ops.clamp(a, -0.0, 1.0), lambda a, b, c: ops.where(a < b, b, c),
    lambda a, b, c: ops.where(a == b, c, a),
    lambda a, b, c: ops.where((a <= b) & ops.isfinite(c), a, b),
    lambda a, b, c: ops.where(~(a != b) | (c >= a), a, c),
)  # fmt: skip
STORED: tuple[Callable[[Any], Value], ...] = (
    ops.fp32, ops.fp32, ops.bf16, ops.fp16, ops.fp8, ops.int32, ops.trit,
    lambda v: ops.uint(1, v), lambda v: ops.uint(3, v), lambda v: ops.uint(8, v),
    lambda v: ops.bf16(v, toward="down"),
)  # fmt: skip


def allowed(rule: Callable[..., Value], *operands: Any) -> Value:
    """The rule's result; where it refuses a constant, the first operand."""
    try:
        return rule(*operands)
    except LanguageError:
        return operands[0]  # type: ignore[no-any-return]


class Drawn:
    """Random expressions of given values, and of results of earlier ones."""

    def __init__(self, seed: str, values: list[Any], steps: int) -> None:
        self.generator = random.Random(seed)
        self.values: list[Any] = list(values)
        for _ in range(steps):
            operands = [self.operand() for _ in range(3)]
            self.values.append(allowed(self.generator.choice(NUMBERS), *operands))

    def operand(self) -> Value:
        """A value, rather a late one, or a constant."""
        if self.generator.random() < 0.45:
            return lift(self.generator.choice(CONSTANTS))
        late = int(self.generator.random() ** 2 * len(self.values))
        return self.values[-1 - late]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RandomProgram(Codec):
    """Elements, numbers of blocks and of the row, in fields of every dtype."""

    seed: int
    steps: int = 12

    def encode(self, g: Value) -> Any:
        x = g.blocks(24)
        given = [x, ops.random(), ops.index("block")]
        first = Drawn(f"first {self.seed}", given, self.steps).values
        elements = [v.blocks(24) for v in first if v.node.scope is Scope.ELEMENT]
        low, high, total = (ops.reduce(f, elements[-1 - i]) for i, f in enumerate((min, max, sum)))
        blocks = Drawn(f"blocks {self.seed}", [low, high, total], self.steps // 3).values
        whole = [ops.reduce(max, low), ops.reduce(min, high)]
        second = Drawn(f"second {self.seed}", [*elements, *blocks, *whole], self.steps).values
        chosen = random.Random(f"fields {self.seed}")
        fields = {"first": ops.fp16(x)}
        for v in [*whole, *blocks, *second[-self.steps :], *elements[-3:]]:
            stored = allowed(chosen.choice(STORED), v)
            stored = ops.fp32(v) if stored is v else stored
            if all(stored.node is not other.node for other in fields.values()):
                fields[f"f{len(fields)}"] = stored
        return ops.concat(**fields)

    def decode(self, first: Value, **fields: Value) -> Any:
        drawn = Drawn(f"decode {self.seed}", list(fields.values()), self.steps)
        return ops.where(first >= 0.0, drawn.values[-1], drawn.values[-2])
