"""CameraInfo as the camera of the pictures that are there.

Raw pictures have K and D; rectified ones (a topic with ``rect`` in it) have P, and the axes that R
turns to. Binning and the region of interest are applied, with the centre of the top-left pixel at
(0, 0). After ROS's REP 104 and the comments of ``sensor_msgs/CameraInfo``.
"""

from __future__ import annotations

from operator import itemgetter
from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.frame import Calibration

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


def size_fault(calibration: Calibration, where: str, width: int, height: int) -> str:
    """Return why a picture is not one of this calibration, which ``where`` states; "" where it
    is.
    """
    size = (calibration.width, calibration.height)
    if (width, height) == size or 0 in size:
        return ""
    stated = f"{size[0]}x{size[1]} px"
    return f"{where} is for pictures of {stated}, and a picture has {width}x{height}"


def camera_calibrations(
    index: LogIndex,
    where: str,
    topic: str,
    info_topic: str,
    ego: str,
) -> dict[int, Calibration]:
    """Return a camera's calibrations by the time [ns] from which each holds, in order; raise
    SourceError, naming ``where``, for an unknown lens.
    """
    is_rectified = any("rect" in part for part in topic.split("/"))
    first_info = index.calibrations[info_topic][0][1]
    frame = index.frame_ids.get(topic) or first_info.frame_id
    cam2ego = index.tree.sensor2ego(frame.lstrip("/"), ego)
    calibrations: dict[int, Calibration] = {}
    before: CameraInfo | None = None
    by_time = sorted(index.calibrations[info_topic], key=itemgetter(0))
    for stamp_ns, info in by_time:
        if before is None or (info is not before and info[1:] != before[1:]):
            calibrations[stamp_ns] = camera_calibration(
                where,
                info=info,
                cam2ego=cam2ego,
                is_rectified=is_rectified,
            )
        before = info
    return calibrations


def camera_calibration(
    where: str,
    info: CameraInfo,
    cam2ego: F64,
    *,
    is_rectified: bool,
) -> Calibration:
    """Return the calibration of raw or rectified pictures; raise SourceError for an unknown
    lens.
    """
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
    return Calibration(
        intrinsics=intrinsics,
        sensor2ego=cam2ego,
        width=(width or info.width) // info.binning[0],
        height=(height or info.height) // info.binning[1],
        dist=dist,
        dist_model=dist_model,
    )
