"""Fetch, parse and decode one sample: the functions of the stages, each from one record to the
next.

Nothing here refers to the loader itself, so that dropping the loader stops its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from fuelrail.loaders.batch.channels import moved_frames
from fuelrail.loaders.batch.temporal import hidden
from fuelrail.loaders.batch.timed import TimedChannels
from fuelrail.loaders.decode import decode_images, decode_views
from fuelrail.loaders.decode.pixels import change_pixels
from fuelrail.loaders.records import CameraImages, Fetched, Parsed, Task
from fuelrail.loaders.schedule.bad_samples import BAD_SAMPLE, BadSamples
from fuelrail.loaders.storage.reader import FetchedSpan
from fuelrail.pipeline.errors import ConfigError, ImageError
from fuelrail.pipeline.transforms.randomness import second_view

if TYPE_CHECKING:
    from fuelrail.loaders.batch.points import Accumulation
    from fuelrail.loaders.batch.timed import TimedValues
    from fuelrail.loaders.config import Transforms
    from fuelrail.loaders.decode.lens import Undistort
    from fuelrail.loaders.decode.protocol import ImageDecoder
    from fuelrail.loaders.storage.protocol import LayeredSpan
    from fuelrail.pipeline.channels.kinds import Value
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.order.windows import Window
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.ego import BevAugment
    from fuelrail.pipeline.transforms.image_map import ImageMap
    from fuelrail.pipeline.transforms.pixels import PixelAugment, PixelChange

T = TypeVar("T")

NOT_TIMED: Final = TimedChannels()


class Augments(NamedTuple):
    """All augmentations of a sample."""

    images: tuple[CameraImages, ...]
    pixels: PixelAugment
    bev: BevAugment
    seed: int
    accumulation: Accumulation | None = None
    undistort: Undistort | None = None
    second_at: int = 0
    """Rows of the batch between a sample's first view and its second; 0: there is no second."""

    def maps(
        self,
        sizes: Sequence[Sequence[int]],
        epoch: int,
        number: int,
        camera_rows: Sequence[int],
    ) -> list[ImageMap]:
        """Draw the maps of a sample's images, stored at ``sizes``, in rig order; ``camera_rows``
        are in the rig.
        """
        seed = self.seed
        first = self.images[0]
        if first.name is None:
            return first.augment.draw(
                sizes,
                seed=seed,
                epoch=epoch,
                sample=number,
                cameras=camera_rows,
            )
        return self._in_rig_order(
            group.augment.draw(
                [sizes[camera] for camera in group.cameras],
                seed=seed,
                epoch=epoch,
                sample=number,
                cameras=[camera_rows[camera] for camera in group.cameras],
            )
            for group in self.images
        )

    def changes(
        self,
        epoch: int,
        number: int,
        camera_rows: Sequence[int],
    ) -> list[PixelChange]:
        """Draw the changes of pixel values of a sample's images, in rig order."""
        drawn = [
            self.pixels.draw(
                group.augment.height,
                seed=self.seed,
                epoch=epoch,
                sample=number,
                cameras=[camera_rows[camera] for camera in group.cameras],
            )
            for group in self.images
        ]
        if self.images[0].name is None:
            return drawn[0]
        return self._in_rig_order(drawn)

    def _in_rig_order(self, by_group: Iterable[Sequence[T]]) -> list[T]:
        pairs = [
            pair
            for group, values in zip(self.images, by_group, strict=True)
            for pair in zip(group.cameras, values, strict=True)
        ]
        return [value for _, value in sorted(pairs, key=lambda pair: pair[0])]


