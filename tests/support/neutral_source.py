"""The world in a format of the tests' own, and its adapter: JSON, images as files or as ranges of one, and `.npy`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np

from fuelrail.sharding.sources.adapter.frame import (
    Absent,
    BoxRows,
    Calibration,
    Clip,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.poses import Trajectory
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource


def install_plugin(folder: Path, name: str, place: str, group: str = "fuelrail.sources") -> None:
    """Make what `pip install` leaves of a plug-in, in a folder that is on the path."""
    info = folder / f"{name}_source-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-source\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {place}\n")


def write_neutral(world, root: Path) -> str:
    """Write the world; images both as files and one after the other in ``blob.bin``."""
    blob = (root / "blob.bin").open("wb")
    offset = 0
    clips = []
    for clip in world.clips:
        rows = []
        for number, frame in enumerate(clip.frames):
            images = {}
            for name, image in frame.images.items():
                file = f"{clip.name}/{name}/{number}.jpg"
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                (root / file).write_bytes(image.jpeg)
                blob.write(image.jpeg)
                images[name] = {
                    "file": file,
                    "range": f"blob.bin#{offset}+{len(image.jpeg)}",
                    "t": image.timestamp_ns,
                    "k": image.intrinsics.tolist(),
                    "cam2ego": image.cam2ego.tolist(),
                    "pose": image.ego2global.tolist(),
                    "size": image.size,
                    "bytes": len(image.jpeg),
                }
                offset += len(image.jpeg)
            sweeps = {}
            for name, sweep in frame.sweeps.items():
                file = f"{clip.name}/{name}-{number}.npy"
                np.save(root / file, sweep.points)
                sweeps[name] = {
                    "file": file,
                    "t": sweep.timestamp_ns,
                    "lidar2ego": sweep.lidar2ego.tolist(),
                }
            boxes = [
                [
                    box.centre.tolist(),
                    box.size_lwh.tolist(),
                    box.yaw,
                    box.category,
                    box.track,
                    box.num_points,
                ]
                for box in frame.boxes
            ]
            rows.append(
                {
                    "t": frame.timestamp_ns,
                    "pose": frame.ego2global.tolist(),
                    "images": images,
                    "sweeps": sweeps,
                    "boxes": boxes,
                }
            )
        clips.append({"name": clip.name, "frames": rows})
    blob.close()
    rig = {"cameras": list(world.cameras), "lidars": list(world.lidars)}
    (root / "world.json").write_text(json.dumps({"rig": rig, "clips": clips}))
    return str(root)


class NeutralSettings(FrameSettings, frozen=True, kw_only=True):
    images: Annotated[
        Literal["file", "range", "made"],
        msgspec.Meta(description="where images come from"),
    ] = "file"
    sizes: Annotated[bool, msgspec.Meta(description="state the size of images")] = False


class Neutral(FrameSource[NeutralSettings]):
    """The tests' own format."""

    kind = "neutral"
    settings_type = NeutralSettings
    ego_origin = "rear_axle_ground"
    num_made = 0

    def _world(self):
        return json.loads(self.files.read("world.json"))

    def sensors(self):
        rig = self._world()["rig"]
        return Sensors.from_names(
            rig["cameras"],
            dict.fromkeys(rig["lidars"], ("x", "y", "z", "intensity", "ring")),
        )

    def clips(self):
        for clip in self._world()["clips"]:
            yield Clip(name=clip["name"])

    def poses(self, clip):
        rows = self._rows(clip)
        pose_by_time = {row["t"]: row["pose"] for row in rows}
        for row in rows:
            pose_by_time.update(
                (image["t"], image["pose"]) for image in row["images"].values() if image
            )
        return Trajectory(
            sorted(pose_by_time),
            np.array([pose_by_time[time] for time in sorted(pose_by_time)]),
            f"poses of {clip.name}",
        )

    def _rows(self, clip):
        return next(
            entry["frames"] for entry in self._world()["clips"] if entry["name"] == clip.name
        )

    def frames(self, clip):
        for row in self._rows(clip):
            images = {}
            for name, image in row["images"].items():
                if not image:
                    images[name] = Absent("no message")
                    continue
                is_made = self.settings.images == "made"
                size = image["size"] if self.settings.sizes or is_made else (0, 0)
                images[name] = Image(
                    ref=image["file" if is_made else self.settings.images],
                    timestamp_ns=image["t"],
                    calibration=Calibration(
                        intrinsics=np.array(image["k"]),
                        sensor2ego=np.array(image["cam2ego"]),
                    ),
                    extension="jpg",
                    width=size[0],
                    height=size[1],
                    made=is_made,
                    num_bytes=1000 if is_made else None,
                )
            boxes = None
            if row["boxes"] is not None:
                columns = list(zip(*row["boxes"], strict=True)) or [()] * 6
                boxes = BoxRows(
                    centre=columns[0],
                    size_lwh=columns[1],
                    yaw=columns[2],
                    category=columns[3],
                    track=columns[4],
                    num_lidar_pts=columns[5],
                    in_global=True,
                )
            sweeps = {
                name: Sweep(
                    ref=sweep["file"],
                    timestamp_ns=sweep["t"],
                    lidar2ego=np.array(sweep["lidar2ego"]),
                )
                for name, sweep in row["sweeps"].items()
            }
            yield Frame(timestamp_ns=row["t"], images=images, sweeps=sweeps, boxes=boxes)

    def points(self, ref):
        return np.load(Path(self.files.path(ref)))

    def make_images(self, refs):
        for ref in sorted(refs):  # another order than the table's
            Neutral.num_made += 1
            yield ref, self.files.read(ref)


class NeutralByClip(Neutral):
    """The tests' own format, read clip by clip."""

    kind = "neutral_by_clip"
    reads = "clip"


class NeutralWithoutPoses(Neutral):
    """The tests' own format, without ego poses."""

    kind = "neutral_without_poses"
    has_poses = False
