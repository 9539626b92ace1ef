"""The records of a sample's way through the loader, in order: each stage takes one and makes the next.

========= ====================== ======================= ==========================================================
stage     takes                  makes                   adds
========= ====================== ======================= ==========================================================
schedule  positions              `Scheduled`             epoch, step, row in the batch, dataset, rows of its frames
prefetch  `Scheduled`            `Requested`             rows of the index, pending reads
slot      `Requested`            `Task`                  its place in a batch buffer, its dataset's storage and reader
fetch     `Task`                 `Fetched`               checked bytes of every frame
parse     `Fetched`              `Parsed`                samples with images still encoded; the augmentation drawn
decode    `Parsed`               `DecodedSample`         pixels in the slot; `DecodedWindow` with all frames
collate   list of DecodedSample  `Batch`                 tensors, matrices, labels (`fuelrail.loaders.batch.assemble`)
transfer  batch                  batch                   on the device, normalised (`fuelrail.loaders.batch.transfer`)
========= ====================== ======================= ==========================================================

The ``str`` of a record is what an error message names. A substituted bad sample begins again as another `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias, TypedDict, get_type_hints

import torch

from fuelrail.pipeline.order.epoch import NO_FLAGS
from fuelrail.pipeline.transforms.ego import IDENTITY, BevMap

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.loaders.storage.protocol import PendingSample, SampleStorage
    from fuelrail.loaders.storage.reader import FetchedSpan, SampleReader
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.attributes import AttributeColumns
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.image import ImageAugment
    from fuelrail.pipeline.transforms.image_map import ImageMap
    from fuelrail.pipeline.transforms.pixels import PixelChange

Images: TypeAlias = "NDArray[np.uint8] | torch.Tensor"


class Source(NamedTuple):
    """One dataset to read from. It is no stage's record: all samples of the dataset share it."""

    name: str | None
    """The name in a mix; None for a dataset alone."""
    dataset: Dataset
    first_row: int
    """The row of its index where its split begins."""
    base: int
    """Rows of the mix's datasets before it: ``base + row`` numbers samples over all of them."""
    storage: SampleStorage
    reader: SampleReader
    attributes: AttributeColumns
    """The attributes that a batch has."""


class Scheduled(NamedTuple):
    """One sample in the order of loading. Made by `fuelrail.loaders.schedule.positions`."""

    epoch: int
    step: int
    at: int
    """Row in the rank's batch."""
    position: int
    """The position in the epoch, over all ranks."""
    rows: Sequence[int]
    """Rows of the dataset's index, one for each frame."""
    valid: bool
    """False for padding."""
    part: int = 0
    """Which dataset of a mix."""
    present: Sequence[bool] | None = None
    """False: the clip has no such frame, the row is that of its stand-in; None: all frames exist."""
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    """Facts of the whole batch (`BatchSlot`), the same for all of its samples."""


class Requested(NamedTuple):
    """A sample that was requested from storage. Made by `fuelrail.loaders.schedule.prefetch`."""

    scheduled: Scheduled
    entries: tuple[IndexRow, ...]
    """Each frame's row of the index; empty where the index is damaged there."""
    pending_reads: tuple[PendingSample, ...]
    """Each waits for one frame's bytes; without entries, the only one raises the index's error."""


class CameraImages(NamedTuple):
    """Cameras whose images have one size in a batch."""

    name: str | None
    """The name of the group (``Transforms.camera_groups``); None: all cameras of the rig have one size."""
    cameras: tuple[int, ...]
    """Which of the loaded cameras."""
    augment: ImageAugment


