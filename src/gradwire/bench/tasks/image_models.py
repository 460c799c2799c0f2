"""The networks of the `image` task, for small grey images.

    cnn      2 convolutions, one hidden dense layer; for quick tests
    vgg      as VGG: 3 convolutions, then two large dense layers that hold nearly all parameters
    resnet   as ResNet: a stem at half the resolution, then 4 stages of 2 residual blocks; no large
             dense layer, hence more computing per parameter

The sizes suit few cores: at 16 bit and 300 Mbit/s, the gradient of vgg takes several times as long
on the wire as the step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError

CLASSES = 10


@dataclass(frozen=True)
class ImageNetwork:
    """One network with its sizes.

    Attributes:
        channels: of the first convolution.
        hidden: width of the hidden dense layers; 0 if it has none.
        make: from channels, hidden and the images' side.
    """

    name: str
    channels: int
    hidden: int
    make: Callable[[int, int, int], nn.Module]

    def build(self, side: int) -> nn.Module:
        """Images [n, 1, side, side] to logits [n, CLASSES]."""
        return self.make(self.channels, self.hidden, side)

    def describe(self) -> str:
        dense = f", dense layers of {self.hidden}" if self.hidden else ""
        return f"{self.name} with BatchNorm, {self.channels} channels{dense}"


def get_network(name: str, channels: int, hidden: int) -> ImageNetwork:
    """The network called `name`; 0 selects its own size.

    Raises:
        ConfigError: there is none of that name, a size is negative, or it has no hidden layer.
    """
    if name not in NETWORKS:
        raise ConfigError(f"network={name}: use one of {', '.join(NETWORKS)}")
    own = NETWORKS[name]
    for option, size in (("channels", channels), ("hidden", hidden)):
        if size < 0:
            raise ConfigError(f"{option}={size}: give 1 or more, or 0 for the network's own")
    if hidden and not own.hidden:
        raise ConfigError(
            f"hidden={hidden}: network {name} has no hidden dense layer; leave it out"
        )
    return ImageNetwork(name, channels or own.channels, hidden or own.hidden, own.make)


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


def _resnet(channels: int, hidden: int, side: int) -> nn.Module:
    stages: list[nn.Module] = []
    width = channels
    for stage in range(4):
        inputs, width = width, channels << stage
        stages += [Residual(inputs, width, 2 if stage else 1), Residual(width, width, 1)]
    stem = (*_convolution(1, channels, stride=2), *stages)
    return nn.Sequential(
        *stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES)
    )  # fmt: skip


def _resnet50(channels: int, hidden: int, side: int) -> nn.Module:
    stages: list[nn.Module] = []
    inputs = channels
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            stages.append(Bottleneck(inputs, channels << stage, stride))
            inputs = 4 * (channels << stage)
    stem = (*_convolution(1, channels, stride=2), *stages)
    return nn.Sequential(
        *stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES)
    )  # fmt: skip


class Bottleneck(nn.Module):
    """Convolutions 1 x 1 to `width`, 3 x 3, and 1 x 1 to four times `width`, added to the input.

    The stride is that of the 3 x 3 convolution, as in most implementations (ResNet v1.5).
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        norm = nn.BatchNorm2d(outputs)
        nn.init.zeros_(norm.weight)  # as in Residual
        self.body = nn.Sequential(
            nn.Conv2d(inputs, width, kernel_size=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            *_convolution(width, width, stride),
            nn.Conv2d(width, outputs, kernel_size=1, bias=False), norm,
        )  # fmt: skip
        self.fitted = _fitted(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.fitted(x))


class Residual(nn.Module):
    """Two convolutions, added to their input; a 1 x 1 convolution fits the input if it must."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        first = _convolution(inputs, outputs, stride)
        convolution, norm, _ = _convolution(outputs, outputs)
        nn.init.zeros_(norm.weight)  # a block starts as the identity: deep networks learn earlier
        self.body = nn.Sequential(*first, convolution, norm)
        self.fitted = _fitted(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.fitted(x))


def _fitted(inputs: int, outputs: int, stride: int) -> nn.Module:
    """The input of a block, fitted to its output where their shapes differ."""
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(outputs),
    )


def _convolution(
    inputs: int, outputs: int, stride: int = 1
) -> tuple[nn.Conv2d, nn.BatchNorm2d, nn.ReLU]:
    return (
        nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


NETWORKS = {
    "cnn": ImageNetwork("cnn", 16, 512, _cnn),
    "vgg": ImageNetwork("vgg", 16, 1536, _vgg),
    "resnet": ImageNetwork("resnet", 32, 0, _resnet),
    "resnet50": ImageNetwork("resnet50", 64, 0, _resnet50),
}
