"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, codec="qsgd", bits=4)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.aggregators import (
        THC,
        Aggregator,
        ARTopK,
        DeepGradientCompression,
        ErrorFeedback,
        GlobalTopK,
        LWTopK,
        PowerSGD,
        TopKC,
    )
    from gradwire.backend.register import register
    from gradwire.codecs import (
        DGC,
        QSGD,
        TBQ,
        AdaComp,
        Cast,
        Float8,
        GradDrop,
        HardThreshold,
        Identity,
        LearnedLevels,
        LowRank,
        MSTopK,
        OneBit,
        RandomK,
        RandomShift,
        Rotated,
        Saturating,
        TernGrad,
        ThreeLC,
        TopK,
    )
    from gradwire.collectives import (
        Options,
        all_gather,
        all_reduce,
        broadcast,
        load_state_dict,
        reduce_scatter,
        state_dict,
    )
    from gradwire.controllers import LGreco
    from gradwire.controllers.replan import Replan
    from gradwire.decide.auto import Auto
    from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError
    from gradwire.flexible.flexible import Flexible
    from gradwire.flexible.triggers import Triggers
    from gradwire.handles.attach import attach
    from gradwire.handles.handle import Handle
    from gradwire.lang import Codec
    from gradwire.planner.probe import Probe, probe
    from gradwire.trainers import accelerate as accelerate
    from gradwire.trainers import keras as keras
    from gradwire.trainers import lightning as lightning
    from gradwire.trainers import ray as ray
    from gradwire.trainers import transformers as transformers

__version__ = "0.1.0"

__all__ = [
    "DGC",
    "QSGD",
    "TBQ",
    "THC",
    "ARTopK",
    "AdaComp",
    "Aggregator",
    "Auto",
    "Cast",
    "Codec",
    "CodecError",
    "ConfigError",
    "DeepGradientCompression",
    "ErrorFeedback",
    "Flexible",
    "Float8",
    "GlobalTopK",
    "GradDrop",
    "GradwireError",
    "Handle",
    "HardThreshold",
    "Identity",
    "LGreco",
    "LWTopK",
    "LearnedLevels",
    "LowRank",
    "MSTopK",
    "OneBit",
    "Options",
    "PowerSGD",
    "Probe",
    "RandomK",
    "RandomShift",
    "Replan",
    "Rotated",
    "Saturating",
    "TernGrad",
    "ThreeLC",
    "TopK",
    "TopKC",
    "TransportError",
    "Triggers",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "load_state_dict",
    "probe",
    "reduce_scatter",
    "register",
    "state_dict",
]

# `import torch` imports this package (backend/entry.py), and so does the build of a
# wheel, where there is no torch: nothing else is imported until one of these names is used. Names
# that are not listed here are codecs.
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
}
# Modules that need a trainer's package; so neither `from gradwire import *` nor `dir` has them.
_TRAINERS = ("accelerate", "keras", "lightning", "ray", "transformers")


if not TYPE_CHECKING:  # type checkers must still refuse a misspelled name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _TRAINERS:
            return import_module(f"{__name__}.trainers.{name}")
        if name not in __all__:
            try:  # gradwire.codecs, ... without an import of its own
                return import_module(f"{__name__}.{name}")
            except ModuleNotFoundError:
                text = f"module {__name__!r} has no attribute {name!r}"
                raise AttributeError(text) from None
        home = next((home for home, names in _HOMES.items() if name in names), "codecs")
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
