"""`fuelrail.view`: a sample's cameras side by side, with its boxes drawn where the batch's matrices
put them.

Selected channels, of the dataset or of layers, are drawn on the image that they belong to: rasters
of law ``image`` as colours, boxes and points of law ``image_points``. All others are named below,
with their value where it is short.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from fuelrail.loaders.config import Transforms
from fuelrail.loaders.schedule.layers import LayerOptions
from fuelrail.loaders.schedule.selection import Selectable
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.loaders.viewer.drawing import png
from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import open_layer
from fuelrail.pipeline.order.batching import Cursor, World
from fuelrail.pipeline.order.windows import FrameWindow
from fuelrail.pipeline.settings import CheckedSettings, flag, make_options
from fuelrail.pipeline.text import shortened
from fuelrail.pipeline.transforms.image import CameraGroup, ImageAugment

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.sample.schema import Sample


def parse_layers(text: str) -> dict[str, str]:
    """Return the places of layers by name; raise ConfigError."""
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and place for name, _, place in pairs):
        raise ConfigError(
            "it must be NAME=PATH, several of them separated by commas, such as "
            "teacher=layers/teacher"
        )
    return {name: place for name, _, place in pairs}


class ViewOptions(CheckedSettings, frozen=True, kw_only=True):
    """Options of `fuelrail.view`, and the flags of ``fuelrail view``."""

    image: Annotated[
        ImageAugment | None,
        flag("image settings (default: whole images, as stored)"),
    ] = None
    train: Annotated[bool, flag("augment as a loader does, for this seed and epoch")] = False
    seed: Annotated[int, Meta(ge=0), flag("seed of the augmentation")] = 0
    epoch: Annotated[int, Meta(ge=0), flag("epoch of the augmentation")] = 0
    frames: Annotated[
        tuple[int, ...],
        flag("draw a temporal window: offsets from the sample, such as -2 -1 0"),
    ] = (0,)
    select: Annotated[
        tuple[str, ...] | None,
        flag("channels and attributes to draw (default: the label of a picture)"),
    ] = None
    layers: Annotated[
        dict[str, str] | None,
        flag("layers to draw, too", parse=parse_layers, metavar="NAME=PATH,..."),
    ] = None
    output: Annotated[
        str | None,
        flag("picture to write (default: contact_sheet.png)", metavar="PNG"),
    ] = None


class ViewReport(NamedTuple):
    """A sample drawn: its key, its numbers of cameras and boxes, and the picture, uint8 [H, W, 3],
    RGB.

    ``selected`` names the channels and attributes that the sample has, of all that were selected,
    ``missing`` those that it does not have.
    """

    key: str
    num_cameras: int
    num_boxes: int
    sheet: U8
    selected: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return a line on what was drawn."""
        selected = f", {', '.join(self.selected)}" if self.selected else ""
        selected += f"; this sample has no {', '.join(self.missing)}" if self.missing else ""
        cameras = "s" * (self.num_cameras != 1)
        boxes = "es" * (self.num_boxes != 1)
        return (
            f"{shortened(self.key)}: {self.num_cameras} camera{cameras}, {self.num_boxes} "
            f"box{boxes}{selected}"
        )

    def _repr_png_(self) -> bytes:
        return png(self.sheet)


def _stored(
    dataset: Dataset, sample: Sample
) -> tuple[ImageAugment | None, dict[str, CameraGroup] | None]:
    """Return the size of a sample's stored images, or groups of its cameras of one size each."""
    cameras_of: dict[tuple[int, int], list[str]] = {}
    absent: list[str] = []
    for camera, (width, height) in zip(
        dataset.manifest.cameras,
        sample.geometry.img_wh.tolist(),
        strict=True,
    ):
        if camera.channel in sample.images:
            cameras_of.setdefault((width, height), []).append(camera.channel)
        else:
            absent.append(camera.channel)
    if not cameras_of:
        return ImageAugment(height=1, width=1), None
    next(iter(cameras_of.values())).extend(absent)
    # Frames of a window may have images of other sizes: they are shown whole, too.
    sizes = {
        size: ImageAugment(height=size[1], width=size[0], resize="contain") for size in cameras_of
    }
    if len(sizes) == 1:
        return next(iter(sizes.values())), None
    return None, {
        f"{width}x{height}": CameraGroup(tuple(cameras), sizes[width, height])
        for (width, height), cameras in cameras_of.items()
    }


