"""Checks of target triton, which run in a separate process where Triton interprets kernels.

TRITON_INTERPRET must be set before Triton is imported, and Triton then compiles nothing in that
process, so it must not be set for other tests. An interpreted launch is slow even if it does
little, so these calls have many rows.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
import torch

from codec_calls import SUMS, gradient, same
from gradwire.codecs import Codec
from gradwire.errors import CodecError
from gradwire.lang import ROW, Layout, kernels, layout, rng
from gradwire.lang.forms import FORMS

GAP = 3  # bytes and values between rows
ALIGNED = 16  # bytes, and values: of every other row
PEERS = 2
ORIGINS = [3, 5]


def begin() -> None:
    """Make Triton interpret kernels in this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    # the interpreter uses numpy, which warns about intended infinities and NaN
    np.seterr(all="ignore")
    patch_once()


def patch_once() -> None:
    """Patch Triton's language for interpretation once, instead of in every call of a function.

    Patching takes 2 ms per call, half of the time of these tests.
    """
    from triton.runtime import interpreter

    from gradwire.lang.emit import triton_prelude

    if hasattr(interpreter, "_patch_lang"):
        interpreter._patch_lang(triton_prelude.find.fn)
        interpreter._patch_lang = lambda function: Patched()


class Patched:
    """The result of patching; does not undo it."""

    def restore(self) -> None:
        """Keep the language patched."""


@dataclass
class Memory:
    """The memory of a call's rows, with gaps that must not change."""

    values: torch.Tensor
    residual: torch.Tensor
    payload: torch.Tensor
    sources: torch.Tensor
    rows: np.ndarray
    stride: int
    error: CodecError | None = None  # of the call after which this is the memory

    def on(self, device: str) -> Memory:
        """A copy on a device."""
        tensors = [t.to(device, copy=True) for t in self.tensors]
        copy = Memory(*tensors, self.rows.copy(), self.stride)
        names = ("values", "residual", "payload", "source")
        for name, old, new in zip(names, self.tensors, tensors, strict=True):
            copy.rows[name] += moved(old, new)
        return copy

    def run(
        self, codec: Codec, form: str, target: str, ranks: int = 1, rank: int = 0,
        device: str = "cpu",
    ) -> Memory:  # fmt: skip
        """Run a form on a copy of this memory on a device; returns the copy, with the error as an
        attribute of it if the payload is refused."""
        copy, error = self.on(device), None
        try:
            kernels(codec, self.values.dtype, target).run(
                form, copy.rows, ranks=ranks, rank=rank, distances=distances(self.stride),
                factor=1 / 3,
            )  # fmt: skip
        except CodecError as raised:
            error = raised
        return Memory(*(t.cpu() for t in copy.tensors), self.rows, self.stride, error)

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.values, self.residual, self.payload, self.sources

    def unequal(self, other: Memory) -> list[str]:
        parts = ("values", "residual", "payload")
        found = [p for p in parts if not same(getattr(self, p), getattr(other, p))]
        return found if self.error is other.error is None else [*found, f"error: {self.error}"]


def distances(stride: int) -> np.ndarray:
    """Of PEERS payloads, and where kernels read them, their origins."""
    return np.concatenate([np.arange(PEERS) * stride, ORIGINS])


def moved(old: torch.Tensor, new: torch.Tensor) -> np.uint64:
    """The difference of addresses, modulo 2^64."""
    return np.uint64((new.data_ptr() - old.data_ptr()) % 2**64)


