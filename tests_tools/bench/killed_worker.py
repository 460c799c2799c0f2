"""`workers`, one of whose ranks is killed before the nth call of a function.

The environment names them: KILLED="RANK FUNCTION NTH".
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from gradwire_tools.bench import workers
from gradwire_tools.bench.train import state, worker

OWNERS = {"save": state, "commit": state, "_train": worker.Training}

if __name__ == "__main__":
    rank, name, nth = os.environ["KILLED"].split()
    owner, calls = OWNERS[name], iter(range(1, 1000))
    function = getattr(owner, name)

    def killed(*arguments: Any) -> Any:
        if os.environ["RANK"] == rank and next(calls) == int(nth):
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    setattr(owner, name, killed)
    workers.main(sys.argv[1:])
