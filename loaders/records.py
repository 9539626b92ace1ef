"""The records of a sample's way through the loader, in order: each stage takes one and makes the
next.

========  ====================  ===========  ======================================================
stage     takes                 makes        adds
========  ====================  ===========  ======================================================
schedule  positions             `Scheduled`  epoch, step, row in the batch, dataset, frames' rows
prefetch  `Scheduled`           `Requested`  rows of the index, pending reads
slot      `Requested`           `Task`       place in a batch, storage and reader of its dataset
fetch     `Task`                `Fetched`    checked bytes of every frame
parse     `Fetched`             `Parsed`     samples, images still encoded; the augmentation drawn
decode    `Parsed`              `Parsed`     pixels in the slot, which with DALI may be another one
collate   list of `Parsed`      `Batch`      tensors, matrices, labels
transfer  batch, or `Collated`  batch        on the device, normalised, through ``batch_transform``
========  ====================  ===========  ======================================================

The ``str`` of a record is what an error message names. A substituted bad sample begins again as
another `Task`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    NamedTuple,
    TypeAlias,
    TypedDict,
    cast,
    get_type_hints,
)

import torch
from torch import Tensor

from fuelrail.pipeline.order.epoch import NO_FLAGS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fuelrail.loaders.storage.layers import LayeredStorage
    from fuelrail.loaders.storage.protocol import PendingSample
    from fuelrail.loaders.storage.reader import FetchedSpan, SampleReader
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.format.attributes import AttributeColumns
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.sample.schema import Sample
    from fuelrail.pipeline.transforms.ego import BevMap
    from fuelrail.pipeline.transforms.image import ImageAugment
    from fuelrail.pipeline.transforms.image_map import ImageMap
    from fuelrail.pipeline.transforms.pixels import PixelChange

Images: TypeAlias = "NDArray[np.uint8] | torch.Tensor"

_IMG: Final = "RGB; zeros where `cam_valid` is False; with `camera_groups` a dict of these"
_CAM_VALID: Final = "the camera's image exists; else its matrices can be NaN (unknown)"
_DIST: Final = "lens coefficients of the stored image; 0 without, and after `undistort`"
_BOXES: Final = "x y z l w h yaw; x y z is the gravity centre; in `box_frame`"
_POINTS: Final = (
    "first lidar, its own frame and columns; with several sweeps also `dt_s`, its age [s]"
)
_FRAME_VALID: Final = "False: the clip lacks this frame, and `pad` chose its stand-in"


class Source(NamedTuple):
    """One dataset to read from. It is not a stage's record: all samples of the dataset share it."""

    name: str | None
    """The name in a mix; None for a dataset alone."""
    dataset: Dataset
    first_row: int
    """The row of its index where its split begins."""
    base: int
    """Rows of the mix's datasets before it: ``base + row`` numbers samples over all of them."""
    storage: LayeredStorage
    reader: SampleReader
    attributes: AttributeColumns
    """The attributes that a batch has."""


class Scheduled(NamedTuple):
    """One sample in the order of loading. Made by `fuelrail.loaders.schedule.positions`."""

    epoch: int
    step: int
    batch_row: int
    """Row in the rank's batch."""
    position: int
    """The position in the epoch, over all ranks."""
    rows: Sequence[int]
    """Rows of the dataset's index, one for each frame."""
    valid: bool
    """False for padding."""
    part: int = 0
    """Which dataset of a mix."""
    present: Sequence[bool] = ()
    """False: the clip has no such frame, the row is that of its stand-in."""
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
    """The name of the group (``Transforms.camera_groups``); None: all cameras of the rig have
    one size.
    """
    cameras: tuple[int, ...]
    """Which of the loaded cameras."""
    augment: ImageAugment


