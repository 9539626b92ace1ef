"""Writes the synthetic world as KITTI's raw drives, and as frames of its object benchmark."""

from __future__ import annotations

import cv2
import numpy as np
from scipy.spatial.transform import Rotation

from support.source_world import OPTICAL, SPEED_MPS, ego_at, turn

EARTH_M = 6378137.0
ORIGIN = 49.0, 8.4
RECT = Rotation.from_euler("xyz", [0.01, -0.02, 0.005]).as_matrix()
FIRST = "2011_09_26"


def as_kitti(world):
    """Make the world one that the format has: PNG, cameras side by side, global at the first row of oxts."""
    for number, clip in enumerate(world.clips):
        clip.name = f"{FIRST}_drive_{number + 1:04d}_sync"
        origin = ego_at(number, oxts_times(clip)[0])[:3, 3]
        for frame in clip.frames:
            for camera_number, image in enumerate(frame.images.values()):
                image.jpeg = cv2.imencode(
                    ".png", cv2.imdecode(np.frombuffer(image.jpeg, np.uint8), 1)
                )[1].tobytes()
                image.cam2ego = np.eye(4)
                image.cam2ego[:3, :3], image.cam2ego[:3, 3] = (
                    turn(0.01, "y") @ OPTICAL,
                    (1.1, 0.3 - camera_number * 0.54, 0.8),
                )
            for record in (
                frame,
                *frame.images.values(),
                *frame.sweeps.values(),
            ):
                record.ego2global = shifted(record.ego2global, origin)
            for sweep in frame.sweeps.values():
                sweep.points = sweep.points[:, :4]
            for box in frame.boxes:
                box.centre = box.centre - origin
                box.category = {"car": "Car", "pedestrian": "Pedestrian"}[box.category]
    return world


def shifted(pose, origin) -> np.ndarray:
    moved = pose.copy()
    moved[:3, 3] -= origin
    return moved


def oxts_times(clip) -> list[int]:
    """A row of oxts for each time at which a sensor measures, so that none is interpolated."""
    return sorted(
        {record.timestamp_ns for frame in clip.frames for record in (frame, *frame.images.values())}
    )


def write_lines(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))


def stamps(times) -> list[str]:
    return [str(np.datetime64(time, "ns")).replace("T", " ") for time in times]


def numbers(values) -> str:
    return " ".join(f"{value:.14e}" for value in np.asarray(values, float).ravel())


def chain(frame) -> dict[str, np.ndarray]:
    """The calibration: T_imu2velo, T_velo2cam (not rectified), and P_rect of each camera."""
    (sweep,) = frame.sweeps.values()
    rect = np.eye(4)
    rect[:3, :3] = RECT
    first2ego = next(iter(frame.images.values())).cam2ego @ np.array(
        [[1, 0, 0, -0.06], [0, 1, 0, 0], [0, 0, 1, -0.003], [0, 0, 0, 1]]
    )
    transforms = {
        "imu2velo": np.linalg.inv(sweep.lidar2ego),
        "velo2cam": np.linalg.inv(rect) @ np.linalg.inv(first2ego) @ sweep.lidar2ego,
    }
    for name, image in frame.images.items():
        cam0_to_cam = np.linalg.inv(image.cam2ego) @ first2ego
        transforms[name] = np.concatenate(
            [image.intrinsics, image.intrinsics @ cam0_to_cam[:3, 3:]], 1
        )  # side by side
    return transforms


def write_drive(root, number, clip) -> None:
    """One drive with its own folder of the date, and the calibration of the date."""
    date = root / FIRST
    drive = date / clip.name
    parts = chain(clip.frames[0])
    write_lines(
        date / "calib_cam_to_cam.txt",
        [
            "calib_time: 09-Jan-2012 13:57:47",
            f"R_rect_00: {numbers(RECT)}",
            *(f"P_rect_{name[-2:]}: {numbers(parts[name])}" for name in clip.frames[0].images),
        ],
    )
    for name, key in (
        ("calib_velo_to_cam", "velo2cam"),
        ("calib_imu_to_velo", "imu2velo"),
    ):
        rows = (
            f"R: {numbers(parts[key][:3, :3])}",
            f"T: {numbers(parts[key][:3, 3])}",
        )
        write_lines(date / f"{name}.txt", ["calib_time: 25-May-2012 16:47:16", *rows])
    write_oxts(drive / "oxts", number, oxts_times(clip))
    for name in clip.frames[0].images:
        write_lines(
            drive / name / "timestamps.txt",
            stamps(frame.images[name].timestamp_ns for frame in clip.frames),
        )
    write_lines(
        drive / "velodyne_points" / "timestamps.txt",
        stamps(frame.timestamp_ns for frame in clip.frames),
    )
    for frame_index, frame in enumerate(clip.frames):
        files = {
            f"{name}/data/{frame_index:010d}.png": image.jpeg
            for name, image in frame.images.items()
        }
        for sweep in frame.sweeps.values():
            files[f"velodyne_points/data/{frame_index:010d}.bin"] = sweep.points.astype(
                "<f4"
            ).tobytes()
        for name, data in files.items():
            (drive / name).parent.mkdir(parents=True, exist_ok=True)
            (drive / name).write_bytes(data)
    (drive / "tracklet_labels.xml").write_text(tracklets(clip))


