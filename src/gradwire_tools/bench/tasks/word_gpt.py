"""`gpt-32k`: the GPT of `gpt` on tokens of a large vocabulary, its output tied to its embedding.

The embedding holds most parameters, as in language models on words (Transformer-XL). Its gradient
is dense, through the output, but rows of frequent tokens are far larger than others.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradwire_tools.bench.tasks.gpt import Gpt
from gradwire_tools.bench.tasks.source_text import SourceText
from gradwire_tools.bench.tasks.word_text import tokens


@dataclass(frozen=True)
class WordGpt(Gpt):
    """As `Gpt`, but `context` counts tokens; see `word_text`.

    Attributes:
        vocabulary: number of tokens.
    """

    metric = "bits per token"

    sequences: int = 4
    tied: bool = True
    vocabulary: int = 32768  # type: ignore[misc]

    def describe(self) -> str:
        return (
            f"GPT, {self.layers} layers of width {self.width}, "
            f"{'tied' if self.tied else 'untied'} embedding of {self.vocabulary} tokens, "
            f"{self.sequences} x {self.context} tokens per rank, on {self._text().origin}"
        )

    def _text(self) -> SourceText:
        return tokens(self.vocabulary)
