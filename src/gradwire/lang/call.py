"""A kernel call: its table of rows, its other arguments, and the kernels that carry it out.

One call covers a table of rows, so all parameters of a chunk with the same codec need one call;
series.py combines the calls of several codecs. Kernels get bare addresses, so what they point to is
checked where an address is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from gradwire.errors import CodecError, ConfigError, use_one_of
from gradwire.lang.codec import Codec
from gradwire.lang.forms import FORMS
from gradwire.lang.layout import Layout, layout

# The table of rows; emit/prelude.h declares the same 64 bytes.
ROW = np.dtype(
    [
        ("values", "<u8"),  # address of the flat values, in the kernel's dtype
        ("residual", "<u8"),  # address of fp32[numel]
        ("payload", "<u8"),  # address of uint8[layout.nbytes(numel)]
        ("source", "<u8"),  # address of the first peer's payload; see `Call.distances`
        ("numel", "<i8"),
        ("start", "<i8"),  # position of the first value in its parameter
        ("key", "<u8"),  # of the random numbers, see rng.step_keys and rng.origin_keys
        ("shared", "<u8"),  # of the random numbers that all ranks share
    ]
)
assert ROW.itemsize == 64


@dataclass(frozen=True)
class Call:
    """The arguments of a kernel call, apart from its table of rows.

    Attributes:
        ranks: contributions to a sum, the caller's own included.
        rank: position of the caller's values in the sum; -1 if all contributions are payloads.
        distances: int64[payloads] or more, the same for all rows: offsets in bytes from a row's
            `source` to each payload that is summed, so the first is 0; None if no payload is
            summed. If the layout `redraws`, each payload's origin (see rng.origin_keys) follows:
            int64[2 * payloads] or more.
        factor: multiplier of decoded values and of sums.
        threads: number of threads that share the blocks (target c); results do not depend on it.
        workspace: uint8[Kernels.workspace_nbytes(...)], or None for codecs that need none.
        mark: from `Kernels.mark`. A GPU sets it when it meets a malformed payload, so the call need
            not wait for the GPU. None: the call itself raises the error.
    """

    ranks: int = 1
    rank: int = 0
    distances: np.ndarray | None = None
    factor: float = 1.0
    threads: int = 1
    workspace: torch.Tensor | None = None
    mark: Mark | None = None

    @property
    def payloads(self) -> int:
        """The number of payloads that are summed."""
        return self.ranks - (self.rank >= 0)

    @property
    def origins(self) -> np.ndarray:
        """The origins of the payloads, where `distances` has them."""
        assert self.distances is not None
        return self.distances[self.payloads : 2 * self.payloads]

    @property
    def stride(self) -> int:
        """The distance between equally spaced payloads, for a target that needs one.

        Raises:
            ConfigError: the payloads are not equally spaced.
        """
        distances = [] if self.distances is None else self.distances[: self.payloads].tolist()
        if len(distances) < 2:
            return 0
        stride = int(distances[1])
        if any(at != k * stride for k, at in enumerate(distances)):
            raise ConfigError(
                f"payloads at distances {distances}: this target only sums equally spaced payloads"
            )
        return stride


class Mark:
    """A device flag that kernels set when they meet a malformed payload; one per caller.

    The decoded values of a malformed payload are undefined, but nothing is written out of bounds.

    Attributes:
        failed: int32[1] on the device: the number of a malformed row, counted from 1, or 0.
    """

    def __init__(self, codec: Codec, device: torch.device) -> None:
        self.codec = codec
        # a synchronous copy, since kernels of any stream may write to it from now on
        self.failed = torch.zeros(1, dtype=torch.int32).to(device)

    def check(self) -> None:
        """Wait for the current stream; raise `CodecError` if a payload was malformed since the last
        check."""
        self.verdict().check()

    def verdict(self) -> Verdict:
        """The result of `check` at this point of the current stream, without waiting."""
        return Verdict(self.codec, self.failed)


class Verdict:
    """Whether the payloads that the current stream has decoded so far were well formed.

    Args:
        codec: of the payloads.
        failed: of a `Mark`; kept alive until the device has copied it.
    """

    def __init__(self, codec: Codec, failed: torch.Tensor) -> None:
        self._codec = codec
        self._failed = failed
        self._found = torch.empty(1, dtype=torch.int32, pin_memory=failed.is_cuda)
        self._found.copy_(failed, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if failed.is_cuda else None

    def known(self) -> bool:
        """Whether the result has arrived from the device; does not wait."""
        return self._copied is None or self._copied.query()

    def check(self) -> None:
        """Wait for the device; raise `CodecError` if a payload was malformed."""
        if self._copied is not None:
            self._copied.synchronize()
        number = int(self._found.item())
        if number:
            self._failed.zero_()
            raise CodecError(f"row {number - 1}: malformed payload for {self._codec}")


class Kernels:
    """All forms of a codec for one dtype of values; `lang.kernels` makes them.

    Each target is a subclass. Calls release the GIL on target c, take no locks, and may run
    concurrently on different rows.

    Attributes:
        target: one of `kernels.TARGETS`. Codecs with matrices are interpreted on every target,
            since torch's BLAS does their work. torch runs the forms of `Exact`: on the CPU for c
            and eager.
        layout: of the payloads.
        device: of the memory that rows point to; with several GPUs, the current one.
    """

    device = torch.device("cpu")

    def __init__(self, codec: Codec, dtype: torch.dtype, target: str) -> None:
        self.codec = codec
        self.dtype = dtype
        self.target = target
        self.layout: Layout = layout(codec, dtype)

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
        mark: Mark | None = None,
    ) -> None:
        """Run one of `forms.FORMS` on every row of a table.

        Args:
            rows: C-contiguous numpy table of dtype `ROW`: addresses of memory that must outlive
                the call. lang/forms.py lists which of them a form reads and writes.
            workspace: as in `Call`; None to allocate what is needed.
            ranks, rank, distances, factor, threads, mark: as in `Call`.

        Raises:
            CodecError: a malformed payload; with a mark, the mark raises it.
            ConfigError: the form is unknown, or could not be compiled; or an argument is not as
                described.
        """
        check_form(form)
        check_table(rows)
        if not (-1 <= rank < ranks and threads >= 1):
            raise ConfigError(f"rank {rank} of {ranks}, threads={threads}: no such call")
        check_distances(distances, self.distances(ranks, rank))
        needed = self.workspace_nbytes(rows["numel"], threads, ranks)
        if needed and workspace is None:
            workspace = torch.empty(needed, dtype=torch.uint8, device=self.device)
        check_workspace(workspace, needed)
        self._run(form, rows, Call(ranks, rank, distances, factor, threads, workspace, mark))

    def _run(self, form: str, rows: np.ndarray, call: Call) -> None:
        """A target's part of `run`, on arguments that have been checked."""
        raise NotImplementedError

    def ready(self, forms: Sequence[str]) -> None:
        """Compile those of these forms that target c lacks. Raises `jit.CompileError`."""

    def distances(self, ranks: int, rank: int) -> int:
        """How many numbers a call reads of `Call.distances`."""
        return (ranks - (rank >= 0)) * (1 + self.layout.redraws)

    def workspace_nbytes(self, numels: np.ndarray, threads: int = 1, ranks: int = 1) -> int:
        """Bytes of scratch memory that a call over rows of these sizes needs on this target."""
        return self.layout.workspace_nbytes(numels, threads)

    def mark(self, device: torch.device | None = None) -> Mark | None:
        """A flag of the caller's own that a GPU sets when `run` meets a malformed payload.

        None if `run` raises the error itself, or if no payload can be malformed. `device` defaults
        to the current one.
        """
        return None


