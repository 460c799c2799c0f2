"""Ranks of one process that average given gradients through an aggregator, as training does.

Each rank has a communicator over the loopback transport, and its parameters' state. Rounds run the
same coroutines, collectives and kernels as DDP's hook. So any registered method can be measured
without a network, and its bytes are those of a network.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from gradwire.aggregators import Aggregator, Attached, Rounds
from gradwire.aggregators.coroutine import Asking
from gradwire.aggregators.error_feedback import RESIDUAL
from gradwire.collectives import AllReduce, Options
from gradwire.engine import Communicator, Outcome
from gradwire.errors import TransportError
from gradwire.lang import Codec, layout, rng
from gradwire.lang.layout import COUNT_NBYTES, run_nbytes
from gradwire.partition import rotation
from gradwire.transport import Hub

_TIMEOUT_S = 600.0
_INDEX_BITS = 32  # of a position, as papers count it


class Counted(Attached):
    """A parameter that counts what its aggregator feeds into collectives.

    Attributes:
        packed_bits: as it is packed, without headers of messages.
        input_bits: with 32 bits for each position that a payload or an aggregator packs.
    """

    packed_bits: int = 0
    input_bits: int = 0


class _CountedRounds(Rounds):
    def _ask(self, number: int) -> list[Asking]:
        asking = super()._ask(number)
        for _, context, request in asking:
            packed, counted = bits_of(request.values, request.codec)
            context.member.packed_bits += packed
            context.member.input_bits += _INDEX_BITS * request.positions or counted
        return asking


def bits_of(values: torch.Tensor, codec: Codec | None) -> tuple[int, int]:
    """(bits as they are packed, bits with 32 for each position) of a collective's input; expected
    bits, if the length of a payload depends on data."""
    numel = values.numel()
    if codec is None:
        bits = 8 * values.itemsize * numel
        return bits, bits
    form = layout(codec, values.dtype)
    packed = 8 * form.expected_nbytes(numel)
    counted = packed
    for f in form.fields:
        if f.capacity is not None and numel:
            expected = form.expected_entries(numel) if form.data_dependent else None
            entries = form.capacity(numel) if expected is None else round(expected)
            positions = COUNT_NBYTES * form.blocks(numel) + run_nbytes(form.position, entries)
            counted += _INDEX_BITS * entries - 8 * positions
    return packed, counted


class InProcessRanks:
    """Ranks as threads, which average the gradients of the same parameters.

    Args:
        parameters: (name, shape) of each.
        aggregator: of all of them.
        options: of every collective.

    Attributes:
        members: rank -> its parameters.
    """

    def __init__(
        self,
        ranks: int,
        parameters: Sequence[tuple[str, tuple[int, ...]]],
        aggregator: Aggregator,
        options: Options,
    ) -> None:
        hub = Hub(ranks, _TIMEOUT_S)
        self._options = options
        self._comms = [Communicator(hub.transport(rank)) for rank in range(ranks)]
        self._owners = [comm.owner("recorded gradients") for comm in self._comms]
        self.members = [
            [
                Counted(
                    name, shape, aggregator, rng.parameter_keys(0, name, rank),
                    rotation(i, ranks),
                )
                for i, (name, shape) in enumerate(parameters)
            ]
            for rank in range(ranks)
        ]  # fmt: skip

    def average(
        self, gradients: Sequence[Sequence[torch.Tensor]]
    ) -> tuple[list[torch.Tensor], float]:
        """One step: rank 0's average of every parameter, equal on all ranks; and what a rank sent,
        headers included, mean over ranks. `gradients` by rank and parameter are not changed.

        Raises:
            ConfigError, CodecError, TransportError: the first error of any rank.
        """
        with ThreadPoolExecutor(len(gradients)) as pool:
            done = list(pool.map(self._one_rank, range(len(gradients)), gradients))
        shapes = [member.shape for member in self.members[0]]
        averages = [part.view(shape) for part, shape in zip(done[0][0], shapes, strict=True)]
        return averages, sum(sent for _, sent in done) / len(done)

    def _one_rank(
        self, rank: int, gradients: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], int]:
        # One buffer, as DDP's.
        bucket = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = list(bucket.split([gradient.numel() for gradient in gradients]))
        ended: Future[int] = Future()

        def done(error: BaseException | None, outcomes: list[Outcome]) -> None:
            if error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(sum(outcome.wire_bytes for outcome in outcomes))

        of = self._owners[rank], self.members[rank], [*map(AllReduce, flat)], self._options
        _CountedRounds(*of, done).start()
        if not wait([ended], 2 * _TIMEOUT_S).done:
            raise TransportError(f"rank {rank} did not end within {2 * _TIMEOUT_S:.0f} s")
        return flat, ended.result()

    def residual_mean(self) -> list[torch.Tensor]:
        """The mean over ranks of each parameter's residual, in float64; zeros where none is."""
        means = []
        for of_ranks in zip(*self.members, strict=True):
            total = torch.zeros(of_ranks[0].shape, dtype=torch.float64)
            for member in of_ranks:
                if RESIDUAL in member.state:
                    total += member.state[RESIDUAL].view(total.shape)
            means.append(total / len(of_ranks))
        return means

    def close(self) -> None:
        for comm in self._comms:
            comm.close()
