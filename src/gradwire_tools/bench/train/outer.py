"""Replicas that meet, as a method of `bench train`: `outer:PRESET:OPTION=VALUE:...`.

`outer:average:every=30`, `outer:every=30:lr=0.8:codec=qsgd:bits=4`: a preset of `gradwire.outer` or
none, its settings, and options of its codec. Each rank is a replica. Scores are those of replicas'
own weights, of each on its share of the validation data; between two meetings they differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn

import gradwire
from gradwire.aggregators import registry
from gradwire.codecs.text import parse
from gradwire.outer_loop.settings import PRESETS, OuterSettings, settings_of
from gradwire_tools.bench.train.applied import Applied, Options, compiled, of_handle

OUTER, PRESET = "outer", "preset"
_SETTINGS = {one.name for one in fields(OuterSettings)}


class Apart(nn.Module):
    """What DDP's wrapper offers, without averages: a replica of one rank."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        yield


def options_of(text: str) -> Options:
    """The options of a method's text, its preset among them. What follows a second `codec=` is of
    the codec: `outer:average:codec=radial:codec=qsgd:bits=4`.

    Raises:
        ConfigError: an unknown preset, or a part that is not OPTION=VALUE.
    """
    kind, colon, rest = text.partition(":")
    first = rest.partition(":")[0]
    if first and "=" not in first:
        if first not in PRESETS:
            settings_of(first, {})  # which says what is known
        text = f"{kind}{colon}{PRESET}={rest}"
    before, *codecs = re.split("[:,]codec=", text)
    names = [re.split("[:,]", one)[0] for one in codecs]
    others = [one.removeprefix(name) for one, name in zip(codecs, names, strict=True)]
    options = parse("".join([before, *others]))[1]
    return {**options, "codec": ":codec=".join(names)} if names else options


def settings(options: Options) -> OuterSettings:
    """The settings of a method with these options.

    Raises:
        ConfigError: a setting is out of range, or its codec, or an option of that, is unknown.
    """
    given = {name: value for name, value in options.items() if name in _SETTINGS}
    found = settings_of(_preset(options), given)
    registry.get(found.codec, **codec_options(options))
    return found


def codec_options(options: Options) -> dict[str, Any]:
    """Those of the codec."""
    return {n: value for n, value in options.items() if n not in {*_SETTINGS, PRESET}}


def meet(model: Apart, optimizer: torch.optim.Optimizer, options: Options) -> Applied:
    """Replicas that meet from now on."""
    given: dict[str, Any] = {n: value for n, value in options.items() if n != PRESET}
    handle = gradwire.outer(model.module, optimizer, _preset(options), **given)
    return replace(of_handle(compiled(handle)), settle=handle.settle)


def _preset(options: Options) -> str | None:
    return str(options[PRESET]) if PRESET in options else None
