"""One sample as a page shows it: what is drawn on its cameras and from above, its values, and where
its bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import simplejpeg

from fuelrail.loaders.decode.arrays import decode_jpeg
from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.loaders.view import ViewOptions, load_sample
from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import ConfigError, FuelrailError, needs
from fuelrail.pipeline.rigid import move_points
from fuelrail.pipeline.sample.image_header import probe

with needs("`fuelrail browse`", "fuelrail[opencv]"):
    from fuelrail.loaders.viewer import drawing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.bench.studies.browse.query import Query
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.image import ImageAugment

    Values = dict[str, tuple[Channel, Any]]

_MAX_POINTS: Final = 60_000
"""Points of a lidar that are sent; of more, every second one, third one, and so on."""
_MAX_SIDE: Final = 1 << 15
_QUALITY: Final = 85


class DatasetSamples:
    """Samples of a dataset with its layers. Thread-safe; the last ones are kept, so that each is
    read from storage once.
    """

    def __init__(
        self,
        dataset: Dataset,
        layers: Sequence[Layer],
        images: Mapping[str, ImageAugment],
    ) -> None:
        """``images`` are settings by name, for samples as a loader augments them."""
        self.dataset = dataset
        self.layers = tuple(layers)
        self.images = dict(images)
        manifest = dataset.manifest
        self.cameras = [camera.channel for camera in manifest.cameras]
        self.lidars = [lidar.channel for lidar in manifest.lidars]
        self.places = [self.cameras.index(name) for name in drawing.placed(self.cameras)]
        """The numbers of the cameras in the order in which they are placed."""
        self.colours: dict[int, str] = {}
        """The colour of each class by its number; -1 is that of other labels."""
        for number in range(-1, len(manifest.classes)):
            colour = bytes(drawing.colour_of(number))
            self.colours[number] = "#" + colour.hex()
        self.channels: list[Channel] = []
        for channel in manifest.extra_channels:
            if KINDS.find(channel.kind) is not None:
                self.channels.append(channel)
        storage = open_storage(dataset)
        self._reader = SampleReader(dataset, storage=LayeredStorage(storage))
        self._num_come: dict[tuple[int, int], int] = {}
        """Bytes that have come of samples that are fetched, by shard and offset."""
        if dataset.url is not None:
            from fuelrail.loaders.storage.remote import RemoteShards

            assert isinstance(storage, RemoteShards)

            def count_bytes(shard: int, start: int, num_bytes: int) -> None:
                self._num_come[shard, start] = num_bytes

            storage.on_bytes = count_bytes
        self.sample = lru_cache(16)(self._read_sample)
        self.thumbnail = lru_cache(2048)(self._make_thumbnail)
        self._values = lru_cache(16)(self._read_values)

    def close(self) -> None:
        """Let go of files and connections."""
        self._reader.storage.close()

    def describe(self, row: int) -> dict[str, Any]:
        """Return all of a sample but its pixels and points; of one that cannot be read, the place
        of its bytes and the ``error``.
        """
        entry = self.dataset.index.row(row)
        place = _describe_place(self.dataset, entry)
        try:
            sample = self.sample(row)
            layers = {}
            for layer in self.layers:
                placed = layer.find(row, sample.key)
                if placed is not None:
                    _, layer_entry = placed
                    layers[layer.name] = _describe_place(layer.data, layer_entry)
        except FuelrailError as error:
            return {"place": place, "error": str(error)}
        boxes = sample.boxes
        boxes3d = np.zeros((0, 7)) if boxes is None else boxes.boxes3d
        corners = drawing.corners_by_yaw(boxes3d)
        ego2img = sample.geometry.ego2img()
        cameras = []
        for number, name in enumerate(self.cameras):
            timestamp_ns = int(sample.geometry.cam_timestamp_ns[number])
            late_ns = timestamp_ns - sample.meta.timestamp_ns
            meta = sample.meta.cameras.get(name)
            size = sample.geometry.img_wh[number]
            camera = {
                "name": name,
                "is_there": name in sample.images,
                "size": size,
                "late_ms": late_ns / 1e6,
                "lens": "none" if meta is None else meta.dist_model,
                "boxes": drawing.seen_boxes(corners, ego2img[number], size),
            }
            cameras.append(camera)
        outlines = None
        if boxes is not None:
            classes = self.dataset.manifest.classes
            outlines = []
            for number, label in enumerate(boxes.label.tolist()):
                velocity = boxes.velocity[number, :2]
                track = int(boxes.instance_id[number]) % 2**64
                outline = {
                    "label": label,
                    "name": classes[label] if label >= 0 else "other",
                    "box": boxes3d[number].astype(float).round(2),
                    "speed": float(np.linalg.norm(velocity)),
                    "points": int(boxes.num_lidar_pts[number]),
                    "track": f"{track:x}",
                    "outline": corners[number, drawing.OUTLINE, :2].round(3),
                }
                outlines.append(outline)
        # The values of all further channels in words, and where they are drawn.
        values, faults = self._values(row)
        channels: list[dict[str, Any]] = []
        for name, (channel, value) in values.items():
            text = drawing.value_in_words(channel, value)
            fields: dict[str, Any] = {"name": name, "text": text}
            law = channel.law
            if law.name == "ego_grid":
                fields["ground"] = law.extent_m
            elif law.name in drawing.ON_IMAGES and law.camera in self.cameras:
                number = self.cameras.index(law.camera)
                size = sample.geometry.img_wh[number]
                fields["camera"] = number
                fields |= drawing.shapes_on_image(channel, value, size)
            channels.append(fields)
        for name, text in faults.items():
            channels.append({"name": name, "text": text})
        facts: dict[str, Any] = msgspec.to_builtins(sample.meta)
        del facts["cameras"]
        for name, value in facts.items():
            if not isinstance(value, str):
                facts[name] = msgspec.json.encode(value).decode()
        return {
            "place": place,
            "layers": layers,
            "cameras": cameras,
            "boxes": outlines,
            "num_points": [len(sample.points.get(name, ())) for name in self.lidars],
            "channels": channels,
            "meta": facts,
        }

    def progress(self, row: int) -> dict[str, int]:
        """Return how many bytes of a sample have come, and of how many; 0 of 0 before its place is
        known.
        """
        if not self.dataset.index.has_row(row):
            return {"come": 0, "all": 0}
        entry = self.dataset.index.row(row)
        num_come = self._num_come.get((entry.shard, entry.offset), 0)
        return {"come": num_come, "all": entry.length}

    def image(self, row: int, camera: int) -> tuple[str, bytes]:
        """Return the media type and the bytes of an image as stored.

        Raises ConfigError where there is none, ImageError where it is none.
        """
        sample = self.sample(row)
        encoded = sample.images.get(self._camera(camera))
        if encoded is None:
            raise ConfigError("the sample has no image of this camera")
        info = probe(encoded)
        return f"image/{info.format}", bytes(encoded)

    def points(self, row: int, lidar: int) -> tuple[str, bytes]:
        """Return points of a lidar in ego, (x, y, z) of each, float32, little-endian."""
        sample = self.sample(row)
        name = self.lidars[lidar] if lidar < len(self.lidars) else ""
        if name not in sample.points:
            raise ConfigError("the sample has no points of this lidar")
        points = sample.points[name][:, :3]
        lidar2ego = sample.geometry.lidar2keyego(lidar)
        step = len(points) // _MAX_POINTS + 1
        points = points[::step].astype(np.float64)
        with np.errstate(all="ignore"):
            points = move_points(points, lidar2ego).astype("<f4")
        is_finite = np.isfinite(points).all(1)
        return "application/octet-stream", points[is_finite].tobytes()

    def raster(self, row: int, name: str) -> tuple[str, bytes]:
        """Return a channel on an image, or on the ground from above, in colours: a PNG that is
        clear where it has no value.
        """
        values, _ = self._values(row)
        channel, value = values.get(name, (None, None))
        if channel is None or channel.law.name not in ("image", "ego_grid"):
            raise ConfigError(f"the sample has no raster {name!r}")
        raster = np.asarray(value)
        if not raster.size or max(raster.shape) > _MAX_SIDE:
            raise ConfigError(f"a raster of {list(raster.shape)} elements cannot be drawn")
        if channel.law.name == "ego_grid":
            raster = drawing.grid_from_above(channel, raster)
        mask, colours = drawing.colour_raster(raster, channel.law.fill or 0.0)
        alpha = mask * np.uint8(255)
        pixels = np.dstack([alpha, colours])
        return "image/png", drawing.png(pixels)

    def as_loaded(self, query: Query) -> list[dict[str, Any]]:
        """Return the cameras of a sample as a loader augments them, with boxes.

        Raises ConfigError for unknown settings of images, and without torch.
        """
        settings = self.images.get(query.name)
        if settings is None:
            names = ", ".join(self.images)
            raise ConfigError(f"no image settings {query.name!r}; there are: {names}")
        options = ViewOptions(image=settings, train=True, seed=query.seed, epoch=query.epoch)
        sample = self.sample(query.row)
        batch, loader = load_sample(self.dataset, query.row, sample, options)
        from fuelrail.loaders.viewer.batch import frames_of

        frame = frames_of(batch, 0, loader)[0]
        assert frame.ida_mat is not None
        cameras = []
        for number, channel in enumerate(loader.cameras):
            image = frame.images[number].transpose(1, 2, 0)
            pixels = np.ascontiguousarray(image)
            size = np.array(pixels.shape[1::-1])
            boxes = []
            if frame.boxes is not None:
                ego2img = frame.ego2img[number].astype(np.float64)
                boxes = drawing.seen_boxes(frame.boxes.corners, ego2img, size)
                labels = frame.boxes.label.tolist()
                for box in boxes:
                    box["label"] = labels[box["box"]]
            camera = {
                "name": channel,
                "size": size,
                "boxes": boxes,
                "turned": drawing.turn_text(frame.ida_mat[number]),
                "image": _jpeg(pixels),  # base64 in JSON
            }
            cameras.append(camera)
        return cameras

    def _read_sample(self, row: int) -> Sample:
        self._num_come.clear()
        return self._reader.sample(row)

    def _make_thumbnail(self, row: int, camera: int, width: int) -> tuple[str, bytes]:
        channel = self._camera(camera)
        encoded = self.dataset.read(row, [channel]).get(channel)  # not the whole sample
        if encoded is None:
            raise ConfigError("the sample has no image of this camera")
        info = probe(encoded)
        width = min(width, info.width)
        height = max(round(info.height * width / info.width), 1)
        pixels = decode_jpeg(encoded, size=(width, height))
        return "image/jpeg", _jpeg(pixels)

    def _read_values(self, row: int) -> tuple[Values, dict[str, str]]:
        """Return channel and value of all further channels that a sample has, with those of layers;
        and what is wrong with the others.
        """
        sample = self.sample(row)
        values: Values = {}
        faults = {}
        for channel in self.channels:
            try:
                decoded = decode_values(sample.extra, [channel], sample.key)
            except FuelrailError as error:
                faults[channel.name] = str(error)
                continue
            value = decoded[channel.name]
            if value is not None:
                values[channel.name] = channel, value
        for layer in self.layers:
            try:
                place = layer.find(row, sample.key)
                if place is None:
                    continue
                layer_row, _ = place
                parts = layer.data.read(layer_row)
            except FuelrailError as error:
                faults[layer.name] = str(error)
                continue
            channels = zip(layer.manifest.channels, layer.channels, strict=True)
            for stored, joined in channels:
                if stored.name in parts:
                    values[joined.name] = joined, parts[stored.name]
        fields = {channel.field for channel in self.channels}
        for field, data in sample.extra.items():
            if field not in fields:
                faults[field] = f"{len(memoryview(data)):,} bytes"
        return values, faults

    def _camera(self, number: int) -> str:
        if number >= len(self.cameras):
            raise ConfigError(f"no camera {number}: the dataset has {len(self.cameras)}")
        return self.cameras[number]


def _describe_place(data: Dataset, entry: IndexRow) -> dict[str, Any]:
    """Return where a sample's bytes are."""
    members = []
    for member in entry.members:
        facts = (
            member.name,
            member.offset,
            member.stored_bytes,
            member.raw_bytes,
            member.codec,
        )
        members.append(facts)
    return {
        "key": entry.key,
        "shard": data.shards.name_of(entry),
        "offset": entry.offset,
        "length": entry.length,
        "xxh3": f"{entry.xxh3:016x}",
        "members": members,
    }


def _jpeg(pixels: NDArray[np.uint8]) -> bytes:
    encoded = simplejpeg.encode_jpeg(pixels, quality=_QUALITY, colorspace="RGB")
    return bytes(encoded)
