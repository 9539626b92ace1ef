"""A batch as people look at it: its entries as a table, its samples as a picture."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fuelrail.loaders.records import batch_entries
from fuelrail.loaders.schedule.selection import Selectable
from fuelrail.loaders.viewer.drawing import (
    DrawnBoxes,
    DrawnFrame,
    contact_sheet,
    corners_by_yaw,
    png,
    stack,
)
from fuelrail.pipeline.channels.kinds import Packed
from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.channels.sensors import lies_on
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.rigid import move_points

if TYPE_CHECKING:
    from fuelrail.loaders.config import BoxFrame, Transforms
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import F64, U8
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer

_NS_PER_S: Final = 1e9
_TO_SELECT: Final = "not in the batch; Transforms(select=[NAME, ...]) takes, by name:"
_REQUIRED: Final = ("img", "ida_mat", "sample_key", "epoch", "step")


class Picture(NamedTuple):
    """A picture: a notebook shows it. ``pixels`` are uint8 [H, W, 3], RGB."""

    pixels: U8

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the picture to a PNG file; raises OSError where that is not possible."""
        Path(file).write_bytes(png(self.pixels))

    def __repr__(self) -> str:
        return (
            f"Picture({self.pixels.shape[1]} x {self.pixels.shape[0]}; save(FILE) writes it as "
            "a PNG)"
        )

    def _repr_png_(self) -> bytes:
        return png(self.pixels)


