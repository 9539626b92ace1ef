"""The synthetic world as the tables of a manifest: wide or long, in Parquet, JSON lines or CSV."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from typing import TYPE_CHECKING, Any

import av
import numpy as np
import pyarrow as pa
import simplejpeg
from pyarrow import parquet
from scipy.spatial.transform import Rotation

if TYPE_CHECKING:
    from pathlib import Path

    from support.source_world import World


def write_table(root: Path, stem: str, rows: list[dict[str, Any]], form: str) -> None:
    """Write a table; rows without a column have null there."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    full = [{name: row.get(name) for name in names} for row in rows]
    path = root / f"{stem}.{form}"
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(full), path, row_group_size=3)
    elif form == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in full))
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(full)


def pose_columns(prefix: str, matrix: np.ndarray, form: str, order: str = "wxyz") -> dict[str, Any]:
    """A pose as a matrix; in CSV as seven numbers; for JSON lines as a translation and a quaternion."""
    x, y, z, w = Rotation.from_matrix(matrix[:3, :3]).as_quat().tolist()
    if form == "csv":
        values = dict(zip(("tx", "ty", "tz"), matrix[:3, 3].tolist(), strict=True))
        values.update(qw=w, qx=x, qy=y, qz=z)
        return {f"{prefix}.{name}": value for name, value in values.items()}
    if form == "jsonl":
        q = [w, x, y, z] if order == "wxyz" else [x, y, z, w]
        return {f"{prefix}.t": matrix[:3, 3].tolist(), f"{prefix}.q_{order}": q}
    return {prefix: matrix.ravel().tolist()}


def camera_columns(prefix: str, image: Any, form: str, pose: str) -> dict[str, Any]:
    k = image.intrinsics
    pinhole = {
        name: k[place]
        for name, place in (
            ("fx", (0, 0)),
            ("fy", (1, 1)),
            ("cx", (0, 2)),
            ("cy", (1, 2)),
        )
    }
    columns = {"intrinsics": k.tolist()} if form == "jsonl" else {"intrinsics": k.ravel().tolist()}
    columns = pinhole if form == "csv" else columns
    return {
        **{f"{prefix}{name}": value for name, value in columns.items()},
        **pose_columns(prefix + pose, image.cam2ego, form),
    }


def write_files(world: World, root: Path, paths: str) -> dict[tuple[str, int, str], str]:
    """Write images and sweeps as files, ranges of one file, or members of a tar; return the path of each."""
    file_paths: dict[tuple[str, int, str], str] = {}
    tar = tarfile.open(root / "data.tar", "w") if paths == "tar" else None  # noqa: SIM115
    blobs = {"jpg": io.BytesIO(), "npy": io.BytesIO()}
    for clip, number, frame in world.frames():
        data = {name: (image.jpeg, "jpg") for name, image in frame.images.items()}
        for name, sweep in frame.sweeps.items():
            buffer = io.BytesIO()
            np.save(buffer, sweep.points)
            data[name] = (buffer.getvalue(), "npy")
        for name, (content, extension) in data.items():
            file = f"{clip.name}/{name}/{number}.{extension}"
            path = file
            if tar is not None:
                info = tarfile.TarInfo(file)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
                path = f"tar:data.tar#{file}"
            elif paths == "range":
                blob = blobs[extension]
                path = f"blob.{extension}#{blob.tell()}+{len(content)}"
                blob.write(content)
            else:
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).write_bytes(content)
            file_paths[clip.name, number, name] = path
    if tar is not None:
        tar.close()
    for extension, blob in blobs.items():
        if blob.tell():
            (root / f"blob.{extension}").write_bytes(blob.getvalue())
    return file_paths


def box_rows(frame: Any) -> list[dict[str, Any]]:
    """Return the boxes of a frame in global, as rows."""
    return [
        {
            **dict(zip(("x", "y", "z"), box.centre.tolist(), strict=True)),
            **dict(
                zip(
                    ("length", "width", "height"),
                    box.size_lwh.tolist(),
                    strict=True,
                )
            ),
            "yaw": box.yaw,
            "category": box.category,
            "track": box.track,
            "num_lidar_pts": box.num_points,
        }
        for box in frame.boxes
    ]


