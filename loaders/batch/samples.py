"""Fetch, parse and decode one sample: the functions of the stages, each from one record to the next.

Nothing here refers to the loader itself, so that dropping the loader stops its threads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from fuelrail.loaders.batch.channels import moved_frames
from fuelrail.loaders.batch.temporal import hidden
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.records import DecodedSample, Fetched, Parsed
from fuelrail.loaders.schedule.bad_samples import BAD_SAMPLE
from fuelrail.loaders.storage.reader import FetchedSpan
from fuelrail.pipeline.errors import ImageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.loaders.batch.points import Accumulation
    from fuelrail.loaders.decode import ImageDecoder
    from fuelrail.loaders.decode.lens import Undistort
    from fuelrail.loaders.records import Task
    from fuelrail.loaders.schedule.bad_samples import BadSamples
    from fuelrail.pipeline.order.windows import FrameWindow
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.ego import BevAugment
    from fuelrail.pipeline.transforms.image import ImageAugment
    from fuelrail.pipeline.transforms.image_map import ImageMap
    from fuelrail.pipeline.transforms.pixels import PixelAugment


class Augments(NamedTuple):
    """All augmentations of a sample."""

    image: ImageAugment
    pixels: PixelAugment
    bev: BevAugment
    seed: int
    accumulation: Accumulation | None = None
    undistort: Undistort | None = None


def fetch(bad: BadSamples, task: Task) -> Fetched:
    """Return the sample's bytes from storage, checked; of a bad sample, those of its substitute."""
    while True:
        stored = []
        for number, (_, _, entry, pending_read) in enumerate(task.frames):
            try:
                span = pending_read()
            except BAD_SAMPLE as error:
                task = bad.replace(task, number, error)
                break
            assert entry is not None
            stored.append(FetchedSpan(entry, span))
        else:
            return Fetched(task, tuple(stored))


def parse(augments: Augments, bad: BadSamples, window: FrameWindow | None, fetched: Fetched) -> Parsed:
    """Decode the sample's members but images, draw its augmentation, and move the selected channels by it."""
    while True:
        task = fetched.task
        known: dict[int, Sample] = {}
        for number, (frame, stored) in enumerate(zip(task.frames, fetched.stored, strict=True)):
            if frame.row in known:
                continue
            try:
                sample = task.source.reader.parse(stored)
                if augments.accumulation is not None:
                    row = task.source.base + frame.row
                    sample = augments.accumulation(sample, seed=augments.seed, epoch=task.slot.epoch, row=row)
            except Exception as error:  # noqa: BLE001 - any, of a shard that changes; what is not bad is raised again
                fetched = fetch(bad, bad.replace(task, number, error))
                break
            known[frame.row] = sample
        else:
            hides = window is not None and window.pad == "mask"
            parsed, failure = moved_frames(_drawn(task, known, augments, hides=hides), hides=hides)
            if failure is None:
                return parsed
            fetched = fetch(bad, bad.replace(task, *failure))


def _drawn(task: Task, known: Mapping[int, Sample], augments: Augments, *, hides: bool) -> Parsed:
    """Draw the augmentation of a sample, once for all of its frames; ``known`` holds these by row."""
    seed, epoch, number = augments.seed, task.slot.epoch, task.number
    by_size: dict[str, Sequence[ImageMap]] = {}
    shown: dict[int, tuple[Sample, Sequence[ImageMap]]] = {}
    for row, sample in known.items():
        sizes = sample.geometry.img_wh.tolist()
        text = str(sizes)
        if text not in by_size:
            by_size[text] = augments.image.draw(sizes, seed=seed, epoch=epoch, sample=number)
        shown[row] = sample, by_size[text]
        if augments.undistort is not None:
            shown[row] = augments.undistort(sample, by_size[text], task.source.reader.cameras)
    samples = [
        hidden(shown[frame.row][0]) if hides and not frame.present else shown[frame.row][0] for frame in task.frames
    ]
    maps = tuple(shown[frame.row][1] for frame in task.frames)
    cameras, height = range(len(maps[0])), augments.image.height
    changes = augments.pixels.draw(height, seed=seed, epoch=epoch, sample=number, cameras=cameras)
    return Parsed(task, tuple(samples), maps, changes, augments.bev.draw(seed=seed, epoch=epoch, sample=number))


def for_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a stage's work on single items to each item of a batch."""
    return [function(item) for item in items]


def decode(
    decoder: ImageDecoder,
    cameras: Sequence[str],
    fill: tuple[int, int, int],
    bad: BadSamples,
    parse_again: Callable[[Fetched], Parsed],
    parsed: Parsed,
) -> DecodedSample:
    """Decode the sample's images into its place in the batch."""
    while True:
        task = parsed.task
        images = task.slot.frames(task.at)
        assert not isinstance(images, torch.Tensor)
        for number in range(len(task.frames)):
            earlier = parsed.is_shown_before(number)
            if earlier is not None:
                images[number] = images[earlier]
                continue
            try:
                _decode(decoder, cameras, fill, parsed, number, images[number])
            except BAD_SAMPLE as error:
                parsed = parse_again(fetch(bad, bad.replace(task, number, error)))
                break
        else:
            return parsed.decoded(task.slot)


def _decode(
    decoder: ImageDecoder,
    cameras: Sequence[str],
    fill: tuple[int, int, int],
    parsed: Parsed,
    number: int,
    images: NDArray[np.uint8],
) -> None:
    sample = parsed.samples[number]
    for camera, (channel, image_map, change) in enumerate(
        zip(cameras, parsed.maps[number], parsed.changes, strict=True)
    ):
        encoded = sample.images.get(channel)
        if encoded is None:
            images[camera] = 0
            continue
        try:
            decoder.decode_into(encoded, image_map, images[camera])
        except ImageError as error:
            raise ImageError(error.message, key=sample.key, member=channel) from error
        change_pixels(images[camera], change, fill)
