"""gradwire: compressed communication for PyTorch training on slow networks.

import gradwire as gw
model = DistributedDataParallel(model)
gw.attach(model, "qsgd:bits=4")
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire import aggregators as aggregators
    from gradwire import codecs as codecs
    from gradwire.aggregators import (
        THC,
        Aggregator,
        ARTopK,
        DeepGradientCompression,
        LWTopK,
        PowerSGD,
        TopKC,
    )
    from gradwire.backend.register import register
    from gradwire.codecs import QSGD, TopK
    from gradwire.collectives import Options, all_gather, all_reduce, broadcast, reduce_scatter
    from gradwire.controllers.replan import Replan
    from gradwire.decide.auto import Auto
    from gradwire.errors import CodecError, ConfigError, GradwireError, TransportError
    from gradwire.flexible.flexible import Flexible
    from gradwire.handles.attach import attach
    from gradwire.handles.handle import Handle
    from gradwire.lang import Codec
    from gradwire.outer_loop.outer import outer
    from gradwire.planner import Plan
    from gradwire.planner.probe import probe
    from gradwire.trainers import accelerate as accelerate
    from gradwire.trainers import keras as keras
    from gradwire.trainers import lightning as lightning
    from gradwire.trainers import ray as ray
    from gradwire.trainers import transformers as transformers

__version__ = "0.1.0"

__all__ = [
    "QSGD",
    "THC",
    "ARTopK",
    "Aggregator",
    "Auto",
    "Codec",
    "CodecError",
    "ConfigError",
    "DeepGradientCompression",
    "Flexible",
    "GradwireError",
    "Handle",
    "LWTopK",
    "Options",
    "Plan",
    "PowerSGD",
    "Replan",
    "TopK",
    "TopKC",
    "TransportError",
    "all_gather",
    "all_reduce",
    "attach",
    "broadcast",
    "outer",
    "probe",
    "reduce_scatter",
    "register",
]

# `import torch` imports this package (backend/entry.py), and so does the build of a wheel, where
# there is no torch: nothing else is imported until one of these names is used.
_HOMES = {
    "aggregators": (
        *("ARTopK", "Aggregator", "DeepGradientCompression", "LWTopK", "PowerSGD", "THC", "TopKC"),
    ),
    "codecs": ("QSGD", "TopK"),
    "collectives": ("Options", "all_gather", "all_reduce", "broadcast", "reduce_scatter"),
    "errors": ("CodecError", "ConfigError", "GradwireError", "TransportError"),
    "handles.attach": ("attach",),
    "backend.register": ("register",),
    "flexible.flexible": ("Flexible",),
    "handles.handle": ("Handle",),
    "outer_loop.outer": ("outer",),
    "decide.auto": ("Auto",),
    "planner": ("Plan",),
    "planner.probe": ("probe",),
    "controllers.replan": ("Replan",),
    "lang": ("Codec",),
}
_MODULES = ("aggregators", "codecs")
# Modules that need a trainer's package, so `from gradwire import *` has none of them.
_TRAINERS = ("accelerate", "keras", "lightning", "ray", "transformers")
# Names of earlier versions -> what to write.
_RENAMED = {
    "DGC": "gw.codecs.DGC  # or the method, gw.DeepGradientCompression",
    "LGreco": 'gw.controllers.LGreco  # or its name, "lgreco"',
    "Probe": "from gradwire.planner.probe import Probe",
    "Triggers": "gw.flexible.Triggers",
    "load_state_dict": "gw.collectives.load_state_dict",
    "state_dict": "gw.collectives.state_dict",
    **{n: f"gw.aggregators.{n}" for n in ("ErrorFeedback", "GlobalTopK", "Radial", "SparseLoCo")},
    **{
        name: f"gw.codecs.{name}"
        for name in (
            *("AdaComp", "Cast", "Float8", "GradDrop", "HardThreshold", "Identity"),
            *("LearnedLevels", "LowRank", "MSTopK", "OneBit", "RandomK", "RandomShift"),
            *("Rotated", "Saturating", "TBQ", "TernGrad", "ThreeLC"),
        )
    },
}


if not TYPE_CHECKING:  # type checkers must still refuse a misspelled name

    def __getattr__(name: str) -> object:
        from importlib import import_module

        if name in _RENAMED:
            from gradwire.errors import ConfigError

            raise ConfigError(f"gw.{name} is elsewhere now: write {_RENAMED[name]}")
        if name in _TRAINERS:
            return import_module(f"{__name__}.trainers.{name}")
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            try:  # gradwire.codecs, ... without an import of its own
                return import_module(f"{__name__}.{name}")
            except ModuleNotFoundError:
                text = f"module {__name__!r} has no attribute {name!r}"
                raise AttributeError(text) from None
        value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES, *_TRAINERS])
