"""Target c: a codec's forms as machine code in a shared library, called through ctypes."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from gradwire.errors import CodecError
from gradwire.lang import forms, prebuilt
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec
from gradwire.lang.emit import c, c_stack
from gradwire.lang.layout import layout, native_name

if TYPE_CHECKING:  # sources are generated where there is neither
    import numpy as np
    import torch

_ARGUMENTS = (
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32,
    ctypes.c_void_p, ctypes.c_float, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip


def source(codec: Codec, dtype: torch.dtype | str = "fp32") -> str:
    """The C source of the codec's kernels, without the prelude that all kernels share."""
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs
    return c.emit(programs.values(), layout(codec, native), native)


class Library:
    """A codec's compiled forms: prebuilt ones, else compiled here. Raises `jit.CompileError`.

    Attributes:
        prebuilt: whether they came with the wheel.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        text = c.prelude() + source(codec, dtype)
        self._layout = layout(codec, dtype)
        self._scratch = c_stack.scratch_nbytes(text)
        self._functions, self.prebuilt = prebuilt.functions(text, forms.FORMS)
        for function in self._functions.values():
            function.argtypes = _ARGUMENTS
            function.restype = ctypes.c_int
        numbers = forms.derive(codec, native_name(dtype)).table
        self._table = (ctypes.c_float * max(1, len(numbers)))(*numbers)

    def workspace_nbytes(self, numels: np.ndarray, threads: int, ranks: int) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs."""
        return self._layout.workspace_nbytes(numels, threads) + threads * self._scratch

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`."""
        workspace = None if call.workspace is None else call.workspace.data_ptr()
        distances = None if call.distances is None else call.distances.ctypes.data
        failed = self._functions[form](
            rows.ctypes.data, rows.size, call.ranks, call.rank, distances, call.factor,
            call.threads, workspace, self._table,
        )  # fmt: skip
        if failed:
            raise CodecError(f"row {failed - 1} of {form}: a payload that this codec never makes")