class BatchSlot(NamedTuple):
    """One batch that is being made, and the buffer that its images are decoded into."""

    epoch: int
    step: int
    images: Images | tuple[Images, ...]
    """uint8 [B, N, 3, H, W], with windows [B, T, N, 3, H, W]; of two views 2 B rows, second views last. With groups of
    cameras one of these for each group."""
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    """What the order knows of the batch's samples, (B,) each, under their names in the batch."""
    has_windows: bool = False
    groups: tuple[CameraImages, ...] = ()
    """Groups of cameras, whose images differ in size; none: all have one size."""

    def img(self) -> torch.Tensor | dict[str | None, torch.Tensor]:
        """Return the images as a tensor on the same memory, or as one for each group of cameras."""
        if isinstance(self.images, tuple):
            return {group.name: _tensor(one) for group, one in zip(self.groups, self.images, strict=True)}
        return _tensor(self.images)

    def frames(self, at: int) -> Sequence[Sequence[NDArray[np.uint8]]]:
        """Return the images of one sample in host memory, frame by frame and camera by camera: (3, H, W) each."""
        if not isinstance(self.images, tuple):
            assert not isinstance(self.images, torch.Tensor)
            return self.images[at] if self.has_windows else self.images[at : at + 1]  # type: ignore[return-value]
        places = {camera: place for place in enumerate(self.groups) for camera in place[1].cameras}
        found: list[list[NDArray[np.uint8]]] = []
        for frame in range(self.images[0].shape[1] if self.has_windows else 1):
            index = (at, frame) if self.has_windows else (at,)
            of_frame = [
                self.images[group][(*index, of.cameras.index(camera))] for camera, (group, of) in sorted(places.items())
            ]
            found.append(of_frame)  # type: ignore[arg-type]
        return found

    def parts(self) -> list[tuple[Sequence[int] | None, torch.Tensor]]:
        """Return the images of each group, uint8 [B, T, N, 3, H, W], T being 1 without windows, with its cameras.

        The cameras are those of `CameraImages`; None: all of them.
        """
        images = self.images if isinstance(self.images, tuple) else (self.images,)
        cameras: list[Sequence[int] | None] = [group.cameras for group in self.groups] or [None]
        tensors = [_tensor(one) if self.has_windows else _tensor(one)[:, None] for one in images]
        return list(zip(cameras, tensors, strict=True))

    def for_rows(self, rows: int, new_output: Callable[[tuple[int, ...]], torch.Tensor]) -> BatchSlot:
        """Return the slot with other memory, for a number of rows."""
        if isinstance(self.images, tuple):
            return self._replace(images=tuple(new_output((rows, *one.shape[1:])) for one in self.images))
        return self._replace(images=new_output((rows, *self.images.shape[1:])))


def _tensor(images: Images) -> torch.Tensor:
    return images if isinstance(images, torch.Tensor) else torch.from_numpy(images)


class FrameTask(NamedTuple):
    """One frame of a sample to load."""

    row: int
    """The row in its dataset's index."""
    present: bool
    """False: a stand-in for a frame that the clip does not have."""
    entry: IndexRow | None
    """The row's content; None where the index is damaged there."""
    pending_read: PendingSample
    """Waits for the bytes; raises the index's error where there is no entry."""


class Task(NamedTuple):
    """One sample to load: its place in a batch, and its frames (one without windows).

    Made by `fuelrail.loaders.batch.buffer_pool`.
    """

    slot: BatchSlot
    at: int
    source: Source
    """The sample's dataset."""
    frames: tuple[FrameTask, ...]
    current: int
    """Which of the frames is the sample's own."""
    valid: bool
    position: int
    """The position in the epoch, over all ranks."""
    num_replaced: int = 0
    """Number of bad samples that it replaces."""

    @property
    def row(self) -> int:
        """The sample's own row."""
        return self.frames[self.current].row

    @property
    def number(self) -> int:
        """The sample's number over all datasets, which keys its augmentation."""
        return self.source.base + self.row

    def __str__(self) -> str:
        return f"row {self.row} (epoch {self.slot.epoch}, step {self.slot.step})"


class Fetched(NamedTuple):
    """A sample as stored, frame by frame. Made by `fuelrail.loaders.batch.samples.fetch`."""

    task: Task
    stored: tuple[FetchedSpan, ...]

    def __str__(self) -> str:
        return f"sample {self.stored[self.task.current].row.key!r}, {self.task}"


