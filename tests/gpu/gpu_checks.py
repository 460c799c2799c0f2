"""What is checked on a GPU: plain functions that say what is wrong, or nothing.

tests/gpu/test_gpu.py runs them under pytest, scripts/gpu_check.py without. They need torch, Triton,
numpy, and gradwire on the path.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "lang")]

import triton_checks  # noqa: E402

from codec_calls import CODECS, DTYPES, WIDTHS  # noqa: E402
from gradwire.codecs import QSGD, AdaComp, Codec, TopK  # noqa: E402
from gradwire.lang import gpu, kernels, layout  # noqa: E402
from loopback import without_lookups  # noqa: E402

CASES = [(codec, dtype) for dtype in DTYPES for codec in CODECS]
CASES += [(codec, torch.float32) for codec in WIDTHS]
SPECIAL = [0.0, -0.0, 1.0, -1.0, 1e-40, -1e-45, 65504.0, 65520.0, 1e30, 3.4e38, -3.4e38, 0.1]
NON_FINITE = [float("nan"), float("inf"), float("-inf"), 1.0]
PARAMETERS = 50
DEVICE = "cuda"
SHARE_SECONDS = 200
BUCKET = 2**20  # values of a bucket of 4 MB


def missing() -> str | None:
    """Why nothing can be checked here, or None."""
    reason = gpu.missing()
    if reason is None and gpu.interpreting():
        reason = "TRITON_INTERPRET=1: nothing would run on the GPU"
    return reason


def same_bytes(codec: Codec, dtype: torch.dtype) -> str:
    """Every form writes what target c, or without a compiler eager, writes on the CPU."""
    block = layout(codec, dtype).block
    sizes = [3 * 4096 + block + 3, 0, 1, block - 1, block, block + 1, 2**18 + 5]
    given = [SPECIAL * 5, NON_FINITE * 9 + SPECIAL, [2.0, -2.0] * 5000]  # the last: ties
    return triton_checks.differences(codec, dtype, sizes, given, device=DEVICE, reference="auto")


def bad_payloads(codec: Codec) -> str:
    """Payloads that no encode makes are refused, and write nothing astray."""
    numel = 2000
    counts = layout(codec).offsets(numel)
    first = counts[[f.capacity is not None for f in layout(codec).fields].index(True)]
    edits = [
        {},
        {first: 255, first + 1: 255},  # more entries than there can be
        dict.fromkeys(range(counts[-1], counts[-1] + 60), 255),  # places in no order
    ]
    wrong = []
    for form in ("decode", "decode_add", "decode_sum"):
        found = triton_checks.verdicts(codec, numel, form, edits, DEVICE)
        if found != ["decoded", "refused", "refused"]:
            wrong.append(f"{form}: {found}")
    wrong += triton_checks.marked(codec, numel, edits[1], DEVICE)
    return ", ".join(wrong)


def two_launches() -> str:
    """A bucket of 4 MB in 50 parameters is two launches of each form, over full tiles and others;
    selections take as many as one parameter does."""
    sizes = [BUCKET // PARAMETERS + i for i in range(PARAMETERS)]
    many = triton_checks.launches(QSGD(), sizes, DEVICE)
    wrong = [f"qsgd {form}: {n} launches" for form, n in many.items() if n != 2]
    few = triton_checks.launches(TopK(), sizes[:1], DEVICE)
    many = triton_checks.launches(TopK(), sizes, DEVICE)
    wrong += [f"topk {form}: {n}, {few[form]} of one" for form, n in many.items() if n != few[form]]
    return ", ".join(wrong)


def nothing_allocated() -> str:
    """In the steady state a call allocates nothing but its table of rows."""
    wrong = []
    for codec in (QSGD(), TopK(), AdaComp()):
        made = kernels(codec, torch.float32, "triton")
        values = [torch.randn(2**16) for _ in range(4)]
        memory = triton_checks.memory(made.layout, values).on(DEVICE)
        needed = made.workspace_nbytes(memory.rows["numel"], 1, 1)
        workspace = torch.empty(needed, dtype=torch.uint8, device=DEVICE)
        counts = []
        for _ in range(5):
            made.run("encode_ef", memory.rows, workspace=workspace)
            torch.cuda.synchronize()
            counts.append(torch.cuda.memory_stats()["segment.all.allocated"])
        if len(set(counts[1:])) > 1:
            wrong.append(f"{codec!r}: segments {counts}")
    return ", ".join(wrong)


def nccl_alone(device: str = DEVICE) -> str:
    """One rank sends to itself over NCCL, in stream order, and the host waits for nothing."""
    script = str(Path(__file__).with_name("nccl_alone.py"))
    try:
        ended = subprocess.run(
            [sys.executable, script, device],
            capture_output=True, check=False, text=True, timeout=SHARE_SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {SHARE_SECONDS} s"
    said = (ended.stdout + (ended.stderr if ended.returncode else "")).strip()
    return f"exit code {ended.returncode}: {said[-1500:]}" if ended.returncode or said else ""


def missing_for_nccl(ranks: int) -> str | None:
    """Why so many ranks cannot meet over NCCL here, or None."""
    if not torch.distributed.is_nccl_available():
        return "this torch has no NCCL"
    found = torch.cuda.device_count()
    return None if found >= ranks else f"NCCL wants a GPU for each of {ranks} ranks: here {found}"


def ranks_share(world_size: int, device: str = DEVICE, backend: str = "gloo") -> str:
    """Ranks reduce CUDA tensors to the bits of the CPU, and train: over gloo they share the GPU,
    over NCCL each has its own."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    script = str(Path(__file__).with_name("share.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(world_size), str(store.port), device, backend],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    wrong = []
    for number, rank in enumerate(ranks):
        try:
            said = without_lookups(rank.communicate(timeout=SHARE_SECONDS)[0])
        except subprocess.TimeoutExpired:
            rank.kill()
            said = f"did not end within {SHARE_SECONDS} s"
        if rank.returncode or said.strip():
            wrong.append(f"rank {number} (exit code {rank.returncode}): {said.strip()[-1500:]}")
    return "\n".join(wrong)


