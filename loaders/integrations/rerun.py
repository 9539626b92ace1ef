"""A clip as a recording of Rerun (https://rerun.io): cameras, boxes, lidar points and the vehicle's
path over time.

``fuelrail view DATASET --rerun clip.rrd`` and ``rerun clip.rrd``, or from Python::

    record_clip("DATASET", "scene-0103-000004", "clip.rrd")

Needs the extra ``viewer``. Entities: ``world/ego`` moves with the vehicle; below it are each camera
with its stored image, ``lidar``, and ``boxes``; ``world/path`` is the whole way. The world's origin
is the first frame's ego, so that float32, which Rerun draws with, has no large coordinates.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.rigid import invert_rigid, move_points
from fuelrail.pipeline.settings import Settings, flag

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import F64
    from fuelrail.pipeline.sample.schema import Sample


_BLUE = np.array([60, 90, 200])
_YELLOW = np.array([250, 220, 60])
"""Colours of points on the ground and three metres above it."""


class RecordOptions(Settings, frozen=True, kw_only=True):
    """Options of ``fuelrail view`` for a recording."""

    rerun: Annotated[
        str | None,
        flag(
            (
                "write the sample's whole clip for Rerun instead of a picture: open it with "
                "`rerun FILE`"
            ),
            metavar="FILE.rrd",
        ),
    ] = None


class RecordReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was recorded."""

    clip_id: str
    num_frames: int
    num_images: int
    num_boxes: int
    num_points: int

    def as_text(self) -> str:
        """Return a line on what was recorded."""
        return (
            f"clip {self.clip_id}: {self.num_frames} frames, {self.num_images} images, "
            f"{self.num_boxes:,} boxes, {self.num_points:,} points"
        )


def record_clip(
    dataset: str | os.PathLike[str],
    key: str | None,
    output: str | os.PathLike[str],
) -> RecordReport:
    """Write the clip of a sample (None: of the first one) to an ``.rrd`` file; frames in their
    order.

    Images are as stored: where a lens bends lines, boxes and image differ by that. Raises
    ConfigError without rerun-sdk or where the file cannot be written, and DatasetErrors for samples
    that cannot be read.
    """
    with needs("a recording", "fuelrail[viewer]"):
        import rerun as rr
    opened = open_dataset(dataset)
    reader = SampleReader(opened)
    clip_ids = opened.index.texts("clip_id").to_numpy(zero_copy_only=False)
    frames = opened.index.column("frame")
    clip_id = clip_ids[0 if key is None else reader.find(key)]
    rows = np.flatnonzero(clip_ids == clip_id)
    rows = rows[np.argsort(frames[rows], kind="stable")]
    recording = rr.RecordingStream(
        "fuelrail", recording_id=f"{opened.manifest.fingerprint}-{clip_id}"
    )
    try:
        recording.save(str(output))
    except Exception as error:  # rerun has no class of its own
        raise ConfigError(f"output '{output}' cannot be written: {error}") from error
    names = [(number, name) for number, name in enumerate(opened.manifest.classes)]
    recording.log(
        "world",
        rr.ViewCoordinates.RIGHT_HAND_Z_UP,
        rr.AnnotationContext(names),
        static=True,
    )
    origin: F64 | None = None
    path = []
    counts = np.zeros(3, np.int64)
    cameras = [camera.channel for camera in opened.manifest.cameras]
    for row in rows.tolist():
        sample = reader.sample(row)
        ego2global = sample.geometry.ego2global
        if origin is None:
            origin = invert_rigid(ego2global)
        ego2world = origin @ ego2global
        path.append(ego2world[:3, 3])
        recording.set_time("time", timestamp=np.datetime64(sample.meta.timestamp_ns, "ns"))
        recording.set_time("frame", sequence=sample.meta.frame_idx)
        recording.log(
            "world/ego",
            rr.Transform3D(translation=ego2world[:3, 3], mat3x3=ego2world[:3, :3]),
        )
        counts += _log_sample(rr, recording, sample, cameras)
    recording.log("world/path", rr.LineStrips3D([np.array(path)]), static=True)
    recording.flush()
    recording.disconnect()
    images, boxes, points = counts.tolist()
    return RecordReport(
        clip_id=clip_id,
        num_frames=len(rows),
        num_images=images,
        num_boxes=boxes,
        num_points=points,
    )


def _log_sample(
    rr: Any,
    recording: Any,
    sample: Sample,
    cameras: list[str],
) -> tuple[int, int, int]:
    """Log images, boxes and points of one sample, in ego; return the number of each."""
    geometry = sample.geometry
    cam2keyego = geometry.cam2keyego()
    for number, channel in enumerate(cameras):
        place = f"world/ego/{channel}"
        if channel not in sample.images:
            recording.log(place, rr.Clear(recursive=True))
            continue
        cam2ego = cam2keyego[number]
        image = bytes(sample.images[channel])
        recording.log(
            place,
            rr.Transform3D(translation=cam2ego[:3, 3], mat3x3=cam2ego[:3, :3]),
            rr.Pinhole(
                image_from_camera=geometry.intrinsics[number],
                resolution=geometry.img_wh[number],
                camera_xyz=rr.ViewCoordinates.RDF,
            ),
            rr.EncodedImage(
                contents=image,
                media_type="image/png" if image[:4] == b"\x89PNG" else "image/jpeg",
            ),
        )
    boxes = sample.boxes
    if boxes is not None:
        recording.log(
            "world/ego/boxes",
            rr.Boxes3D(
                centers=boxes.boxes3d[:, :3],
                sizes=boxes.boxes3d[:, 3:6],
                quaternions=boxes.rotation_wxyz[:, [1, 2, 3, 0]],
                class_ids=np.maximum(boxes.label, 0),
            ),
        )
    points = np.zeros((0, 3))
    if sample.points:
        lidar2ego = geometry.lidar2ego[0]
        sweep = next(iter(sample.points.values()))
        xyz = sweep[:, :3].astype(np.float64)
        points = move_points(xyz, lidar2ego)
    heights = points[:, 2:3]
    share = np.clip((heights + 0.5) / 3.5, 0.0, 1.0)
    colours = _BLUE + share * (_YELLOW - _BLUE)
    recording.log(
        "world/ego/lidar",
        rr.Points3D(points, colors=colours.astype(np.uint8), radii=0.03),
    )
    return (
        len(sample.images),
        0 if boxes is None else len(boxes.boxes3d),
        len(points),
    )
