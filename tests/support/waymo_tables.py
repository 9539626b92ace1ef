"""Writes the synthetic world as the Parquet files of Waymo's version 2: a file a component and segment."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.waymo_files import (
    CAMERAS,
    FRONT_MOUNT,
    IMAGE_BOXES,
    INCLINATIONS,
    TOP_MOUNT,
    TYPES,
    to_camera_axes,
)

TRANSFORM = pa.list_(pa.float64(), 16)


def write_table(root, component, name, columns) -> None:
    (root / component).mkdir(parents=True, exist_ok=True)
    pq.write_table(
        pa.table(columns),
        root / component / f"{name}.parquet",
        row_group_size=7,
    )


def transforms(matrices) -> pa.Array:
    return pa.array([np.asarray(matrix).ravel().tolist() for matrix in matrices], TRANSFORM)


def box_columns(prefix, frames_boxes) -> dict[str, list[float]]:
    """Boxes in ego at the frame's pose."""
    rows = []
    for frame, box in frames_boxes:
        to_ego = np.linalg.inv(frame.ego2global)
        centre = to_ego[:3, :3] @ box.centre + to_ego[:3, 3]
        nose = to_ego[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
        rows.append([*centre, *box.size_lwh, np.arctan2(nose[1], nose[0])])
    names = (
        "center.x",
        "center.y",
        "center.z",
        "size.x",
        "size.y",
        "size.z",
        "heading",
    )
    return {
        f"{prefix}.{name}": list(values)
        for name, values in zip(names, zip(*rows, strict=True), strict=True)
    }


def write_segment(root, clip) -> None:
    """All components of a clip; rows of images are not in the order of time, as in the dataset."""
    name = clip.name
    frames = clip.frames
    segment = "key.segment_context_name"
    micros = [frame.timestamp_ns // 1000 for frame in frames]
    write_table(
        root,
        "vehicle_pose",
        name,
        {
            segment: [name] * len(frames),
            "key.frame_timestamp_micros": micros[::-1],
            "[VehiclePoseComponent].world_from_vehicle.transform": transforms(
                [frame.ego2global for frame in frames[::-1]]
            ),
        },
    )
    rows = [
        (time, camera, image)
        for camera in CAMERAS
        for time, frame in zip(micros, frames, strict=True)
        if (image := frame.images.get(camera)) is not None
    ]
    part = "[CameraImageComponent]."
    shutter = "[CameraImageComponent].rolling_shutter_params."
    seconds = [image.timestamp_ns / 1e9 for _, _, image in rows]
    write_table(
        root,
        "camera_image",
        name,
        {
            segment: [name] * len(rows),
            "key.frame_timestamp_micros": [time for time, _, _ in rows],
            "key.camera_name": pa.array([CAMERAS[camera] for _, camera, _ in rows], pa.int8()),
            f"{part}image": [image.jpeg for _, _, image in rows],
            f"{part}pose.transform": transforms([image.ego2global for _, _, image in rows]),
            f"{part}pose_timestamp": seconds,
            f"{shutter}shutter": [0.0025] * len(rows),
            f"{shutter}camera_trigger_time": [time - 0.02 for time in seconds],
            f"{shutter}camera_readout_done_time": [time + 0.025 for time in seconds],
        },
    )
    first = frames[0].images
    lens = "[CameraCalibrationComponent]."
    values = {
        name_: [image.intrinsics[index] for image in first.values()]
        for name_, index in (("f_u", (0, 0)), ("f_v", (1, 1)))
    }
    values |= {
        name_: [image.intrinsics[index] + 0.5 for image in first.values()]
        for name_, index in (("c_u", (0, 2)), ("c_v", (1, 2)))
    }
    values |= {name_: [0.01] * len(first) for name_ in ("k1", "k2", "p1", "p2", "k3")}
    write_table(
        root,
        "camera_calibration",
        name,
        {
            segment: [name] * len(first),
            "key.camera_name": [str(CAMERAS[camera]) for camera in first],
            **{f"{lens}intrinsic.{key}": column for key, column in values.items()},
            f"{lens}extrinsic.transform": transforms(
                [to_camera_axes(image.cam2ego) for image in first.values()]
            ),
            f"{lens}width": [image.size[0] for image in first.values()],
            f"{lens}height": [image.size[1] for image in first.values()],
            f"{lens}rolling_shutter_direction": pa.array([2] * len(first), pa.int8()),
        },
    )
    boxes = [(frame, box) for frame in frames for box in frame.boxes]
    for component, prefix, chosen in (
        ("lidar_box", "[LiDARBoxComponent].box", boxes),
        (
            "lidar_camera_synced_box",
            "[LiDARCameraSyncedBoxComponent].camera_synced_box",
            boxes[1:],
        ),
    ):
        write_table(
            root,
            component,
            name,
            {
                segment: [name] * len(chosen),
                "key.frame_timestamp_micros": [frame.timestamp_ns // 1000 for frame, _ in chosen],
                "key.laser_object_id": [box.track for _, box in chosen],
                **box_columns(prefix, chosen),
                "[LiDARBoxComponent].type": pa.array(
                    [TYPES[box.category] for _, box in chosen], pa.int8()
                ),
                "[LiDARBoxComponent].num_lidar_points_in_box": [
                    box.num_points for _, box in chosen
                ],
            },
        )
    marked = [
        (time, camera, *box)
        for time in micros
        for camera, camera_boxes in IMAGE_BOXES.items()
        for box in camera_boxes
    ]
    prefix = "[CameraBoxComponent]."
    write_table(
        root,
        "camera_box",
        name,
        {
            segment: [name] * len(marked),
            "key.frame_timestamp_micros": [row[0] for row in marked],
            "key.camera_name": pa.array([CAMERAS[row[1]] for row in marked], pa.int8()),
            "key.camera_object_id": [row[7] for row in marked],
            f"{prefix}type": pa.array([TYPES[row[6]] for row in marked], pa.int8()),
            **{
                f"{prefix}box.{side}": [row[index] for row in marked]
                for index, side in enumerate(("center.x", "center.y", "size.x", "size.y"), 2)
            },
        },
    )
    write_table(
        root,
        "stats",
        name,
        {
            segment: [name] * len(frames),
            "key.frame_timestamp_micros": micros,
            **{
                f"[StatsComponent].{key}": [text] * len(frames)
                for key, text in (
                    ("time_of_day", "Day"),
                    ("location", "location_phx"),
                    ("weather", "sunny"),
                )
            },
        },
    )


def write_lidar(root, clip) -> None:
    """The components of lidar, of what `waymo_files.add_sweep` gave the frames; rows are in no order."""
    name = clip.name
    segment = "key.segment_context_name"
    rows = [
        (frame.timestamp_ns // 1000, number, *images)
        for frame in clip.frames
        for number, images in frame.range_images.items()
    ][::-1]
    part = "[LiDARComponent].range_image_return1"
    write_table(
        root,
        "lidar",
        name,
        {
            segment: [name] * len(rows),
            "key.frame_timestamp_micros": [row[0] for row in rows],
            "key.laser_name": pa.array([row[1] for row in rows], pa.int8()),
            f"{part}.values": pa.array(
                [row[2].ravel().tolist() for row in rows],
                pa.list_(pa.float32()),
            ),
            f"{part}.shape": pa.array([list(row[2].shape) for row in rows], pa.list_(pa.int32())),
        },
    )
    rows = [row for row in rows if row[3] is not None]
    part = "[LiDARPoseComponent].range_image_return1"
    write_table(
        root,
        "lidar_pose",
        name,
        {
            segment: [name] * len(rows),
            "key.frame_timestamp_micros": [row[0] for row in rows],
            "key.laser_name": pa.array([row[1] for row in rows], pa.int8()),
            f"{part}.values": pa.array(
                [row[3].ravel().tolist() for row in rows],
                pa.list_(pa.float32()),
            ),
            f"{part}.shape": pa.array([list(row[3].shape) for row in rows], pa.list_(pa.int32())),
        },
    )
    part = "[LiDARCalibrationComponent]."
    write_table(
        root,
        "lidar_calibration",
        name,
        {
            segment: [name] * 2,
            "key.laser_name": pa.array([1, 2], pa.int8()),
            f"{part}extrinsic.transform": transforms([TOP_MOUNT, FRONT_MOUNT]),
            f"{part}beam_inclination.min": [-0.4, -0.4],
            f"{part}beam_inclination.max": [0.2, 0.2],
            f"{part}beam_inclination.values": pa.array(
                [list(INCLINATIONS), None], pa.list_(pa.float64())
            ),
        },
    )
