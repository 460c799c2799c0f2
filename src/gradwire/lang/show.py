"""The compiler's output for a codec, stage by stage, as text."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from gradwire.errors import ConfigError, use_one_of
from gradwire.lang import forms, ir
from gradwire.lang.codec import Codec, check_codec
from gradwire.lang.emit import c
from gradwire.lang.exact import Exact, torch_name
from gradwire.lang.layout import native_name

if TYPE_CHECKING:
    import torch

STAGES = ("ir", "c", "triton")
UNFUSED = "{}: torch's BLAS does the work, so every target interprets this codec {}"


def show(codec: Codec, stage: str, dtype: torch.dtype | str = "fp32") -> str:
    """The IR of every form ("ir"), the generated C ("c") or the generated Triton ("triton")."""
    check_codec(codec)
    if stage == "ir":
        programs = forms.derive(codec, native_name(dtype)).programs
        return "\n\n".join(ir.show(program) for program in programs.values())
    if stage == "c":
        fused = forms.derive(codec, native_name(dtype)).fused
        return c.source(codec, dtype) if fused else UNFUSED.format("/* no C", "*/")
    if stage == "triton":
        from gradwire.lang.emit import triton  # which few processes need

        fused = forms.derive(codec, native_name(dtype)).fused
        return triton.source(codec, dtype) if fused else UNFUSED.format("# no Triton", "").rstrip()
    raise ConfigError(f"unknown stage {stage!r}: {use_one_of(stage, STAGES)}")


def fingerprint(codec: Codec, dtype: torch.dtype | str = "fp32") -> str:
    """16 hexadecimal digits that identify a codec's computation on `dtype`; ranks compare them."""
    if isinstance(codec, Exact):
        codec.itemsize(dtype)  # raises for unsupported dtypes
        return _digest(f"{codec!r} of {torch_name(dtype)}")
    table = forms.derive(codec, native_name(dtype)).table
    return _digest(f"{show(codec, 'ir', dtype)}\n{table}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
