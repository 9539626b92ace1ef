"""CameraInfo as the camera of the pictures that are there.

Raw pictures have K and D; rectified ones (a topic with ``rect`` in it) have P, and the axes that R
turns to. Binning and the region of interest are applied, with the centre of the top-left pixel at
(0, 0). After ROS's REP 104 and the comments of ``sensor_msgs/CameraInfo``.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import Image

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F64
    from fuelrail.sharding.sources.logs.index import LogIndex
    from fuelrail.sharding.sources.logs.messages.records import CameraInfo

_MODELS: Final = {
    "plumb_bob": ("opencv_radtan", (4, 5)),
    "rational_polynomial": ("opencv_rational", (8, 12, 14)),
    "equidistant": ("kannala_brandt", (4,)),
    "fisheye": ("kannala_brandt", (4,)),
    "kannala_brandt": ("kannala_brandt", (4,)),
}


class CameraModel(NamedTuple):
    """One camera from a time on: what its images have in common, and the size of its pictures
    [px], 0 where it is not stated.
    """

    where: str
    stamp_ns: int
    image: Image
    size: tuple[int, int]

    def size_fault(self, width: int, height: int) -> str:
        """Return why a picture is not one of this calibration; "" where it is."""
        if (width, height) == self.size or 0 in self.size:
            return ""
        stated = f"{self.size[0]}x{self.size[1]} px"
        return f"{self.where} is for pictures of {stated}, and a picture has {width}x{height}"


def camera_models(
    index: LogIndex,
    channel: str,
    topic: str,
    info_topic: str,
    ego: str,
) -> list[CameraModel]:
    """Return a camera's models in the order of time; raise SourceError for an unknown lens."""
    where = f"log '{index.name}', {channel}: {info_topic}"
    is_rectified = any("rect" in part for part in topic.split("/"))
    first_info = index.calibrations[info_topic][0][1]
    frame = index.frame_ids.get(topic) or first_info.frame_id
    cam2ego = index.tree.sensor2ego(frame.lstrip("/"), ego)
    models: list[CameraModel] = []
    before: CameraInfo | None = None
    by_time = sorted(index.calibrations[info_topic], key=itemgetter(0))
    for stamp_ns, info in by_time:
        if before is None or (info is not before and info[1:] != before[1:]):
            model = camera_model(
                where,
                info=info,
                cam2ego=cam2ego,
                is_rectified=is_rectified,
            )
            models.append(model._replace(stamp_ns=stamp_ns))
        before = info
    return models


def camera_model(
    where: str,
    info: CameraInfo,
    cam2ego: F64,
    *,
    is_rectified: bool,
) -> CameraModel:
    """Return the model of raw or rectified pictures; raise SourceError for an unknown lens."""
    if (
        len(info.k) != 9
        or not np.isfinite(info.k).all()
        or not info.k[0] > 0
        or (is_rectified and not info.p[0] > 0)
    ):
        raise SourceError(
            f"{where}: the camera is not calibrated: K is {list(info.k)}; the option "
            "cameras leaves it out"
        )
    dist: tuple[float, ...] = ()
    dist_model = "none"
    intrinsics = np.array(info.k).reshape(3, 3)
    if is_rectified:
        p = np.array(info.p).reshape(3, 4)
        intrinsics = p[:, :3].copy()
        turned = np.eye(4)
        if len(info.r) == 9 and any(info.r):
            rotation = np.array(info.r).reshape(3, 3)
            turned[:3, :3] = rotation.T
        shifted = np.eye(4)
        place = np.linalg.solve(p[:, :3], p[:, 3])
        shifted[:3, 3] = -place
        cam2ego = cam2ego @ turned @ shifted
    elif any(info.d):
        dist = tuple(info.d)
        dist_model, lengths = _MODELS.get(info.model, ("", ()))
        if len(dist) not in lengths:
            raise SourceError(
                f"{where}: the lens '{info.model}' with {len(dist)} coefficients is not "
                f"known; known are {', '.join(_MODELS)}"
            )
    x, y, width, height = info.roi
    binning = np.array(info.binning, np.float64)
    centre = intrinsics[:2, 2] - (x, y)
    intrinsics[:2, 2] = (centre + 0.5) / binning - 0.5
    intrinsics[0, :2] /= binning[0]
    intrinsics[1, 1] /= binning[1]
    image = Image(
        ref="",
        timestamp_ns=0,
        intrinsics=intrinsics,
        cam2ego=cam2ego,
        dist=dist,
        dist_model=dist_model,
    )
    size = (
        (width or info.width) // info.binning[0],
        (height or info.height) // info.binning[1],
    )
    return CameraModel(
        where=where,
        stamp_ns=info.stamp_ns,
        image=image,
        size=size,
    )
