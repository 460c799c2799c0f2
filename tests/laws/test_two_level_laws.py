"""Laws of all-reduce on several machines that take many draws, or a message of many parts.

test_collective_laws.py has the laws that every single run meets, on machines of many shapes too.
"""

from __future__ import annotations

import pytest
import torch

from gradwire import QSGD, CodecError, Options, TransportError, all_reduce
from gradwire.engine import Communicator
from gradwire.transport import Hub
from laws.ways import hierarchical
from ranks import as_threads, caught

SHAPES = {
    "2 of 2": hierarchical((0, 0, 1, 1)),
    "3 of 1 and 1 of 2": hierarchical((0, 1, 2, 3, 3), inside="full"),
    "5 in a grid": hierarchical((0, 1, 2, 3, 4, 4), between="grid"),
}


def reduced(data: list[torch.Tensor], codec: QSGD, options: Options) -> torch.Tensor:
    def body(comm: Communicator) -> torch.Tensor:
        mine = data[comm.rank].clone()
        all_reduce(mine, codec, op="avg", group=comm, options=options, step=0)
        return mine

    return as_threads(len(data), body)[0].double()


@pytest.mark.parametrize("shape", SHAPES)
def test_law_3_unbiased_means_unbiased(shape: str) -> None:
    """QSGD: over 20 000 draws the mean of each of ten values is within 5 standard errors."""
    options, pattern, draws = SHAPES[shape], 10, 20_000
    made = torch.Generator().manual_seed(0)
    assert options.nodes is not None
    values = [torch.randn(pattern, generator=made) for _ in options.nodes]
    codec = QSGD(bits=2, block=pattern * 8)
    found = reduced([x.repeat(draws) for x in values], codec, options).view(draws, pattern)
    expected = torch.stack(values).double().mean(0)
    standard = found.std(0) / draws**0.5
    assert (standard > 0).all()
    assert ((found.mean(0) - expected).abs() < 5 * standard).all()


def test_error_is_that_of_the_encodings() -> None:
    """docs/reference/algorithms.md: 4 machines of 2, QSGD, in encodings of one rank's values."""
    made = torch.Generator().manual_seed(0)
    data = [torch.randn(100_000, generator=made) for _ in range(8)]
    mean = torch.stack(data).double().mean(0)
    nodes = (0, 0, 1, 1, 2, 2, 3, 3)
    ways = {
        15: Options(),
        # 3 encodings of two ranks' sums, one of the sum of all
        14: hierarchical(nodes, inside="full", between="sra"),
        # in addition the locals of 4 ranks
        18: hierarchical(nodes, inside="codec", between="sra"),
        # 2 of two ranks' sums, 1 of four, 1 of eight, and 4 locals
        20: hierarchical(nodes, inside="codec", between="grid"),
    }
    found = {}
    for units, options in ways.items():
        error = reduced(data, QSGD(bits=4, block=128), options) - mean
        found[units] = float(error.square().sum() / mean.square().sum())
    for units, error in found.items():
        assert error / found[15] == pytest.approx(units / 15, rel=0.06)


def test_law_10_a_corrupted_part_of_a_message_is_named() -> None:
    """Two machines of two ranks: the share that rank 0 sends to rank 1."""
    for at in (150, -100):

        def corrupt(
            source: int, destination: int, tag: int, message: torch.Tensor, at: int = at
        ) -> None:
            if (source, destination) == (0, 1) and message.numel() > 200:
                message[at] ^= 4

        def body(comm: Communicator) -> BaseException | None:
            values, options = torch.randn(5000), SHAPES["2 of 2"]
            return caught(lambda: all_reduce(values, QSGD(), group=comm, options=options))

        errors = as_threads(4, body, Hub(4, timeout=20, corrupt=corrupt))
        assert isinstance(errors[1], CodecError)
        # its chunks are both machines' parts of share 1
        chunk = 1 if at > 0 else 3
        assert f"message from rank 0 (segment 0, chunk {chunk})" in str(errors[1])
        assert "checksum differs" in str(errors[1])
        for rank in (0, 2, 3):
            assert isinstance(errors[rank], TransportError)
