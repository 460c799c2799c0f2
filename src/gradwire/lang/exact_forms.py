"""The forms of `Exact`, a row at a time, by torch's own operations.

| form | does |
| --- | --- |
| encode | payload = values |
| decode | values = payload * factor |
| decode_add | values = op(values, payload) |
| decode_sum | values = op over the ranks, in their order, * factor |
| reduce_encode | the same, and payload = values |

A factor other than 1 is for floats and complex numbers. Threads are torch's: a call's `threads` is
not looked at. Forms with error feedback are refused: nothing is lost that a residual could keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang.call import Call
from gradwire.lang.eager_memory import view
from gradwire.lang.exact import Exact

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
PIECE = 1 << 18  # its sum stays in the cache, and eight threads share it
_COPIES = ("encode", "decode")
_REDUCING = ("decode_add", "decode_sum", "reduce_encode")


class ExactForms:
    """The backend of `Exact` on all targets. `ConfigError` where target triton cannot be.

    Attributes:
        device: where the memory of rows lies; of several GPUs, the current one.
        piece: values that are reduced at a time.
    """

    def __init__(self, codec: Exact, dtype: torch.dtype, target: str) -> None:
        self.codec, self.dtype = codec, dtype
        self.device = torch.device("cpu")
        self.piece = PIECE
        if target == "triton":
            from gradwire.lang import gpu  # triton is imported where it is asked for

            self.device = gpu.device()
            self.piece = 2**63 - 1  # a launch costs more than memory that is not in the cache

    def ready(self, forms: Sequence[str]) -> None:
        """Nothing is compiled. Raises `ConfigError` for a form that there is not."""
        for form in forms:
            if form.endswith("_ef"):
                raise ConfigError(f"{self.codec} loses nothing: use it without error feedback")
            if form not in _COPIES and not self.codec.op:
                raise ConfigError(
                    f"{self.codec} is only copied, and {form!r} reduces: give it an op"
                )

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`."""
        self.ready([form])
        scales = self.dtype.is_floating_point or self.dtype.is_complex
        assert scales or call.factor == 1, f"{self.dtype} values times {call.factor}"
        for row in rows:
            if row["numel"] > 0:
                getattr(self, f"_{form}")(row, call)

    def _encode(self, row: np.void, call: Call) -> None:
        self._bytes(row, "payload").copy_(self._bytes(row, "values"))

    def _decode(self, row: np.void, call: Call) -> None:
        self._bytes(row, "values").copy_(self._bytes(row, "payload"))
        if call.factor != 1:
            self._numbers(row, "values").mul_(call.factor)

    def _decode_add(self, row: np.void, call: Call) -> None:
        values = self._numbers(row, "values")
        self._reduce([values, self._numbers(row, "payload")], 1.0, [values])

    def _decode_sum(self, row: np.void, call: Call) -> None:
        self._reduce(self._contributions(row, call), call.factor, [self._numbers(row, "values")])

    def _reduce_encode(self, row: np.void, call: Call) -> None:
        written = [self._numbers(row, "values"), self._numbers(row, "payload")]
        self._reduce(self._contributions(row, call), call.factor, written)

    def _contributions(self, row: np.void, call: Call) -> list[Tensor]:
        """The payloads of a row, and its own values, in the order of ranks."""
        found = []
        if call.distances is not None:
            peers = call.distances[: call.ranks - (call.rank >= 0)]
            found = [self._numbers(row, "source", distance) for distance in peers.tolist()]
        if call.rank >= 0:
            found.insert(call.rank, self._numbers(row, "values"))
        return found

    def _reduce(self, parts: list[Tensor], factor: float, written: list[Tensor]) -> None:
        """Reduce `parts`, and write it where they may stand themselves."""
        for pieces in zip(*(x.split(self.piece) for x in (*parts, *written)), strict=True):
            reduced = self._reduced(pieces[: len(parts)], factor)
            for at in pieces[len(parts) :]:
                at.copy_(reduced)

    def _reduced(self, parts: Sequence[Tensor], factor: float) -> Tensor:
        reduced = parts[0].clone()
        for part in parts[1:]:
            _REDUCTIONS[self.codec.op](reduced, part, out=reduced)
        if factor != 1:
            reduced.mul_(factor)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            # Vectors and single values differ in what they make of -0 and +0, and of NaN; which of
            # the two torch uses for a value depends on its place, the CPU and the threads.
            if self.codec.op != "sum":
                reduced.add_(0.0)
            reduced.nan_to_num_(torch.nan, torch.inf, -torch.inf)
        return reduced

    def _numbers(self, row: np.void, column: str, distance: int = 0) -> Tensor:
        return self._bytes(row, column, distance).view(self.dtype)

    def _bytes(self, row: np.void, column: str, distance: int = 0) -> Tensor:
        address = int(row[column]) + distance
        nbytes = int(row["numel"]) * self.dtype.itemsize
        if self.device.type == "cpu":
            return view(address, nbytes)
        return torch.as_tensor(_OnGPU(address, nbytes), device=self.device)


class _OnGPU:
    """uint8[nbytes] on a GPU's memory that the caller owns. No GPU has run this yet."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
