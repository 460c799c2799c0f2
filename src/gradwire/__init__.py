"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, codec="qsgd", bits=4)
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.aggregators import THC as THC
    from gradwire.aggregators import Aggregator as Aggregator
    from gradwire.aggregators import ARTopK as ARTopK
    from gradwire.aggregators import DeepGradientCompression as DeepGradientCompression
    from gradwire.aggregators import ErrorFeedback as ErrorFeedback
    from gradwire.aggregators import GlobalTopK as GlobalTopK
    from gradwire.aggregators import LWTopK as LWTopK
    from gradwire.aggregators import PowerSGD as PowerSGD
    from gradwire.aggregators import TopKC as TopKC
    from gradwire.backend.register import register as register
    from gradwire.codecs.registry import *  # noqa: F403
    from gradwire.collectives import Options as Options
    from gradwire.collectives import all_gather as all_gather
    from gradwire.collectives import all_reduce as all_reduce
    from gradwire.collectives import broadcast as broadcast
    from gradwire.collectives import load_state_dict as load_state_dict
    from gradwire.collectives import reduce_scatter as reduce_scatter
    from gradwire.collectives import state_dict as state_dict
    from gradwire.controllers import LGreco as LGreco
    from gradwire.controllers.replan import Replan as Replan
    from gradwire.decide.auto import Auto as Auto
    from gradwire.errors import CodecError as CodecError
    from gradwire.errors import ConfigError as ConfigError
    from gradwire.errors import GradwireError as GradwireError
    from gradwire.errors import TransportError as TransportError
    from gradwire.flexible.flexible import Flexible as Flexible
    from gradwire.flexible.triggers import Triggers as Triggers
    from gradwire.handles.attach import attach as attach
    from gradwire.handles.handle import Handle as Handle
    from gradwire.lang import Codec as Codec
    from gradwire.planner.probe import Probe as Probe
    from gradwire.planner.probe import probe as probe
    from gradwire.trainers import accelerate as accelerate
    from gradwire.trainers import keras as keras
    from gradwire.trainers import lightning as lightning
    from gradwire.trainers import ray as ray
    from gradwire.trainers import transformers as transformers

__version__ = "0.1.0"

# `import torch` imports this package (backend/entry.py), and so does the build of a
# wheel, where there is no torch: nothing else is imported until one of these names is used, or one
# of the codecs, which have a list of their own.
_HOMES = {
    "aggregators": (
        "ARTopK",
        "Aggregator",
        "DeepGradientCompression",
        "ErrorFeedback",
        "GlobalTopK",
        "LWTopK",
        "PowerSGD",
        "THC",
        "TopKC",
    ),
    "collectives": (
        *("Options", "all_gather", "all_reduce", "broadcast", "reduce_scatter"),
        *("load_state_dict", "state_dict"),
    ),
    "controllers": ("LGreco",),
    "errors": ("CodecError", "ConfigError", "GradwireError", "TransportError"),
    "handles.attach": ("attach",),
    "backend.register": ("register",),
    "flexible.flexible": ("Flexible",),
    "handles.handle": ("Handle",),
    "decide.auto": ("Auto",),
    "planner.probe": ("Probe", "probe"),
    "controllers.replan": ("Replan",),
    "flexible.triggers": ("Triggers",),
    "lang": ("Codec",),
}
# Modules that need a trainer's package; so neither `from gradwire import *` nor `dir` has them.
_TRAINERS = ("accelerate", "keras", "lightning", "ray", "transformers")


if not TYPE_CHECKING:  # type checkers must still refuse a misspelled name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        def inside(module: str) -> object:
            return import_module(f"{__name__}.{module}")

        def codecs() -> dict[str, type]:
            return {made.__name__: made for made, _ in inside("codecs").REGISTRY.values()}

        if name in _TRAINERS:
            return inside(f"trainers.{name}")
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is not None:
            value = getattr(inside(home), name)
        elif name == "__all__":
            value = sorted({*chain(*_HOMES.values()), *codecs()})
        else:
            try:  # gradwire.codecs, ... without an import of its own
                return inside(name)
            except ModuleNotFoundError:
                value = None if name.startswith("__") else codecs().get(name)
            if value is None:
                raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
