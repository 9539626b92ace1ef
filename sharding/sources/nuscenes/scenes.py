"""What the kinds with nuScenes' tables share, and how a scene's rows of the tables become frames."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import Absent, Frame, Image, Sweep
from fuelrail.sharding.sources.adapter.source import FrameSource, S
from fuelrail.sharding.sources.nuscenes.extras.boxes2d import ImageBoxes
from fuelrail.sharding.sources.nuscenes.extras.radar import RadarFiles
from fuelrail.sharding.sources.nuscenes.geometry import NS_PER_US
from fuelrail.sharding.sources.shared.points import parse_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.sources.nuscenes.extras.groups import Group
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows, SensorRow

POINT_COLUMNS: Final = ("x", "y", "z", "intensity", "ring")
NOT_VALID: Final = "marked as not valid"
"""Why there is no image or sweep where the tables say so."""
_POINT_FILES: Final = (".bin", ".npy", ".pcd")
_NOT_STATED: Final = (np.nan, np.nan, np.nan)


class TableSource(FrameSource[S]):
    """A source of nuScenes' tables."""

    ego_origin = "rear_axle_ground"

    def points(self, ref: str) -> NDArray[np.float32]:
        """Read a sweep: rows of five float32, ``.npy``, or PCD with these columns; or a radar's."""
        if ref.startswith("{"):
            return msgspec.json.decode(ref, type=RadarFiles).points(self.files.read)
        return parse_points(self.files.read(ref), POINT_COLUMNS, f"lidar file '{self.files.shown}/{ref}'")


def scene_frames(rows: SceneRows, groups: Sequence[Group]) -> Iterator[Frame]:
    """Yield the frames of a scene, with the members of ``groups``; raises SourceError."""
    cameras = [name.lower() for name in rows.keyframes.cameras]
    for at, (token, own) in enumerate(zip(rows.tokens, rows.sensors, strict=True)):
        if rows.poses[at] < 0:
            raise SourceError(f"table 'sample': row '{token}' has no sensor data at all")
        images: dict[str, Image | Absent] = {
            name: Absent("no row") if row is None else image_of(row, stays=True)
            for name, row in zip(cameras, own, strict=False)
        }
        yield Frame(
            timestamp_ns=rows.timestamp_us[at] * NS_PER_US,
            images=images,
            ego2global=rows.ego2global[at],
            sweeps={n.lower(): sweep_of(_checked(row)) for n, row in rows.of_sample(at, rows.keyframes.lidars)},
            boxes=rows.boxes[at],
            boxes2d={k: v for one in groups if isinstance(one, ImageBoxes) for k, v in one.boxes2d(rows, at).items()},
            members=[member for group in groups for member in group.members(rows, at)],
            token=token,
            ego_velocity=_NOT_STATED,
        )


def image_of(row: SensorRow, folder: str = "", *, stays: bool) -> Image:
    """Return the image of a row, whose file is below ``folder``; ``stays`` as :class:`Image` has it."""
    one = row.calibration
    return Image(
        ref=f"{folder}{row.filename}", timestamp_ns=row.timestamp_ns, intrinsics=one.intrinsics,
        cam2ego=one.sensor2ego, ego2global=row.ego2global, width=row.width, height=row.height, dist=one.dist,
        dist_model=one.dist_model, token=row.token, absent="" if row.is_valid else NOT_VALID, stays=stays,
    )  # fmt: skip


def sweep_of(row: SensorRow, folder: str = "") -> Sweep:
    """Return the sweep of a row, whose file is below ``folder``."""
    return Sweep(
        ref=f"{folder}{row.filename}", timestamp_ns=row.timestamp_ns, lidar2ego=row.calibration.sensor2ego,
        ego2global=row.ego2global, absent="" if row.is_valid else NOT_VALID,
    )  # fmt: skip


def _checked(row: SensorRow) -> SensorRow:
    """Return the row of a lidar; raise SourceError for a file of a kind that is not read."""
    if row.is_valid and not row.filename.endswith(_POINT_FILES):
        raise SourceError(
            f"table 'sample_data': row '{row.token}' of a lidar has the file '{row.filename}', of a kind that is not "
            f"read; read are {', '.join(_POINT_FILES)}"
        )
    return row
