"""Lidar of version 2: range images of five lidars, a row each, as one cloud of points a frame.

Components are ``lidar``, ``lidar_calibration``, ``vehicle_pose`` and, for the top lidar,
``lidar_pose`` with the vehicle's pose at each pixel. What the numbers mean is as in version 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.shared.arrow import (
    check_unique,
    open_parquet,
    read_parquet,
    unique_pairs,
)
from fuelrail.sharding.sources.waymo.range_images import (
    POINT_COLUMNS,
    Inclination,
    first_returns,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32
    from fuelrail.sharding.sources.shared.files import SourceFiles

_TIME = "key.frame_timestamp_micros"
_LASER = "key.laser_name"
_IMAGE: Final = "[LiDARComponent].range_image_return1"
_PIXEL_POSES: Final = "[LiDARPoseComponent].range_image_return1"
_CALIBRATION: Final = "[LiDARCalibrationComponent]."
_POSE: Final = "[VehiclePoseComponent].world_from_vehicle.transform"
_ROWS_AT_ONCE: Final = 5
_KEYS: Final = {_TIME: pa.int64(), _LASER: pa.int64()}


def bytes_by_time(files: SourceFiles, name: str) -> dict[int, int]:
    """Return about how many bytes the points of each frame have, by its time [us], without
    reading a range image.
    """
    rows = read_parquet(files, name, _KEYS)
    where = f"table '{files.shown}/{name}'"
    pairs = unique_pairs(rows, (_TIME, _LASER), where, "time and lidar")
    with open_parquet(files, name) as file:
        total = sum(
            file.metadata.row_group(group).total_byte_size
            for group in range(file.metadata.num_row_groups)
        )
    times = dict.fromkeys(time for time, _ in pairs)
    # Of four numbers a pixel, and five a point: what compression saves, empty pixels do.
    most_bytes = total // max(len(times), 1)
    return dict.fromkeys(times, max(most_bytes, 4 * len(POINT_COLUMNS)))


def sweeps(
    files: SourceFiles,
    name: str,
    selected: Collection[int],
) -> Iterator[tuple[int, F32]]:
    """Yield the points (P, 5) of these frames, by their times [us], as the files have them; each
    file is read once.

    Lidars are in the order of their numbers. Raises SourceError for what is missing or cannot be
    read.
    """
    where = f"table '{files.shown}/{name}'"
    keys = read_parquet(files, name, _KEYS, read_whole=True)
    remaining = set(selected)
    lasers: dict[int, set[int]] = {}
    pairs = zip(keys[_TIME].tolist(), keys[_LASER].tolist(), strict=True)
    for time, laser in pairs:
        lasers.setdefault(time, set()).add(laser)
    absent = remaining - lasers.keys()
    if absent:
        raise SourceError(f"{where} has no range image at {min(absent)} us")
    # Lidar to vehicle, and inclinations, by lidar.
    calibration_name = _name_beside(name, "lidar_calibration")
    mount_column = f"{_CALIBRATION}extrinsic.transform"
    tilt = f"{_CALIBRATION}beam_inclination."
    ends = dict.fromkeys((f"{tilt}min", f"{tilt}max"), pa.float64())
    rows = read_parquet(
        files,
        calibration_name,
        {_LASER: pa.int64(), mount_column: pa.list_(pa.float64(), 16), **ends},
        read_whole=True,
    )
    check_unique(rows[_LASER].tolist(), f"table '{files.shown}/{calibration_name}'", "the lidar")
    stated: list[list[float] | None] = [None] * len(rows[_LASER])
    with open_parquet(files, calibration_name, read_whole=True) as file:
        if f"{tilt}values" in file.schema_arrow.names:
            stated = file.read([f"{tilt}values"]).column(0).to_pylist()
    low, high = (rows[end].tolist() for end in ends)
    mounts = {}
    for row, laser in enumerate(rows[_LASER].tolist()):
        inclination = Inclination(stated[row] or (), low[row], high[row])
        mount = rows[mount_column][row].reshape(4, 4)
        mounts[laser] = (mount, inclination)
    types = {_TIME: pa.int64(), _POSE: pa.list_(pa.float64(), 16)}
    poses = read_parquet(files, _name_beside(name, "vehicle_pose"), types, read_whole=True)
    matrices = poses[_POSE].reshape(-1, 4, 4)
    pose_of = dict(zip(poses[_TIME].tolist(), matrices, strict=True))
    pixel_poses = _PixelPoses(files, _name_beside(name, "lidar_pose"), remaining)
    parts: dict[int, dict[int, F32]] = {}
    for time, laser, image in _read_range_images(
        files,
        name=name,
        column=_IMAGE,
        depth=4,
        selected=remaining,
    ):
        if laser not in mounts:
            raise SourceError(f"{where} has lidar {laser}, which has no calibration")
        mount, inclination = mounts[laser]
        try:
            sweep_points = first_returns(
                image,
                inclination=inclination,
                mount=mount,
                pose=pose_of[time],
                poses=pixel_poses.read_image(time, laser),
            )
        except (ValueError, KeyError) as error:
            raise SourceError(f"{where}: lidar {laser} at {time} us: {error}") from error
        frame_parts = parts.setdefault(time, {})
        frame_parts[laser] = sweep_points
        if len(frame_parts) == len(lasers[time]):
            points_of_lasers = [points for _, points in sorted(parts.pop(time).items())]
            yield time, np.concatenate(points_of_lasers)
            remaining.discard(time)
            if not remaining:
                return


class _PixelPoses:
    """Poses of the vehicle for each pixel of the top lidar, in step with its range images."""

    def __init__(
        self,
        files: SourceFiles,
        name: str,
        selected: Collection[int],
    ) -> None:
        self._poses: dict[tuple[int, int], F32] = {}
        keys = read_parquet(files, name, _KEYS, read_whole=True)
        pairs = zip(keys[_TIME].tolist(), keys[_LASER].tolist(), strict=True)
        self._keys = set(pairs)
        self._rows = _read_range_images(
            files,
            name=name,
            column=_PIXEL_POSES,
            depth=6,
            selected=selected,
        )

    def read_image(self, time: int, laser: int) -> F32 | None:
        """Return the pixel poses of one range image; None where it has none."""
        if (time, laser) not in self._keys:
            return None
        while (time, laser) not in self._poses:
            time_read, number, poses = next(self._rows)
            self._poses[time_read, number] = poses
        return self._poses.pop((time, laser))


def _read_range_images(
    files: SourceFiles,
    name: str,
    column: str,
    depth: int,
    selected: Collection[int],
) -> Iterator[tuple[int, int, F32]]:
    """Time [us], lidar, and range image (H, W, ``depth``) of each row of these frames."""
    names = [_TIME, _LASER, f"{column}.values", f"{column}.shape"]
    where = f"table '{files.shown}/{name}'"
    selected = set(selected)
    with open_parquet(files, name, read_whole=True) as file:
        missing = [
            column_name for column_name in names if column_name not in file.schema_arrow.names
        ]
        if missing:
            raise SourceError(
                f"{where} has no column '{missing[0]}'; it has {', '.join(file.schema_arrow.names)}"
            )
        try:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=names, use_threads=False):
                for row in range(len(batch)):
                    time = batch.column(_TIME)[row].as_py()
                    laser = batch.column(_LASER)[row].as_py()
                    if int(time) not in selected:
                        continue
                    values, shape = (
                        batch.column(f"{column}.{part}")[row] for part in ("values", "shape")
                    )
                    flat: Any = np.empty(0)
                    if values.is_valid:
                        flat = values.values.to_numpy(zero_copy_only=False)
                    sides = shape.as_py() or []
                    is_image = len(sides) == 3 and sides[2] == depth
                    if not is_image or flat.size != sides[0] * sides[1] * depth:
                        raise SourceError(
                            f"{where}: lidar {laser}: a range image of {flat.size} numbers has "
                            f"the shape {sides}, wanted is H, W, {depth}"
                        )
                    image = np.asarray(flat, np.float32).reshape(sides)
                    yield int(time), int(laser), image
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{where} cannot be read: {' '.join(str(error).split())}") from error


def _name_beside(name: str, component: str) -> str:
    """Return the file of another component of the same segment."""
    folder, _, file = name.rpartition("/")
    split, slash, _ = folder.rpartition("/")
    return f"{split}{slash}{component}/{file}"
