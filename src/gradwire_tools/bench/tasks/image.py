"""`image`: a convolutional network on Fashion-MNIST (or digits), with SGD and momentum.

BatchNorm gives the model buffers, and `channels_last` gives the gradients non-contiguous strides; a
communication hook must handle both.

    cnn      2 convolutions, one hidden dense layer; for quick tests
    vgg      as VGG: 3 convolutions, then two large dense layers that hold nearly all parameters
    resnet   as ResNet: a stem at half the resolution, then 4 stages of 2 residual blocks; no large
             dense layer, hence more computing per parameter

The sizes of these networks suit few cores: at 16 bit and 300 Mbit/s, the gradient of vgg takes
several times as long on the wire as the step computes.

`split="by-class"` gives each rank the images of some classes only: with N ranks, class c belongs to
rank c mod N (from 10 ranks on, rank r has class r mod 10). Ranks then disagree about the gradient,
as in federated learning; AR-Topk conjectures that its VAR variant helps there (section 3-B).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.tasks.image_data import ImageData, load
from gradwire_tools.bench.tasks.task import Batch, Score, Task

CLASSES = 10
SPLITS = ("iid", "by-class")
_EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Image(Task):
    """Sizes and recipe of the image classifier."""

    metric = "accuracy"
    floor = 0.01

    data: str = "auto"  # or "fashion", "digits" (`image_data.load`)
    network: str = "vgg"  # a name of `NETWORKS`
    channels: int = 0  # of the first convolution; 0 selects the default of the network
    hidden: int = 0  # width of the hidden dense layers; 0 selects the default of the network
    split: str = "iid"  # or "by-class": see above
    images: int = 32  # per rank and step, drawn with replacement
    channels_last: bool = False  # whether model and images use that memory format
    peak_learning_rate: float = 0.05  # SGD's, reached after `warmup` steps
    momentum: float = 0.9
    warmup: int = 10
    horizon: int = 900  # the step at which the rate has decayed to a hundredth of it
    test_images: int = 2000  # per evaluation, the first ones

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split}: {use_one_of(self.split, SPLITS)}")
        self._network()

    def describe(self) -> str:
        network = self._network()
        dense = f", dense layers of {network.hidden}" if network.hidden else ""
        return (
            f"{network.name} with BatchNorm, {network.channels} channels{dense}, "
            f"{self.images} images per rank"
            f"{', split by class' if self.split == 'by-class' else ''}, on {self._data().origin}"
        )

    def build(self) -> nn.Module:
        network = self._network()
        model = network.make(network.channels, network.hidden, self._data().side)
        return model.to(memory_format=self._format())  # type: ignore[call-overload, no-any-return]

    def optimizer(self, model: nn.Module, momentum: float | None = None) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.peak_learning_rate,
            momentum=self.momentum if momentum is None else momentum,
            weight_decay=5e-4,
        )

    def batch(self, seed: int, rank: int, step: int, ranks: int = 1) -> Batch:
        data = self._data()
        draw = np.random.default_rng((seed, rank, step))
        if self.split == "by-class":
            mine = _of_classes(self.data, rank, ranks)
            chosen = mine[torch.from_numpy(draw.integers(0, len(mine), size=self.images))]
        else:
            chosen = torch.from_numpy(draw.integers(0, len(data.train_labels), size=self.images))
        images = data.train_images[chosen].contiguous(memory_format=self._format())
        return images, data.train_labels[chosen]

    def validation(self, part: int, parts: int) -> Iterator[Batch]:
        data = self._data()
        count = min(self.test_images, len(data.test_labels))
        chosen = torch.arange(count, dtype=torch.int64)[part::parts]
        for some in chosen.split(_EVALUATION_BATCH):
            images = data.test_images[some].contiguous(memory_format=self._format())
            yield images, data.test_labels[some]

    def metric_of(self, score: Score) -> float:
        return score.correct / score.count

    def _network(self) -> ImageNetwork:
        """With the sizes that it is to have.

        Raises:
            ConfigError: there is none of that name, a size is negative, or it has no hidden layer.
        """
        if self.network not in NETWORKS:
            raise ConfigError(f"network={self.network}: {use_one_of(self.network, NETWORKS)}")
        own = NETWORKS[self.network]
        for option, size in (("channels", self.channels), ("hidden", self.hidden)):
            if size < 0:
                raise ConfigError(f"{option}={size}: give 1 or more, or 0 for the network's own")
        if self.hidden and not own.hidden:
            raise ConfigError(
                f"hidden={self.hidden}: network {self.network} has no hidden dense layer; leave it "
                "out"
            )
        channels, hidden = self.channels or own.channels, self.hidden or own.hidden
        return replace(own, channels=channels, hidden=hidden)

    def _data(self) -> ImageData:
        return load(self.data)

    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


@dataclass(frozen=True)
class ResNet50(Image):
    """`image-resnet50`: `Image` with ResNet-50, whose steps compute ten times as long."""

    network: str = "resnet50"
    images: int = 16


@lru_cache(maxsize=64)
def _of_classes(data: str, rank: int, ranks: int) -> Tensor:
    """The training images of one rank's classes, as indices."""
    assert 0 <= rank < ranks, "a split by class needs the number of ranks"
    own = [c for c in range(CLASSES) if c % ranks == rank % CLASSES]
    labels = torch.tensor(own, dtype=torch.int64)
    return torch.isin(load(data).train_labels, labels).nonzero()[:, 0]


