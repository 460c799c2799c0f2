"""Moves large block arrays of a sweep from the stack to the workspace.

A kernel does not control the stack size of its threads, which may be below 1 MiB. One array of
65536 floats takes 256 KiB, and a codec may need any number of them. So if the arrays of a function
exceed ON_STACK bytes together, all of them are placed in the calling thread's part of the
workspace. This is the last pass over the text of a file, so the rules that declare arrays need not
handle it.

The threads' parts are at the beginning of the workspace, in reverse order; the workspace pointer
that functions see points behind them.
"""

from __future__ import annotations

import re

ON_STACK = 100 << 10  # bytes; the copy of a function for partial groups takes as much again
LINE = 64  # alignment of arrays, in bytes

_FUNCTION = re.compile(r"^INLINE void \w+_group\d+\(")
_GROUP = re.compile(r"^  enum { GROUP = (\d+) };$")
_ARRAY = re.compile(
    r"^(?P<indent> *)(?P<type>\w+) (?P<name>\w+)(?P<group>\[GROUP\])?\[(?P<block>BLOCK[ +\d]*)\]"
    r"(?: __attribute__\(\(aligned\(64\)\)\))?;$"
)
_BYTES = {"float": 4, "uint32_t": 4, "int32_t": 4, "int": 4, "uint16_t": 2, "uint8_t": 1}
_BYTES["Code"] = 4  # or 1: see prelude.h
_SCRATCH = re.compile(r"^enum { SCRATCH = (\d+) };", re.MULTILINE)

_TEXT = """\
enum {{ SCRATCH = {nbytes} }}; /* bytes of arrays that a thread has in the workspace */
INLINE char *scratch_of(const Call *call) {{
  return (char *)call->workspace - (int64_t)(omp_get_thread_num() + 1) * SCRATCH;
}}
INLINE void *past_scratch(void *workspace, int threads) {{
  const uintptr_t begin = ((uintptr_t)workspace + {line} - 1) / {line} * {line};
  return (char *)begin + (int64_t)threads * SCRATCH;
}}

"""


def placed(text: str, block: int) -> str:
    """The text of a file, with its large arrays in the workspace."""
    lines, largest, begin = text.split("\n"), 0, None
    for at, line in enumerate(lines):
        if _FUNCTION.match(line):
            begin = at
        elif line == "}" and begin is not None:
            lines[begin:at], nbytes = _function(lines[begin:at], block)
            largest, begin = max(largest, nbytes), None
    if not largest:
        return text
    entry = "  Call call = {"
    text = "\n".join(lines).replace(
        entry, f"  workspace = past_scratch(workspace, threads);\n{entry}"
    )
    return _TEXT.format(nbytes=largest, line=LINE) + text


def scratch_nbytes(text: str) -> int:
    """Bytes of workspace per thread for the arrays of a file, alignment included."""
    found = _SCRATCH.search(text)
    return LINE + int(found[1]) if found else 0


def _function(lines: list[str], block: int) -> tuple[list[str], int]:
    """The lines with their arrays in the workspace, and the bytes these take; 0 if unchanged."""
    group = next(int(found[1]) for line in lines if (found := _GROUP.match(line)))
    placed, nbytes = [], 0
    for line in lines:
        array = _ARRAY.match(line)
        if array is not None:
            length = block + int(array["block"].partition("+")[2] or 0)
            many = group if array["group"] else 1
            name = f"(*restrict const {array['name']})[{array['block']}]"
            if not array["group"]:
                name = f"*restrict const {array['name']}"
            line = f"{array['indent']}{array['type']} {name} = (void *)(scratch + {nbytes});"
            nbytes += -(-_BYTES[array["type"]] * length * many // LINE) * LINE
        elif _GROUP.match(line):
            line += "\n  char *const scratch = scratch_of(call);"
        placed.append(line)
    return (placed, nbytes) if nbytes > ON_STACK else (lines, 0)