class BatchSlot(NamedTuple):
    """One batch that is being made, and the buffer that its images are decoded into."""

    epoch: int
    step: int
    images: Images | tuple[Images, ...]
    """uint8 [B, N, 3, H, W], with windows [B, T, N, 3, H, W]; of two views 2 B rows, second views
    last. With groups of cameras one of these for each group.
    """
    flags: Mapping[str, NDArray[Any]] = NO_FLAGS
    """What the order knows of the batch's samples, (B,) each, under their names in the batch."""
    has_windows: bool = False
    groups: tuple[CameraImages, ...] = ()
    """Groups of cameras, whose images differ in size; none: all have one size."""
    position: int = 0
    """The position of its first row in the epoch, over all ranks."""

    def img(self) -> torch.Tensor | dict[str | None, torch.Tensor]:
        """Return the images as a tensor on the same memory, or as one for each group of cameras."""
        if isinstance(self.images, tuple):
            return {
                group.name: _tensor(images)
                for group, images in zip(self.groups, self.images, strict=True)
            }
        return _tensor(self.images)

    def frames(self, batch_row: int) -> Sequence[Sequence[U8]]:
        """Return the images of one sample in host memory, frame by frame and camera by camera:
        (3, H, W) each.
        """
        if not isinstance(self.images, tuple):
            assert not isinstance(self.images, torch.Tensor)
            images: Any = self.images
            frames = images[batch_row] if self.has_windows else images[batch_row : batch_row + 1]
            return cast("Sequence[Sequence[NDArray[np.uint8]]]", frames)
        places = {camera: place for place in enumerate(self.groups) for camera in place[1].cameras}
        images_of_frames: list[list[U8]] = []
        for frame in range(self.images[0].shape[1] if self.has_windows else 1):
            index = (batch_row, frame) if self.has_windows else (batch_row,)
            frame_images = [
                self.images[group][(*index, members.cameras.index(camera))]
                for camera, (group, members) in sorted(places.items())
            ]
            images_of_frames.append(frame_images)  # type: ignore[arg-type]
        return images_of_frames

    def parts(self) -> list[tuple[Sequence[int] | None, torch.Tensor]]:
        """Return the images of each group, uint8 [B, T, N, 3, H, W], T being 1 without windows,
        with its cameras.

        The cameras are those of `CameraImages`; None: all of them.
        """
        images = self.images if isinstance(self.images, tuple) else (self.images,)
        cameras: list[Sequence[int] | None] = [group.cameras for group in self.groups] or [None]
        tensors = []
        for group_images in images:
            if self.has_windows:
                tensors.append(_tensor(group_images))
            else:
                tensors.append(_tensor(group_images)[:, None])
        return list(zip(cameras, tensors, strict=True))

    def for_rows(
        self, rows: int, new_output: Callable[[tuple[int, ...]], torch.Tensor]
    ) -> BatchSlot:
        """Return the slot with other memory, for a number of rows."""
        if isinstance(self.images, tuple):
            return self._replace(
                images=tuple(new_output((rows, *images.shape[1:])) for images in self.images)
            )
        return self._replace(images=new_output((rows, *self.images.shape[1:])))


def _tensor(images: Images) -> torch.Tensor:
    if isinstance(images, torch.Tensor):
        return images
    return torch.from_numpy(images)


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
    batch_row: int
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
    """A sample with all members decoded but images, and the augmentation of these, drawn once for
    all frames.

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
    timed: Mapping[str, Sequence[Any]] = {}
    """The values of channels at times of their own, moved; None for those that are not there."""

    @property
    def views(self) -> tuple[Parsed, ...]:
        """The draws of the sample: itself, and the other one where there are two."""
        if self.second is None:
            return (self,)
        return self, self.second

    @property
    def sample(self) -> Sample:
        """The sample itself."""
        return self.samples[self.task.current]

    @property
    def slot(self) -> BatchSlot:
        """The batch that it is a part of."""
        return self.task.slot

    @property
    def key(self) -> str:
        """The name of the sample."""
        return self.sample.key

    def is_shown_before(self, frame: int) -> int | None:
        """Return the earlier frame that shows the same row, under the same maps, so that its
        images can be copied.
        """
        frames = self.task.frames
        for earlier in range(frame):
            if (
                frames[earlier].row == frames[frame].row
                and self.samples[earlier] is self.samples[frame]
            ):
                return earlier
        return None

    def in_slot(self, slot: BatchSlot) -> Parsed:
        """Return the sample, and its other draw, with their images in this slot's memory."""
        second = None if self.second is None else self.second.in_slot(slot)
        return self._replace(task=self.task._replace(slot=slot), second=second)

    def __str__(self) -> str:
        return f"sample {self.sample.key!r}, {self.task}"


class Collated(NamedTuple):
    """A batch with its place in the order, for ``batch_transform``.

    Made by `fuelrail.loaders.batch.stages`.
    """

    batch: Any
    epoch: int
    step: int
    position: int
    """The position of its first row in the epoch, over all ranks."""
    keys: tuple[str, ...]

    def __str__(self) -> str:
        place = f"the batch of epoch {self.epoch}, step {self.step}, from position {self.position}"
        return f"{place} (samples {', '.join(map(repr, self.keys))})"


