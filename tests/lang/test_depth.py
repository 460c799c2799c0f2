"""Long chains of operators with shared operands: work is linear in them, and nothing recurses.

Work that is repeated per use of an operand doubles with every link, so these tests would not end;
a recursion ends in RecursionError.
"""

from __future__ import annotations

import pytest
import torch
from programs import Decoded, Everywhere, Matrices

from codec_calls import gradient
from gradwire.lang import Codec, decode, encode, ir, show
from products import one_in


@pytest.mark.parametrize("codec", one_in(2, [Everywhere(100), Decoded(100)]), ids=repr)
def test_200_operators_with_shared_operands(codec: Codec) -> None:
    values = gradient(100)
    payload = encode(codec, values, target="eager")
    assert torch.equal(payload, encode(codec, values, target="c"))
    decoded = [decode(codec, payload, 100, target=target) for target in ("eager", "c")]
    assert torch.equal(*decoded)
    assert decoded[0].any()
    assert "def encode_0(" in show(codec, "triton")
    assert len(repr(ir.alu("add", ir.const(1.0), ir.const(2.0)))) < 200


@pytest.mark.parametrize("codec", [Decoded(1000), Matrices(1000)], ids=repr)
def test_2000_operators(codec: Codec) -> None:
    payload = encode(codec, torch.ones(70), target="eager")
    assert torch.isfinite(decode(codec, payload, 70, target="eager")).all()
    for stage in ("ir", "c", "triton"):
        assert show(codec, stage)
