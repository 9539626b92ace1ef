"""A member's bytes, stored and raw: the codec registry.

============== ============= ======================================================================
codec          name suffix   stored form
============== ============= ======================================================================
``raw``        (none)        the bytes themselves: encoded images and other media that do not shrink
``zstd``       ``.zst``      one zstd frame that states its content size
``zstd-dict``  ``.dict.zst`` as ``zstd``, with the dataset's dictionary (`Dictionary`)
``zstd-pR``    ``.pR.zst``   as ``zstd``, after splitting rows of R bytes (counted from the end)
                             into R byte planes: column-wise and byte-shuffled at once, for float
                             arrays such as lidar
============== ============= ======================================================================

All are exact, byte for byte. Sizes read from untrusted data are capped before memory is taken.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import zstandard

from fuelrail.pipeline.errors import (
    CodecError,
    ConfigError,
    MemberTooLargeError,
)
from fuelrail.pipeline.limits import MEMBER, SAMPLE
from fuelrail.pipeline.sample.schema import BOXES, GEOMETRY, META

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.arrays import Buffer

MAX_MEMBER_BYTES: Final = MEMBER.maximum
"""Cap on one member, stored or decoded: 128 MiB."""

MAX_SAMPLE_BYTES: Final = SAMPLE.maximum
"""Cap on what a reader holds of one sample, 512 MiB: its span, and what its compressed members
decode to.
"""

MAX_MEMBERS: Final = 4096
"""Cap on the members of one sample."""

_CAPS: Final = {META: 1 << 20, GEOMETRY: 1 << 20, BOXES: 4 << 20}
"""Caps on members of which readers make Python objects or tables."""

MAX_ZSTD_LEVEL: Final = zstandard.MAX_COMPRESSION_LEVEL

DEFAULT_ZSTD_LEVEL: Final = 3
"""Level 9 saves 2 % more on lidar for 3.6 times the time; level 1 loses 2 to 3 %."""

RAW: Final = "raw"

ZSTD: Final = "zstd"

ZSTD_DICT: Final = "zstd-dict"

_MIN_BLOCK_BYTES: Final = 4096
"""The least size of planes that get blocks of their own: a block costs 3 bytes, and a table some
100.
"""

MAX_ROW_BYTES: Final = 4096
"""The largest row that the codec ``zstd-pR`` takes."""

_PLANES = re.compile(r"zstd-p([1-9][0-9]{0,3})\Z")

_DICT_SUFFIX: Final = ".dict.zst"

_PLANES_SUFFIX = re.compile(r"\.p([1-9][0-9]{0,3})\.zst\Z")

DICTIONARY_FILE: Final = "zstd.dict"

MIN_DICTIONARY_BYTES: Final = 1 << 10

MAX_DICTIONARY_BYTES: Final = 1 << 20

# All of fastCover's parameters are given: left open, the library searches, and its next version may
# do so otherwise.
_SEGMENT_BYTES: Final = 512

_MATCH_BYTES: Final = 8

_LOG2_FREQUENCIES: Final = 20


class Zstd(threading.local):
    """One thread's compressors and its decompressor.

    zstandard's objects must not be used by two threads at once, and making one costs more than a
    small member.
    """

    def __init__(
        self,
        dictionary: zstandard.ZstdCompressionDict | None = None,
        *,
        checksum: bool = False,
    ) -> None:
        """Frames are of this dictionary, and end with a ``checksum``; they state their content
        size.
        """
        self._dictionary = dictionary
        self._checksum = checksum
        self._compressors: dict[int, zstandard.ZstdCompressor] = {}
        self.decompressor = zstandard.ZstdDecompressor(dict_data=dictionary)

    def compressor(self, level: int) -> zstandard.ZstdCompressor:
        """Return the compressor of a level; raise ConfigError for one that zstd does not have."""
        if level not in self._compressors:
            if not 1 <= level <= MAX_ZSTD_LEVEL:
                raise ConfigError(f"zstd level {level} is not allowed: use 1 to {MAX_ZSTD_LEVEL}")
            self._compressors[level] = zstandard.ZstdCompressor(
                level,
                self._dictionary,
                write_checksum=self._checksum,
                write_content_size=True,
            )
        return self._compressors[level]


_PLAIN: Final = Zstd()


def member_cap(name: str) -> int:
    """Return the most bytes that a member of this field name (without codec suffix) may decode
    to.
    """
    return _CAPS.get(name, MAX_MEMBER_BYTES)


def held_bytes(stored_bytes: int, raw_bytes: int, codec: str) -> int:
    """Return the bytes that a member counts for in :data:`MAX_SAMPLE_BYTES`."""
    return stored_bytes if codec == RAW else stored_bytes + raw_bytes


def planes(row_bytes: int) -> str:
    """Name of the byte-plane codec for rows of ``row_bytes`` bytes (20 for float32 x, y, z,
    intensity, ring).
    """
    name = f"zstd-p{row_bytes}"
    _row_bytes(name)
    return name


def suffix(codec: str) -> str:
    """Return suffix that a member's name carries in the tar, e.g. ``.zst``; raise ConfigError
    for an unknown codec.
    """
    if codec == RAW:
        return ""
    if codec == ZSTD_DICT:
        return _DICT_SUFFIX
    row = _row_bytes(codec)
    return f".p{row}.zst" if row else ".zst"


def stored_name(name: str, codec: str) -> str:
    """Return the field name in the tar: ``name`` with the codec's suffix.

    Raises ConfigError for a name that reads as if a codec's suffix were part of it, for that would
    not split back.
    """
    stored = name + suffix(codec)
    if split_name(stored) != (name, codec):
        raise ConfigError(
            f"field name {name!r} is not allowed: stored as {stored!r} it reads as another codec's"
        )
    return stored


def split_name(stored_name: str) -> tuple[str, str]:
    """Split a stored field name into (field name, codec): ``meta.json.zst`` to ``meta.json`` and
    ``zstd``.
    """
    match = _PLANES_SUFFIX.search(stored_name)
    if match is not None:
        row_bytes = int(match[1])
        if row_bytes <= MAX_ROW_BYTES:
            return stored_name[: match.start()], planes(row_bytes)
    if stored_name.endswith(_DICT_SUFFIX):
        return stored_name.removesuffix(_DICT_SUFFIX), ZSTD_DICT
    if stored_name.endswith(".zst"):
        return stored_name.removesuffix(".zst"), ZSTD
    return stored_name, RAW


def encode(
    codec: str,
    raw: Buffer,
    *,
    level: int = DEFAULT_ZSTD_LEVEL,
    dictionary: Dictionary | None = None,
) -> Buffer:
    """Return the stored form of ``raw``.

    The same input, codec, level, dictionary and zstd version: the same bytes.

    Raises MemberTooLargeError over the cap, ConfigError for an unknown codec or a level that zstd
    does not have, and for the dictionary codec without a dictionary.
    """
    size = memoryview(raw).nbytes
    if size > MAX_MEMBER_BYTES:
        raise MemberTooLargeError(f"{size} bytes, over the cap of {MAX_MEMBER_BYTES}")
    if codec == RAW:
        return raw
    if codec == ZSTD_DICT:
        if dictionary is None:
            raise ConfigError(f"codec {ZSTD_DICT!r} needs a dictionary")
        return dictionary.zstd.compressor(level).compress(raw)
    row = _row_bytes(codec)
    if not row:
        return _PLAIN.compressor(level).compress(raw)
    # Rows are counted from the end, because array files have a header in front and their data last.
    data = np.frombuffer(raw, np.uint8)
    head = size % row
    planes = np.empty(size, np.uint8)
    planes[:head] = data[:head]
    _transpose(
        data[head:].reshape(-1, row),
        planes[head:].reshape(row, -1),
    )
    plane_bytes = size // row
    if plane_bytes < _MIN_BLOCK_BYTES:
        return _PLAIN.compressor(level).compress(planes.data)
    # Exponents and mantissas have little in common. So each plane is a block of its own with a
    # Huffman table that fits, and one that does not shrink stays as it is, which is decoded at the
    # speed of a copy.
    frame = _PLAIN.compressor(level).compressobj(size=size)
    parts: list[bytes] = []
    begin = 0
    for num_behind in reversed(range(row)):
        end = size - num_behind * plane_bytes
        is_last = num_behind == 0
        flush = zstandard.COMPRESSOBJ_FLUSH_FINISH if is_last else zstandard.COMPRESSOBJ_FLUSH_BLOCK
        parts.append(frame.compress(planes.data[begin:end]))
        parts.append(frame.flush(flush))
        begin = end
    return b"".join(parts)


def decode(
    codec: str,
    stored: Buffer,
    raw_bytes: int | None = None,
    *,
    dictionary: Dictionary | None = None,
) -> Buffer:
    """Return the raw bytes of a stored member.

    ``raw_bytes`` is the size that the index promises; without an index (None) the zstd frame's own
    content size is taken, under the same cap. Raises CodecError when the bytes do not decode to
    exactly that size, and where they need another dictionary than the dataset's.
    """
    if codec == RAW:
        size = memoryview(stored).nbytes
        if raw_bytes is not None and size != raw_bytes:
            raise CodecError(f"{size} bytes stored raw, the index promises {raw_bytes}")
        return stored
    row = 0 if codec == ZSTD_DICT else _row_bytes(codec)
    try:
        stated = zstandard.frame_content_size(stored)
    except zstandard.ZstdError as error:
        raise CodecError(f"not a zstd frame: {error}") from error
    expected = stated if raw_bytes is None else raw_bytes
    if stated < 0:
        raise CodecError("the zstd frame does not state its content size")
    if stated != expected:
        raise CodecError(f"the zstd frame states {stated} bytes, the index promises {expected}")
    if expected > MAX_MEMBER_BYTES:
        raise MemberTooLargeError(
            f"decodes to {expected} bytes, over the cap of {MAX_MEMBER_BYTES}"
        )
    decompressor = _PLAIN.decompressor
    if codec == ZSTD_DICT:
        if dictionary is None:
            raise CodecError("stored with a dictionary, and the dataset has none")
        dictionary.check_id(stored)
        decompressor = dictionary.zstd.decompressor
    try:
        raw: bytes = decompressor.decompress(
            stored,
            max_output_size=expected,
            allow_extra_data=False,
        )
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged zstd frame: {error}") from error
    if len(raw) != expected:
        raise CodecError(f"decoded to {len(raw)} bytes instead of {expected}")
    if not row:
        return raw
    shuffled = np.frombuffer(raw, np.uint8)
    head = expected % row
    data = np.empty(expected, np.uint8)
    data[:head] = shuffled[:head]
    _transpose(
        shuffled[head:].reshape(row, -1),
        data[head:].reshape(-1, row),
    )
    return data.data


@functools.lru_cache(maxsize=64)
def _row_bytes(codec: str) -> int:
    """Return the rows' bytes of a plane codec, 0 for plain zstd; raise ConfigError for any other
    name.
    """
    if codec == ZSTD:
        return 0
    match = _PLANES.match(codec)
    row_bytes = 0 if match is None else int(match[1])
    if not 1 <= row_bytes <= MAX_ROW_BYTES:
        raise ConfigError(
            f"unknown codec {codec!r}; known: raw, zstd, zstd-dict, zstd-pR with R from 1 "
            f"to {MAX_ROW_BYTES}"
        )
    return row_bytes


def _transpose(source: U8, out: U8) -> None:
    """Write the transpose of ``source`` into ``out``, both contiguous."""
    if source.size == 0:
        return
    # OpenCV transposes bytes 4 to 7 times as fast as numpy's strided copy, which would take longer
    # than zstd. It is imported on first use, so that reading metadata does not wait for it.
    try:
        import cv2

        if len(source) in (2, 4):
            # Planes of float16 and float32, which this interleaves 3 to 4 times as fast.
            rows = list(source[:, None])
            cv2.merge(rows, dst=out[None])
        else:
            cv2.transpose(source, dst=out)
    except ModuleNotFoundError:  # the extra opencv is not installed
        np.copyto(out, source.T)
    except (ImportError, AttributeError) as error:
        # The latter: another thread's import of it failed half-way.
        raise ConfigError(
            f"OpenCV cannot be loaded ({error}): it needs the package "
            "opencv-python-headless and some 1 GiB of address space (see `ulimit -v`)"
        ) from error


class Dictionary:
    """A trained dictionary, ready to compress and to decompress; safe to use from many threads."""

    def __init__(self, data: bytes, where: str = "the dictionary") -> None:
        """Take the bytes of ``zstd.dict``; raises CodecError where they are no dictionary of a
        legal size.
        """
        if len(data) > MAX_DICTIONARY_BYTES:
            raise CodecError(
                f"{where} has {len(data)} bytes, over the cap of {MAX_DICTIONARY_BYTES}"
            )
        try:
            self._dictionary = zstandard.ZstdCompressionDict(
                data,
                dict_type=zstandard.DICT_TYPE_FULLDICT,
            )
            self.zstd = Zstd(self._dictionary)
            compressor = self.zstd.compressor(DEFAULT_ZSTD_LEVEL)
            self.zstd.decompressor.decompress(compressor.compress(b""))
        except zstandard.ZstdError as error:
            raise CodecError(f"{where} is not a zstd dictionary: {error}") from error
        self.data = data
        self.id: int = self._dictionary.dict_id()
        if not self.id:
            raise CodecError(f"{where} is not a zstd dictionary: it has no id")

    def __reduce__(self) -> tuple[type[Dictionary], tuple[bytes]]:
        return Dictionary, (self.data,)

    def check_id(self, stored: Buffer) -> None:
        """Raise CodecError for a frame that was made with another dictionary, or without one."""
        frame_id = zstandard.get_frame_parameters(stored).dict_id
        if frame_id != self.id:
            raise CodecError(
                f"the zstd frame needs the dictionary {frame_id}, {DICTIONARY_FILE} is {self.id}"
            )


def train_dictionary(
    samples: Sequence[bytes],
    num_bytes: int,
    level: int,
) -> Dictionary:
    """Train a dictionary of at most ``num_bytes`` on samples; the same ones, in their order, give
    the same bytes.

    Raises ConfigError for a size out of range, and for samples that are too few or too short to
    train on.
    """
    if not MIN_DICTIONARY_BYTES <= num_bytes <= MAX_DICTIONARY_BYTES:
        raise ConfigError(
            f"a dictionary of {num_bytes} bytes is not allowed: {MIN_DICTIONARY_BYTES} to "
            f"{MAX_DICTIONARY_BYTES}"
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
            f"{len(samples)} small members of {total} bytes in all are too little to train "
            f"a dictionary of {num_bytes} bytes on ({error}): choose a smaller one, or none"
        ) from error
    return Dictionary(trained.as_bytes())
