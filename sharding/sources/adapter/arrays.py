"""Times, ego poses, calibration and motion of a clip's frames, as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import F64, I64, NUM_DIST, Geometry, Mask
from fuelrail.sharding.sources.adapter.frame import Image
from fuelrail.sharding.sources.adapter.poses import nearest_rigid

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32
    from fuelrail.sharding.sources.adapter.frame import Frame, Sensors
    from fuelrail.sharding.sources.adapter.poses import Trajectory

_MAX_SPAN_NS: Final = 3_000_000_000
"""The longest time between the two frames of a speed."""


class ClipArrays(NamedTuple):
    """What is known of a clip's F frames, N cameras and L lidars; NaN and -1 where there is
    nothing.
    """

    time_ns: I64
    ego2global: F64
    cam_time_ns: I64
    cam_ego2global: F64
    lidar_time_ns: I64
    lidar_ego2global: F64
    motion: F64
    """(F, 3, 3): velocity, acceleration and rates of ego in its own axes."""


def clip_arrays(
    sensors: Sensors,
    frames: Sequence[Frame],
    trajectory: Trajectory | None,
    *,
    has_poses: bool,
) -> ClipArrays:
    """Return times and ego poses, from the trajectory where the adapter gave none; identities
    without ``has_poses``.
    """
    time_ns = np.array([frame.timestamp_ns for frame in frames], np.int64)
    images = _list_images(frames, [camera.channel for camera in sensors.cameras])
    sweeps = [frame.sweeps.get(lidar.channel) for frame in frames for lidar in sensors.lidars]

    def poses_at(stated: list[Any], times: I64, is_there: Mask) -> F64:
        poses_found = np.full((len(stated), 4, 4), np.nan)
        if not has_poses:
            poses_found[is_there] = np.eye(4)
            return poses_found
        is_stated = np.array([pose is not None for pose in stated], np.bool_)
        if is_stated.any():
            poses_found[is_stated] = [pose for pose in stated if pose is not None]
        rest = is_there & ~is_stated
        if trajectory is not None and rest.any():
            poses_found[rest] = trajectory.at(times[rest])
        return poses_found

    def times_and_poses(entries: Sequence[Any], number: int) -> tuple[I64, F64]:
        times = np.array(
            [-1 if item is None else item.timestamp_ns for item in entries],
            np.int64,
        )
        is_there = np.array([item is not None for item in entries], np.bool_)
        poses = poses_at(
            [None if item is None else item.ego2global for item in entries],
            times,
            is_there,
        )
        shape = (len(frames), number)
        return times.reshape(shape), poses.reshape(*shape, 4, 4)

    frame_poses = poses_at(
        [frame.ego2global for frame in frames],
        time_ns,
        np.ones(len(frames), np.bool_),
    )
    # The motion that frames state, else velocities by their neighbours' poses; NaN unknown.
    num_frames = len(frames)
    motion = np.full((num_frames, 3, 3), np.nan)
    numbers = np.arange(num_frames)
    before = np.maximum(numbers - 1, 0)
    after = np.minimum(numbers + 1, num_frames - 1)
    span_ns = time_ns[after] - time_ns[before]
    with np.errstate(all="ignore"):
        place = frame_poses[:, :3, 3]
        moved = place[after] - place[before]
        speed = moved / (span_ns[:, None] * 1e-9)
        in_ego = np.einsum("fji,fj->fi", frame_poses[:, :3, :3], speed)
    usable = has_poses & (span_ns > 0) & (span_ns <= _MAX_SPAN_NS)
    motion[usable, 0] = in_ego[usable]
    for row, frame in enumerate(frames):
        motion_of_frame = (frame.ego_velocity, frame.ego_accel, frame.ego_rates)
        for number, stated in enumerate(motion_of_frame):
            if stated is not None:
                motion[row, number] = stated
    cam_time_ns, cam_ego2global = times_and_poses(images, len(sensors.cameras))
    lidar_time_ns, lidar_ego2global = times_and_poses(sweeps, len(sensors.lidars))
    return ClipArrays(
        time_ns=time_ns,
        ego2global=frame_poses,
        cam_time_ns=cam_time_ns,
        cam_ego2global=cam_ego2global,
        lidar_time_ns=lidar_time_ns,
        lidar_ego2global=lidar_ego2global,
        motion=motion,
    )


def stacked_geometry(
    where: str,
    sensors: Sensors,
    frames: Sequence[Frame],
    sizes: I32,
    is_there: Mask,
    arrays: ClipArrays,
    rows: NDArray[np.intp],
) -> Geometry:
    """Return the geometry of some frames of a clip, with an axis more in front; ``rows`` are their
    numbers.

    ``sizes`` (R, N, 2) [px] are of their images, -1 where there is none, and ``is_there`` (R, N) is
    which are members. Raises SourceError, naming ``where``.
    """
    cameras = [camera.channel for camera in sensors.cameras]
    chosen = [frames[index] for index in rows.tolist()]
    shape = (len(rows), len(cameras))
    images = _list_images(chosen, cameras)
    calibrations = [None if image is None else image.calibration for image in images]
    sweeps = [frame.sweeps.get(lidar.channel) for frame in chosen for lidar in sensors.lidars]
    dist = np.full((len(images), NUM_DIST), np.nan)
    needs = np.zeros(len(images), np.bool_)
    for index, calibration in enumerate(calibrations):
        if calibration is None:
            continue
        if calibration.dist:
            num_dist = len(calibration.dist)
            if num_dist > NUM_DIST:
                raise SourceError(f"{where}: {num_dist} lens coefficients, allowed are {NUM_DIST}")
            dist[index, :num_dist] = calibration.dist
        has_intrinsics = calibration.intrinsics is not None
        needs[index] = has_intrinsics or calibration.sensor2ego is not None

    cam2ego, camera_at = _find_unique(calibrations, "sensor2ego", 4, where)
    lidar2ego, lidar_at = _find_unique(sweeps, "lidar2ego", 4, where)
    intrinsics, intrinsics_at = _find_unique(calibrations, "intrinsics", 3, where)
    is_placed = np.asarray(np.isfinite(cam2ego).all((1, 2)))
    with np.errstate(all="ignore"):
        is_lens = (
            np.isfinite(intrinsics).all((1, 2))
            & (intrinsics[:, 0, 0] > 0)
            & (intrinsics[:, 1, 1] > 0)
        )
    is_calibrated = is_lens[intrinsics_at] & is_placed[camera_at]
    bad = needs & is_there.ravel() & ~is_calibrated
    if bad.any():
        index = int(np.argmax(bad))
        values = (
            intrinsics[intrinsics_at[index]].tolist(),
            cam2ego[camera_at[index]].tolist(),
        )
        raise SourceError(
            f"{where}: frame {rows[index // len(cameras)]}, {cameras[index % len(cameras)]}: the "
            f"camera is not calibrated: intrinsics {values[0]}, sensor2ego {values[1]}; wanted are "
            "finite numbers, and focal lengths over 0"
        )
    poses = _fit_rigid(
        where,
        cam2ego=cam2ego,
        cam_ego2global=arrays.cam_ego2global[rows],
        ego2global=arrays.ego2global[rows],
        lidar2ego=lidar2ego,
        lidar_ego2global=arrays.lidar_ego2global[rows],
    )
    poses["cam2ego"] = poses["cam2ego"][camera_at].reshape(*shape, 4, 4)
    lidar_shape = (len(rows), len(sensors.lidars), 4, 4)
    poses["lidar2ego"] = poses["lidar2ego"][lidar_at].reshape(lidar_shape)
    motion = arrays.motion[rows]
    return Geometry(
        cam_valid=is_there.astype(np.uint8),
        cam_timestamp_ns=arrays.cam_time_ns[rows],
        img_wh=sizes,
        intrinsics=intrinsics[intrinsics_at].reshape(*shape, 3, 3),
        dist=dist.reshape(*shape, NUM_DIST),
        lidar_timestamp_ns=arrays.lidar_time_ns[rows],
        ego_velocity=motion[:, 0],
        ego_accel=motion[:, 1],
        ego_rates=motion[:, 2],
        **poses,
    )


def _list_images(frames: Sequence[Frame], cameras: Sequence[str]) -> list[Image | None]:
    """Return the images of frames, frame by frame; None for those that are absent."""
    images: list[Image | None] = []
    for frame in frames:
        for name in cameras:
            image = frame.images.get(name)
            images.append(image if isinstance(image, Image) else None)
    return images


def _fit_rigid(where: str, **values: F64) -> dict[str, F64]:
    """Return transforms with exact rotations, by name; NaN stays.

    Raise SourceError for what is not a transform.
    """
    flat = np.concatenate([value.reshape(-1, 4, 4) for value in values.values()])
    is_unknown = np.isnan(flat).all((1, 2))
    known_rows = np.flatnonzero(~is_unknown)
    fitted, sound = nearest_rigid(flat[known_rows])
    ends = np.cumsum([value.size // 16 for value in values.values()])
    if not sound.all():
        place = int(np.argmin(sound))
        number = int(np.searchsorted(ends, known_rows[place], "right"))
        name = list(values)[number]
        raise SourceError(
            f"{where}: {name} is not a rotation and a translation with the last row 0 0 0 "
            f"1: {fitted[place].tolist()}"
        )
    flat[known_rows] = fitted
    parts = np.split(flat, ends[:-1])
    return {
        name: part.reshape(value.shape)
        for part, (name, value) in zip(parts, values.items(), strict=True)
    }


def _find_unique(
    items: Sequence[Any],
    name: str,
    size: int,
    where: str,
) -> tuple[F64, NDArray[np.intp]]:
    """Return the distinct matrices (U, size, size) of P items, NaN for None, and of each item its
    number (P,).
    """
    places: dict[int, int] = {}
    unique: list[Any] = [np.full((size, size), np.nan)]
    rows = np.zeros(len(items), np.intp)
    for row, item in enumerate(items):
        value = None if item is None else getattr(item, name)
        if value is not None:
            place = places.get(id(value))
            if place is None:
                array = np.asarray(value, np.float64)
                if array.shape != (size, size):
                    raise SourceError(
                        f"{where}: {name} is {list(array.shape)}, wanted [{size}, {size}]"
                    )
                place = places[id(value)] = len(unique)
                unique.append(array)
            rows[row] = place
    return np.array(unique), rows