def image_groups(transforms: Transforms, cameras: Sequence[str]) -> tuple[CameraImages, ...]:
    """Return the sizes of the loaded cameras' images; raises ConfigError unless each is in one
    group.
    """
    if transforms.camera_groups is None:
        assert transforms.image is not None, "the loader has named the size"
        return (CameraImages(None, tuple(range(len(cameras))), transforms.image),)
    named = [camera for group in transforms.camera_groups.values() for camera in group.cameras]
    for wrong, fault in (
        (
            [channel for channel in named if channel not in cameras],
            "names cameras that are not loaded",
        ),
        (
            [channel for channel in cameras if channel not in named],
            "leaves out cameras that are loaded",
        ),
        (
            [channel for channel in dict.fromkeys(named) if named.count(channel) > 1],
            "names cameras in several groups",
        ),
    ):
        if wrong:
            raise ConfigError(
                f"camera_groups {fault}: {', '.join(wrong)}; each camera must be in one "
                f"group, and loaded are {', '.join(cameras)}"
            )
    return tuple(
        CameraImages(name, tuple(map(cameras.index, group.cameras)), group.image)
        for name, group in transforms.camera_groups.items()
    )


def fetch(bad: BadSamples, task: Task) -> Fetched:
    """Return the sample's bytes from storage, checked; of a bad sample, those of its substitute."""
    while True:
        stored = []
        spans: dict[int, LayeredSpan] = {}
        for number, (_, _, entry, pending_read) in enumerate(task.frames):
            read = id(pending_read)  # of rows that are shown more than once
            try:
                spans[read] = span = spans[read] if read in spans else pending_read()
            except BAD_SAMPLE as error:
                task = bad.replace(task, number, error)
                break
            assert entry is not None
            stored.append(FetchedSpan(entry, span))
        else:
            return Fetched(task, tuple(stored))


def parse(
    augments: Augments,
    bad: BadSamples,
    window: Window | None,
    fetched: Fetched,
    timed: TimedChannels = NOT_TIMED,
) -> Parsed:
    """Decode the sample's members but images, draw its augmentation, and move the selected channels
    by it.

    What was read for channels at times of their own (``timed``) is not a frame of what is returned.
    """
    while True:
        task = fetched.task
        samples_by_row: dict[int, Sample] = {}
        values_by_row: dict[int, tuple[int, Mapping[str, Value | None]]] = {}
        for number, (frame, stored) in enumerate(zip(task.frames, fetched.stored, strict=True)):
            is_frame = not timed.by_name or number < timed.num_frames
            if frame.row in (samples_by_row if is_frame else values_by_row):
                continue
            try:
                if not is_frame:
                    row_values = task.source.reader.values(stored) | task.source.attributes.values(
                        frame.row
                    )
                    values_by_row[frame.row] = (
                        stored.row.timestamp_ns,
                        row_values,
                    )
                    continue
                sample = task.source.reader.parse(stored)
                if augments.accumulation is not None:
                    row = task.source.base + frame.row
                    sample = augments.accumulation(
                        sample,
                        seed=augments.seed,
                        epoch=task.slot.epoch,
                        row=row,
                    )
            except Exception as error:  # noqa: BLE001 - any, of a shard that changes
                fetched = fetch(bad, bad.replace(task, number, error))
                break
            samples_by_row[frame.row] = sample
        else:
            hides = window is not None and window.pad == "mask"
            values: TimedValues = {}
            if timed.by_name:
                values = timed.read(
                    fetched.stored[task.current].row.timestamp_ns,
                    values_by_row.values(),
                )
                task = task._replace(frames=task.frames[: timed.num_frames])
            parsed, failure = moved_frames(
                _draw_sample(task, samples_by_row, augments, task.number, hides=hides),
                hides=hides,
            )
            parsed = parsed._replace(timed=timed.moved(values, parsed.bev))
            if augments.second_at and failure is None:
                second_task = task._replace(batch_row=task.batch_row + augments.second_at)
                drawn = _draw_sample(
                    second_task,
                    samples_by_row,
                    augments,
                    second_view(task.number),
                    hides=hides,
                )
                second, failure = moved_frames(drawn, hides=hides)
                second = second._replace(view=1, timed=timed.moved(values, second.bev))
                parsed = parsed._replace(view=0, second=second)
            if failure is None:
                return parsed
            fetched = fetch(bad, bad.replace(task, *failure))


