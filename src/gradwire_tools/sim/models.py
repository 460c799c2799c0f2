"""Parameter shapes of well-known models, in the order of their modules, from short formulas.

The simulator needs only which parameters are matrices, their sizes and their order, and which of
them FSDP2 shards together. Tied parameters count once. tests_tools/sim/test_models.py checks the
totals against the published ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator

from gradwire.errors import ConfigError

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]


class BlockShapes(tuple[Shape, ...]):
    """The shapes that FSDP2 shards by themselves: a block, or a large layer outside of blocks."""


Parts = Iterator[Shape | BlockShapes]

_MOST = 10**13  # values of a model


def shapes(text: str) -> Shapes:
    """The shapes of a model by name, or of a list of sizes such as "1e6,4096x1024".

    A size without x is a matrix of one row, so that it is compressed.

    Raises:
        ConfigError: `text` is neither; the message lists the models.
    """
    name = text.strip().lower()
    if name in MODELS:
        return tuple(named(name).values())
    sizes = tuple(_size(text, part) for part in text.split(","))
    if numel(sizes) > _MOST:
        raise _too_many(text)
    return sizes


def groups(text: str) -> tuple[Shapes, ...]:
    """The groups of a model under FSDP2: its blocks in order, then what is left to the root, maybe
    nothing.

    A size given by hand is a block; without x it is a matrix of one column, which has a row for
    every value, so that all ranks get a part.

    Raises:
        ConfigError: as `shapes`.
    """
    name = text.strip().lower()
    if name not in MODELS:
        sizes = shapes(text)
        return (*(((size[1], 1) if size[:-1] == (1,) else size,) for size in sizes), ())
    parts = list(MODELS[name]())
    blocks = [tuple(part) for part in parts if isinstance(part, BlockShapes)]
    return (*blocks, tuple(part for part in parts if not isinstance(part, BlockShapes)))


def named(text: str) -> dict[str, Shape]:
    """As `shapes`, by name: a block's begin with its number, as in a ModuleList; layers that do not
    repeat, such as embeddings and a head, have none. A size given by hand is a block."""
    name = text.strip().lower()
    if name not in MODELS:
        return {f"{number}.weight": shape for number, shape in enumerate(shapes(text))}
    parts, found = list(MODELS[name]()), {}
    most = max(len(part) for part in parts if isinstance(part, BlockShapes))
    for number, part in enumerate(parts):
        whole = part if isinstance(part, BlockShapes) else (part,)
        prefix = f"{number}." if 2 * len(whole) > most else f"layer{number}."
        found.update({f"{prefix}weight{place}": shape for place, shape in enumerate(whole)})
    return found


def _too_many(text: str) -> ConfigError:
    return ConfigError(f"--model {text!r}: more than {_MOST:.0e} values; give smaller sizes")


def _size(text: str, part: str) -> Shape:
    sizes = []
    for number in part.strip().lower().split("x"):
        if re.fullmatch(r"\d+(\.\d+)?(e\d+)?", number) is None:
            raise ConfigError(
                f"--model {text!r}: {part.strip()!r} is neither a model nor a size; models: "
                f"{', '.join(MODELS)}; sizes: as in 1e6,4096x1024"
            )
        size = float(number)
        if size > _MOST:
            raise _too_many(text)
        if size < 1 or size != int(size):
            raise ConfigError(f"--model {text!r}: a size is a whole number, at least 1: {number}")
        sizes.append(int(size))
    return tuple(sizes) if len(sizes) > 1 else (1, *sizes)


def numel(shapes: Shapes) -> int:
    """The number of values."""
    return sum(map(math.prod, shapes))


def _linear(out: int, into: int) -> Shapes:
    return (out, into), (out,)


def _norm(width: int) -> Shapes:
    return (width,), (width,)


def _convolution(out: int, into: int, kernel: int) -> Shape:
    return out, into, kernel, kernel


def _resnet50() -> Parts:
    """He et al. 2015: bottlenecks of widths 64 to 512, whose outputs are four times as wide."""
    yield _convolution(64, 3, 7)
    yield from _norm(64)
    into = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            yield BlockShapes(_bottleneck(width, into, block == 0))
            into = 4 * width
    yield BlockShapes(_linear(1000, into))


def _bottleneck(width: int, into: int, projects: bool) -> Iterator[Shape]:
    yield _convolution(width, into, 1)
    yield from _norm(width)
    yield _convolution(width, width, 3)
    yield from _norm(width)
    yield _convolution(4 * width, width, 1)
    yield from _norm(4 * width)
    if projects:
        yield _convolution(4 * width, into, 1)
        yield from _norm(4 * width)


def _vgg(most: int) -> Parts:
    """Simonyan and Zisserman 2014, up to 3 (D) or 4 (E) convolutions of a width."""
    into = 3
    for width, layers in ((64, 2), (128, 2), (256, most), (512, most), (512, most)):
        for _ in range(layers):
            yield BlockShapes((_convolution(width, into, 3), (width,)))
            into = width
    for out, into in ((4096, 512 * 7 * 7), (4096, 4096), (1000, 4096)):
        yield BlockShapes(_linear(out, into))


def _bert(layers: int, width: int) -> Parts:
    """Devlin et al. 2018, uncased, with the pooler and without a task's head."""
    yield from ((30522, width), (512, width), (2, width), *_norm(width))
    for _ in range(layers):
        attention = _linear(width, width) * 4  # query, key, value, output
        inner = _linear(4 * width, width) + _linear(width, 4 * width)
        yield BlockShapes(attention + _norm(width) + inner + _norm(width))
    yield BlockShapes(_linear(width, width))


