"""The backend's settings from the environment, for models without a registration.

A script that only names the backend has no other place for settings.

    GRADWIRE_CODEC      a codec or aggregator, NAME or NAME:OPTION=VALUE:..., such as qsgd:bits=8;
                        "none" compresses nothing that is not registered. Default qsgd: 4 bits,
                        blocks of 128
    GRADWIRE_BLOB       1 compresses the tensors that a backward pass reduces as blobs, without
                        knowledge of parameters (blob.py). Default 0
    GRADWIRE_MIN_BYTES  smaller blobs are sent uncompressed. Default 65536
    GRADWIRE_SEED       seed of the codec's random numbers. Default 0
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gradwire.aggregators import Aggregator, Compressed, Dense, registry
from gradwire.collectives import Options, check_defined
from gradwire.errors import ConfigError
from gradwire.lang import Codec

CODEC, BLOB = "GRADWIRE_CODEC", "GRADWIRE_BLOB"
MIN_BYTES, SEED = "GRADWIRE_MIN_BYTES", "GRADWIRE_SEED"

# At 1 Gbit/s they take half a millisecond, about the latency of such a network.
_MIN_BYTES = 64 << 10


@dataclass(frozen=True)
class Settings:
    """The same on every rank of a process group.

    Attributes:
        codec: a codec, or an aggregator unless there are blobs; None compresses nothing.
        min_bytes: blobs of fewer bytes are sent uncompressed.
        seed: of the codec's random numbers.
        blob: whether blob mode is on.
    """

    codec: Codec | Aggregator | None
    min_bytes: int
    seed: int
    blob: bool = False

    def describe(self) -> str:
        """The text that ranks compare."""
        name = "none" if self.codec is None else str(self.codec)
        blob = f"{BLOB} {int(self.blob)}, {MIN_BYTES} {self.min_bytes}"
        return f"{CODEC} {name}, {blob}, {SEED} {self.seed}"


def from_environment(environment: Mapping[str, str]) -> Settings:
    """The settings that the variables above give.

    Raises:
        ConfigError: an unknown codec or option, a codec that all-reduces cannot use, or a number
            that is none; the message names the variable.
    """
    codec, blob = _codec(environment.get(CODEC, "qsgd")), _switch(environment, BLOB)
    if blob and isinstance(codec, Aggregator):
        raise ConfigError(f"{CODEC}: {codec} needs parameters, which {BLOB}=1 does not know")
    return Settings(
        codec=codec,
        min_bytes=_whole(environment, MIN_BYTES, _MIN_BYTES),
        seed=_whole(environment, SEED, 0),
        blob=blob,
    )


def _codec(text: str) -> Codec | Aggregator | None:
    try:
        method = registry.get(text)
        if isinstance(method, Dense):
            return None
        if isinstance(method, Compressed) and method == Compressed(method.codec):
            check_defined(Options().algorithm, method.codec)
            return method.codec
    except ConfigError as error:
        raise ConfigError(f"{CODEC}={text!r}: {error}") from None
    return method


def _switch(environment: Mapping[str, str], name: str) -> bool:
    text = environment.get(name, "0")
    if text not in ("0", "1"):
        raise ConfigError(f"{name}={text!r}: give 0 or 1")
    return text == "1"


def _whole(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    short = text.isascii() and text.isdecimal() and len(text) <= 20
    if not short or int(text) >= 1 << 64:
        raise ConfigError(f"{name}={text!r:.60}: give a whole number from 0 to below 2^64")
    return int(text)
