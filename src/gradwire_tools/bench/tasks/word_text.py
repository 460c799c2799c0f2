"""The text of `source_text` as tokens of a large vocabulary: bytes, and its most frequent pieces.

A *piece* is a word (letters, digits, underscores) with at most one space before it, a line's end
with the spaces after it, a run of spaces, or one other character. The vocabulary has the 256 bytes
and then the most frequent pieces of the training text. A piece that is not in it is spelled in
bytes, so every text has tokens, and tokens give back their text.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from gradwire.errors import ConfigError
from gradwire_tools.bench.tasks.source_text import SourceText, standard_library

BYTES = 256
_PIECE = re.compile(rb" ?\w+|\n *| +|[^\w\s]|\s", re.ASCII)


def encode(text: SourceText, vocabulary: int) -> SourceText:
    """The text as int32 tokens below `vocabulary`.

    Raises:
        ConfigError: the vocabulary has no room for the bytes, or the text has too few pieces.
    """
    if vocabulary < BYTES:
        raise ConfigError(f"vocabulary={vocabulary}: {BYTES} tokens are bytes; give more")
    train, validation = (
        _PIECE.findall(part.numpy().tobytes()) for part in (text.train, text.validation)
    )
    # Of equally frequent pieces, the first in the text: the result does not depend on the run.
    counts = Counter(piece for piece in train if len(piece) > 1)
    frequent = [piece for piece, _ in counts.most_common(vocabulary - BYTES)]
    if len(frequent) < vocabulary - BYTES:
        raise ConfigError(
            f"vocabulary={vocabulary}: the text has {len(frequent)} pieces; "
            f"give {BYTES + len(frequent)} at most"
        )
    number = {piece: BYTES + i for i, piece in enumerate(frequent)}
    return SourceText(
        _tokens(train, number),
        _tokens(validation, number),
        f"{text.origin}, {vocabulary} tokens",
    )


@lru_cache(maxsize=2)
def tokens(vocabulary: int) -> SourceText:
    """The standard library's source as tokens, made once per process (some seconds)."""
    return encode(standard_library(), vocabulary)


def _tokens(pieces: list[bytes], number: dict[bytes, int]) -> Tensor:
    found: list[int] = []
    for piece in pieces:
        known = number.get(piece)
        if known is None:
            found += piece
        else:
            found.append(known)
    return torch.from_numpy(np.array(found, dtype=np.int32))
