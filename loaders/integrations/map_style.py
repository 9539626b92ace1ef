"""A dataset by number, images decoded: for torch's own DataLoader with a sampler, for Grain, for
code that indexes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from fuelrail.loaders.decode.arrays import decode_jpeg
from fuelrail.loaders.schedule.selection import Selectable
from fuelrail.pipeline.sample.image_header import probe

if TYPE_CHECKING:
    from fuelrail.pipeline.format.dataset import Dataset


class MapView(TorchDataset[Any]):
    """Samples by number or key, as torch's map-style ``Dataset`` and as Grain's random-access data
    source.

    ::

        view = MapView(fuelrail.open("DATASET"), ["cam_front", "boxes", "night"], transform=crop)
        torch.utils.data.DataLoader(view, batch_size=8, num_workers=4, sampler=sampler)
        grain.MapDataset.source(view).shuffle(seed=7).batch(8)

    An item is a dict: ``key``, and what ``select`` names: attributes (None where one is not known),
    and of channels, boxes, geometry and metadata what ``Dataset.read`` gives, with images decoded
    to uint8 arrays (3, height, width), RGB, of the stored size. ``select`` None: all of
    ``Dataset.read``, and the label of a dataset of images without boxes. Arrays by channel can be
    written to. ``transform`` gets the dict, and what it returns is the item. One range of one shard
    is read for each item: this is for random access. `fuelrail.DataLoader` reads ahead, and is
    faster.

    It can be pickled, and each process opens the dataset itself. Raises ConfigError for a name that
    the dataset does not have. Items raise what ``Dataset.read`` raises, and ImageError for an image
    that cannot be decoded.
    """

    def __init__(
        self,
        dataset: Dataset,
        select: Collection[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
    ) -> None:
        selectable = Selectable(dataset)
        names = (select,) if isinstance(select, str) else tuple(select or ())
        if select is None:
            names = selectable.default([])
        index_names = {name.partition(".")[0] for name in dataset.index.names}
        members = [name for name in names if name in index_names]
        choices = [name for name in names if name not in index_names]
        channels, attributes = selectable.split(choices)
        self._channels = None if select is None else (*members, *channels)
        self._attributes: dict[str, Any] = {}
        if attributes:
            table = dataset.table
            self._attributes = {name: table[name] for name in attributes}
        self._dataset = dataset
        self._transform = transform
        self._cameras = {camera.channel for camera in dataset.manifest.cameras}

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number_or_key: SupportsIndex | str) -> Any:
        number = self._dataset.position(number_or_key)
        item: dict[str, Any] = {"key": self._dataset.index.row(number).key}
        for name, column in self._attributes.items():
            item[name] = column[number].as_py()
        item |= self._dataset.read(number, self._channels)
        for channel, value in item.items():
            if channel in self._cameras:
                info = probe(value)
                shape = (3, info.height, info.width)
                image = np.empty(shape, np.uint8)
                item[channel] = decode_jpeg(value, out=image)
            elif isinstance(value, np.ndarray) and not value.flags.writeable:
                item[channel] = value.copy()
        if self._transform is None:
            return item
        return self._transform(item)

    def __repr__(self) -> str:
        """Name the data and the channels: Grain stores this text to see that a restored run
        reads the same.
        """
        channels = None if self._channels is None else sorted(self._channels)
        attributes = f", attributes={sorted(self._attributes)}" if self._attributes else ""
        return f"MapView({self._dataset.manifest.fingerprint}, channels={channels}{attributes})"
