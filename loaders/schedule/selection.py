"""What of the datasets is loaded where a loader is not told: the size of images, and the label; and
what there is.

Nothing here imports torch: commands refuse wrong names before they do.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.sensors import LIDAR, lies_on
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.layers import INDEXED
from fuelrail.pipeline.sample.schema import BOXES
from fuelrail.pipeline.settings import did_you_mean
from fuelrail.pipeline.transforms.image import ImageAugment

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer

_NO_IMAGE: Final = (1, 1)
"""The size of black images in batches of a dataset that stores none."""

_NUM_NAMED: Final = 8
"""Cameras, and sizes of a camera, that an error names."""

LABELS: Final = ("cls", "label", "labels", "target")
"""Names of the channel or the attribute that is the label of a dataset of images."""


class Selectable:
    """What of a dataset and its layers can be selected by name."""

    def __init__(self, dataset: Dataset, layers: Sequence[Layer] = ()) -> None:
        self._dataset = dataset
        self._layers = layers
        manifest = dataset.manifest
        lidars = [channel for channel in manifest.channels if channel.sensor == LIDAR]
        joined = [channel for layer in layers for channel in layer.channels]
        self.channels = {
            channel.name: channel for channel in (*manifest.extra_channels, *lidars, *joined)
        }
        """The entries of channels by name, as a loader sees them."""

    @cached_property
    def attributes(self) -> dict[str, str]:
        """The types of attributes by name; raises IndexFileError for damaged ones."""
        types = _attribute_types(self._dataset)
        for layer in self._layers:
            for name, kind in _attribute_types(layer.data).items():
                types[f"{layer.name}.{name}"] = kind
        return types

    def default(self, cameras: Collection[str]) -> tuple[str, ...]:
        """Return what a batch has where nothing is selected: the label of images, and the
        layers' channels.
        """
        labels: list[str] = []
        if BOXES not in self._dataset.index.names:
            for name in LABELS:
                channel = self.channels.get(name)
                if name in self.attributes if channel is None else KINDS.find(channel.kind):
                    labels.append(name)
        joined = [channel for layer in self._layers for channel in layer.channels]
        return (
            *labels,
            *(channel.name for channel in joined if lies_on(channel, cameras)),
        )

    def split(self, names: Sequence[str]) -> tuple[list[str], list[str]]:
        """Return which of the selected names are channels, and which attributes.

        Raises ConfigError, naming both, for a name that is neither.
        """
        channels: list[str] = []
        attributes: list[str] = []
        channel_names = {
            channel.name for channel in self._dataset.manifest.channels
        } | self.channels.keys()
        for name in dict.fromkeys(names):
            if name in channel_names:
                channels.append(name)
            elif name in self.attributes or name in INDEXED:
                attributes.append(name)
            else:
                hint = did_you_mean(name, (*self.channels, *self.attributes)) or ";"
                raise ConfigError(
                    f"select={list(names)}: '{self._dataset.location}' has no channel or attribute "
                    f"{name!r:.110}{hint} channels: {', '.join(self.channels) or 'none'}; "
                    f"attributes: {', '.join(self.attributes) or 'none'}"
                )
        return channels, attributes


def _attribute_types(dataset: Dataset) -> dict[str, str]:
    """Return the type of each attribute but those that are in the index, too."""
    file = dataset.attributes_file()
    if not file.exists:
        return {}
    fields = file.schema(len(dataset.index))
    return {field.name: str(field.type) for field in fields if field.name not in INDEXED}


def stored_image(
    datasets: Mapping[str, Dataset],
    cameras: Sequence[str] | Mapping[str, Sequence[str]] | None = None,
) -> ImageAugment:
    """Return the settings that leave the images as they are stored; ``cameras`` are as in
    `Transforms.cameras`.

    Raises ConfigError where the images of the cameras that are loaded differ in size.
    """
    sizes_of: dict[str, set[tuple[int, int]]] = {}
    for name, dataset in datasets.items():
        names = cameras.get(name) if isinstance(cameras, Mapping) else cameras
        for camera in dataset.manifest.cameras:
            if names is None or camera.channel in names:
                title = camera.channel if len(datasets) == 1 else f"{camera.channel} of {name!r}"
                sizes_of[title] = set(camera.sizes)
    sizes = sorted(set().union(*sizes_of.values()))
    if len(sizes) > 1:
        listed = []
        for title, camera_sizes in list(sizes_of.items())[:_NUM_NAMED]:
            in_order = [f"{width}x{height}" for width, height in sorted(camera_sizes)]
            if len(in_order) > _NUM_NAMED:
                in_order = [f"{len(in_order):,} sizes from {in_order[0]} to {in_order[-1]}"]
            listed.append(f"{title} {' and '.join(in_order) or 'no image'}")
        if len(sizes_of) > _NUM_NAMED:
            listed.append(f"{len(sizes_of) - _NUM_NAMED} more cameras")
        where = " and ".join(f"'{dataset.location}'" for dataset in datasets.values())
        width, height = min(sizes, key=math.prod)
        fix = f'image={{"height": {height}, "width": {width}}} (an ImageAugment)'
        if len(sizes_of) > 1:
            fix += ", camera_groups= for a size of each group, cameras= for those of one size"
        raise ConfigError(
            f"image= is needed, for a batch has images of one size, and those of {where} differ: "
            f"{', '.join(listed)}; give Transforms {fix}, or a preset such as "
            "image='bevdet-704x256' (`fuelrail presets` lists them)"
        )
    width, height = sizes[0] if sizes else _NO_IMAGE
    return ImageAugment(height=height, width=width)
