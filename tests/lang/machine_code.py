"""What a compiled kernel costs, read from its machine code for sm_90 with the tools that Triton
brings: no GPU is needed."""

from __future__ import annotations

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REGISTERS, SHARED_NBYTES, WARPS, PROGRAMS = 65536, 227 * 1024, 64, 32  # of a multiprocessor
RESERVED_NBYTES = 1024  # of shared memory, per program
THREADS = 32  # of a warp
INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_.]+)")


@dataclass(frozen=True)
class Cost:
    """Of a kernel of full tiles.

    Attributes:
        instructions: per value; loops count once, and the rare path of a division does not.
        registers: per thread.
        spills: instructions that access what did not fit registers.
        warps: that a multiprocessor holds at once.
        conversions: changes of layout of an eighth of a tile's values or more.
        barriers: of a program.
    """

    instructions: float
    registers: int
    spills: int
    warps: int
    conversions: int
    barriers: int


def cost(kernel: Any, values: int) -> Cost:
    """The cost of what `triton.compile` returns; `values` per tile."""
    from triton import backends

    tools = Path(backends.__file__).parent / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        code = printed(tools / "nvdisasm", "-c", file.name)
        used = printed(tools / "cuobjdump", "-res-usage", file.name)
    found = [
        m[1].split(".")[0]
        for m in INSTRUCTION.finditer(re.split(r"\.type\s+\$__internal", code)[0])
    ]
    path = [op for op in found if op != "NOP"]
    (registers,) = (int(n) for n in re.findall(r"\bREG:(\d+)", used))
    warps = kernel.metadata.num_warps
    return Cost(
        instructions=round(len(path) * warps * THREADS / values, 1),
        registers=registers,
        spills=sum(op in ("LDL", "STL") for op in path),
        warps=warps * programs(registers, kernel.metadata.shared, warps),
        conversions=conversions(kernel.asm["ttgir"], values // 8),
        barriers=path.count("BAR"),
    )


def printed(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def programs(registers: int, shared: int, warps: int) -> int:
    """How many programs a multiprocessor holds at once."""
    of_warp = -(-registers * THREADS // 256) * 256
    by_registers = REGISTERS // (of_warp * warps)
    by_memory = SHARED_NBYTES // (shared + RESERVED_NBYTES)
    return min(PROGRAMS, WARPS // warps, by_registers, by_memory)


def conversions(ttgir: str, least: int) -> int:
    """The changes of layout of tensors with `least` numbers or more."""
    shapes = re.findall(r"ttg\.convert_layout .*? -> tensor<((?:\d+x)+)", ttgir)
    return sum(math.prod(map(int, s.rstrip("x").split("x"))) >= least for s in shapes)