def check_memory(
    of: object,
    what: str,
    tensor: torch.Tensor | None,
    numel: int,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Raise ConfigError unless `tensor` is contiguous and no lazy view (conjugate, negative).

    Args:
        of, what: for the message: whose memory it is, and which.
        numel, dtype, device: what the tensor must have.
    """
    if tensor is None:
        raise ConfigError(f"{of}: `{what}` is missing")
    # torch releases the GIL in these checks, so they are made only where a lazy view is possible: a
    # negative view of real dtype is every other value of a complex one, hence not contiguous.
    lazy = (dtype.is_complex or numel == 1) and (tensor.is_conj() or tensor.is_neg())
    as_it_must_be = (
        tensor.numel() == numel
        and tensor.dtype is dtype
        and tensor.device == device
        and tensor.is_contiguous()
        and not lazy
    )
    if not as_it_must_be:
        layout = "contiguous" if tensor.is_contiguous() else "not contiguous"
        if lazy:
            layout = "a view that negates its imaginary part"
        raise ConfigError(
            f"{of}: `{what}` holds {tensor.numel()} x {tensor.dtype} on {tensor.device}, "
            f"{layout}; it must hold {numel} x {dtype}, contiguous on {device}"
        )


def check_table(rows: np.ndarray) -> None:
    """Raise ConfigError unless `rows` is a C-contiguous table of dtype `ROW`."""
    if rows.dtype != ROW or not rows.flags.c_contiguous:
        raise ConfigError("rows: give a C-contiguous numpy table of dtype gradwire.lang.ROW")


def check_distances(distances: np.ndarray | None, read: int) -> None:
    """Raise ConfigError unless there are as many as a call reads; see `Call.distances`."""
    if distances is None:
        if read:
            raise ConfigError(f"distances: none are given, and the call reads {read}")
    elif distances.dtype != np.int64 or not distances.flags.c_contiguous or distances.size < read:
        raise ConfigError(
            f"distances: {distances.size} x {distances.dtype} are given; the call reads {read}, "
            "int64 and C-contiguous"
        )


def check_workspace(workspace: torch.Tensor | None, needed: int) -> None:
    """Raise ConfigError unless a workspace has the bytes that a call needs."""
    given = 0 if workspace is None else workspace.nbytes
    if given < needed:
        raise ConfigError(f"workspace: {given} bytes are given; the call needs {needed}")


def check_form(form: str) -> None:
    """Raise `ConfigError` for an unknown form."""
    if form not in FORMS:
        raise ConfigError(f"unknown form {form!r}: {use_one_of(form, FORMS)}")
