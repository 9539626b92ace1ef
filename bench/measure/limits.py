"""This machine's limits, measured on the bytes of this dataset: upper bounds for any loader.

Every limit is a rate in samples/s, so that they can be compared with the loader's. All bytes come
from the page cache: they are read once before. How fast the storage itself is, cold, is another
question.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import simplejpeg
import xxhash
from numpy.typing import NDArray

from fuelrail.bench.measure.rates import Rate, measure_rate
from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.zstd_frames import is_framed, open_span
from fuelrail.pipeline.sample.image_header import probe

if TYPE_CHECKING:
    from fuelrail.loaders.records import Fetched, Parsed
    from fuelrail.pipeline.format.dataset import Dataset

_JPEG_SCALES = (1, 2, 4, 8)


class _Scratch(threading.local):
    """Each thread's reused memory: fresh megabytes would cost as much in page faults as the work
    that is measured.
    """

    def __init__(self) -> None:
        self._memory = np.empty(0, np.uint8)

    def take(self, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return an array with undefined content, valid until the thread's next call."""
        size = math.prod(shape)
        if len(self._memory) < size:
            self._memory = np.empty(size, np.uint8)
        return self._memory[:size].reshape(shape)


def measure_limits(
    fetched: Sequence[Fetched],
    parsed: Sequence[Parsed],
    skipped: Collection[str],
    output_bytes: int,
    num_threads: int,
    seconds: float,
    dataset: Dataset | None = None,
    to_device: Callable[[int], object] | None = None,
) -> list[Rate]:
    """Measure each limit for ``seconds`` with ``num_threads`` threads, on samples that are in
    memory already.

    ``skipped`` names channels whose members the loader leaves as they are. ``dataset`` is needed
    where it has frame shards or a dictionary. ``to_device`` copies a sample's images to the device
    and waits for it, as :func:`fuelrail.bench.measure.cuda.pinned_copy` does; None where there is
    none. One thread calls it, as in the loader.
    """
    count = len(fetched)
    stored = [entry.stored[entry.task.current] for entry in fetched]
    spans = [frame.span.base for frame in stored]
    shards = () if dataset is None else dataset.shards
    dictionary = None if dataset is None else dataset.dictionary
    framed = [bool(shards) and is_framed(shards[frame.row.shard].name) for frame in stored]
    compressed = [
        [
            (
                member.codec,
                span[member.offset : member.offset + member.stored_bytes],
                member.raw_bytes,
            )
            for member in frame.row.members
            if member.codec != codecs.RAW and member.name.partition(".")[0] not in skipped
        ]
        for frame, span in zip(stored, spans, strict=True)
    ]
    images = [list(entry.sample.images.values()) for entry in parsed]
    all_maps = itertools.chain.from_iterable(entry.maps for entry in parsed)
    scales = [image_map.max_scale for maps in all_maps for image_map in maps]
    formats = {probe(image).format for entry in parsed for image in entry.sample.images.values()}
    # The largest divisor by which libjpeg-turbo may shrink for every map of the samples.
    factor = None
    if formats == {"jpeg"}:
        factor = max(n for n in _JPEG_SCALES if n == 1 or max(scales) * n <= 1.0 + 1e-9)
    picture = np.zeros(output_bytes, np.uint8)
    scratch = _Scratch()

    def read(number: int) -> None:
        span = np.frombuffer(spans[number % count], np.uint8)
        np.copyto(scratch.take(span.shape), span)

    def digest(number: int) -> None:
        xxhash.xxh3_64_intdigest(spans[number % count])

    def decompress(number: int) -> None:
        if framed[number % count]:
            row = stored[number % count].row
            open_span(row, spans[number % count], shards[row.shard].name)
        for codec, data, raw_bytes in compressed[number % count]:
            codecs.decode(codec, data, raw_bytes, dictionary=dictionary)

    def copy(number: int) -> None:  # noqa: ARG001 - each copies the same
        np.copyto(scratch.take(picture.shape), picture)

    def decode(divisor: int, number: int) -> None:
        for image in images[number % count]:
            info = probe(image)
            height = -(-info.height // divisor)
            width = -(-info.width // divisor)
            simplejpeg.decode_jpeg(
                image,
                "RGBX",
                min_height=height,
                min_width=width,
                buffer=scratch.take((height, width, 4)),
            )

    rates = [
        measure_rate("copy decoded images", copy, num_threads, seconds),
        measure_rate("read from the page cache", read, num_threads, seconds),
        measure_rate("xxh3 digest", digest, num_threads, seconds),
    ]
    if any(compressed) or any(framed):
        rates.append(measure_rate("zstd", decompress, num_threads, seconds))
    if factor is not None:
        for divisor in sorted({1, factor}, reverse=True):
            name = f"libjpeg-turbo at 1/{divisor}" if divisor > 1 else "libjpeg-turbo at full size"
            rates.append(measure_rate(name, partial(decode, divisor), num_threads, seconds))
    if to_device is not None:
        rates.append(measure_rate("host to device", to_device, 1, seconds))
    return rates


def jpeg_limit(rates: Sequence[Rate]) -> Rate | None:
    """Return the limit that JPEG decoding at the size in use sets; None for datasets without
    JPEG.
    """
    return next((rate for rate in rates if rate.name.startswith("libjpeg-turbo")), None)
