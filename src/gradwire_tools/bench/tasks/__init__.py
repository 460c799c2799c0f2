"""The training tasks of the benchmark: model, data and metric.

A new task is one file and one line in `REGISTRY`.
"""

from __future__ import annotations

import dataclasses
import functools

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.tasks.gpt import Gpt, Gpt124M, WordGpt
from gradwire_tools.bench.tasks.image import Image, ResNet50
from gradwire_tools.bench.tasks.task import Batch, Score, Task

__all__ = ["REGISTRY", "Batch", "Score", "Task", "get", "shapes"]

REGISTRY: dict[str, type[Gpt] | type[Image]] = {
    "gpt": Gpt,
    "gpt-32k": WordGpt,
    "gpt-124m": Gpt124M,
    "image": Image,
    "image-resnet50": ResNet50,
}


def get(name: str, **options: object) -> Task:
    """The task called `name`, with its fields set from `options`.

    Raises:
        ConfigError: the name or an option is unknown; the message lists the known ones.
    """
    if name not in REGISTRY:
        raise ConfigError(f"unknown task {name!r}: {use_one_of(name, sorted(REGISTRY))}")
    factory = REGISTRY[name]
    defaults = {field.name: field.default for field in dataclasses.fields(factory)}
    if "split" in options and "split" not in defaults:
        raise ConfigError(
            f"split={options['split']}: the data of task {name!r} have no classes to split by; "
            "leave --split out"
        )
    for option, value in options.items():
        if option not in defaults:
            raise ConfigError(
                f"task {name!r} has no option {option!r}: {use_one_of(option, sorted(defaults))}"
            )
        _check_type(name, option, value, defaults[option])
    return factory(**options)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=8)
def shapes(task: Task) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """(name, shape) of each parameter that the task trains."""
    named = task.model(0).named_parameters()
    return tuple((name, tuple(p.shape)) for name, p in named if p.requires_grad)


def _check_type(task: str, option: str, value: object, default: object) -> None:
    kind = type(default)
    if type(value) is kind or (kind is float and type(value) is int):
        return
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
    raise ConfigError(f"option {option}={value} of task {task!r}: give {words[kind]}")