class LoaderDisplay(ABC):
    """What a loader shows of itself; `fuelrail.loaders.loader.DataLoader` is one."""

    dataset: Dataset
    transforms: Transforms
    cameras: tuple[str, ...]
    selected: tuple[Channel, ...]
    """The selected channels and attributes of the dataset and of layers."""
    layers: tuple[Layer, ...]
    """The layers of the dataset; of a mix, of the first one."""

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Iterate over batches."""

    @abstractmethod
    def _copy(self, **changes: Any) -> Any:
        """Return a loader of the same arguments, but for ``changes``, at the same position."""

    def describe(self) -> BatchDescription:
        """Return name, form and meaning of each entry of the next iteration's first batch, loaded
        apart from this one.

        Raises ConfigError where there is none, or where it is not a dict.
        """
        described = describe_batch(self._next_batch(), self.selected, self.transforms.box_frame)
        return described._replace(selectable=self.selectable())

    def selectable(self) -> tuple[tuple[str, str, str], ...]:
        """Return what ``Transforms(select=...)`` could add to a batch: name, kind and meaning of
        each.

        Of a mix: what the first dataset has. Raises IndexFileError for damaged attributes.
        """
        selectable = Selectable(self.dataset, self.layers)
        names = {channel.name for channel in self.selected}
        is_cloud = {
            lidar.channel for lidar in self.dataset.manifest.lidars[: bool(self.transforms.points)]
        }
        choices = []
        for name, channel in selectable.channels.items():
            if name not in names | is_cloud and lies_on(channel, self.cameras):
                choices.append((name, f"channel, {channel.kind}", channel.description))
        for name, kind in selectable.attributes.items():
            if name not in names and name not in batch_entries():
                choices.append((name, f"attribute, {kind}", ""))
        return tuple(choices)

    def show(self, batch: Mapping[str, Any] | None = None, *, samples: int = 4) -> Picture:
        """Draw a batch of this loader as it goes into training: after augmentation, normalisation
        undone, with boxes.

        Of each sample: its cameras, and lidar points and boxes from above, in the ego frame as
        augmented. With a temporal window the frames of a camera are in a row; boxes, which are the
        sample's own, are moved by their velocity in the others, or left out of them without ego
        poses. Selected channels are drawn as `fuelrail.view` draws them.

        Args:
            batch: a batch of this loader; None: the first of the next iteration, loaded apart from
                this one.
            samples: number of samples to draw, from the first one on.

        Raises ConfigError where there is no batch, or where it lacks entries of `Batch` that a
        picture needs.
        """
        entries = self._next_batch() if batch is None else batch
        if samples < 1:
            raise ConfigError(f"samples={samples} must be 1 or more")
        missing = [name for name in _REQUIRED if name not in entries]
        if missing:
            raise ConfigError(
                f"a batch without {missing[0]!r} cannot be drawn: let transform and "
                "collate_fn keep it"
            )
        sheets = []
        for row in range(min(samples, len(entries["sample_key"]))):
            title = (
                f"{entries['sample_key'][row]}   epoch {entries['epoch']}, step {entries['step']}"
            )
            sheets.append((title, draw_sample(entries, row, self)))
        return Picture(stack(sheets))

    def _next_batch(self) -> dict[str, Any]:
        """Load the first batch of the next iteration by a loader of its own."""
        with self._copy(check_ranks=False, trace=None, ledger=None) as preview:
            batch = next(iter(preview), None)
        if not isinstance(batch, dict):
            raise ConfigError(f"the next batch must be a dict, and it is {type(batch).__name__}")
        return batch


class _Frames:
    """A sample of a batch with its frames on the first axis; without a temporal window there is
    one.
    """

    def __init__(self, batch: Mapping[str, Any], row: int) -> None:
        self._batch = batch
        self._at = row
        self._has_windows = batch["ida_mat"][row].ndim == 4
        self.key = 0
        """Which frame is the sample's own."""
        if self._has_windows:
            rows = _array(batch["frame_global_index"][row])
            is_own = rows == int(batch["global_index"][row])
            is_own &= _array(batch["frame_valid"][row])
            self.key = int(np.argmax(is_own))
        self.index = (row, self.key) if self._has_windows else (row,)
        """Where the sample's own frame is in entries [B, ...] or [B, T, ...]."""

    def entry(self, name: str) -> NDArray[Any]:
        """Return an entry that belongs to frames."""
        value = _array(self._batch[name][self._at])
        return value if self._has_windows else value[None]

    def images(self, cameras: Sequence[str], transforms: Transforms) -> list[list[U8]]:
        """Return the images, uint8 [3, H, W], frame by frame and camera by camera."""
        img = self._batch["img"]
        groups = transforms.camera_groups
        parts = img if isinstance(img, dict) else {None: img}
        images_of_frames: list[dict[str, U8]] = [{} for _ in self.entry("ida_mat")]
        for name, part in parts.items():
            pixels = part[self._at].detach()
            if pixels.dtype != torch.uint8:
                normalize = transforms.normalize
                if normalize is None:
                    raise ConfigError(
                        "'img' must be uint8 to be drawn, or normalised by "
                        f"Transforms(normalize=...), got {pixels.dtype}"
                    )
                mean = torch.tensor(normalize.mean, device=pixels.device)
                std = torch.tensor(normalize.std, device=pixels.device)
                levels = pixels.float() * std[:, None, None] + mean[:, None, None]
                pixels = levels.round().clamp(0, 255).byte()
                if normalize.channel_order == "bgr":
                    pixels = pixels.flip(-3)
            images = _array(pixels if self._has_windows else pixels[None])
            names = cameras if name is None or groups is None else groups[name].cameras
            for by_camera, frame in zip(images_of_frames, images, strict=True):
                by_camera.update(zip(names, frame, strict=True))
        return [[by_camera[camera] for camera in cameras] for by_camera in images_of_frames]

    def boxes(self, box_frame: BoxFrame) -> list[DrawnBoxes] | None:
        """Return the boxes in each frame's ego, moved by their velocity since the sample's own
        time.
        """
        batch = self._batch
        row = self._at
        if "gt_boxes_3d" not in batch:
            return None
        boxes3d = _array(batch["gt_boxes_3d"][row])
        label = _array(batch["gt_labels_3d"][row])
        velocity = _array(batch["gt_velocity"][row])
        if "gt_mask" in batch:
            mask = _array(batch["gt_mask"][row])
            boxes3d = boxes3d[mask]
            label = label[mask]
            velocity = velocity[mask]
        corners = corners_by_yaw(boxes3d)
        velocity = np.nan_to_num(velocity.astype(np.float64))
        if box_frame == "lidar":
            lidar2ego = self.entry("lidar2ego")[self.key].astype(np.float64)
            corners = move_points(corners, lidar2ego)
            velocity = velocity @ lidar2ego[:3, :3].T
        if not self._has_windows:
            return [DrawnBoxes(corners, label)]
        if "ego2key" not in batch:  # without ego poses boxes have a place in their own frame alone
            none = DrawnBoxes(corners[:0], label[:0])
            boxes_of_frames = [none for _ in self.since_s()]
            boxes_of_frames[self.key] = DrawnBoxes(corners, label)
            return boxes_of_frames
        ways = self.since_s()[:, None, None, None] * velocity[:, None]
        ego2key = self.entry("ego2key").astype(np.float64)
        boxes_of_frames = []
        for way, key2ego in zip(ways, np.linalg.inv(ego2key), strict=True):
            moved = move_points(corners + way, key2ego)
            boxes_of_frames.append(DrawnBoxes(moved, label))
        return boxes_of_frames

    def since_s(self) -> F64:
        """Return the seconds of each frame since the sample's own time."""
        times = self.entry("timestamp_ns")
        return np.asarray((times - times[self.key]) / _NS_PER_S)

    def points(self) -> NDArray[np.floating[Any]]:
        """Return the lidar's points in the ego of the sample's own frame, [P, 3]; none where the
        batch has none.
        """
        if "points" not in self._batch or "lidar2ego" not in self._batch:
            return np.zeros((0, 3))
        points = _index_value(self._batch["points"], self.index)
        xyz = points[:, :3]
        if "points_mask" in self._batch:
            mask = _index_value(self._batch["points_mask"], self.index)
            xyz = xyz[mask]
        lidar2ego = self.entry("lidar2ego")[self.key]
        return move_points(xyz.astype(np.float64), lidar2ego.astype(np.float64))


