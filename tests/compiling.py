"""Fewer calls of the compiler: most of a small kernel's time goes to the prelude and to linking."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps

import pytest

# Forms that tests use together: payloads made and read, and those of sums.
GROUPS = (
    ("encode", "encode_ef", "decode"),
    ("decode_add", "decode_sum", "reduce_encode", "reduce_encode_ef"),
)


def in_groups(patch: pytest.MonkeyPatch) -> None:
    """Compile a codec's forms by groups, not one by one, where kernels are not optimised."""
    from gradwire.lang import jit, native, prebuilt  # not before the environment is set
    from gradwire.lang.emit import c

    one_by_one = native.Library.ready

    @wraps(one_by_one)
    def ready(self: native.Library, names: Sequence[str]) -> None:
        if jit.kernel_flags() != ("-O0",):
            one_by_one(self, names)
            return
        missing = set(names) - set(self._functions)
        for group in GROUPS:
            if missing & {*group}:
                text = c.prelude() + native.source(self._codec, self._dtype, group)
                found = prebuilt.compiled(text, group, self._why_compiled, jit.kernel_flags())
                self._functions.update({form: native._typed(found[form]) for form in group})

    patch.setattr(native.Library, "ready", ready)
