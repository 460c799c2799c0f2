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
    from gradwire.decide.auto import Auto
    from gradwire.decide.replan import Replan
    from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError
    from gradwire.integrations.attach import attach
    from gradwire.integrations.backend_register import register
    from gradwire.integrations.flexible import Flexible
    from gradwire.integrations.handle import Handle
    from gradwire.integrations.trainers import accelerate as accelerate
    from gradwire.integrations.trainers import keras as keras
    from gradwire.integrations.trainers import lightning as lightning
    from gradwire.integrations.trainers import ray as ray
    from gradwire.integrations.trainers import transformers as transformers
    from gradwire.integrations.triggers import Triggers
    from gradwire.lang import Codec
    from gradwire.planner.probe import Probe, probe

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

# `import torch` imports this package (integrations/backend_entry.py), and so does the build of a
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
    "integrations.attach": ("attach",),
    "integrations.backend_register": ("register",),
    "integrations.flexible": ("Flexible",),
    "integrations.handle": ("Handle",),
    "decide.auto": ("Auto",),
    "planner.probe": ("Probe", "probe"),
    "decide.replan": ("Replan",),
    "integrations.triggers": ("Triggers",),
}
# Modules that need a trainer's package; so neither `from gradwire import *` nor `dir` has them.
_TRAINERS = ("accelerate", "keras", "lightning", "ray", "transformers")


if not TYPE_CHECKING:  # type checkers must still refuse a misspelled name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _TRAINERS:
            return import_module(f"{__name__}.integrations.trainers.{name}")
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
