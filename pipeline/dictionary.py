"""A zstd dictionary shared by the small members of a dataset: training, and the codec that needs it.

A member of a few hundred bytes holds little that zstd could refer back to; what all samples have in common (JSON
keys, the rig's calibration) stands in the dictionary instead, once for the dataset, in ``zstd.dict``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import zstandard

from fuelrail.pipeline.errors import CodecError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.buffers import Buffer

DICTIONARY_FILE: Final = "zstd.dict"
MIN_DICTIONARY_BYTES: Final = 1 << 10
MAX_DICTIONARY_BYTES: Final = 1 << 20

# All of fastCover's parameters are given: left open, the library searches, and its next version may do so otherwise.
_SEGMENT_BYTES: Final = 512
_MATCH_BYTES: Final = 8
_LOG2_FREQUENCIES: Final = 20


class Dictionary:
    """A trained dictionary, ready to compress and to decompress; safe to use from many threads."""

    def __init__(self, data: bytes, where: str = "the dictionary") -> None:
        """Take the bytes of ``zstd.dict``; raises CodecError where they are no dictionary of a legal size."""
        if len(data) > MAX_DICTIONARY_BYTES:
            raise CodecError(f"{where} has {len(data)} bytes, over the cap of {MAX_DICTIONARY_BYTES}")
        try:
            self._dictionary = zstandard.ZstdCompressionDict(data, dict_type=zstandard.DICT_TYPE_FULLDICT)
            zstandard.ZstdCompressor(dict_data=self._dictionary)
            zstandard.ZstdDecompressor(dict_data=self._dictionary).decompress(
                zstandard.ZstdCompressor(dict_data=self._dictionary).compress(b"")
            )
        except zstandard.ZstdError as error:
            raise CodecError(f"{where} is no zstd dictionary: {error}") from error
        self.data = data
        self.id: int = self._dictionary.dict_id()
        if not self.id:
            raise CodecError(f"{where} is no zstd dictionary: it has no id")
        self._local = threading.local()

    def __reduce__(self) -> tuple[type[Dictionary], tuple[bytes]]:
        return Dictionary, (self.data,)

    def compress(self, raw: Buffer, level: int) -> bytes:
        """One zstd frame that states its content size and the dictionary's id."""
        pool: dict[int, zstandard.ZstdCompressor] = self._local.__dict__.setdefault("compressors", {})
        if level not in pool:
            pool[level] = zstandard.ZstdCompressor(
                level=level, dict_data=self._dictionary, write_content_size=True, write_checksum=False
            )
        return pool[level].compress(raw)

    def decompressor(self) -> zstandard.ZstdDecompressor:
        """This thread's decompressor with the dictionary."""
        if not hasattr(self._local, "decompressor"):
            self._local.decompressor = zstandard.ZstdDecompressor(dict_data=self._dictionary)
        decompressor: zstandard.ZstdDecompressor = self._local.decompressor
        return decompressor

    def check_id(self, stored: Buffer) -> None:
        """Raise CodecError for a frame that was made with another dictionary, or without one."""
        found = zstandard.get_frame_parameters(stored).dict_id
        if found != self.id:
            raise CodecError(f"the zstd frame needs the dictionary {found}, {DICTIONARY_FILE} is {self.id}")


def train_dictionary(samples: Sequence[bytes], num_bytes: int, level: int) -> Dictionary:
    """Train a dictionary of at most ``num_bytes`` on samples; the same ones, in their order, give the same bytes.

    Raises ConfigError for a size out of range, and for samples that are too few or too short to train on.
    """
    if not MIN_DICTIONARY_BYTES <= num_bytes <= MAX_DICTIONARY_BYTES:
        raise ConfigError(
            f"a dictionary of {num_bytes} bytes is not allowed: {MIN_DICTIONARY_BYTES} to {MAX_DICTIONARY_BYTES}"
        )
    try:
        trained = zstandard.train_dictionary(
            num_bytes,
            list(samples),
            k=_SEGMENT_BYTES,
            d=_MATCH_BYTES,
            f=_LOG2_FREQUENCIES,
            split_point=1.0,
            accel=1,
            level=level,
        )
    except zstandard.ZstdError as error:
        total = sum(map(len, samples))
        raise ConfigError(
            f"{len(samples)} small members of {total} bytes in all are too little to train a dictionary of {num_bytes} "
            f"bytes on ({error}): choose a smaller one, or none"
        ) from error
    return Dictionary(trained.as_bytes())