def _draw_sample(
    task: Task,
    samples_by_row: Mapping[int, Sample],
    augments: Augments,
    number: int,
    *,
    hides: bool,
) -> Parsed:
    """Draw the augmentation of sample ``number``, once for all of its frames."""
    seed = augments.seed
    epoch = task.slot.epoch
    reader = task.source.reader
    by_size: dict[str, Sequence[ImageMap]] = {}
    drawn_by_row: dict[int, tuple[Sample, Sequence[ImageMap]]] = {}
    for row, sample in samples_by_row.items():
        sizes = sample.geometry.img_wh.tolist()
        text = str(sizes)
        if text not in by_size:
            by_size[text] = augments.maps(sizes, epoch, number, reader.camera_rows)
        drawn_by_row[row] = sample, by_size[text]
        if augments.undistort is not None:
            drawn_by_row[row] = augments.undistort(sample, by_size[text], reader.cameras)
    samples = [
        hidden(drawn_by_row[frame.row][0])
        if hides and not frame.present
        else drawn_by_row[frame.row][0]
        for frame in task.frames
    ]
    maps = tuple(drawn_by_row[frame.row][1] for frame in task.frames)
    bev = augments.bev.draw(seed=seed, epoch=epoch, sample=number)
    return Parsed(
        task=task,
        samples=tuple(samples),
        maps=maps,
        changes=augments.changes(epoch, number, reader.camera_rows),
        bev=bev,
    )


def keep(item: Any) -> Any:
    """Return the item: the work of a stage that has nothing to do."""
    return item


def for_each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Apply a stage's work on single items to each item of a batch."""
    return [function(item) for item in items]


def decode(
    parsed: Parsed,
    *,
    decoder: ImageDecoder,
    cameras: Sequence[str],
    fill: tuple[int, int, int],
    bad: BadSamples,
    parse_again: Callable[[Fetched], Parsed],
) -> Parsed:
    """Decode the sample's images into its place in the batch."""
    while True:
        task = parsed.task
        views = parsed.views
        images = [task.slot.frames(view.task.batch_row) for view in views]
        for number in range(len(task.frames)):
            earlier = parsed.is_shown_before(number)
            if earlier is not None:
                for view_images in images:
                    for image, source in zip(
                        view_images[number],
                        view_images[earlier],
                        strict=True,
                    ):
                        image[:] = source
                continue
            try:
                _decode_frame(
                    decoder,
                    cameras=cameras,
                    fill=fill,
                    views=views,
                    number=number,
                    images=[view_images[number] for view_images in images],
                )
            except BAD_SAMPLE as error:
                parsed = parse_again(fetch(bad, bad.replace(task, number, error)))
                break
        else:
            return parsed


def _decode_frame(
    decoder: ImageDecoder,
    cameras: Sequence[str],
    fill: tuple[int, int, int],
    views: Sequence[Parsed],
    number: int,
    images: Sequence[Sequence[U8]],
) -> None:
    """Decode the images of one frame, for each view into uint8 (3, H, W) of each camera."""
    sample = views[0].samples[number]
    files = {
        camera: sample.images[channel]
        for camera, channel in enumerate(cameras)
        if channel in sample.images
    }
    for camera in range(len(cameras)):
        if camera not in files:
            for view_images in images:
                view_images[camera][:] = 0
    if len(views) == 1:
        maps = [views[0].maps[number][camera] for camera in files]
        outs = [images[0][camera] for camera in files]
        for camera, error in zip(
            files,
            decode_images(decoder, [*files.values()], maps, outs),
            strict=True,
        ):
            if error is not None:
                raise ImageError(error.message, key=sample.key, member=cameras[camera]) from error
    else:
        for camera, encoded in files.items():
            outs = [view_images[camera] for view_images in images]
            try:
                decode_views(
                    decoder,
                    encoded,
                    [view.maps[number][camera] for view in views],
                    outs,
                )
            except ImageError as error:
                raise ImageError(error.message, key=sample.key, member=cameras[camera]) from error
    for view, view_images in zip(views, images, strict=True):
        for camera in files:
            change_pixels(view_images[camera], view.changes[camera], fill)