def write_oxts(folder, number, times) -> None:
    """Rows whose Mercator projection, scaled at the first one, is the world's drive."""
    origin = ego_at(number, times[0])[:3, 3]
    scale = np.cos(np.radians(ORIGIN[0])) * EARTH_M
    north = scale * np.log(np.tan(np.radians(90 + ORIGIN[0]) / 2))
    for row, time in enumerate(times):
        pose = ego_at(number, time)
        x, y, z = pose[:3, 3] - origin
        yaw, pitch, roll = Rotation.from_matrix(pose[:3, :3]).as_euler("ZYX")
        latitude = np.degrees(2 * np.arctan(np.exp((north + y) / scale))) - 90
        forward = pose[:3, 0] * SPEED_MPS
        values = [
            latitude,
            ORIGIN[1] + np.degrees(x / scale),
            116 + z,
            roll,
            pitch,
            yaw,
            forward[1],
            forward[0],
            SPEED_MPS,
            0,
            forward[2],
            *[0] * 8,
            0.2,
            *[0] * 10,
        ]
        write_lines(
            folder / "data" / f"{row:010d}.txt",
            [" ".join(repr(float(value)) for value in values)],
        )
    write_lines(folder / "timestamps.txt", stamps(times))


def tracklets(clip) -> str:
    """Boxes in the lidar's frame, on their bottoms; those of one track in one item."""
    items = []
    for track in range(len(clip.frames[0].boxes)):
        poses = []
        for frame in clip.frames:
            box = frame.boxes[track]
            (sweep,) = frame.sweeps.values()
            to_lidar = np.linalg.inv(sweep.ego2global @ sweep.lidar2ego)
            x, y, z = to_lidar[:3, :3] @ box.centre + to_lidar[:3, 3]
            nose = to_lidar[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
            values = {
                "tx": x,
                "ty": y,
                "tz": z - box.size_lwh[2] / 2,
                "rx": 0,
                "ry": 0,
                "rz": np.arctan2(nose[1], nose[0]),
            }
            poses.append(
                "".join(
                    f"<{tag}>{value!r}</{tag}>"
                    for tag, value in ((tag, float(value)) for tag, value in values.items())
                )
            )
        length, width, height = box.size_lwh
        items.append(
            f"<item><objectType>{box.category}</objectType><h>{height}</h><w>{width}</w><l>{length}</l>"
            f"<first_frame>0</first_frame><poses><count>{len(poses)}</count>"
            + "".join(f"<item>{pose}</item>" for pose in poses)
            + "</poses></item>"
        )
    return f"<boost_serialization><tracklets><count>{len(items)}</count>{''.join(items)}</tracklets></boost_serialization>"  # noqa: E501


def write_object(root, number, frame) -> None:
    """One frame of the object benchmark."""
    parts = chain(frame)
    first2ego = np.linalg.inv(
        np.block([[RECT, np.zeros((3, 1))], [0, 0, 0, 1]]) @ parts["velo2cam"] @ parts["imu2velo"]
    )
    rows = [f"P{index}: {numbers(parts[name])}" for index, name in enumerate(frame.images, 2)]
    rows += [
        f"R0_rect: {numbers(RECT)}",
        f"Tr_velo_to_cam: {numbers(parts['velo2cam'][:3])}",
    ]
    rows += [f"Tr_imu_to_velo: {numbers(parts['imu2velo'][:3])}"]
    write_lines(root / "calib" / f"{number:06d}.txt", rows)
    for index, image in enumerate(frame.images.values(), 2):
        (root / f"image_{index}").mkdir(parents=True, exist_ok=True)
        (root / f"image_{index}" / f"{number:06d}.png").write_bytes(image.jpeg)
    (root / "velodyne").mkdir(parents=True, exist_ok=True)
    for sweep in frame.sweeps.values():
        (root / "velodyne" / f"{number:06d}.bin").write_bytes(sweep.points.astype("<f4").tobytes())
    labels = ["DontCare -1 -1 -10 503 169 590 190 -1 -1 -1 -1000 -1000 -1000 -10"]
    to_rect = np.linalg.inv(frame.ego2global @ first2ego)
    for index, box in enumerate(frame.boxes):
        x, y, z = to_rect[:3, :3] @ box.centre + to_rect[:3, 3]
        nose = to_rect[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
        length, width, height = box.size_lwh
        values = (
            height,
            width,
            length,
            x,
            y + height / 2,
            z,
            np.arctan2(-nose[2], nose[0]),
        )
        labels.append(f"{box.category} 0 0 0 {index} 2.5 {index + 3} 4.25 {numbers(values)}")
    write_lines(root / "label_2" / f"{number:06d}.txt", labels)