def _gpt2() -> Parts:
    """Radford et al. 2019, the smallest; the head is the embedding."""
    width = 768
    yield (50257, width)
    yield BlockShapes(((1024, width),))
    for _ in range(12):
        attention = _linear(3 * width, width) + _linear(width, width)
        inner = _linear(4 * width, width) + _linear(width, 4 * width)
        yield BlockShapes(_norm(width) + attention + _norm(width) + inner)
    yield from _norm(width)


def _gpt() -> Parts:
    """The task `gpt` of `gradwire bench train`."""
    width = 256
    yield from ((256, width), (64, width))
    for _ in range(6):
        attention = _linear(3 * width, width) + _linear(width, width)
        inner = _linear(4 * width, width) + _linear(width, 4 * width)
        yield BlockShapes(_norm(width) + attention + _norm(width) + inner)
    yield from _norm(width)
    yield (256, width)


def _transformer_xl() -> Parts:
    """Dai et al. 2019, standard, on WikiText-103; the adaptive softmax is tied to the embedding."""
    words, width, inner = 267735, 410, 2100
    yield (words, width)
    yield from ((10, 41), (10, 41))  # biases of content and position, of all layers
    for _ in range(16):
        attention = ((3 * width, width), (width, width), *_norm(width))
        positions = (width, width)  # relative ones
        feed_forward = _linear(inner, width) + _linear(width, inner)
        yield BlockShapes((*attention, positions, *feed_forward, *_norm(width)))
    yield (words,)
    yield from ((3, width), (3,))  # of the softmax's clusters


def _llama_7b() -> Parts:
    """Touvron et al. 2023."""
    words, width, inner = 32000, 4096, 11008
    yield BlockShapes(((words, width),))
    for _ in range(32):
        inner_layers = ((inner, width), (width, inner), (inner, width))
        yield BlockShapes((*[(width, width)] * 4, *inner_layers, *_norm(width)))
    yield (width,)
    yield BlockShapes(((words, width),))


MODELS: dict[str, Callable[[], Parts]] = {
    "resnet50": _resnet50,
    "vgg16": lambda: _vgg(3),
    "vgg19": lambda: _vgg(4),
    "bert-base": lambda: _bert(12, 768),
    "bert-large": lambda: _bert(24, 1024),
    "gpt": _gpt,
    "gpt2": _gpt2,
    "transformer-xl": _transformer_xl,
    "llama-7b": _llama_7b,
}
