"""What messages say, in neutral terms, and the types that say it. Quaternions are w, x, y, z."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer

VIDEOS: Final = frozenset({"foxglove_msgs/CompressedVideo", "foxglove.CompressedVideo"})
RAWS: Final = frozenset({"sensor_msgs/Image"})
PICTURES: Final = (
    VIDEOS | RAWS | {"sensor_msgs/CompressedImage", "foxglove_msgs/CompressedImage", "foxglove.CompressedImage"}
)
CALIBRATIONS: Final = frozenset(
    {"sensor_msgs/CameraInfo", "foxglove_msgs/CameraCalibration", "foxglove.CameraCalibration"}
)
TRANSFORMS: Final = frozenset(
    {
        "tf2_msgs/TFMessage",
        "foxglove_msgs/FrameTransform",
        "foxglove_msgs/FrameTransforms",
        "foxglove.FrameTransform",
        "foxglove.FrameTransforms",
    }
)
POSES: Final = frozenset({"nav_msgs/Odometry", "geometry_msgs/PoseStamped", "geometry_msgs/PoseWithCovarianceStamped"})
FIXES: Final = frozenset({"sensor_msgs/NavSatFix"})
CLOUDS: Final = frozenset({"sensor_msgs/PointCloud2", "foxglove.PointCloud"})


class Picture(NamedTuple):
    """The head of a picture: its bytes are ``length`` from ``offset`` on in the message.

    ``encoding``, ``width``, ``height`` and ``step`` are of a raw one: "", 0, 0 and 0 of others;
    ``big_endian`` are its pixels of 16 bits.
    """

    stamp_ns: int
    frame_id: str
    offset: int
    length: int
    encoding: str = ""
    width: int = 0
    height: int = 0
    step: int = 0
    big_endian: bool = False


class Calibration(NamedTuple):
    """What CameraInfo says: ``k`` (9,), ``r`` (9,) and ``p`` (12,) by rows, ``d``; ``roi`` is x, y, width, height."""

    stamp_ns: int
    frame_id: str
    width: int
    height: int
    model: str
    d: tuple[float, ...]
    k: tuple[float, ...]
    r: tuple[float, ...]
    p: tuple[float, ...]
    binning: tuple[int, int] = (1, 1)
    roi: tuple[int, int, int, int] = (0, 0, 0, 0)


class Edge(NamedTuple):
    """The frame ``child`` in the frame ``parent`` at a time: rotation w, x, y, z, translation [m]."""

    parent: str
    child: str
    stamp_ns: int
    wxyz: tuple[float, float, float, float]
    xyz: tuple[float, float, float]


class Fix(NamedTuple):
    """A position by satellites [degrees, m above the ellipsoid] at a time; NaN without a fix."""

    stamp_ns: int
    latitude: float
    longitude: float
    altitude: float


class PointField(NamedTuple):
    """A column of a point cloud; ``kind`` is numpy's code of its type."""

    name: str
    offset: int
    kind: str


class Cloud(NamedTuple):
    """A point cloud: rows of ``width`` points, ``step`` bytes each; ``row_step`` bytes a row; ``pose`` moves them."""

    stamp_ns: int
    frame_id: str
    height: int
    width: int
    fields: tuple[PointField, ...]
    big_endian: bool
    step: int
    row_step: int
    data: Buffer
    pose: Edge | None = None