class Batch(TypedDict, total=False):
    """What a batch holds, for type checkers and readers: ``batch = cast(fr.Batch, batch)``.

    Each entry has its form and its meaning. B samples, N cameras of the rig, output images H x W, M
    boxes, P points of C columns; the axis in brackets, of T frames, exists with a temporal window.
    Selected channels and layers add entries of their own. `fuelrail.loaders.batch.assemble` says
    more about frames of reference.
    """

    img: Annotated[Tensor, "[B, (T,) N, 3, H, W] uint8", _IMG]
    cam_valid: Annotated[Tensor, "[B, (T,) N] bool", _CAM_VALID]
    intrinsics: Annotated[Tensor, "[B, (T,) N, 3, 3] float32", "K of the output image"]
    dist: Annotated[Tensor, "[B, (T,) N, 14] float32", _DIST]
    ida_mat: Annotated[
        Tensor,
        "[B, (T,) N, 4, 4] float32",
        "stored pixels to output pixels, homogeneous",
    ]
    cam2ego: Annotated[Tensor, "[B, (T,) N, 4, 4] float32", "static extrinsics"]
    cam2keyego: Annotated[
        Tensor,
        "[B, (T,) N, 4, 4] float32",
        "camera at its exposure to ego at the sample's time",
    ]
    ego2img: Annotated[
        Tensor,
        "[B, (T,) N, 4, 4] float32",
        "ego to (u d, v d, d, 1) of the output image",
    ]
    lidar2img: Annotated[
        Tensor,
        "[B, (T,) N, 4, 4] float32",
        "first lidar at its time to the same",
    ]
    lidar2ego: Annotated[
        Tensor,
        "[B, (T,) 4, 4] float32",
        "first lidar at its time to ego, not augmented",
    ]
    ego2global: Annotated[
        Tensor,
        "[B, (T,) 4, 4] float64",
        "ego pose",
    ]
    ego2key: Annotated[
        Tensor,
        "[B, T, 4, 4] float32",
        "ego at the frame's time to ego at the time of frame 0",
    ]
    bda_mat: Annotated[Tensor, "[B, 4, 4] float32", "stored ego frame to augmented ego frame"]
    timestamp_ns: Annotated[Tensor, "[B, (T)] int64", "time of the sample or frame"]
    img_timestamp_ns: Annotated[Tensor, "[B, (T,) N] int64", "each camera's exposure"]
    gt_boxes_3d: Annotated[list[Tensor], "list of [M, 7] float32", _BOXES]
    gt_labels_3d: Annotated[
        list[Tensor],
        "list of [M] int64",
        "class, -1 outside the dataset's classes",
    ]
    gt_velocity: Annotated[
        list[Tensor],
        "list of [M, 3] float32",
        "m/s over ground, axes of `box_frame`, NaN if unknown",
    ]
    gt_valid: Annotated[
        list[Tensor],
        "list of [M] bool",
        "has lidar or radar points, or unknown",
    ]
    gt_mask: Annotated[Tensor, "[B, M] bool", "static batches: the row is a box"]
    instance_id: Annotated[list[Tensor], "list of [M] int64", "track"]
    points: Annotated[list[Tensor], "list of (T of) [P, C] float32", _POINTS]
    points_mask: Annotated[Tensor, "[B, P] bool", "static batches: the row is a point"]
    sample_key: Annotated[list[str], "list of str", "name of the sample"]
    sample_token: Annotated[
        list[str],
        "list of str",
        "the source's name: nuScenes' token, the key in a tar",
    ]
    clip_id: Annotated[list[str], "list of str", "clip of the sample"]
    frame: Annotated[Tensor, "[B] int64", "number in the clip"]
    global_index: Annotated[Tensor, "[B] int64", "row of the dataset's index"]
    frame_valid: Annotated[Tensor, "[B, T] bool", _FRAME_VALID]
    frame_global_index: Annotated[Tensor, "[B, T] int64", "row of each frame"]
    valid: Annotated[
        Tensor,
        "[B] bool",
        "False: a repeated sample (`drop_last=False`, lanes that ended)",
    ]
    lane: Annotated[Tensor, "[B] int64", "lane of the global batch"]
    prev_exists: Annotated[
        Tensor,
        "[B] bool",
        "the lane showed the frame before; False: forget the past",
    ]
    dataset: Annotated[list[str], "list of str", "in a mix: the sample's dataset"]
    seed: Annotated[
        int,
        "int",
        "of a sample in `transform`: take randomness from it only",
    ]
    view: Annotated[
        Tensor,
        "[2 B] int64",
        "with `two_views`: the draw, 0 or 1",
    ]
    bucket: Annotated[
        Tensor,
        "[B] int64",
        "the batch's bucket, in the order of bounds, or values",
    ]
    pack: Annotated[
        Tensor,
        "[S] int64",
        "pack of each of the S samples; in packs S replaces B everywhere",
    ]
    pack_offsets: Annotated[
        Tensor,
        "[B + 1] int32",
        "first sample of each pack, and S",
    ]
    cu_seqlens: Annotated[
        Tensor,
        "[S + 1] int32",
        "first token of each sample, and their number",
    ]
    max_seqlen: Annotated[int, "int", "largest number of tokens of a sample"]
    position_ids: Annotated[
        Tensor,
        "[tokens] int64",
        "place of each token in its sample",
    ]
    sequence_ids: Annotated[
        Tensor,
        "[tokens] int32",
        "sample of each token, 0 .. S - 1",
    ]
    epoch: Annotated[int, "int", "number of the epoch"]
    step: Annotated[int, "int", "number of the global batch in the epoch"]
    weight: Annotated[
        float,
        "float",
        "where ranks differ by a row: what the mean loss is multiplied with (`rank_weight`)",
    ]


def batch_entries() -> dict[str, tuple[str, str]]:
    """Return form and meaning of each entry of `Batch`, by name."""
    return {
        name: hint.__metadata__ for name, hint in get_type_hints(Batch, include_extras=True).items()
    }