def write_wide(world: World, root: Path, form: str, paths: str = "file") -> str:
    """One row a frame; boxes in a column, in CSV in a table."""
    named = write_files(world, root, paths)
    rows = []
    boxes = []
    for clip, number, frame in world.frames():
        row: dict[str, Any] = {
            "clip_id": clip.name,
            "timestamp_ns": frame.timestamp_ns,
            "weather_code": number,
        }
        row.update(pose_columns("ego2global", frame.ego2global, form))
        for name, image in frame.images.items():
            prefix = f"cam.{name}."
            row[f"{prefix}path"] = named[clip.name, number, name]
            row[f"{prefix}timestamp_us"] = image.timestamp_ns // 1000
            row.update(camera_columns(prefix, image, form, "cam2ego"))
            row.update(pose_columns(f"{prefix}ego2global", image.ego2global, form, "xyzw"))
        for name, sweep in frame.sweeps.items():
            row[f"lidar.{name}.path"] = named[clip.name, number, name]
            row.update(pose_columns(f"lidar.{name}.lidar2ego", sweep.lidar2ego, form))
        if form == "csv":
            boxes += [
                {
                    "clip_id": clip.name,
                    "timestamp_ns": frame.timestamp_ns,
                    **box,
                }
                for box in box_rows(frame)
            ]
        else:
            row["boxes"] = box_rows(frame)
        rows.append(row)
    write_table(root, "frames", rows, form)
    if boxes:
        write_table(root, "boxes", boxes, form)
    return str(root)


def write_long(world: World, root: Path, form: str) -> str:
    """One row a file, a sensor, a pose and a box, in no order of time."""
    named = write_files(world, root, "file")
    data = []
    calibration = {}
    poses = {}
    boxes = []
    for clip, number, frame in world.frames():
        poses[clip.name, frame.timestamp_ns] = frame.ego2global
        for name, sensor in {**frame.images, **frame.sweeps}.items():
            file = {
                "path": named[clip.name, number, name],
                "timestamp_ns": sensor.timestamp_ns,
            }
            data.append({"clip_id": clip.name, "sensor": name, **file})
            poses[clip.name, sensor.timestamp_ns] = sensor.ego2global
            if name in frame.images:
                columns = camera_columns("", sensor, form, "sensor2ego")
            else:
                columns = pose_columns("sensor2ego", sensor.lidar2ego, form)
            calibration[name] = {"sensor": name, **columns}
        boxes += [
            {"clip_id": clip.name, "timestamp_ns": frame.timestamp_ns, **box}
            for box in box_rows(frame)
        ]
    by_clip = sorted(
        range(len(data)),
        key=lambda index: (data[index]["clip_id"], data[index]["path"][::-1]),
    )
    write_table(root, "sensor_data", [data[index] for index in by_clip], form)
    write_table(root, "calibration", list(calibration.values()), form)
    write_table(root, "boxes", boxes, form)
    write_table(
        root,
        "ego_pose",
        [
            {
                "clip_id": clip,
                "timestamp_ns": time,
                **pose_columns("ego2global", pose, form),
            }
            for (clip, time), pose in poses.items()
        ],
        form,
    )
    return str(root)


GROUPS = {
    "g": "4",
    "bf": "2",
    "preset": "veryfast",
    "x264-params": "scenecut=0",
}


def write_video(path: Path, pictures, container=None, options=None) -> None:
    """Encode RGB pictures, with times that are not those of the table."""
    with av.open(str(path), "w", format=container) as file:
        stream = file.add_stream("libx264", rate=10, options=options or GROUPS)
        stream.height, stream.width, stream.pix_fmt = (
            *pictures[0].shape[:2],
            "yuv420p",
        )
        for number, picture in enumerate(pictures):
            frame = av.VideoFrame.from_ndarray(picture, "rgb24")
            frame.pts = number
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def as_video(world, root: Path, stem: str) -> None:
    """Put the images of a written world into a video of each clip and camera, and rewrite the paths."""
    for clip in world.clips:
        for name in world.cameras:
            pictures = [simplejpeg.decode_jpeg(frame.images[name].jpeg) for frame in clip.frames]
            write_video(root / f"{clip.name}-{name}.mp4", pictures)
            for number in range(len(pictures)):
                (root / clip.name / name / f"{number}.jpg").unlink()
    table = root / f"{stem}.jsonl"
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    for row in rows:
        for column, path in row.items():
            if column.endswith("path") and path.endswith(".jpg"):
                clip, camera, file = path.split("/")
                row[column] = f"{clip}-{camera}.mp4#frame={file.removesuffix('.jpg')}"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
