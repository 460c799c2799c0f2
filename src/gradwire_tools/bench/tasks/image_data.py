"""Images that need no download: Fashion-MNIST from Debian's package, or scikit-learn's digits.

The Debian package `dataset-fashion-mnist` installs the four idx files (LeCun's format, gzipped,
which torchvision reads too). Without it the 1797 digits of scikit-learn replace it, and `origin`
says so. Digits are far easier, so rows of the two data sets are not comparable.
"""

from __future__ import annotations

import gzip
import struct
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gradwire.errors import ConfigError, use_one_of

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")  # by the package's file list
DATA_SETS = ("auto", "fashion", "digits")
_FASHION_MEAN, _FASHION_DEVIATION = 0.286, 0.353  # of the training images, scaled to [0, 1]
_DIGITS_HELD_OUT = 300


@dataclass(frozen=True)
class ImageData:
    """Images as fp32 [n, 1, side, side], about standard normal; labels as int64 [n] in 0..9.

    Attributes:
        origin: the data set's name, for people; if it is a substitute, also what is missing.
    """

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    origin: str

    @property
    def side(self) -> int:
        return self.train_images.shape[-1]


@lru_cache(maxsize=4)
def load(data: str, folder: Path = DEBIAN_FOLDER) -> ImageData:
    """The data set `data`: "fashion", "digits", or "auto" (fashion where its files are).

    Raises:
        ConfigError: the name is unknown, files are missing or damaged, or scikit-learn is missing.
    """
    if data not in DATA_SETS:
        raise ConfigError(f"unknown image data {data!r}: {use_one_of(data, DATA_SETS)}")
    present = (folder / "train-images-idx3-ubyte.gz").exists()
    if data == "fashion" and not present:
        raise ConfigError(
            f"no Fashion-MNIST files in {folder}: install Debian's dataset-fashion-mnist, "
            "or choose data=digits"
        )
    if data == "fashion" or (data == "auto" and present):
        return _fashion(folder)
    substitute = " in place of Fashion-MNIST (Debian's dataset-fashion-mnist is not installed)"
    return _digits(substitute if data == "auto" else "")


def _fashion(folder: Path) -> ImageData:
    def images(name: str) -> Tensor:
        pixels = torch.from_numpy(read_idx(folder / name)).float() / 255
        return ((pixels - _FASHION_MEAN) / _FASHION_DEVIATION).unsqueeze(1)

    def labels(name: str) -> Tensor:
        return torch.from_numpy(read_idx(folder / name)).long()

    return ImageData(
        images("train-images-idx3-ubyte.gz"),
        labels("train-labels-idx1-ubyte.gz"),
        images("t10k-images-idx3-ubyte.gz"),
        labels("t10k-labels-idx1-ubyte.gz"),
        "Fashion-MNIST",
    )


def _digits(remark: str) -> ImageData:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ConfigError(
            "the image task needs Debian's dataset-fashion-mnist or scikit-learn (its digits); "
            "neither is installed"
        ) from error
    digits = load_digits()
    # The file is ordered by writer, so a fixed shuffle precedes the split.
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = torch.from_numpy(digits.images[order]).float().unsqueeze(1)
    labels = torch.from_numpy(digits.target[order]).long()
    images = (images - images.mean()) / images.std()
    held_out, train = slice(0, _DIGITS_HELD_OUT), slice(_DIGITS_HELD_OUT, None)
    return ImageData(
        images[train], labels[train], images[held_out], labels[held_out], "digits" + remark
    )


def read_idx(path: Path) -> npt.NDArray[np.uint8]:
    """The array of a gzipped idx file of unsigned bytes.

    Raises:
        ConfigError: the file has another format or is truncated; the message names it.
    """
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if len(raw) < 4 or raw[:3] != b"\0\0\x08":  # two zeros, then the code of "unsigned byte"
        raise ConfigError(f"{path} is not an idx file of unsigned bytes")
    dimensions = raw[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack_from(f">{dimensions}I", raw, 4) if len(raw) >= start else ()
    if not shape or len(raw) != start + int(np.prod(shape)):
        raise ConfigError(f"{path} is truncated or damaged: {len(raw)} bytes for shape {shape}")
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()
