"""How often Python calls kernels: once per task of a collective, whatever its codecs."""

from __future__ import annotations

import pytest
import torch

from fifo import FifoHub
from gradwire import QSGD, Codec, Options
from gradwire.codecs import Identity, OneBit, TopK
from gradwire.collectives import prepare
from gradwire.engine import Communicator
from gradwire.partition import Spec
from ranks import as_threads
from typed_values import items_of

MIX: list[Codec] = [
    *(QSGD(bits=bits) for bits in (2, 4, 8)),
    TopK(density=0.05),
    OneBit(),
    Identity(),
]
NUMEL = 3000


@pytest.mark.parametrize(("n", "in_order"), [(2, False), (3, True)])
def test_a_task_is_one_call(n: int, in_order: bool) -> None:
    def averaged(comm: Communicator, options: Options) -> tuple[list[torch.Tensor], int, int, int]:
        """The results; the calls that the second step made; its tasks; its kernel calls."""
        twice = [codec for codec in MIX for _ in range(2)]
        specs = [Spec(f"p{k}", NUMEL, torch.float32, c, True) for k, c in enumerate(twice)]
        collective = prepare(comm.calls, specs, options)
        made = torch.Generator().manual_seed(comm.rank)
        values = [torch.randn(NUMEL, generator=made) for _ in specs]
        residuals = [torch.zeros(NUMEL) for _ in specs]
        for step in range(2):
            items = items_of(comm, specs, values, residuals, step)
            calls = collective.start(items).result(timeout=60).kernel_calls
        program = collective.prepared[0][0].program
        tasks = sum(bool(of_task) for of_task in program.calls.of)
        return [*values, *residuals], calls, tasks, len(program.calls.form)

    ways = [
        Options(segments=2, target="c"),
        Options(segments=2, target="c", batched=False),
        Options(segments=2, target="eager"),
    ]
    found = as_threads(
        n,
        lambda comm: [averaged(comm, options) for options in ways],
        fifo=FifoHub(n, False) if in_order else None,
    )
    for (one, calls, tasks, listed), (alone, each, _, rows), (eager, apart, *_) in found:
        assert calls == tasks < listed
        assert each == rows > listed
        assert apart == listed
        assert all(map(torch.equal, one, alone))
        assert all(map(torch.equal, one, eager))