def memory(lay: Layout, values: list[torch.Tensor], stride: int = 0) -> Memory:
    """Memory for rows of these values; peers' payloads are `stride` bytes apart, or side by
    side. The first row is aligned, the second is not, and so on."""
    sizes = [v.numel() for v in values]
    bytes_each = [lay.nbytes(n) for n in sizes]
    starts, at = placed(sizes), placed(bytes_each) + ALIGNED
    stride = stride or -(-max(bytes_each) // ALIGNED) * ALIGNED
    sources = placed([PEERS * stride] * len(sizes))
    made = Memory(
        torch.full((int(starts[-1]),), 7.0, dtype=values[0].dtype),
        gradient(int(starts[-1]), seed=4),
        torch.full((int(at[-1]),), 0xA5, dtype=torch.uint8),
        torch.full((int(sources[-1]),), 0xA5, dtype=torch.uint8),
        np.zeros(len(sizes), ROW),
        stride,
    )
    for i, v in enumerate(values):
        made.values[starts[i] : starts[i] + v.numel()] = v
    made.rows["values"] = made.values.data_ptr() + starts[:-1] * made.values.element_size()
    made.rows["residual"] = made.residual.data_ptr() + starts[:-1] * 4
    made.rows["payload"] = made.payload.data_ptr() + at[:-1]
    made.rows["source"] = made.sources.data_ptr() + sources[:-1]
    made.rows["numel"], made.rows["start"] = sizes, np.arange(len(sizes)) * 1000 + 2**32 - 1500
    made.rows["key"], made.rows["shared"] = np.arange(len(sizes), dtype=np.uint64), 5
    made.rows["key"] += np.uint64(2**63)
    return made


def placed(sizes: Sequence[int]) -> np.ndarray:
    """Where rows begin, every other one aligned; then the end. A gap follows each row."""
    at = [0]
    for n in sizes:
        end = at[-1] + n + GAP
        at.append(-(-end // ALIGNED) * ALIGNED + len(at) % 2 * GAP)
    return np.array(at)


def with_payloads(codec: Codec, made: Memory) -> Memory:
    """The same memory, with valid payloads in it."""
    values, rows = made.values.clone(), made.rows.copy()
    rows["values"] += moved(made.values, values)
    eager = kernels(codec, values.dtype, "eager")
    for peer in range(PEERS + 1):
        values.copy_(gradient(values.numel(), values.dtype, seed=peer))
        own = made.rows["source"] + np.uint64(peer * made.stride)
        rows["payload"] = own if peer < PEERS else made.rows["payload"]
        rows["key"] = made.rows["key"]
        if eager.layout.redraws and peer < PEERS:
            rows["key"] = rng.origin_keys(rows["shared"], ORIGINS[peer])
        eager.run("encode", rows)
    return made


def differences(
    codec: Codec,
    dtype: torch.dtype,
    sizes: Sequence[int],
    given: Sequence[Sequence[float]] = (),
    forms: Sequence[str] = FORMS,
    device: str = "cpu",
    reference: str = "eager",
) -> str:
    """The results in which target triton on a device and another target differ; empty if none.

    Rows: one per size in `sizes`, and one per list of values in `given`.
    """
    values = [gradient(n, dtype, seed=n) for n in sizes]
    values += [torch.tensor(numbers, dtype=torch.float32).to(dtype) for numbers in given]
    made = with_payloads(codec, memory(layout(codec, dtype), values))
    wrong, valid = [], made.payload.clone()
    for form in forms:
        sums = form in SUMS
        made.payload.copy_(valid) if form.startswith("decode") else made.payload.fill_(0xA5)
        for rank in (1, -1) if form == "decode_sum" else (1 if sums else 0,):
            ranks = PEERS + (rank >= 0) if sums else 1
            a = made.run(codec, form, "triton", ranks, rank, device)
            b = made.run(codec, form, reference, ranks, rank)
            wrong += [f"{part} of {form} at rank {rank}" for part in a.unequal(b)]
    return ", ".join(wrong)


def sampled_differences(
    codec: Codec, given: Sequence[Sequence[float]], form: str
) -> tuple[str, int]:
    """`differences` where short rows take a sample, too; and how many rows were sifted again."""
    from gradwire.lang import gpu, tiles
    from gradwire.lang.emit import triton_selection

    launch, usual, again = gpu.Launches.launch, gpu.UNSAMPLED, 0
    chosen: list[torch.Tensor] = []

    def watching(self: gpu.Launches, kernel: object, *arguments: object, **options: object) -> None:
        nonlocal again
        launch(self, kernel, *arguments, **options)  # type: ignore[arg-type]
        table = self.divided.table
        floors = self.table[: table.size].view(table.shape)[:, tiles.COLUMN["floor"]].clone()
        if kernel is triton_selection.choose:
            chosen.append(floors)
        elif kernel is triton_selection.histogram and chosen:
            again += int((floors < chosen.pop()).sum())

    gpu.Launches.launch, gpu.UNSAMPLED = watching, 0  # type: ignore[method-assign]
    found = differences(codec, torch.float32, [], given, [form])
    gpu.Launches.launch, gpu.UNSAMPLED = launch, usual  # type: ignore[method-assign]
    return found, again


def verdicts(
    codec: Codec, numel: int, form: str, edits: Sequence[dict[int, int]], device: str = "cpu"
) -> list[str]:
    """For every edit ({offset: byte}) of a valid payload: "refused" or "decoded" if both targets
    agree, else what is wrong."""
    made = with_payloads(codec, memory(layout(codec), [gradient(numel, seed=1)]))
    at = int(made.rows["payload"][0]) - made.payload.data_ptr()
    valid, ranks = made.payload.clone(), PEERS + 1 if form == "decode_sum" else 1

    def verdict(edit: dict[int, int]) -> str:
        made.payload.copy_(valid)
        for place, byte in edit.items():
            made.payload[at + place] = byte
            made.sources[place] = byte  # the first peer's
        ways = (("eager", "cpu"), ("triton", device))
        left = [made.run(codec, form, target, ranks, 0, place) for target, place in ways]
        said = ["decoded" if after.error is None else "refused" for after in left]
        if said[0] != said[1]:
            return f"eager {said[0]}, triton {said[1]}"
        if said[0] == "decoded" and left[1].unequal(left[0]):
            return "decoded to something else"
        # only the row's values may change, whatever the payload contains
        left[1].values[:numel], left[1].error = made.values[:numel], None
        stray = left[1].unequal(made)
        return f"stray writes: {stray}" if stray else said[0]

    return [verdict(edit) for edit in edits]


def marked(codec: Codec, numel: int, bad: dict[int, int], device: str = "cpu") -> list[str]:
    """Cases where a malformed payload is not reported to its caller, or is reported to another.

    Callers a and b have their own marks for the same kernels; a third has none.
    """
    made, wrong = kernels(codec, torch.float32, "triton"), []
    good = with_payloads(codec, memory(layout(codec), [gradient(numel, seed=1)])).on(device)
    rows, payload = good.rows, good.payload.clone()
    at = int(rows["payload"][0]) - good.payload.data_ptr()
    for place, byte in bad.items():
        payload[at + place] = byte
    bad_rows = rows.copy()
    bad_rows["payload"] += moved(good.payload, payload)

    def check(who: str, body: Callable[[], object], expected: bool) -> None:
        try:
            body()
            found = False
        except CodecError as error:
            found = str(error).startswith("row 0: malformed payload")
        if found != expected:
            wrong.append(f"{who}: {'error' if found else 'no error'}")

    a, b = made.mark(), made.mark()
    assert a is not None
    assert b is not None
    for form in ("decode", "decode_add"):
        check("a's bad call by itself", lambda f=form: made.run(f, bad_rows, mark=a), False)
        check("b's good call", lambda f=form: made.run(f, rows, mark=b), False)
        check("b", b.check, False)
        check("a call without a mark", lambda f=form: made.run(f, rows), False)
        check("a bad call without a mark", lambda f=form: made.run(f, bad_rows), True)
        check("b, after another's", b.check, False)
        check("a's good call, after its bad one", lambda f=form: made.run(f, rows, mark=a), False)
        verdict = a.verdict()
        check("a, at this place", verdict.check, True)
        check("a, once more", a.check, False)
    check("an encoding", lambda: made.run("encode", rows), False)
    check("a, after an encoding", a.check, False)
    return wrong


def numbers(codec: Codec, form: str) -> list[float]:
    """The codec's numbers, and what a form's kernels are given of them."""
    from gradwire.lang import gpu

    device = kernels(codec, torch.float32, "triton")
    assert isinstance(device, gpu.Device)
    found: list[float] = device.numbers(form, torch.device("cpu")).tolist()
    return found


def has_mark(codecs: Sequence[Codec]) -> list[bool]:
    """Whether the payloads of these codecs can be malformed."""
    return [kernels(codec, torch.float32, "triton").mark() is not None for codec in codecs]


def launches(codec: Codec, sizes: Sequence[int], device: str = "cpu") -> dict[str, int]:
    """The number of launches per form over rows of these sizes."""
    from gradwire.lang import gpu

    made = with_payloads(codec, memory(layout(codec), [gradient(n, seed=n) for n in sizes]))
    counted: list[object] = []
    launch = gpu.Launches.launch

    def counting(self: gpu.Launches, *arguments: object, **options: object) -> None:
        counted.append(arguments[0])
        launch(self, *arguments, **options)  # type: ignore[arg-type]

    gpu.Launches.launch = counting  # type: ignore[method-assign]
    found = {}
    for form in FORMS:
        sums = form in SUMS
        counted.clear()
        made.run(codec, form, "triton", PEERS + 1 if sums else 1, 0, device)
        found[form] = len(counted)
    gpu.Launches.launch = launch  # type: ignore[method-assign]
    return found


def launches_of(codec: Codec, numel: int) -> dict[str, int]:
    """The number of launches per form over one row of this size, none of which is carried out."""
    from gradwire.lang import gpu

    rows, found = np.zeros(1, ROW), {}
    rows["numel"] = numel
    counted: list[object] = []
    launch = gpu.Launches.launch

    def counting(*arguments: object, **options: object) -> None:
        counted.append(arguments[0])

    gpu.Launches.launch = counting  # type: ignore[method-assign]
    for form in FORMS:
        ranks = PEERS + 1 if form in SUMS else 1
        counted.clear()
        made = kernels(codec, torch.float32, "triton")
        made.run(form, rows, ranks=ranks, distances=distances(numel))
        found[form] = len(counted)
    gpu.Launches.launch = launch  # type: ignore[method-assign]
    return found


def trips(codec: Codec, numel: int) -> int:
    """The most trips of a loop when the blocks of a row of this size are counted."""
    from gradwire.lang import gpu, tiles
    from gradwire.lang.call import Call
    from gradwire.lang.emit import triton_counts

    device, lay = kernels(codec, torch.float32, "triton"), layout(codec)
    assert isinstance(device, gpu.Device)
    payload, rows = torch.zeros(lay.nbytes(numel), dtype=torch.uint8), np.zeros(1, ROW)
    rows["numel"], rows["payload"] = numel, payload.data_ptr()
    workspace = torch.zeros(device.workspace_nbytes(rows["numel"]), dtype=torch.uint8)
    divided = tiles.divide(rows, lay, statistics=device.statistics)
    failed = torch.zeros(1, dtype=torch.int32)
    made, most = gpu.Launches(device, "decode", divided, Call(workspace=workspace), failed), 0

    def counting(*arguments: int) -> range:
        nonlocal most
        most = max(most, len(range(*(int(n) for n in arguments))))
        return range(*(int(n) for n in arguments))

    triton_counts.range = counting  # type: ignore[attr-defined]
    made.survey(peers=False)
    if lay.staged:
        made.scan()
    del triton_counts.range  # type: ignore[attr-defined]
    return most


def strays(
    codec: Codec, sizes: Sequence[int], target: str = "triton", forms: Sequence[str] = FORMS
) -> list[str]:
    """Forms that write beyond their workspace, on some number of threads."""
    made = with_payloads(codec, memory(layout(codec), [gradient(n, seed=n) for n in sizes]))
    k, wrong, at = kernels(codec, torch.float32, target), [], distances(made.stride)
    for threads, form in product((1, 3) if target == "c" else (1,), forms):
        ranks = PEERS + 1 if form in SUMS else 1
        needed = k.workspace_nbytes(made.rows["numel"], threads, ranks)
        workspace = torch.full((needed + 64,), 0xA5, dtype=torch.uint8)
        k.run(
            form, made.rows, ranks=ranks, distances=at, factor=1 / 3, threads=threads,
            workspace=workspace,
        )  # fmt: skip
        if not bool((workspace[needed:] == 0xA5).all()):
            wrong.append(f"{form} on {threads} threads")
    return wrong
