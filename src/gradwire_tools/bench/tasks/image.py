"""`image`: a convolutional network on Fashion-MNIST (or digits), with SGD and momentum.

BatchNorm gives the model buffers, and `channels_last` gives the gradients non-contiguous strides; a
communication hook must handle both. `image_models` has the networks.

`split="by-class"` gives each rank the images of some classes only: with N ranks, class c belongs to
rank c mod N (from 10 ranks on, rank r has class r mod 10). Ranks then disagree about the gradient,
as in federated learning; AR-Topk conjectures that its VAR variant helps there (section 3-B).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.errors import ConfigError, use_one_of
from gradwire_tools.bench.tasks.image_data import ImageData, load
from gradwire_tools.bench.tasks.image_models import CLASSES, ImageNetwork, get_network
from gradwire_tools.bench.tasks.task import Batch, Score, Task

SPLITS = ("iid", "by-class")
_EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Image(Task):
    """Sizes and recipe of the image classifier.

    Attributes:
        data: "auto", "fashion" or "digits" (`image_data.load`).
        network: a name of `image_models.NETWORKS`.
        channels: of the first convolution; 0 selects the default of the network.
        hidden: width of the hidden dense layers; 0 selects the default of the network.
        split: "iid", or "by-class": see above.
        images: images per rank and step, drawn with replacement.
        channels_last: whether model and images use that memory format.
        peak_learning_rate, momentum: SGD's; the rate is reached after `warmup` steps.
        horizon: the step at which the rate has decayed to a hundredth of it.
        test_images: number of test images per evaluation (the first ones).
    """

    metric = "accuracy"
    floor = 0.01

    data: str = "auto"
    network: str = "vgg"
    channels: int = 0
    hidden: int = 0
    split: str = "iid"
    images: int = 32
    channels_last: bool = False
    peak_learning_rate: float = 0.05
    momentum: float = 0.9
    warmup: int = 10
    horizon: int = 900
    test_images: int = 2000

    def __post_init__(self) -> None:
        if self.split not in SPLITS:
            raise ConfigError(f"split={self.split}: {use_one_of(self.split, SPLITS)}")
        self._size()

    def describe(self) -> str:
        return (
            f"{self._size().describe()}, {self.images} images per rank"
            f"{', split by class' if self.split == 'by-class' else ''}, on {self._data().origin}"
        )

    def build(self) -> nn.Module:
        size = self._size()
        model = size.make(size.channels, size.hidden, self._data().side)
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

    def _size(self) -> ImageNetwork:
        return get_network(self.network, self.channels, self.hidden)

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
