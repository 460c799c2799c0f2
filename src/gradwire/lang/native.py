"""Target c: a codec's forms in a shared library, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from gradwire.errors import CodecError
from gradwire.lang import forms, jit, prebuilt
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec
from gradwire.lang.emit import c, c_stack
from gradwire.lang.forms import FORMS
from gradwire.lang.layout import layout, native_name

if TYPE_CHECKING:  # sources are also generated without numpy and torch
    import numpy as np
    import torch

_ARGUMENTS = (
    ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_int32,
    ctypes.c_void_p, ctypes.c_float, ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p,
)  # fmt: skip

RUNNER = "run_series"  # of emit/series.c

# Without optimisation a compilation takes what the prelude takes, so forms that go together are
# compiled together.
_TOGETHER = (
    ("encode", "encode_ef", "decode"),
    ("decode_add", "decode_sum", "reduce_encode", "reduce_encode_ef"),
)


def source(codec: Codec, dtype: torch.dtype | str = "fp32", names: Sequence[str] = FORMS) -> str:
    """The C source of the codec's kernels, without the prelude that all kernels share.

    Args:
        names: of the forms to generate.
    """
    native = native_name(dtype)
    programs = forms.derive(codec, native).programs
    return c.emit([programs[name] for name in names], layout(codec, native), native)


def runner() -> Callable[[int, int], int]:
    """The function run_series(entries, count); emit/series.c describes its return value.

    Libraries of prebuilt kernels contain it; otherwise it is compiled. Raises `jit.CompileError`.
    """
    functions, _ = prebuilt.functions(c.series(), [RUNNER])
    function = functions[RUNNER]
    function.argtypes = ctypes.c_void_p, ctypes.c_int64
    function.restype = ctypes.c_int64
    return function


def malformed(row: int, form: str, codec: Codec) -> CodecError:
    """The error for a malformed payload in a row of a call."""
    return CodecError(f"row {row} of {form}: malformed payload for {codec!r}")


class Library:
    """A codec's forms as machine code: prebuilt, or each compiled on first use.

    Attributes:
        prebuilt: whether they came with the wheel.
        table: address of the codec's table of numbers.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        text = c.prelude() + source(codec, dtype)
        self._codec = codec
        self._dtype = dtype
        self._layout = layout(codec, dtype)
        self._scratch = c_stack.scratch_nbytes(text)
        numbers = forms.derive(codec, native_name(dtype)).table
        self._numbers = (ctypes.c_float * max(1, len(numbers)))(*numbers)
        self.table = ctypes.addressof(self._numbers)
        found, self._why_compiled = prebuilt.find(text, FORMS)
        self.prebuilt = found is not None
        self._functions: prebuilt.Functions = {}
        for form, function in (found or {}).items():
            self._functions[form] = _typed(function)

    def missing(self) -> str | None:
        """Why forms are neither prebuilt nor can be compiled; None if they are, or can."""
        if self.prebuilt:
            return None
        try:
            prebuilt.compiled(c.series(), [RUNNER], self._why_compiled)  # small, and needed anyway
        except jit.CompileError as error:
            return str(error)
        return None

    def ready(self, names: Sequence[str]) -> None:
        """Compile those of these forms that are missing, in parallel. Raises `jit.CompileError`."""
        missing = {name for name in names if name not in self._functions}
        if not missing:
            return
        groups = [(form,) for form in FORMS] if jit.optimises() else _TOGETHER
        wanted = [group for group in groups if missing & {*group}]
        with ThreadPoolExecutor(len(wanted), "gradwire-compile") as at:
            for found in at.map(self._compiled, wanted):
                self._functions.update(found)

    def _compiled(self, names: Sequence[str]) -> prebuilt.Functions:
        text = c.prelude() + source(self._codec, self._dtype, names)
        found = prebuilt.compiled(text, names, self._why_compiled, jit.kernel_flags())
        return {name: _typed(function) for name, function in found.items()}

    def address(self, form: str) -> int:
        """The address of the form's function, compiled if needed. Raises `jit.CompileError`."""
        self.ready([form])
        address = ctypes.cast(self._functions[form], ctypes.c_void_p).value
        assert address is not None
        return address

    def workspace_nbytes(self, numels: np.ndarray, threads: int, ranks: int) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs."""
        return self._layout.workspace_nbytes(numels, threads) + threads * self._scratch

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """The backend's one method; see `kernels.Backend`."""
        workspace = None if call.workspace is None else call.workspace.data_ptr()
        distances = None if call.distances is None else call.distances.ctypes.data
        if form not in self._functions:
            self.ready([form])
        failed = self._functions[form](
            rows.ctypes.data, rows.size, call.ranks, call.rank, distances, call.factor,
            call.threads, workspace, self.table,
        )  # fmt: skip
        if failed:
            raise malformed(failed - 1, form, self._codec)


def _typed(function: ctypes._NamedFuncPointer) -> ctypes._NamedFuncPointer:
    function.argtypes = _ARGUMENTS
    function.restype = ctypes.c_int
    return function
