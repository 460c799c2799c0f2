"""The Work that FSDP2 waits for: of a gather whose payloads are decoded.

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
    """The Work of a gather. On the CPU payloads are decoded as they have arrived, on the engine's
    thread; on a GPU on the stream that waits.

    Args:
        of: counts the time that waits take. Once an exception has ended a forward or backward,
            FSDP2's `reset_iter_state` waits, and an error here is none of the script's any more.
        ended: the gather of the payloads; on a GPU, queued on another stream.
        payloads: of all ranks, once it has ended.
        decode: decodes them, on the current stream, unless one was withheld; returns the parameters
            of which one was.
        once_more: gathers once more, without these.
    """

    def __init__(
        self,
        of: GatheredWeights,
        ended: Future[Outcome],
        payloads: torch.Tensor,
        decode: Callable[[], list[int]],
        once_more: Callable[[list[int]], None],
    ) -> None:
        super().__init__()
        self.payloads = payloads
        self._of, self._decode = of, decode
        self._unfit: Future[list[int]] = Future()
        self._once_more: Callable[[list[int]], None] | None = once_more
        self._queued = ended if payloads.is_cuda else None
        if self._queued is None:
            ended.add_done_callback(self._arrived)

    def _arrived(self, ended: Future[Outcome]) -> None:
        try:
            ended.result()
            self._unfit.set_result(self._decode())
        except BaseException as error:
            self._unfit.set_exception(error)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        with self._of.exposed(), self._of.owner.awaited():
            queued, self._queued = self._queued, None
            if queued is not None:
                until_done(queued)
                self.payloads.record_stream(torch.cuda.current_stream(self.payloads.device))
                self._arrived(queued)
            until_done(self._unfit)
        error = self._unfit.exception()
        if self._of.abandoned:
            return error is None
        if error is not None:
            raise again(error)
        gather, self._once_more = self._once_more, None
        if gather is not None and self._unfit.result():
            gather(self._unfit.result())
        return True

    def is_completed(self) -> bool:
        return self._unfit.done()
