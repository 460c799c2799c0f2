"""What the kernels of full tiles cost on a GPU that is absent: instructions, registers, barriers.

A kernel at memory speed has few instructions per value, and enough warps to wait for memory: those
of encode and decode have bounds, and no form may cost a quarter more than is stored.
triton_costs.json has what each form costs; `python tests/lang/test_triton_costs.py` writes it anew.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from gradwire import codecs
from gradwire.lang import layout
from gradwire.lang.emit import triton_rows
from products import EXHAUSTIVE

triton = pytest.importorskip("triton", reason="triton is not installed here")

from machine_code import Cost, cost  # noqa: E402
from test_triton_compile import compiled  # noqa: E402

pytestmark = pytest.mark.xdist_group("triton")

STORED = Path(__file__).with_name("triton_costs.json")
COSTS = {name: Cost(**row) for name, row in json.loads(STORED.read_text()).items()}
FEW = ("qsgd encode", "qsgd decode", "terngrad decode")  # the others take too long to compile
CASES = [pytest.param(name, marks=[] if name in FEW else EXHAUSTIVE) for name in COSTS]
MOST = {"encode": 28, "decode": 18}  # instructions per value, of each sweep
BARRIERS = 8
WARPS = 16
GROWTH = 1.25  # a change that costs more must say so, in the stored figures
# (codec and form, quantity) beyond its bound -> why
BEYOND = {
    ("onebit encode", "instructions"): "two sums in order, by 40 shuffles of each thread",
    ("learnedlevels encode", "instructions"): "4 comparisons, 11 choices among their bounds",
    ("rotated encode", "instructions"): "four of seven steps among the lanes of a tensor",
    ("rotated decode", "instructions"): "the same, and random numbers drawn again",
    ("qsgd decode", "instructions"): "random numbers drawn again",
    ("fp8 decode", "instructions"): "no instruction for fp8 with the same bits",
    ("qsgd:scale=l2 encode", "instructions"): "13 of an exact division, by the norm",
    ("qsgd:scale=l2 encode", "conversions"): "codes at even bytes: narrower loads take 3 more",
    ("qsgd:scale=l2 encode", "barriers"): "those of the conversions",
    ("threelc encode", "conversions"): "kept codes are stored at any byte",
    ("threelc encode_ef", "conversions"): "the same",
    ("threelc reduce_encode", "conversions"): "the same",
    ("topk encode", "instructions"): "two stores at computed places per value",
    ("topk encode", "barriers"): "where a thread loads single numbers, four warps share a block",
    ("topk encode_ef", "barriers"): "the same",
    ("topk reduce_encode", "barriers"): "the same",
    ("topk reduce_encode", "spills"): "a number for the second loop is kept through the first",
    (
        "adacomp encode_ef",
        "conversions",
    ): "entries, an eighth of a tile, go to computed places",
    ("adacomp encode_ef", "barriers"): "the same, and as in topk",
    ("adacomp encode_ef", "warps"): "two loops over candidates beside stores of all elements",
    ("qsgd encode_ef", "warps"): "24 of 32 random numbers are drawn before the extremes are known",
    ("rotated encode_ef", "warps"): "signs, random and rotated numbers: 96 of a thread",
    ("rotated reduce_encode", "warps"): "the same",
    ("rotated reduce_encode", "spills"): "a mask and a number are kept through the loop over ranks",
}
OLDEST = "3.6."  # that the package allows; the stored figures are of 3.9
# codec -> why it has no bounds under the oldest Triton
COSTLIER = {
    "topk": "changes layouts of candidates 40 times",
    "adacomp": "the same",
    "qsgd:scale=l2": "not counted",
    "learnedlevels": "changes layouts of looked-up bounds 12 to 25 times",
    "onebit": "12 warps for encode_ef and reduce_encode",
    "threelc": "18.4 instructions for decode",
    "rotated": "not counted",
}


def costs(name: str) -> list[Cost]:
    """Those of the sweeps of a form, of full tiles."""
    codec, form = name.split()
    lay = layout(codecs.get(codec))
    values = triton_rows.group(lay) * lay.block
    kernels = compiled(codecs.get(codec), form, "sm_90", others=False)
    return [cost(kernel, values) for kernel in kernels]


def of_form(found: list[Cost]) -> Cost:
    """The sweeps' costs together: their sum, or the worst of them."""
    return Cost(
        instructions=round(sum(c.instructions for c in found), 1),
        registers=max(c.registers for c in found),
        spills=sum(c.spills for c in found),
        warps=min(c.warps for c in found),
        conversions=sum(c.conversions for c in found),
        barriers=max(c.barriers for c in found),
    )


@pytest.mark.parametrize("name", CASES)
def test_full_tiles_run_at_memory_speed(name: str) -> None:
    codec, form = name.split()
    if triton.__version__.startswith(OLDEST) and codec in COSTLIER:
        pytest.skip(f"Triton {triton.__version__}: {COSTLIER[codec]}")
    found = costs(name)
    beyond = {
        "instructions": any(c.instructions > MOST.get(form, 1e9) for c in found),
        "spills": any(c.spills for c in found),
        "warps": any(c.warps < WARPS for c in found),
        "conversions": any(c.conversions for c in found),
        "barriers": any(c.barriers > BARRIERS for c in found),
    }
    assert {q for q in beyond if beyond[q] and (name, q) not in BEYOND} == set()
    now, before = of_form(found), COSTS[name]
    assert now.instructions <= GROWTH * before.instructions, now
    assert now.registers <= GROWTH * before.registers, now
    if not triton.__version__.startswith(OLDEST):  # of which the other figures are not stored
        assert before.instructions <= GROWTH * now.instructions, now  # store what is better
        assert before.warps <= GROWTH * now.warps, now
        for quantity in ("spills", "conversions", "barriers"):
            assert getattr(now, quantity) <= GROWTH * getattr(before, quantity), (quantity, now)


def test_beyond_names_costs() -> None:
    assert {name for name, _ in BEYOND} <= set(COSTS)


if __name__ == "__main__":
    rows = [f"{json.dumps(name)}: {json.dumps(asdict(of_form(costs(name))))}" for name in COSTS]
    STORED.write_text("{\n" + ",\n".join(rows) + "\n}\n")
