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
from dataclasses import dataclass, replace

import torch.nn.functional as F
from torch import Tensor, nn

from gradwire.errors import ConfigError, use_one_of

CLASSES = 10


@dataclass(frozen=True)
class ImageNetwork:
    """One network with its sizes.

    Attributes:
        channels: of the first convolution.
        hidden: width of the hidden dense layers; 0 if it has none.
        make: from channels, hidden and the images' side a module from images [n, 1, side, side] to
            logits [n, CLASSES].
    """

    name: str
    channels: int
    hidden: int
    make: Callable[[int, int, int], nn.Module]

    def describe(self) -> str:
        dense = f", dense layers of {self.hidden}" if self.hidden else ""
        return f"{self.name} with BatchNorm, {self.channels} channels{dense}"


def get_network(name: str, channels: int, hidden: int) -> ImageNetwork:
    """The network called `name`; 0 selects its own size.

    Raises:
        ConfigError: there is none of that name, a size is negative, or it has no hidden layer.
    """
    if name not in NETWORKS:
        raise ConfigError(f"network={name}: {use_one_of(name, NETWORKS)}")
    own = NETWORKS[name]
    for option, size in (("channels", channels), ("hidden", hidden)):
        if size < 0:
            raise ConfigError(f"{option}={size}: give 1 or more, or 0 for the network's own")
    if hidden and not own.hidden:
        raise ConfigError(
            f"hidden={hidden}: network {name} has no hidden dense layer; leave it out"
        )
    return replace(own, channels=channels or own.channels, hidden=hidden or own.hidden)


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
