"""The training tasks of the benchmark: model, data and metric.

A new task is one file and one line in `REGISTRY`.
"""

from __future__ import annotations

import dataclasses

from gradwire.bench.tasks.gpt import Gpt
from gradwire.bench.tasks.image import Image
from gradwire.bench.tasks.task import Batch, Score, Task
from gradwire.errors import ConfigError

__all__ = ["REGISTRY", "Batch", "Score", "Task", "get"]

REGISTRY: dict[str, type[Gpt] | type[Image]] = {"gpt": Gpt, "image": Image}


def get(name: str, **options: object) -> Task:
    """The task called `name`, with its fields set from `options`.

    Raises:
        ConfigError: the name or an option is unknown; the message lists the known ones.
    """
    if name not in REGISTRY:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(sorted(REGISTRY))}")
    factory = REGISTRY[name]
    known = [field.name for field in dataclasses.fields(factory)]
    for option in options:
        if option not in known:
            raise ConfigError(
                f"task {name!r} has no option {option!r}; it has: {', '.join(sorted(known))}"
            )
    return factory(**options)  # type: ignore[arg-type]
