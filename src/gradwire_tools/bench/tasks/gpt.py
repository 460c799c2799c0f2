"""`gpt`: a byte-level GPT on the Python standard library's own source; `gpt-32k`: on its tokens;
`gpt-124m`: as large as GPT-2.

Pre-norm blocks, learned positions, attention by torch's fused kernel, AdamW. Nearly all parameters
are in the blocks' matrices (12 x width^2 per layer), as in real models. `layers` and `width`
determine the bytes per step; `sequences` x `context` scales the computation per step alone. So the
ratio of communication to computation can be set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from gradwire_tools.bench.tasks.task import Batch, Score, Task
from gradwire_tools.bench.tasks.text import SourceText, standard_library, tokens, with_torch

_EVALUATION_BATCH = 32
_MOMENTUM = 0.9  # AdamW's first beta


@dataclass(frozen=True)
class Gpt(Task):
    """Sizes and recipe of the byte-level GPT."""

    metric = "bits per byte"
    vocabulary: ClassVar[int] = 256  # the symbols that the model tells apart

    layers: int = 6
    width: int = 256
    heads: int = 4  # which divide `width`
    context: int = 64  # bytes per sequence
    sequences: int = 1  # per rank and step
    tied: bool = False  # whether the output matrix is the embedding
    peak_learning_rate: float = 2e-3  # AdamW's, reached after `warmup` steps
    warmup: int = 10
    horizon: int = 900  # the step at which the rate has decayed to a tenth of it
    validation_sequences: int = 128  # held-out ones per evaluation, evenly spaced

    def describe(self) -> str:
        return (
            f"byte-level GPT, {self.layers} layers of width {self.width}, {self.sequences} x "
            f"{self.context} bytes per rank, on {self._text().origin}"
        )

    def build(self) -> nn.Module:
        return GptModel(self)

    def optimizer(self, model: nn.Module, momentum: float | None = None) -> Optimizer:
        return AdamW(
            model.parameters(),
            lr=self.peak_learning_rate,
            betas=(_MOMENTUM if momentum is None else momentum, 0.95),
            weight_decay=0.01,
            fused=True,
        )

    def batch(self, seed: int, rank: int, step: int, ranks: int = 1) -> Batch:
        text = self._text().train
        draw = np.random.default_rng((seed, rank, step))
        starts = draw.integers(0, text.numel() - self.context, size=self.sequences)
        return self._sequences(text, torch.from_numpy(starts))

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        text = self._text().validation
        last = text.numel() - self.context - 1
        starts = torch.linspace(0, last, self.validation_sequences, dtype=torch.float64).long()
        for some in starts[part::parts].split(_EVALUATION_BATCH):
            yield self._sequences(text, some)

    def metric_of(self, score: Score) -> float:
        return score.mean_loss / math.log(2)

    def _text(self) -> SourceText:
        return standard_library()

    def _sequences(self, text: Tensor, starts: Tensor) -> Batch:
        """Sequences of `context` symbols, and the symbol that follows each: int64, [n, context]."""
        positions = starts[:, None] + torch.arange(self.context + 1, dtype=torch.int64)
        window = text[positions].long()
        return window[:, :-1], window[:, 1:]


@dataclass(frozen=True)
class WordGpt(Gpt):
    """As `Gpt`, on tokens of a large vocabulary, which `context` counts; the output is tied.

    The embedding holds most parameters, as in language models on words (Transformer-XL). Its
    gradient is dense, through the output, but rows of frequent tokens are far larger than others.
    """

    metric = "bits per token"

    sequences: int = 4
    tied: bool = True
    vocabulary: int = 32768  # type: ignore[misc]  # number of tokens

    def describe(self) -> str:
        return (
            f"GPT, {self.layers} layers of width {self.width}, "
            f"{'tied' if self.tied else 'untied'} embedding of {self.vocabulary} tokens, "
            f"{self.sequences} x {self.context} tokens per rank, on {self._text().origin}"
        )

    def _text(self) -> SourceText:
        return tokens(self.vocabulary)


@dataclass(frozen=True)
class Gpt124M(WordGpt):
    """As `WordGpt`, with the sizes of the least GPT-2 but for the context: 124 million parameters.
    It is for a GPU."""

    layers: int = 12
    width: int = 768
    heads: int = 12
    context: int = 256
    sequences: int = 8
    vocabulary: int = 50257  # type: ignore[misc]
    peak_learning_rate: float = 6e-4
    warmup: int = 100
    horizon: int = 1000

    def _text(self) -> SourceText:
        return tokens(self.vocabulary, with_torch)


class GptModel(nn.Module):
    """Symbols [n, context] (int64) to logits [n, context, symbols]."""

    def __init__(self, size: Gpt) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList([Block(size.width, size.heads) for _ in range(size.layers)])
        self.norm = nn.LayerNorm(size.width)
        self.output = nn.Linear(size.width, size.vocabulary, bias=False)
        self._initialise(size)

    def forward(self, given: Tensor) -> Tensor:
        positions = torch.arange(given.shape[1], dtype=torch.int64, device=given.device)
        x = self.embedding(given) + self.position(positions)  # [n, context, width]
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.output(self.norm(x))
        return logits

    def _initialise(self, size: Gpt) -> None:
        """Embeddings start ten times larger than GPT-2's, so that short runs of a few hundred steps
        learn to distinguish bytes early: this saves a third of the steps (measured: 2.50 nats
        against 2.86 after 200 steps of 256 bytes at width 192).
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                # Matrices that write into the residual stream are scaled by depth, as in GPT-2.
                writes = name.endswith(("attention.output.weight", "contract.weight"))
                depth = math.sqrt(2 * size.layers) if writes else 1.0
                nn.init.normal_(parameter, std=0.5 / math.sqrt(size.width) / depth)
        nn.init.normal_(self.position.weight, std=0.05)
        nn.init.normal_(self.embedding.weight, std=0.02 if size.tied else 0.5)
        if size.tied:
            self.output.weight = self.embedding.weight


class Block(nn.Module):
    """Attention, then a feed-forward layer, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.forward_norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        y: Tensor = self.contract(F.gelu(self.expand(self.forward_norm(x))))
        return x + y


class Attention(nn.Module):
    """Causal self-attention over [n, context, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, context, width = x.shape
        shape = (n, context, 3, self.heads, width // self.heads)
        query, key, value = self.inputs(x).view(shape).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        result: Tensor = self.output(y.transpose(1, 2).reshape(n, context, width))
        return result