def draw_sample(batch: Mapping[str, Any], row: int, loader: LoaderDisplay) -> U8:
    """Draw sample ``row`` of a loader's batch with its selected channels, uint8 [H, W, 3], RGB."""
    frames = frames_of(batch, row, loader)
    sample = _Frames(batch, row)
    values = values_of(batch, row, loader.selected)
    has_world = frames[0].boxes is not None or "points" in batch
    return contact_sheet(
        frames,
        loader.cameras,
        loader.dataset.manifest.classes,
        values,
        points=sample.points() if has_world else None,
        key=sample.key,
    )


def frames_of(
    batch: Mapping[str, Any],
    row: int,
    loader: LoaderDisplay,
) -> list[DrawnFrame]:
    """Return the frames of sample ``row`` of a loader's batch; without a temporal window there is
    one.
    """
    cameras = loader.cameras
    transforms = loader.transforms
    frames = _Frames(batch, row)
    images = frames.images(cameras, transforms)
    ida_mat = frames.entry("ida_mat")
    ego2img = np.full(ida_mat.shape, np.nan)
    if "ego2img" in batch:
        ego2img = frames.entry("ego2img")
    boxes = frames.boxes(transforms.box_frame)
    titles = [""]
    if len(images) > 1:
        valid = frames.entry("frame_valid")
        titles = [
            f"  {t:+.2f} s{'' if real else '  stand-in'}"
            for t, real in zip(frames.since_s(), valid, strict=True)
        ]
    return [
        DrawnFrame(
            images=images[t],
            ego2img=ego2img[t],
            boxes=None if boxes is None else boxes[t],
            ida_mat=ida_mat[t],
            title=title,
        )
        for t, title in enumerate(titles)
    ]


def _array(value: object) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def values_of(
    batch: Mapping[str, Any],
    row: int,
    channels: Sequence[Channel],
) -> list[tuple[Channel, Any]]:
    """Return the selected channels that a sample has, in its own frame."""
    if not channels:
        return []
    frames = _Frames(batch, row)
    values = (
        (channel, _read_value(batch, channel.name, frames.index))
        for channel in channels
        if channel.name in batch
    )
    return [(channel, value) for channel, value in values if value is not None]


