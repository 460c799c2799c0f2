"""`image`: a small convolutional network on Fashion-MNIST (or digits), with SGD and momentum.

BatchNorm gives the model buffers, and `channels_last` gives the gradients non-contiguous strides; a
communication hook must handle both. Most parameters are in one fully connected layer, as in VGG, so
communication matters.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gradwire.bench.tasks.image_data import ImageData, load
from gradwire.bench.tasks.schedule import warm_up_then_decay
from gradwire.bench.tasks.task import Batch, Score

_CLASSES = 10
_EVALUATION_BATCH = 250


@dataclass(frozen=True)
class Image:
    """Sizes and recipe of the image classifier.

    Attributes:
        data: "auto", "fashion" or "digits" (`image_data.load`).
        channels: of the first convolution; the second has twice as many.
        hidden: width of the fully connected layer.
        images: images per rank and step, drawn with replacement.
        channels_last: whether model and images use that memory format.
        peak_learning_rate, momentum: SGD's.
        test_images: number of test images per evaluation (the first ones).
    """

    data: str = "auto"
    channels: int = 16
    hidden: int = 512
    images: int = 32
    channels_last: bool = False
    peak_learning_rate: float = 0.05
    momentum: float = 0.9
    warmup: int = 10
    test_images: int = 2000

    @property
    def metric(self) -> str:
        return "accuracy"

    def describe(self) -> str:
        return (
            f"CNN with BatchNorm, {self.channels} channels, hidden layer of {self.hidden}, "
            f"{self.images} images per rank, on {self._data().origin}"
        )

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = ImageModel(self.channels, self.hidden, self._data().side)
        return model.to(memory_format=self._format())  # type: ignore[call-overload, no-any-return]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SGD(
            model.parameters(),
            lr=self.peak_learning_rate,
            momentum=self.momentum,
            weight_decay=5e-4,
        )

    def learning_rate(self, step: int, steps: int) -> float:
        return warm_up_then_decay(step, steps, self.warmup, floor=0.01)

    def batch(self, seed: int, rank: int, step: int) -> Batch:
        data = self._data()
        draw = np.random.default_rng((seed, rank, step))
        chosen = torch.from_numpy(draw.integers(0, len(data.train_labels), size=self.images))
        images = data.train_images[chosen].contiguous(memory_format=self._format())
        return images, data.train_labels[chosen]

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        images, labels = batch
        return F.cross_entropy(model(images), labels)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, part: int, parts: int) -> Score:
        data = self._data()
        chosen = torch.arange(min(self.test_images, len(data.test_labels)))[part::parts]
        loss = correct = count = 0.0
        for some in chosen.split(_EVALUATION_BATCH):
            images = data.test_images[some].contiguous(memory_format=self._format())
            labels = data.test_labels[some]
            logits = model(images)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            correct += (logits.argmax(dim=1) == labels).sum().item()
            count += len(labels)
        return Score(loss, correct, count)

    def metric_of(self, score: Score) -> float:
        return score.correct / score.count

    def _data(self) -> ImageData:
        return load(self.data)

    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.contiguous_format


class ImageModel(nn.Module):
    """Images [n, 1, side, side] to logits [n, 10]; `side` is halved twice, rounding down."""

    def __init__(self, channels: int, hidden: int, side: int) -> None:
        super().__init__()
        self.features = nn.Sequential(
            _convolution(1, channels),
            _convolution(channels, 2 * channels),
        )
        flat = 2 * channels * (side // 4) ** 2
        self.hidden = nn.Linear(flat, hidden)
        self.output = nn.Linear(hidden, _CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images).flatten(1)
        logits: Tensor = self.output(F.relu(self.hidden(x)))
        return logits


def _convolution(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
