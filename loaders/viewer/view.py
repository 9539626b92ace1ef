"""`fuelrail.view`: a sample's cameras side by side, with its boxes drawn where the batch's matrices put them.

Chosen channels, of the dataset or of layers, are drawn on the image that they belong to: rasters of law ``image`` as
colours, boxes and points of law ``image_points``. All others are named below, with their value where it is short.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fuelrail.loaders.config import Transforms
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.loaders.viewer.drawing import ON_IMAGES, png
from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.selection import select
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.attributes import ClipTable
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.layers import open_layer
from fuelrail.pipeline.order.windows import FrameWindow, WindowLookup
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options
from fuelrail.pipeline.text import shown
from fuelrail.pipeline.transforms.image import ImageAugment

if TYPE_CHECKING:
    from fuelrail.loaders.records import DecodedWindow
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import Sample


def _parse_layers(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and place for name, _, place in pairs):
        raise ConfigError("it must be NAME=PATH, several of them separated by commas, such as teacher=layers/teacher")
    return {name: place for name, _, place in pairs}


class ViewOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.view`, and the flags of ``fuelrail view``."""

    image: Annotated[
        ImageAugment | None, flag("image settings (default: crop 704x256 from the bottom of the image)")
    ] = None
    train: Annotated[bool, flag("augment as a loader does, for this seed and epoch")] = False
    seed: Annotated[int, Meta(ge=0), flag("seed of the augmentation")] = 0
    epoch: Annotated[int, Meta(ge=0), flag("epoch of the augmentation")] = 0
    frames: Annotated[tuple[int, ...], flag("draw a temporal window: offsets from the sample, such as -2 -1 0")] = (0,)
    channels: Annotated[tuple[str, ...], flag("channels of the dataset to draw, too")] = ()
    layers: Annotated[
        dict[str, str] | None, flag("layers to draw, too", parse=_parse_layers, metavar="NAME=PATH,...")
    ] = None
    output: Annotated[str | None, flag("picture to write (default: contact_sheet.png)", metavar="PNG")] = None


