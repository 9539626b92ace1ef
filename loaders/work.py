"""What the loader's threads do: one function for each stage, and the records that pass between them.

Nothing here refers to the loader itself: then dropping the loader stops its threads. The records' ``str`` is what an
error names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.loaders.assemble import BatchSlot, DecodedSample
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.lookahead import NO_FLAGS, Due
from fuelrail.loaders.quarantine import BAD_SAMPLE
from fuelrail.loaders.reader import FetchedSpan
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.lanes import LaneEpoch
from fuelrail.pipeline.world import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.loaders.lookahead import Ahead
    from fuelrail.loaders.points import Accumulation
    from fuelrail.loaders.quarantine import BadSamples
    from fuelrail.loaders.reader import SampleReader
    from fuelrail.loaders.slots import BufferPool
    from fuelrail.loaders.storage.protocol import PendingSpan
    from fuelrail.loaders.undistort import Undistort
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.bev_augment import BevAugment, BevMap
    from fuelrail.pipeline.geometry import ImageMap
    from fuelrail.pipeline.index import IndexRow
    from fuelrail.pipeline.order import PositionMap
    from fuelrail.pipeline.pixel_augment import PixelAugment, PixelChange
    from fuelrail.pipeline.schema import Sample
    from fuelrail.pipeline.world import Batching


class Augments(NamedTuple):
    """All that is drawn for a sample."""

    image: ImageAugment
    pixels: PixelAugment
    bev: BevAugment
    seed: int
    accumulation: Accumulation | None = None
    undistort: Undistort | None = None


class Share(NamedTuple):
    """Which steps a process makes of its rank's: every ``of``-th from ``first`` on."""

    first: int = 0
    of: int = 1

    def steps(self, batching: Batching) -> range:
        """The steps of these batches that are its own."""
        return range(self.first, batching.num_steps, self.of)


class Task(NamedTuple):
    """One sample to load: its row in the index and its place in a batch."""

    slot: BatchSlot
    at: int
    row: int
    valid: bool
    position: int
    """In the epoch, over all ranks."""
    entry: IndexRow | None
    """The row's content; None where the index is damaged there, which ``take`` tells."""
    take: PendingSpan
    """Waits for the sample's bytes."""
    num_replaced: int = 0
    """Bad samples that it stands in for."""

    def __str__(self) -> str:
        return f"row {self.row} (epoch {self.slot.epoch}, step {self.slot.step})"


class Fetched(NamedTuple):
    """A sample as stored."""

    task: Task
    stored: FetchedSpan

    def __str__(self) -> str:
        return f"sample {self.stored.row.key!r}, {self.task}"


class Parsed(NamedTuple):
    """A sample with all members decoded but images, and what is to happen to those."""

    task: Task
    sample: Sample
    maps: Sequence[ImageMap]
    changes: Sequence[PixelChange]
    bev: BevMap

    def __str__(self) -> str:
        return f"sample {self.sample.key!r}, {self.task}"


def coming(
    order_of: Callable[[int], PositionMap], start: Cursor, whole: Batching, share: Share, first_row: int
) -> Iterator[Due]:
    """The samples of this rank from ``start`` on, epoch after epoch without end."""
    while share.steps(whole):  # a share of nothing would never come to an end
        yield from _coming_in_epoch(order_of(start.epoch), start, start.rest(whole), share, first_row)
        start = Cursor(start.epoch + 1)


def _coming_in_epoch(order: PositionMap, start: Cursor, rest: Batching, share: Share, first_row: int) -> Iterator[Due]:
    steps_done = start.samples_consumed // rest.global_batch
    for step in share.steps(rest):
        positions, valid, flags = rest.positions(step), rest.valid(step), NO_FLAGS
        if isinstance(order, LaneEpoch):
            lanes = order.entries(positions)
            samples, valid = lanes.samples, valid & lanes.valid
            flags = {"lane": positions % order.num_lanes, "prev_exists": lanes.prev_exists}
        else:
            samples = order(positions)
        places = zip(positions.tolist(), (samples + first_row).tolist(), valid.tolist(), strict=True)
        for at, place in enumerate(places):
            yield Due(start.epoch, steps_done + step, at, *place, flags)


def tasks(asked_for: Iterator[Ahead], buffers: BufferPool) -> Iterator[Task]:
    """The samples with their places in batches; a batch's buffer is taken when its first sample's turn comes."""
    slot: BatchSlot | None = None
    for due, entry, take in asked_for:
        if due.at == 0:
            slot = BatchSlot(due.epoch, due.step, buffers.take(), due.flags)
        assert slot is not None, "a batch begins with its first sample"
        yield Task(slot, due.at, due.row, due.valid, due.position, entry, take)


def fetch(bad: BadSamples, task: Task) -> Fetched:
    """The sample's bytes from storage, checked; or those of the sample that takes its place."""
    while True:
        try:
            span = task.take()
        except BAD_SAMPLE as error:
            task = bad.replace(task, error)
        else:
            assert task.entry is not None
            return Fetched(task, FetchedSpan(task.entry, span))


def parse(reader: SampleReader, augments: Augments, bad: BadSamples, fetched: Fetched) -> Parsed:
    """The sample's members, and the augmentation drawn for it."""
    while True:
        task = fetched.task
        try:
            sample = reader.parse(fetched.stored)
            if augments.accumulation is not None:
                sample = augments.accumulation(sample, seed=augments.seed, epoch=task.slot.epoch, row=task.row)
        except BAD_SAMPLE as error:
            fetched = fetch(bad, bad.replace(task, error))
        else:
            image, pixels, bev, seed = augments.image, augments.pixels, augments.bev, augments.seed
            epoch, row, img_wh = task.slot.epoch, task.row, sample.geometry.img_wh.tolist()
            maps = image.draw(img_wh, seed=seed, epoch=epoch, sample=row)
            if augments.undistort is not None:
                sample, maps = augments.undistort(sample, maps, reader.cameras)
            changes = pixels.draw(image.height, seed=seed, epoch=epoch, sample=row, cameras=range(len(img_wh)))
            return Parsed(task, sample, maps, changes, bev.draw(seed=seed, epoch=epoch, sample=row))


def for_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """A stage's work on single items, where the items come as batches."""
    return [function(item) for item in items]


def decode(
    decoder: ImageDecoder,
    cameras: Sequence[str],
    fill: tuple[int, int, int],
    bad: BadSamples,
    parse_again: Callable[[Fetched], Parsed],
    parsed: Parsed,
) -> DecodedSample:
    """The sample's images, decoded into its place in the batch."""
    while True:
        try:
            return _decode(decoder, cameras, fill, parsed)
        except BAD_SAMPLE as error:
            parsed = parse_again(fetch(bad, bad.replace(parsed.task, error)))


def _decode(decoder: ImageDecoder, cameras: Sequence[str], fill: tuple[int, int, int], parsed: Parsed) -> DecodedSample:
    task, sample, maps, changes, bev = parsed
    images = task.slot.images[task.at]
    assert not isinstance(images, torch.Tensor)
    for camera, (channel, image_map, change) in enumerate(zip(cameras, maps, changes, strict=True)):
        encoded = sample.images.get(channel)
        if encoded is None:
            images[camera] = 0
            continue
        try:
            decoder.decode_into(encoded, image_map, images[camera])
        except ImageError as error:
            raise ImageError(error.message, key=sample.key, member=channel) from error
        change_pixels(images[camera], change, fill)
    return DecodedSample(task.slot, task.at, task.row, task.valid, sample, maps, bev)