TRAINERS = ("lightning", "accelerate", "transformers")


def trainers() -> str:
    """Trainers compress and resume as on the CPU, where ranks share the GPU."""
    tests = str(TESTS / "trainers" / "test_checkpoints.py")
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-k", " or ".join(TRAINERS), tests],
        env=os.environ | {"GRADWIRE_TEST_DEVICE": DEVICE},
        capture_output=True, check=False, text=True, timeout=SHARE_SECONDS,
    )  # fmt: skip
    return ended.stdout[-3000:] + ended.stderr[-1000:] if ended.returncode else ""


def missing_for_trainers() -> str | None:
    names = ("pytest", "pytest_timeout", "xdist", *TRAINERS)
    absent = [name for name in names if find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


# By name.
OTHERS: dict[str, Callable[[], str]] = {
    "two launches a bucket": two_launches,
    "nothing is allocated": nothing_allocated,
    "bad payloads, topk": lambda: bad_payloads(TopK(0.05)),
    "2 ranks share the GPU": lambda: ranks_share(2),
    "3 ranks share the GPU": lambda: ranks_share(3),
    "NCCL, 1 rank": nccl_alone,
    "NCCL, 2 ranks": lambda: ranks_share(2, backend="nccl"),
    "NCCL, 3 ranks": lambda: ranks_share(3, backend="nccl"),
    "trainers": trainers,
    "bad payloads, adacomp": lambda: bad_payloads(AdaComp(block=100, density=0.1)),
}

# Why one of these cannot be made here; the others take one GPU, and nothing else.
LACKING = {
    "trainers": missing_for_trainers,
    "NCCL, 1 rank": lambda: missing_for_nccl(1),
    "NCCL, 2 ranks": lambda: missing_for_nccl(2),
    "NCCL, 3 ranks": lambda: missing_for_nccl(3),
}
