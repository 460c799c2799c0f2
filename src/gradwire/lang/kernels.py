"""Which kernels run a codec: the targets, target c itself, and encode and decode by one call."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from gradwire.errors import CodecError, ConfigError, use_one_of
from gradwire.lang import eager, forms
from gradwire.lang.call import ROW, Call, Kernels, check_form
from gradwire.lang.codec import Codec, check_codec
from gradwire.lang.emit import c, c_stack
from gradwire.lang.exact import Exact
from gradwire.lang.exact_forms import ExactForms
from gradwire.lang.forms import FORMS
from gradwire.lang.layout import native_name
from gradwire.lang.native import jit, prebuilt
from gradwire.lang.trace import integer

# Without optimisation a compilation takes what the prelude takes, so forms that go together are
# compiled together.
_TOGETHER = (
    ("encode", "encode_ef", "decode"),
    ("decode_add", "decode_sum", "reduce_encode", "reduce_encode_ef"),
)


class Library(Kernels):
    """Target c: a codec's forms as machine code: prebuilt, or each compiled on first use.

    Attributes:
        prebuilt: whether they came with the wheel.
        table: address of the codec's table of numbers.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, target: str) -> None:
        super().__init__(codec, dtype, target)
        text = c.prelude() + c.source(codec, dtype)
        self._scratch = c_stack.scratch_nbytes(text)
        numbers = forms.derive(codec, native_name(dtype)).table
        self._numbers = (ctypes.c_float * max(1, len(numbers)))(*numbers)
        self.table = ctypes.addressof(self._numbers)
        found, self._why_compiled = prebuilt.find(text, c.FORM)
        self.prebuilt = found is not None
        self._functions = found or {}

    def missing(self) -> str | None:
        """Why forms are neither prebuilt nor can be compiled; None if they are, or can."""
        if self.prebuilt:
            return None
        try:
            prebuilt.compiled(c.series(), c.SERIES, self._why_compiled)  # small, and needed
        except jit.CompileError as error:
            return str(error)
        return None

    def ready(self, forms: Sequence[str]) -> None:
        """Compile those of these forms that are missing, in parallel. Raises `jit.CompileError`."""
        missing = {*forms} - {*self._functions}
        if not missing:
            return
        groups = [(form,) for form in FORMS] if jit.optimises() else _TOGETHER
        wanted = [group for group in groups if missing & {*group}]
        with ThreadPoolExecutor(len(wanted), "gradwire-compile") as at:
            for found in at.map(self._compiled, wanted):
                self._functions.update(found)

    def _compiled(self, names: Sequence[str]) -> prebuilt.Functions:
        text = c.prelude() + c.source(self.codec, self.dtype, names)
        wanted = {name: c.FORM[name] for name in names}
        return prebuilt.compiled(text, wanted, self._why_compiled, jit.kernel_flags())

    def _function(self, form: str) -> Any:
        if form not in self._functions:
            with compiler_needed():
                self.ready([form])
        return self._functions[form]

    def address(self, form: str) -> int:
        """The address of the form's function, compiled if needed. Raises `ConfigError`."""
        address = ctypes.cast(self._function(form), ctypes.c_void_p).value
        assert address is not None
        return address

    def workspace_nbytes(self, numels: np.ndarray, threads: int = 1, ranks: int = 1) -> int:
        return self.layout.workspace_nbytes(numels, threads) + threads * self._scratch

    def _run(self, form: str, rows: np.ndarray, call: Call) -> None:
        workspace = None if call.workspace is None else call.workspace.data_ptr()
        distances = None if call.distances is None else call.distances.ctypes.data
        failed = self._function(form)(
            rows.ctypes.data, rows.size, call.ranks, call.rank, distances, call.factor,
            call.threads, workspace, self.table,
        )  # fmt: skip
        if failed:
            raise self.malformed(failed - 1, form)

    def malformed(self, row: int, form: str) -> CodecError:
        """The error for a malformed payload in a row of a call."""
        return CodecError(f"row {row} of {form}: malformed payload for {self.codec}")


TARGETS = ("auto", "c", "eager", "triton")
MEND = "install a C compiler (apt install gcc), or a wheel that carries kernels"


def kernels(
    codec: Codec,
    dtype: torch.dtype = torch.float32,
    target: str = "auto",
    forms: Sequence[str] = ("encode",),
) -> Kernels:
    """The codec's kernels, made once per process.

    Args:
        dtype: of the values: float32, float16 or bfloat16; for `Exact`, any that its `op` supports.
        target: "c", "eager", "triton" (on a GPU), or "auto": c, or eager with one warning that
            says why c is not available.
        forms: compiled now, in parallel, if target c has them neither prebuilt nor in the cache;
            others are compiled when they are first run.

    Raises:
        ConfigError: an unknown target, dtype or form, an ill-formed codec, target "c" without a
            compiler, or target "triton" without Triton or a GPU.
    """
    if target not in TARGETS:
        raise ConfigError(f"unknown target {target!r}: {use_one_of(target, TARGETS)}")
    check_codec(codec)
    for form in forms:
        check_form(form)
    if target == "auto":
        reason = _missing(codec, dtype, tuple(forms))
        if reason is not None:
            announce(reason)
        target = "c" if reason is None else "eager"
    with compiler_needed():
        made = _made(codec, dtype, target)
        made.ready(forms)
    return made


