"""The forms of `Exact`, row by row, with torch's own operations.

| form | does |
| --- | --- |
| encode | payload = values |
| decode | values = payload * factor |
| decode_add | values = op(values, payload) |
| decode_sum | values = factor * op over the ranks, in rank order |
| reduce_encode | the same, and payload = values |

Only floats and complex numbers take a factor other than 1. torch chooses the threads; a call's
`threads` is ignored. Forms with error feedback raise `ConfigError`: there is no error to feed back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gradwire.errors import ConfigError
from gradwire.lang.call import Call, Kernels
from gradwire.lang.eager_memory import view
from gradwire.lang.exact import Exact

Tensor = torch.Tensor

_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
}
PIECE = 1 << 18  # values: small enough for the cache, large enough for eight threads


class ExactForms(Kernels):
    """The kernels of `Exact` on all targets. `ConfigError` if target triton is not available.

    Attributes:
        piece: values reduced at a time.
    """

    def __init__(self, codec: Exact, dtype: torch.dtype, target: str) -> None:
        super().__init__(codec, dtype, target)
        self.op = codec.op
        self.piece = PIECE
        if target == "triton":
            from gradwire.lang import gpu  # loads the emitter, which few processes need

            self.device = gpu.device()
            self.piece = 2**63 - 1  # on a GPU a launch costs more than a cache miss

    def ready(self, forms: Sequence[str]) -> None:
        """Raise `ConfigError` for a form that does not exist. Nothing is compiled."""
        for form in forms:
            if form.endswith("_ef"):
                raise ConfigError(f"{self.codec} is lossless: use it without error feedback")
            if form not in ("encode", "decode") and not self.op:
                raise ConfigError(f"{self.codec} only copies, but {form!r} reduces: give it an op")

    def _run(self, form: str, rows: np.ndarray, call: Call) -> None:
        self.ready([form])
        scales = self.dtype.is_floating_point or self.dtype.is_complex
        assert scales or call.factor == 1, f"{self.dtype} values times {call.factor}"
        for row in rows:
            if row["numel"] > 0:
                self._run_row(form, row, call)

    def _run_row(self, form: str, row: np.void, call: Call) -> None:
        if form == "encode":
            self._bytes(row, "payload").copy_(self._bytes(row, "values"))
            return
        if form == "decode":
            self._bytes(row, "values").copy_(self._bytes(row, "payload"))
            if call.factor != 1:
                self._numbers(row, "values").mul_(call.factor)
            return
        written = [self._numbers(row, "values")]
        if form == "decode_add":
            self._reduce([*written, self._numbers(row, "payload")], 1.0, written)
            return
        if form == "reduce_encode":
            written.append(self._numbers(row, "payload"))
        self._reduce(self._contributions(row, call), call.factor, written)

    def _contributions(self, row: np.void, call: Call) -> list[Tensor]:
        """The payloads of a row and its own values, in rank order."""
        found = []
        if call.distances is not None:
            peers = call.distances[: call.payloads]
            found = [self._numbers(row, "source", distance) for distance in peers.tolist()]
        if call.rank >= 0:
            found.insert(call.rank, self._numbers(row, "values"))
        return found

    def _reduce(self, parts: list[Tensor], factor: float, written: list[Tensor]) -> None:
        """Reduce `parts` into each tensor of `written`, which may alias them."""
        for pieces in zip(*(x.split(self.piece) for x in (*parts, *written)), strict=True):
            reduced = self._reduced(pieces[: len(parts)], factor)
            for at in pieces[len(parts) :]:
                at.copy_(reduced)

    def _reduced(self, parts: Sequence[Tensor], factor: float) -> Tensor:
        reduced = parts[0].clone()
        for part in parts[1:]:
            _REDUCTIONS[self.op](reduced, part, out=reduced)
        if factor != 1:
            reduced.mul_(factor)
        if self.dtype.is_floating_point or self.dtype.is_complex:
            # torch's vector and scalar code differ in signs of zero and in NaN bits, and which one
            # handles a value depends on its position, the CPU and the threads.
            if self.op != "sum":
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
        return torch.as_tensor(_OnGPU(address, nbytes), dtype=torch.uint8, device=self.device)


class _OnGPU:
    """uint8[nbytes] in GPU memory that the caller owns. Not yet run on a GPU."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