@dataclass(frozen=True)
class ImageNetwork:
    """One network with its sizes."""

    name: str
    channels: int  # of the first convolution
    hidden: int  # width of the hidden dense layers; 0 if it has none
    # From channels, hidden and the images' side, a module from images [n, 1, side, side] to logits
    # [n, CLASSES].
    make: Callable[[int, int, int], nn.Module]


def _cnn(channels: int, hidden: int, side: int) -> nn.Module:
    return nn.Sequential(
        *_convolution(1, channels), nn.MaxPool2d(2),
        *_convolution(channels, 2 * channels), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, hidden), nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )  # fmt: skip


def _vgg(channels: int, hidden: int, side: int) -> nn.Module:
    made = nn.Sequential(
        *_convolution(1, channels), nn.MaxPool2d(2),
        *_convolution(channels, 2 * channels),
        *_convolution(2 * channels, 2 * channels), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * (side // 4) ** 2, hidden), nn.ReLU(),
        nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, CLASSES),
    )  # fmt: skip
    for layer in made:
        if isinstance(layer, nn.Linear):  # torch's default vanishes over three layers
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    return made


def _residual(
    block: Callable[[int, int, int], Residual], blocks: tuple[int, ...]
) -> Callable[[int, int, int], nn.Module]:
    """A stem at half the resolution, then stages of so many blocks, each twice as wide as the one
    before and at half its resolution."""

    def make(channels: int, hidden: int, side: int) -> nn.Module:
        stages: list[Residual] = []
        inputs = channels
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                stages.append(block(inputs, channels << stage, stride))
                inputs = stages[-1].outputs
        return nn.Sequential(
            *_convolution(1, channels, stride=2), *stages,
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES),
        )  # fmt: skip

    return make


class Residual(nn.Module):
    """Convolutions, added to their input; a 1 x 1 convolution fits the input if it must.

    Args:
        body: ends with a BatchNorm of `outputs`.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, *body: nn.Module) -> None:
        super().__init__()
        self.outputs = outputs
        self.body = nn.Sequential(*body)
        # A block starts as the identity: deep networks learn earlier.
        nn.init.zeros_(body[-1].weight)  # type: ignore[arg-type]
        self.fitted: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.fitted = nn.Sequential(*_convolution(inputs, outputs, 1, stride)[:2])

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.fitted(x))


def _basic(inputs: int, width: int, stride: int) -> Residual:
    """Two convolutions."""
    first = _convolution(inputs, width, stride=stride)
    return Residual(inputs, width, stride, *first, *_convolution(width, width)[:2])


def _bottleneck(inputs: int, width: int, stride: int) -> Residual:
    """Convolutions 1 x 1 to `width`, 3 x 3, and 1 x 1 to four times `width`.

    The stride is that of the 3 x 3 convolution, as in most implementations (ResNet v1.5).
    """
    first, second = _convolution(inputs, width, 1), _convolution(width, width, stride=stride)
    return Residual(
        inputs, 4 * width, stride, *first, *second, *_convolution(width, 4 * width, 1)[:2]
    )


def _convolution(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    ]


NETWORKS = {
    "cnn": ImageNetwork("cnn", 16, 512, _cnn),
    "vgg": ImageNetwork("vgg", 16, 1536, _vgg),
    "resnet": ImageNetwork("resnet", 32, 0, _residual(_basic, (2, 2, 2, 2))),
    "resnet50": ImageNetwork("resnet50", 64, 0, _residual(_bottleneck, (3, 4, 6, 3))),
}
