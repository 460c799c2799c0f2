"""The Works that FSDP2 waits for: of gathers whose payloads are decoded.

Where a payload was withheld (handles/payloads.py), the thread that waits gathers once more:
ranks wait in the order of their program, so it is the next gather on all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradwire.engine import Outcome
from gradwire.errors import again
from gradwire.waiting import until_done

if TYPE_CHECKING:
    from gradwire.handles.gathered import GatheredWeights


class Decoding(dist.Work):
    """The Work of a gather on the CPU: payloads are decoded as they have arrived, on the engine's
    thread.

    Args:
        of: counts the time that waits take. Once an exception has ended a forward or backward,
            FSDP2's `reset_iter_state` waits, and an error here is none of the script's any more.
        ended: the gather of the payloads.
        decode: called then; False: a payload was withheld.
        once_more: what gathers once more in that case, called by the thread that waits.
    """

    def __init__(
        self,
        of: GatheredWeights,
        ended: Future[Outcome],
        decode: Callable[[], bool],
        once_more: Callable[[], None],
    ) -> None:
        super().__init__()
        self._of = of
        self._decoded: Future[bool] = Future()
        self._decode = decode
        self._once_more: Callable[[], None] | None = once_more
        ended.add_done_callback(self._arrived)

    def _arrived(self, ended: Future[Outcome]) -> None:
        try:
            ended.result()
            self._decoded.set_result(self._decode())
        except BaseException as error:
            self._decoded.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._of.exposed(), self._of.owner.awaited():
            until_done(self._decoded)
        error = self._decoded.exception()
        if self._of.abandoned:
            return error is None
        if error is not None:
            raise again(error)
        gather, self._once_more = self._once_more, None
        if gather is not None and not self._decoded.result():
            gather()
        return True

    def is_completed(self) -> bool:
        return self._decoded.done()


class InOrder(dist.Work):
    """The Work of a gather on a GPU: payloads are decoded on the stream that waits.

    Args:
        of, once_more: as of `Decoding`.
        ended: the gather, queued on another stream.
        decode: queues the decoding on the current stream; False: as of `Decoding`.
        payloads: memory that the current stream then reads.
    """

    def __init__(
        self,
        of: GatheredWeights,
        ended: Future[Outcome],
        decode: Callable[[], bool],
        once_more: Callable[[], None],
        payloads: torch.Tensor,
    ) -> None:
        super().__init__()
        self._of, self._ended, self._decode, self._once_more = of, ended, decode, once_more
        self._payloads = payloads

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._of.exposed(), self._of.owner.awaited():
            until_done(self._ended)
        error = self._ended.exception()
        if error is not None and self._of.abandoned:
            return False
        self._ended.result()
        self._payloads.record_stream(torch.cuda.current_stream(self._payloads.device))
        if not self._decode() and not self._of.abandoned:
            self._once_more()
        return True
