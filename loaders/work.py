"""What the loader's threads do: one function for each stage, and the records that pass between them.

Nothing here refers to the loader itself: then dropping the loader stops its threads. The records' ``str`` is what an
error names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.assemble import BatchSlot, DecodedSample
from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.world import Cursor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.loaders.reader import FetchedSpan, SampleReader
    from fuelrail.loaders.slots import BufferPool
    from fuelrail.pipeline.augment import ImageAugment
    from fuelrail.pipeline.geometry import ImageMap
    from fuelrail.pipeline.order import Order
    from fuelrail.pipeline.schema import Sample
    from fuelrail.pipeline.world import Batching


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

    def __str__(self) -> str:
        return f"sample {self.sample.key!r}, {self.task}"


def tasks(
    order_of: Callable[[int], Order],
    start: Cursor,
    whole: Batching,
    share: Share,
    first_row: int,
    buffers: BufferPool,
) -> Iterator[Task]:
    """The samples of this rank from ``start`` on, epoch after epoch without end, with their places in batches."""
    while share.steps(whole):  # a share of nothing would never come to an end
        yield from _epoch_tasks(order_of(start.epoch), start, start.rest(whole), share, first_row, buffers)
        start = Cursor(start.epoch + 1)


def _epoch_tasks(
    order: Order, start: Cursor, rest: Batching, share: Share, first_row: int, buffers: BufferPool
) -> Iterator[Task]:
    steps_done = start.samples_consumed // rest.global_batch
    for step in share.steps(rest):
        slot = BatchSlot(start.epoch, steps_done + step, buffers.take())
        rows = (order(rest.positions(step)) + first_row).tolist()
        for at, (row, valid) in enumerate(zip(rows, rest.valid(step).tolist(), strict=True)):
            yield Task(slot, at, row, valid)


def fetch(reader: SampleReader, task: Task) -> Fetched:
    """The sample's bytes from storage, checked."""
    return Fetched(task, reader.fetch(task.row))


def parse(reader: SampleReader, image: ImageAugment, seed: int, fetched: Fetched) -> Parsed:
    """The sample's members, and the image maps drawn for it."""
    sample = reader.parse(fetched.stored)
    task = fetched.task
    maps = image.draw(sample.geometry.img_wh.tolist(), seed=seed, epoch=task.slot.epoch, sample=task.row)
    return Parsed(task, sample, maps)


def decode(decoder: ImageDecoder, cameras: Sequence[str], parsed: Parsed) -> DecodedSample:
    """The sample's images, decoded into its place in the batch."""
    task, sample, maps = parsed
    images = task.slot.images[task.at]
    for camera, (channel, image_map) in enumerate(zip(cameras, maps, strict=True)):
        encoded = sample.images.get(channel)
        if encoded is None:
            images[camera] = 0
            continue
        try:
            decoder.decode_into(encoded, image_map, images[camera])
        except ImageError as error:
            raise ImageError(error.message, key=sample.key, member=channel) from error
    return DecodedSample(task.slot, task.at, task.row, task.valid, sample, maps)
