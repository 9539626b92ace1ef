"""What a peer is: one folder written in its own format, and batches of images out of it."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

import msgspec

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

Count = Annotated[int, msgspec.Meta(gt=0)]

_SAMPLES_PER_SHARD = 100

_NUMBER = struct.Struct("<q")


class Work(Settings, frozen=True):
    """What every loader is to deliver: uint8 RGB planes [batch_size, cameras, 3, height, width] of every sample.

    Each picture is shrunk so that it fills ``width`` (or ``height``, if that needs less shrinking), centred across and
    cut at the top, as BEVDet and its family evaluate. ``num_workers`` is the number of CPUs to keep busy: worker
    processes or decoding threads, whichever the loader has. ``num_samples``, ``cameras`` and ``source_wh``, the size of
    all images, are the data's.
    """

    height: Count
    width: Count
    batch_size: Count
    num_workers: Count
    seed: int
    num_samples: Count
    source_wh: tuple[int, int]
    cameras: tuple[str, ...]

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """Cameras, colours, height, width."""
        return len(self.cameras), 3, self.height, self.width

    @property
    def samples_per_shard(self) -> int:
        """Of every format that has shards: few enough that each worker has several, even of a small dataset."""
        return max(1, min(_SAMPLES_PER_SHARD, self.num_samples // (2 * self.num_workers)))


class Sample(NamedTuple):
    """A sample as all formats store it: its number in the dataset, which stands for its key, and its encoded images."""

    number: int
    images: tuple[bytes, ...]


class Batch(NamedTuple):
    """The numbers of some samples and their images [B, N, 3, H, W], uint8; valid until the next batch is taken."""

    numbers: list[int]
    images: NDArray[np.uint8]


class Peer(Protocol):
    """One loader. ``recipe`` names one of its ways to decode; the registry lists them."""

    def write(self, samples: Iterable[Sample], folder: Path, work: Work, /) -> None:
        """Write the samples in the loader's own format; the folder is there and empty."""

    def batches(self, folder: Path, work: Work, recipe: str, /) -> Iterator[Batch]:
        """Batches of one shuffled epoch after another, without end."""


class UnavailableError(ConfigError):
    """A peer cannot run here; the message says why."""


def pack_number(number: int) -> bytes:
    """A sample's number as the member of a format that stores bytes: 8 bytes, little-endian."""
    return _NUMBER.pack(number)


def unpack_number(data: bytes) -> int:
    """The number of :func:`pack_number`."""
    number: int = _NUMBER.unpack(data)[0]
    return number
