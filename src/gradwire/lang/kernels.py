"""Kernels: a codec compiled for one dtype of values and one target.

One call covers a table of rows, so all parameters of a chunk with the same codec need one call;
series.py combines the calls of several codecs. Calls release the GIL on target c, take no locks,
and may run concurrently on different rows.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from gradwire.errors import CodecError, ConfigError, use_one_of
from gradwire.lang import eager, forms, jit, native
from gradwire.lang.call import Call
from gradwire.lang.codec import Codec, check_codec
from gradwire.lang.exact import Exact
from gradwire.lang.exact_forms import ExactForms
from gradwire.lang.forms import FORMS
from gradwire.lang.layout import Layout, layout, native_name
from gradwire.lang.rows import ROW, check_distances, check_table, check_workspace
from gradwire.lang.trace import integer

if TYPE_CHECKING:
    from gradwire.lang import gpu


class Backend(Protocol):
    """Runs a codec's forms on one target."""

    def run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """Run one form on every row. Raises `CodecError` for a malformed payload."""


def _gpu(codec: Codec, dtype: torch.dtype) -> Backend:
    from gradwire.lang import gpu  # imports triton

    return gpu.Device(codec, dtype)


BACKENDS: dict[str, Callable[[Codec, torch.dtype], Backend]] = {
    "c": native.Library,
    "eager": eager.Interpreter,
    "triton": _gpu,
}
TARGETS = ("auto", *BACKENDS)
MEND = "install a C compiler (apt install gcc), or a wheel that carries kernels"


class Kernels:
    """All forms of a codec. Made by `kernels`.

    Attributes:
        target: a key of `BACKENDS`. Codecs with matrices are interpreted on every target, since
            torch's BLAS does their work. torch runs the forms of `Exact`: on the CPU for c and
            eager.
        layout: of the payloads.
        device: of the memory that rows point to.
        library: the backend, if it is machine code.
    """

    def __init__(self, codec: Codec, dtype: torch.dtype, target: str) -> None:
        self.codec = codec
        self.dtype = dtype
        self.target = target
        self.layout: Layout = layout(codec, dtype)
        self._backend = _backend(codec, dtype, target)
        self.library = self._backend if isinstance(self._backend, native.Library) else None
        self.device = getattr(self._backend, "device", torch.device("cpu"))

    def run(
        self,
        form: str,
        rows: np.ndarray,
        ranks: int = 1,
        rank: int = 0,
        distances: np.ndarray | None = None,
        factor: float = 1.0,
        threads: int = 1,
        workspace: torch.Tensor | None = None,
        mark: gpu.Mark | None = None,
    ) -> None:
        """Run one of `forms.FORMS` on every row of a table.

        Args:
            rows: C-contiguous numpy table of dtype `ROW`: addresses of memory that must outlive
                the call. lang/forms.py lists which of them a form reads and writes.
            workspace: uint8[self.workspace_nbytes(rows["numel"], threads, ranks)], or None to
                allocate it.
            ranks, rank, distances, factor, threads: as in `Call`.
            mark: from `self.mark`. A GPU sets it when it meets a malformed payload, so the call
                need not wait for the GPU.

        Raises:
            CodecError: a malformed payload; with a mark, the mark raises it.
            ConfigError: the form is unknown, or could not be compiled; or an argument is not as
                described.
        """
        check_form(form)
        check_table(rows)
        if not (-1 <= rank < ranks and threads >= 1):
            raise ConfigError(f"rank {rank} of {ranks}, threads={threads}: no such call")
        check_distances(distances, (ranks - (rank >= 0)) * (1 + self.layout.redraws))
        needed = self.workspace_nbytes(rows["numel"], threads, ranks)
        if needed and workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=self.device)
        check_workspace(workspace, needed)
        failed = None if mark is None else mark.failed
        call = Call(ranks, rank, distances, factor, threads, workspace, failed)
        with compiler_needed():
            self._backend.run(form, rows, call)

    def ready(self, forms: Sequence[str]) -> None:
        """Compile those of these forms that target c lacks. Raises `jit.CompileError`."""
        ready = getattr(self._backend, "ready", None)
        if ready is not None:
            ready(forms)

    def workspace_nbytes(self, numels: np.ndarray, threads: int = 1, ranks: int = 1) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs on this target."""
        own = getattr(self._backend, "workspace_nbytes", None)
        if own is not None:
            return int(own(numels, threads, ranks))
        return self.layout.workspace_nbytes(numels, threads)

    def mark(self, device: torch.device | None = None) -> gpu.Mark | None:
        """A flag of the caller's own that a GPU sets when `run` meets a malformed payload.

        None if `run` raises the error itself, or if no payload can be malformed. `device` defaults
        to the current one.
        """
        mark = getattr(self._backend, "mark", None)
        return None if mark is None else mark(device)


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


_made = lru_cache(maxsize=512)(Kernels)


def _backend(codec: Codec, dtype: torch.dtype, target: str) -> Backend:
    if isinstance(codec, Exact):
        return ExactForms(codec, dtype, target)
    fused = forms.derive(codec, native_name(dtype)).fused
    return BACKENDS[target if fused else "eager"](codec, dtype)


def needs_compiling(codec: Codec) -> bool:
    """Whether a codec's kernels are much slower in target eager than in c. Those that store values
    as they are or in 16 bits are not, nor is what torch's BLAS does on all targets."""
    derived = forms.derive(codec, "fp32")
    return derived.fused and not {*derived.operators} <= {"concat", "extract"}


def uncompiled(codecs: Iterable[Codec]) -> str | None:
    """Why target auto interprets one of these codecs on this machine's CPU, although it
    `needs_compiling`; None if it interprets none."""
    for codec in codecs:
        library = _made(codec, torch.float32, "c").library if needs_compiling(codec) else None
        reason = None if library is None else library.missing()
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


def check_form(form: str) -> None:
    """Raise `ConfigError` for an unknown form."""
    if form not in FORMS:
        raise ConfigError(f"unknown form {form!r}: {use_one_of(form, FORMS)}")


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

    Target "auto" is triton for tensors on a GPU. Raises `ConfigError` if the target does not run on
    the device.
    """
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
    wrong."""
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
            f"{codec!r} runs on {k.device.type} with target {target!r}, but the tensor is on "
            f"{device}: move it, or use another target"
        )
    return k


def _run(k: Kernels, form: str, values: torch.Tensor, payload: torch.Tensor, key: int) -> None:
    on_gpu = values.device.type == "cuda"
    with torch.cuda.device(values.device) if on_gpu else contextlib.nullcontext():
        k.run(form, _row(values, payload, key))


def _row(values: torch.Tensor, payload: torch.Tensor, key: int) -> np.ndarray:
    number = integer(key)
    if number is None or not 0 <= number < 2**64:
        raise ConfigError(f"key={key!r}: give a whole number of 0 to 2**64 - 1")
    rows = np.zeros(1, ROW)
    rows[0]["values"] = values.data_ptr()
    rows[0]["payload"] = payload.data_ptr()
    rows[0]["numel"] = values.numel()
    rows[0]["key"] = number
    return rows