@lru_cache(maxsize=512)
def _made(codec: Codec, dtype: torch.dtype, target: str) -> Kernels:
    if isinstance(codec, Exact):
        return ExactForms(codec, dtype, target)
    if target == "eager" or not forms.derive(codec, native_name(dtype)).fused:
        return eager.Interpreter(codec, dtype, target)
    if target == "c":
        return Library(codec, dtype, target)
    from gradwire.lang import gpu  # loads the emitter, which few processes need

    return gpu.Device(codec, dtype, target)


def needs_compiling(codec: Codec) -> bool:
    """Whether a codec's kernels are much slower in target eager than in c. Those that store values
    as they are or in 16 bits are not, nor is what torch's BLAS does on all targets."""
    derived = forms.derive(codec, "fp32")
    return derived.fused and not {*derived.operators} <= {"concat", "extract"}


def uncompiled(codecs: Iterable[Codec]) -> str | None:
    """Why target auto interprets one of these codecs on this machine's CPU, although it
    `needs_compiling`; None if it interprets none."""
    for codec in codecs:
        made = _made(codec, torch.float32, "c") if needs_compiling(codec) else None
        reason = made.missing() if isinstance(made, Library) else None
        if reason is not None:
            return reason
    return None


@lru_cache(maxsize=512)
def _missing(codec: Codec, dtype: torch.dtype, forms: tuple[str, ...]) -> str | None:
    """Why target c is not available here, or None if it is."""
    try:
        _made(codec, dtype, "c").ready(forms)
    except jit.CompileError as error:
        return str(error)
    return None


@contextlib.contextmanager
def compiler_needed() -> Iterator[None]:
    """A context that turns `jit.CompileError` into `ConfigError`."""
    try:
        yield
    except jit.CompileError as error:
        raise ConfigError(
            f"target 'c': {error}; use target 'eager', or install a C compiler"
        ) from None


_announced: set[str] = set()
_announcing = threading.Lock()


def announce(reason: str, told: bool = False) -> None:
    """Warn, once per reason, that eager kernels are used, unless the user was `told` otherwise."""
    with _announcing:
        known = told or reason in _announced
        _announced.add(reason)
    if known:
        return
    warnings.warn(
        f"gradwire: no compiled kernels, using slow eager ones: {reason}; {MEND}",
        RuntimeWarning,
        stacklevel=4,
    )


def encode(codec: Codec, tensor: torch.Tensor, key: int = 0, target: str = "auto") -> torch.Tensor:
    """The payload of a tensor of any shape, as uint8[nbytes] on its device.

    Target "auto" is triton for tensors on a GPU. Raises `ConfigError` if the tensor is sparse, or
    the target does not run on its device.
    """
    if tensor.layout != torch.strided:
        raise ConfigError(f"the tensor's layout is {tensor.layout}: give a dense one")
    values = tensor.detach().contiguous()
    k = for_device(codec, values.dtype, values.device, target, "encode")
    payload = torch.empty(k.layout.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    _run(k, "encode", values, payload, key)
    return payload


def decode(
    codec: Codec,
    payload: torch.Tensor,
    numel: int,
    dtype: torch.dtype = torch.float32,
    key: int = 0,
    target: str = "auto",
) -> torch.Tensor:
    """The values of a payload, as dtype[numel] on its device. Raises `CodecError` if its size is
    wrong, `ConfigError` if `numel` is."""
    if (given := integer(numel)) is None or given < 0:
        raise ConfigError(f"numel={numel!r}: give a whole number, 0 or more")
    k = for_device(codec, dtype, payload.device, target, "decode")
    expected = k.layout.nbytes(numel)
    if payload.dtype != torch.uint8 or payload.numel() != expected:
        raise CodecError(
            f"a payload of {numel} values is uint8[{expected}], not "
            f"{str(payload.dtype).removeprefix('torch.')}[{payload.numel()}]"
        )
    values = torch.empty(numel, dtype=dtype, device=payload.device)
    _run(k, "decode", values, payload.contiguous(), key)
    return values


def for_device(
    codec: Codec, dtype: torch.dtype, device: torch.device, target: str, form: str
) -> Kernels:
    """The kernels for tensors on this device. Raises `ConfigError` if there are none."""
    if target == "auto" and device.type == "cuda":
        target = "triton"
    k = kernels(codec, dtype, target, [form])
    if k.device.type != device.type:
        raise ConfigError(
            f"{codec} runs on {k.device.type} with target {target!r}, but the tensor is on "
            f"{device}: move it, or use another target"
        )
    return k


def _run(k: Kernels, form: str, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
    number = integer(key)
    if number is None or not 0 <= number < 2**64:
        raise ConfigError(f"key={key!r}: give a whole number of 0 to 2**64 - 1")
    row = values.data_ptr(), 0, payload.data_ptr(), 0, values.numel(), 0, number, 0
    on_gpu = values.device.type == "cuda"
    with torch.cuda.device(values.device) if on_gpu else contextlib.nullcontext():
        k.run(form, np.array([row], ROW))