def load_sample(
    opened: Dataset,
    row: int,
    sample: Sample,
    options: ViewOptions,
) -> tuple[dict[str, Any], DataLoader]:
    """Return a batch of one row of a dataset, which is ``sample``, as a loader delivers it; and the
    loader, closed.

    Raises ConfigError for options that fit neither the dataset nor each other, and what a loader
    raises.
    """
    split, place = next(
        (name, row - entry.first_sample)
        for name, entry in opened.splits.items()
        if 0 <= row - entry.first_sample < entry.num_samples
    )
    layers = {
        name: LayerOptions(where, missing="mask") for name, where in (options.layers or {}).items()
    }
    joined = [open_layer(name, entry.path, opened, entry.missing) for name, entry in layers.items()]
    added: list[str] = []
    for layer in joined:
        added += [channel.name for channel in layer.channels]
    Selectable(opened, joined).split(options.select or ())
    image = options.image
    groups = None
    if image is None:
        if options.train:
            raise ConfigError(
                "train=True needs image settings, whose random draws it shows: give image, such as "
                "image='bevdet-704x256' (`fuelrail presets` lists those of models)"
            )
        image, groups = _stored(opened, sample)
    else:
        image = msgspec.structs.replace(image, train=options.train)
    transforms = Transforms(
        image=image,
        camera_groups=groups,
        points=bool(opened.manifest.lidars),
        select=None if options.select is None else (*options.select, *added),
    )
    window = None if options.frames == (0,) else FrameWindow(options.frames)
    with needs("a view of a sample"):  # torch, which the checks above do without
        from fuelrail.loaders.loader import DataLoader

    try:
        with DataLoader(
            opened,
            batch_size=1,
            seed=options.seed,
            num_workers=1,
            split=split,
            window=window,
            layers=layers,
            transforms=transforms,
            world=World(),
        ) as loader:
            (batch,) = loader.make_steps(Cursor(options.epoch), place)
    except MemoryError as error:
        raise _too_large(opened) from error
    return batch, loader


def _too_large(opened: Dataset) -> ConfigError:
    return ConfigError(
        f"no memory to draw {len(opened.manifest.cameras)} cameras: give image settings with a "
        "smaller height and width"
    )


def view(
    dataset: str | os.PathLike[str],
    key: str | None = None,
    options: ViewOptions | None = None,
    **changes: Any,  # fields of ViewOptions
) -> ViewReport:
    """Draw a sample's cameras and boxes as a loader delivers them; ``key`` None: the first sample
    of the dataset.

    ``fuelrail.view("DATASET", output="sample.png")`` takes the fields of :class:`ViewOptions` as
    keywords; without ``output`` nothing is written. Raises ConfigError, OrderError for ``frames``
    that make no window, and DatasetErrors for a sample or a layer that cannot be read.
    """
    options = make_options(ViewOptions, options, changes)
    output = None if options.output is None else Path(options.output)
    if output is not None and output.suffix.lower() != ".png":
        raise ConfigError(f"output {options.output!r} must end with .png")
    opened = open_dataset(dataset)
    reader = SampleReader(opened)
    row = 0 if key is None else reader.find(key)
    sample = reader.sample(row)
    batch, loader = load_sample(opened, row, sample, options)
    from fuelrail.loaders.viewer.batch import Picture, draw_sample, values_of

    try:
        sheet = draw_sample(batch, 0, loader)
    except MemoryError as error:
        raise _too_large(opened) from error
    names = tuple(channel.name for channel, _ in values_of(batch, 0, loader.selected))
    missing = tuple(channel.name for channel in loader.selected if channel.name not in names)
    try:
        if output is not None:
            Picture(sheet).save(output)
    except OSError as error:
        raise ConfigError(f"output '{output}' cannot be written: {error.strerror}") from error
    num_boxes = 0 if sample.boxes is None else len(sample.boxes.boxes3d)
    return ViewReport(
        key=sample.key,
        num_cameras=len(sample.images),
        num_boxes=num_boxes,
        sheet=sheet,
        selected=names,
        missing=missing,
    )