class Parsed(NamedTuple):
    """A sample with all members decoded but images, and the augmentation of these, drawn once for all frames.

    Made by `fuelrail.loaders.batch.samples.parse`.
    """

    task: Task
    samples: tuple[Sample, ...]
    """Frame by frame."""
    maps: tuple[Sequence[ImageMap], ...]
    """Frame by frame, camera by camera: stored pixels to output pixels."""
    changes: Sequence[PixelChange]
    """The changes of pixel values, camera by camera."""
    bev: BevMap
    """The augmentation of the ego frame."""
    extra: Sequence[Mapping[str, Any]] = ()
    """Frame by frame the values of the selected channels, moved; None for what the frame lacks."""
    view: int | None = None
    """Which of two draws it is (``Transforms.two_views``), 0 or 1; None: there is one."""
    second: Parsed | None = None
    """The same sample under its other draw, for another row of the batch."""

    @property
    def views(self) -> tuple[Parsed, ...]:
        """The draws of the sample: itself, and the other one where there are two."""
        return (self,) if self.second is None else (self, self.second)

    @property
    def sample(self) -> Sample:
        """The sample itself."""
        return self.samples[self.task.current]

    def is_shown_before(self, frame: int) -> int | None:
        """Return the earlier frame that shows the same row, under the same maps, so that its images can be copied."""
        frames = self.task.frames
        for earlier in range(frame):
            if frames[earlier].row == frames[frame].row and self.samples[earlier] is self.samples[frame]:
                return earlier
        return None

    def decoded(self, slot: BatchSlot) -> DecodedSample:
        """Return the next record, for images that are decoded into their place in ``slot``."""
        task = self.task
        window = None
        if task.slot.has_windows:
            frames = task.frames
            rows, present = tuple(frame.row for frame in frames), tuple(frame.present for frame in frames)
            window = DecodedWindow(rows, present, self.samples, self.maps)
        maps, source = self.maps[task.current], task.source
        return DecodedSample(
            slot, task.at, task.row, task.valid, self.sample, maps, self.bev, source.name, source.base, window,
            self.extra, self.view, None if self.second is None else self.second.decoded(slot),
        )  # fmt: skip

    def __str__(self) -> str:
        return f"sample {self.sample.key!r}, {self.task}"


class DecodedWindow(NamedTuple):
    """The T frames of one decoded sample."""

    rows: tuple[int, ...]
    present: tuple[bool, ...]
    """False: a stand-in for a frame that the clip does not have."""
    samples: tuple[Sample, ...]
    maps: tuple[Sequence[ImageMap], ...]


class DecodedSample(NamedTuple):
    """One sample whose images are decoded in row ``at`` of its slot's buffer.

    Made by `fuelrail.loaders.batch.samples.decode`, with DALI by `fuelrail.loaders.batch.stages`.
    """

    slot: BatchSlot
    at: int
    row: int
    valid: bool
    sample: Sample
    maps: Sequence[ImageMap]
    bev: BevMap = IDENTITY
    dataset: str | None = None
    """The dataset's name in a mix."""
    base: int = 0
    """Rows of the mix's datasets before it: ``base + row`` numbers samples over all of them."""
    window: DecodedWindow | None = None
    """All frames, the sample's own among them."""
    extra: Sequence[Mapping[str, Any]] = ()
    """Frame by frame the values of the selected channels (`Parsed`)."""
    view: int | None = None
    """Which of two draws it is, 0 or 1; None: there is one."""
    second: DecodedSample | None = None
    """The same sample under its other draw, in another row of the slot's buffer."""

    def __str__(self) -> str:
        return f"sample {self.sample.key!r} (row {self.row}, epoch {self.slot.epoch}, step {self.slot.step})"