class ViewReport(NamedTuple):
    """A sample drawn: its key, its numbers of cameras and boxes, and the picture, uint8 [H, W, 3], RGB.

    ``channels`` names those that the sample has, of all that were asked for, ``missing`` those that it does not have.
    """

    key: str
    num_cameras: int
    num_boxes: int
    sheet: NDArray[np.uint8]
    channels: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return a line on what was drawn."""
        channels = f", {', '.join(self.channels)}" if self.channels else ""
        channels += f"; this sample has no {', '.join(self.missing)}" if self.missing else ""
        cameras, boxes = "s" * (self.num_cameras != 1), "es" * (self.num_boxes != 1)
        return f"{shown(self.key)}: {self.num_cameras} camera{cameras}, {self.num_boxes} box{boxes}{channels}"

    def _repr_png_(self) -> bytes:
        return png(self.sheet)


def view(
    dataset: str | os.PathLike[str],
    key: str | None = None,
    options: ViewOptions | None = None,
    **changes: Any,  # fields of ViewOptions
) -> ViewReport:
    """Draw a sample's cameras and boxes as a loader delivers them; ``key`` None: the first sample of the dataset.

    ``fuelrail.view("DATASET", output="sample.png")`` takes the fields of :class:`ViewOptions` as keywords; without
    ``output`` nothing is written. Raises ConfigError, OrderError for ``frames`` that make no window, and DatasetErrors
    for a sample or a layer that cannot be read.
    """
    options = make_options(ViewOptions, options, changes)
    output = None if options.output is None else Path(options.output)
    if output is not None and output.suffix.lower() != ".png":
        raise ConfigError(f"output {options.output!r} must end with .png")
    opened = open_dataset(dataset)
    reader = SampleReader(opened)
    row = 0 if key is None else reader.find(key)
    sample = reader.sample(row)
    image = msgspec.structs.replace(options.image or Transforms().image, train=options.train)
    cameras = [camera.channel for camera in opened.manifest.cameras]
    lidar = next(iter(opened.manifest.lidars), None)
    window = None if options.frames == (0,) else _window(opened, reader, row, FrameWindow(options.frames))
    try:
        maps = image.draw(sample.geometry.img_wh.tolist(), seed=options.seed, epoch=options.epoch, sample=row)
        values, missing = _values(opened, row, options, Motion(dict(zip(cameras, maps, strict=True))))
        from fuelrail.loaders.viewer.batch import Picture, draw_sample  # needs torch, and the checks above do not

        batch = decode_single(
            sample, cameras, image, seed=options.seed, epoch=options.epoch, row=row, lidar=lidar, window=window
        )
        sheet = draw_sample(batch, 0, cameras, opened.manifest.classes, Transforms(image=image), values)
        if output is not None:
            Picture(sheet).save(output)
    except MemoryError as error:
        num_bytes = len(cameras) * 3 * image.height * image.width
        raise ConfigError(
            f"no memory to draw {len(cameras)} cameras of {image.width}x{image.height} pixels, {num_bytes} bytes and "
            "the same for the sheet: give image settings with a smaller height and width"
        ) from error
    except OSError as error:
        raise ConfigError(f"output '{output}' cannot be written: {error.strerror}") from error
    num_boxes = 0 if sample.boxes is None else len(sample.boxes.boxes3d)
    names = tuple(channel.name for channel, _ in values)
    return ViewReport(sample.key, len(sample.images), num_boxes, sheet, names, missing)


def _values(
    dataset: Dataset, row: int, options: ViewOptions, motion: Motion
) -> tuple[list[tuple[Channel, Any]], tuple[str, ...]]:
    """Return the channels that the sample has, of those asked for, with values that lie on the images as drawn.

    Also the names of those that it does not have.
    """
    found: list[tuple[Channel, Any]] = []
    missing: list[str] = []
    if options.channels:
        chosen = select(dataset.manifest.channels, options.channels, dataset.location)
        values = dataset.read(row, options.channels)
        found += [(one, values[one.name]) for one in chosen if one.name in values and one.sensor is None]
        missing += [one.name for one in chosen if one.name not in values]
    for name, place in (options.layers or {}).items():
        layer = open_layer(name, place, dataset, "mask")
        at = layer.find(row, dataset.index.row(row).key)
        values = {} if at is None else layer.data.read(at[0])
        stored = list(zip(layer.channels, layer.manifest.channels, strict=True))
        found += [(one, values[own.name]) for one, own in stored if own.name in values]
        missing += [one.name for one, own in stored if own.name not in values]
    moved = [
        (one, LAWS[one.law.name].move(value, one, motion) if one.law.name in ON_IMAGES else value)
        for one, value in found
    ]
    return moved, tuple(missing)


def _window(dataset: Dataset, reader: SampleReader, row: int, window: FrameWindow) -> DecodedWindow:
    """Return the frames of a sample's window, without maps."""
    from fuelrail.loaders.records import DecodedWindow

    name, split = next(
        (name, one) for name, one in dataset.splits.items() if 0 <= row - one.first_sample < one.num_samples
    )
    first = split.first_sample
    found = WindowLookup(ClipTable.of_split(dataset, name), window)(np.array([row - first]))
    rows = tuple((found.samples[0] + first).tolist())
    return DecodedWindow(rows, tuple(found.present[0].tolist()), tuple(reader.sample(one) for one in rows), ())


def decode_single(
    sample: Sample,
    cameras: Sequence[str],
    image: ImageAugment,
    *,
    seed: int,
    epoch: int,
    row: int,
    lidar: LidarEntry | None = None,
    window: DecodedWindow | None = None,
) -> dict[str, Any]:
    """Decode and assemble one sample as a batch of one, through the loader's own decoder and matrices.

    ``row`` is the sample's in the index: with the seed and the epoch it decides the augmentation, as in the loader.
    ``lidar`` is the one whose points are in the batch, ``window`` holds the frames, whose maps are drawn here.
    """
    from fuelrail.loaders.batch.assemble import assemble
    from fuelrail.loaders.records import BatchSlot, DecodedSample

    samples = (sample,) if window is None else window.samples
    maps = [image.draw(one.geometry.img_wh.tolist(), seed=seed, epoch=epoch, sample=row) for one in samples]
    images = np.zeros((1, len(samples), len(cameras), 3, image.height, image.width), np.uint8)
    decoder = make_decoder("auto")
    for at, (frame, of_frame) in enumerate(zip(samples, maps, strict=True)):
        for number, (channel, image_map) in enumerate(zip(cameras, of_frame, strict=True)):
            if channel in frame.images:
                decoder.decode_into(frame.images[channel], image_map, images[0, at, number])
    if window is None:
        slot, own = BatchSlot(epoch, 0, images[:, 0]), maps[0]
    else:
        slot, own = BatchSlot(epoch, 0, images, has_windows=True), maps[window.rows.index(row)]
        window = window._replace(maps=tuple(maps))
    return assemble([DecodedSample(slot, 0, row, True, sample, own, window=window)], lidar=lidar)
