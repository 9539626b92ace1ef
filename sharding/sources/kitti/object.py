"""KITTI's object benchmark: single frames of unknown drives, without times and ego poses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.sharding.sources.adapter.frame import (
    BoxRows,
    Clip,
    Frame,
    Image,
    ImageBoxRows,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.poses import quaternions
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.kitti.calibration import (
    CATEGORIES,
    LIDAR,
    POINT_COLUMNS,
    camera_calibration,
    numbers_of,
    read_numbers,
    read_points,
)
from fuelrail.sharding.sources.shared.foreign import read_text

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32

SPLITS: Final = {"training": "train", "testing": "test"}
"""Folder to split."""
_CAMERAS: Final = {"image_2": "P2", "image_3": "P3"}
_LABEL: Final = 15
_TYPE_TO_IGNORE: Final = "DontCare"


class KittiObjectSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the source."""

    right: Annotated[
        bool,
        Meta(description="true takes the right colour camera (image_3) too"),
    ] = False
    boxes2d: Annotated[
        bool,
        Meta(description="true stores the labels' boxes in image_2 as the channel boxes2d_image_2"),
    ] = False


class KittiObject(FrameSource[KittiObjectSettings]):
    """KITTI's object benchmark: single frames with boxes, without ego poses.

    PATH holds `training` and `testing`, or `image_2`. An image, of its own size, is a clip of one
    sample; its time is its number plus 1. Poses are the identity. `DontCare` gives no boxes. In
    `boxes2d_image_2`, `row` is the same label's in `boxes`.
    """

    kind = "kitti_object"
    settings_type = KittiObjectSettings
    time_base = "none"
    ego_origin = "imu"
    has_poses = False
    license = "CC BY-NC-SA 3.0"

    def sensors(self) -> Sensors:
        """Return the left colour camera, with the option also the right one, and the lidar."""
        return Sensors.from_names(self._cameras, {LIDAR: POINT_COLUMNS})

    @property
    def image_boxes(self) -> dict[str, str]:  # type: ignore[override]  # by the options
        """The left colour camera, with the option."""
        if self.settings.boxes2d:
            return {"image_2": "bounds as labelled; row counts in boxes"}
        return {}

    @property
    def _cameras(self) -> tuple[str, ...]:
        if self.settings.right:
            return tuple(_CAMERAS)
        return ("image_2",)

    def category_names(self) -> tuple[str, ...]:
        """Return the classes without DontCare, which marks what is not labelled and has no box."""
        return CATEGORIES

    def clips(self) -> Iterator[Clip]:
        """Yield a clip for each image: the dataset does not say which drive it is from."""
        names = self.files.listed()
        folders = [folder for folder in SPLITS if folder in names] or (
            [""] if "image_2" in names else []
        )
        for folder in folders:
            prefix = f"{folder}/" if folder else ""
            inside = self.files.listed(folder)
            if "image_2" not in inside:
                raise SourceError(f"'{self.files.shown}/{folder}' has no folder image_2")
            has = {name: name in inside for name in ("velodyne", "label_2")}
            scans = set[str]()
            if has["velodyne"]:
                scans = set(self.files.listed(f"{prefix}velodyne"))
            pictures = self.files.listed(f"{prefix}image_2")
            for name in numbers_of(pictures, ["png", "jpg"]).values():
                stem = name.rpartition(".")[0]
                labels = (f"{prefix}label_2/{stem}.txt",) if has["label_2"] else ()
                scan = (
                    (f"{prefix}velodyne/{stem}.bin",)
                    if f"{stem}.bin" in scans and self.settings.points
                    else ()
                )
                yield Clip(
                    name=f"{folder or 'frame'}-{stem}",
                    token=f"{prefix}image_2/{name}",
                    split=SPLITS.get(folder, ""),
                    files=(f"{prefix}calib/{stem}.txt", *labels, *scan),
                )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the one frame. It has no time: its number, from 1 on, takes the place of one."""
        image = clip.token
        stem = image.rpartition("/")[2].partition(".")[0]
        number = int(stem)
        numbers = read_numbers(self.files, clip.files[0])
        rect = numbers.transform(numbers.matrix("R0_rect", 3, 3), np.zeros(3))
        velo2cam, imu2velo = (
            numbers.transform(matrix[:, :3], matrix[:, 3])
            for matrix in (
                numbers.matrix("Tr_velo_to_cam", 3, 4),
                numbers.matrix("Tr_imu_to_velo", 3, 4),
            )
        )
        ego2rect = rect @ velo2cam @ imu2velo
        images = {}
        for name in self._cameras:
            projection = numbers.matrix(_CAMERAS[name], 3, 4)
            images[name] = Image(
                ref=image.replace("image_2/", f"{name}/"),
                timestamp_ns=number + 1,
                calibration=camera_calibration(projection, ego2rect),
            )
        scans = [name for name in clip.files if name.endswith(".bin")]
        lidar2ego = invert_rigid(imu2velo)
        sweeps = (
            {LIDAR: Sweep(ref=scans[0], timestamp_ns=number + 1, lidar2ego=lidar2ego)}
            if scans
            else {}
        )
        labels = [name for name in clip.files[1:] if name.endswith(".txt")]
        boxes = None
        bounds: dict[str, ImageBoxRows] = {}
        if labels:
            rect2ego = invert_rigid(ego2rect)
            where = f"file '{self.files.shown}/{labels[0]}'"
            text = read_text(self.files.read(labels[0]), where)
            rows = [line.split() for line in text.splitlines()]
            kinds = []
            numbers_read = []
            for line, row in enumerate(rows, 1):
                try:
                    values = [float(text) for text in row[1:_LABEL]]
                except ValueError as error:
                    raise SourceError(f"{where}: line {line}: {error}") from error
                if len(values) != _LABEL - 1:
                    raise SourceError(
                        f"{where}: line {line} has {len(row)} columns, wanted are {_LABEL}"
                    )
                if row[0] != _TYPE_TO_IGNORE:
                    kinds.append(row[0])
                    numbers_read.append(values[3:14])
            table = np.array(numbers_read).reshape(-1, 11)
            *sides, height, width, length, x, y, z, turn = table.T
            # The bottom centre is given, in rectified camera 0 (y down).
            centre = np.stack([x, y - height / 2, z], 1)
            cos = np.cos(turn)
            sin = np.sin(turn)
            none = np.zeros(len(kinds))
            # Columns: the box's forward, left and up, in the camera's axes right, down and forward.
            right = [cos, sin, none]
            down = [none, none, none - 1]
            ahead = [-sin, cos, none]
            axes = np.stack([*right, *down, *ahead], 1).reshape(-1, 3, 3)
            bounds["image_2"] = ImageBoxRows(
                box=np.stack(sides, 1),
                category=kinds,
                row=np.arange(len(kinds)),
            )
            boxes = BoxRows(
                centre=move_points(centre, rect2ego),
                size_lwh=np.stack([length, width, height], 1),
                rotation_wxyz=quaternions(rect2ego[:3, :3] @ axes),
                category=kinds,
            )
        yield Frame(
            timestamp_ns=number + 1,
            images=images,
            sweeps=sweeps,
            boxes=boxes,
            boxes2d=bounds,
        )

    def points(self, ref: str) -> F32:
        """Read points (P, 4) in the lidar's frame."""
        return read_points(self.files, ref)