class Batch(TypedDict, total=False):
    """What a batch holds, for type checkers and readers: ``batch = cast(fr.Batch, batch)``.

    B samples, N cameras, M boxes, P points. With a temporal window an axis of T frames follows B in what belongs to a
    frame (`fuelrail.loaders.batch.temporal`). `fuelrail.loaders.batch.assemble` says more about frames of reference.
    Selected channels and layers add entries of their own.
    """

    img: Annotated[torch.Tensor, "RGB planes [B, N, 3, H, W]; 0 where cam_valid is False; a dict with camera_groups"]
    cam_valid: Annotated[torch.Tensor, "the camera's image exists"]
    intrinsics: Annotated[torch.Tensor, "K of the output image"]
    dist: Annotated[torch.Tensor, "lens coefficients of the stored image; 0 without, and where they were undone"]
    ida_mat: Annotated[torch.Tensor, "stored pixels to output pixels, homogeneous"]
    cam2ego: Annotated[torch.Tensor, "static extrinsics"]
    cam2keyego: Annotated[torch.Tensor, "camera at its exposure to ego at the sample's time"]
    ego2img: Annotated[torch.Tensor, "ego to (u d, v d, d, 1) of the output image"]
    lidar2img: Annotated[torch.Tensor, "first lidar at its time to (u d, v d, d, 1) of the output image"]
    lidar2ego: Annotated[torch.Tensor, "first lidar at its time to ego, not augmented"]
    ego2global: Annotated[torch.Tensor, "ego pose"]
    ego2key: Annotated[torch.Tensor, "ego at the frame's time to ego at the key frame's"]
    bda_mat: Annotated[torch.Tensor, "stored ego frame to augmented ego frame"]
    timestamp_ns: Annotated[torch.Tensor, "the sample's time"]
    img_timestamp_ns: Annotated[torch.Tensor, "each camera's exposure"]
    gt_boxes_3d: Annotated[list[torch.Tensor], "x y z l w h yaw; x y z is the gravity centre; in box_frame"]
    gt_labels_3d: Annotated[list[torch.Tensor], "class, -1 outside the dataset's classes"]
    gt_velocity: Annotated[list[torch.Tensor], "m/s over ground, axes of box_frame, NaN if unknown"]
    gt_valid: Annotated[list[torch.Tensor], "has lidar or radar points, or unknown"]
    gt_mask: Annotated[torch.Tensor, "static batches: which rows are boxes"]
    instance_id: Annotated[list[torch.Tensor], "track"]
    points: Annotated[list[torch.Tensor], "first lidar, its own frame and columns"]
    points_mask: Annotated[torch.Tensor, "static batches: which rows are points"]
    sample_key: Annotated[list[str], "name of the sample"]
    sample_token: Annotated[list[str], "the source's own name of the sample"]
    clip_id: Annotated[list[str], "clip of the sample"]
    frame: Annotated[torch.Tensor, "number in the clip"]
    global_index: Annotated[torch.Tensor, "row of the dataset's index"]
    frame_valid: Annotated[torch.Tensor, "False: the clip has no such frame, another stands in for it"]
    frame_global_index: Annotated[torch.Tensor, "row of the dataset's index that is shown"]
    valid: Annotated[torch.Tensor, "False: a repeated sample (drop_last=False, lanes that ended)"]
    lane: Annotated[torch.Tensor, "lane of the global batch"]
    prev_exists: Annotated[torch.Tensor, "the lane showed the frame before; False: forget the past"]
    dataset: Annotated[list[str], "name of the sample's dataset in the mix"]
    seed: Annotated[int, "of a sample before `transform`: take randomness from it only"]
    view: Annotated[torch.Tensor, "number of the sample's draw with two_views"]
    epoch: Annotated[int, "which epoch this is"]
    step: Annotated[int, "which global batch of the epoch this is"]


class BatchDescription(NamedTuple):
    """The entries of a batch: (name, form, meaning) of each. Its text is a table."""

    entries: tuple[tuple[str, str, str], ...]

    def __str__(self) -> str:
        widths = [max(min(len(entry[column]), 40) for entry in self.entries) for column in (0, 1)]
        rows = (f"{name:<{widths[0]}}  {form:<{widths[1]}}  {meaning}" for name, form, meaning in self.entries)
        return "\n".join(row.rstrip() for row in rows)

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in self.entries)
        return f"<table><tr><th>name</th><th>form</th><th>meaning</th></tr>{rows}</table>"


def describe_batch(batch: Mapping[str, Any], channels: Sequence[Channel], box_frame: str) -> BatchDescription:
    """Return form and meaning of each entry of a batch with these selected channels, and with boxes in this frame."""
    known = {name: hint.__metadata__[0] for name, hint in get_type_hints(Batch, include_extras=True).items()}
    for one in channels:
        frame = f", frame {one.frame}" if one.frame else ""
        known[one.name] = f"channel: {one.kind}{frame}, moved by law {one.law.name}"
        known[f"{one.name}_valid"] = f"the sample has {one.name}"
    known = {name: text.replace("box_frame", f"the {box_frame} frame") for name, text in known.items()}
    return BatchDescription(tuple((name, _form(value), known.get(name, "")) for name, value in batch.items()))


def _form(value: Any) -> str:  # noqa: ANN401 - whatever is in a batch
    """Say what a value is: ``float32 [4, 6, 3, 3]``, ``list of 4 float32 [*, 7]``; ``*`` is a length that differs."""
    if isinstance(value, torch.Tensor):
        where = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{where}"
    if isinstance(value, list) and value and all(isinstance(one, torch.Tensor) for one in value):
        dims = [set(sizes) for sizes in zip(*(one.shape for one in value), strict=False)]
        shape = ", ".join(str(*sizes) if len(sizes) == 1 else "*" for sizes in dims)
        return f"list of {len(value)} {_form(value[0]).partition(' ')[0]} [{shape}]"
    if isinstance(value, list):
        forms = dict.fromkeys(map(_form, value))
        return f"list of {len(value)} {' or '.join(forms)}"
    if isinstance(value, Mapping):
        return "dict of " + ", ".join(f"{name}: {_form(one)}" for name, one in value.items())
    return type(value).__name__