def _read_value(
    batch: Mapping[str, Any],
    name: str,
    index: tuple[int, ...],
) -> Any:
    """Return a sample's value of a selected channel, by its index (sample,) or (sample, frame);
    None: it has none.
    """
    valid = batch[f"{name}_valid"]
    value = batch[name]
    if not valid[index]:
        return None
    if isinstance(value, Packed | Logits) and value.offsets is not None:
        number = int(np.ravel_multi_index(index, valid.shape))
        start = int(value.offsets[number])
        stop = int(value.offsets[number + 1])
        interval = slice(start, stop)
        if isinstance(value, Logits):
            return value.map(lambda part: _array(part[interval]))
        return _array(value.values[interval])
    if isinstance(value, Logits):
        return value.map(lambda part: _index_value(part, index))
    if isinstance(value, dict):
        return {column_name: _index_value(column, index) for column_name, column in value.items()}
    return _index_value(value, index)


def _index_value(value: Any, index: tuple[int, ...]) -> Any:
    for number in index:
        value = value[number]
    if isinstance(value, (str, bytes)):
        return value
    return _array(value)


class BatchDescription(NamedTuple):
    """The entries of a batch: (name, form, meaning) of each. Its text is a table.

    ``selectable`` has the same of what ``Transforms(select=[NAME, ...])`` could add.
    """

    entries: tuple[tuple[str, str, str], ...]
    selectable: tuple[tuple[str, str, str], ...] = ()

    def __str__(self) -> str:
        if not self.selectable:
            return _align_columns(self.entries)
        return (
            f"{_align_columns(self.entries)}\n\n{_TO_SELECT}\n\n{_align_columns(self.selectable)}"
        )

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.entries
        )
        more = "".join(
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self.selectable
        )
        if more:
            rows += f'<tr><th colspan="3">{escape(_TO_SELECT)}</th></tr>{more}'
        return f"<table><tr><th>name</th><th>form</th><th>meaning</th></tr>{rows}</table>"


def _align_columns(rows: Sequence[tuple[str, str, str]]) -> str:
    """Align the first two columns to the left."""
    widths = []
    for column in (0, 1):
        lengths = [min(len(row[column]), 40) for row in rows]
        widths.append(max(lengths))
    return "\n".join(
        f"{name:<{widths[0]}}  {form:<{widths[1]}}  {meaning}".rstrip()
        for name, form, meaning in rows
    )


def describe_batch(
    batch: Mapping[str, Any],
    channels: Sequence[Channel],
    box_frame: str,
) -> BatchDescription:
    """Return form and meaning of each entry of a batch with these selected channels, and with
    boxes in this frame.
    """
    meanings = {name: meaning for name, (_, meaning) in batch_entries().items()}
    for channel in channels:
        frame = f", frame {channel.frame}" if channel.frame else ""
        meanings[channel.name] = f"selected: {channel.kind}{frame}, moved by law {channel.law.name}"
        meanings[f"{channel.name}_valid"] = f"the sample has {channel.name}"
    meanings = {
        name: text.replace("`box_frame`", f"the {box_frame} frame")
        for name, text in meanings.items()
    }
    return BatchDescription(
        tuple(
            (name, _describe_form(value), meanings.get(name, "").replace("`", ""))
            for name, value in batch.items()
        )
    )


def _describe_form(value: object) -> str:
    """Say what a value is: ``float32 [4, 6, 3, 3]``, ``list of 4 float32 [*, 7]``; ``*`` is a
    length that differs.
    """
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{where}"
    if isinstance(value, list) and value and all(isinstance(item, torch.Tensor) for item in value):
        dims = [set(sizes) for sizes in zip(*(item.shape for item in value), strict=False)]
        shape = ", ".join(str(*sizes) if len(sizes) == 1 else "*" for sizes in dims)
        return f"list of {len(value)} {_describe_form(value[0]).partition(' ')[0]} [{shape}]"
    if isinstance(value, list):
        forms = dict.fromkeys(map(_describe_form, value))
        return f"list of {len(value)} {' or '.join(forms)}"
    if isinstance(value, Logits):
        return _describe_form(value.parts).replace("dict", "Logits", 1)
    if isinstance(value, Mapping):
        return "dict of " + ", ".join(
            f"{name}: {_describe_form(item)}" for name, item in value.items()
        )
    return type(value).__name__
