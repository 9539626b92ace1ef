"""What an adapter yields: clips, and their frames with images, lidar sweeps and boxes, in neutral
terms.

Frames of reference and units are those of :mod:`fuelrail.pipeline.sample.schema`: ``a2b`` maps
frame a to frame b; ``ego`` is x forward, y left, z up; a camera's axes are x right, y down, z
forward; pixel (0, 0) is the centre of the top-left one; time is integer nanoseconds; quaternions
are w, x, y, z.

A reference (``ref``) is the name of a file below the source's root, with ``/``; or
``NAME#OFFSET+LENGTH``, bytes of such a file, which go to the shard as they are; or, of an image
that is ``made``, whatever :meth:`~fuelrail.sharding.sources.adapter.source.FrameSource.make_images`
takes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np

from fuelrail.pipeline.channels.sensors import LidarEntry
from fuelrail.pipeline.sample.schema import F64
from fuelrail.sharding.sources.shared.scan_table import Reference
from fuelrail.sharding.sources.source import Camera

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64

Vectors: TypeAlias = Any
"""What numpy makes an array of numbers from."""
FRAME: Final = "#frame="
"""What a reference has between a video and the number of a frame."""


class Sensors(NamedTuple):
    """The rig of the whole source, in the order of the dataset: a camera of any clip is one of
    these.
    """

    cameras: Sequence[Camera]
    lidars: Sequence[LidarEntry] = ()

    @property
    def channels(self) -> list[str]:
        """The channels of cameras, then of lidars."""
        return [camera.channel for camera in self.cameras] + [
            lidar.channel for lidar in self.lidars
        ]

    @classmethod
    def from_names(
        cls,
        cameras: Iterable[str],
        lidars: Mapping[str, Sequence[str]] | None = None,
    ) -> Sensors:
        """Return the rig of these cameras, and lidars with the names of their columns; channels
        are in lower case.
        """
        return cls(
            [Camera(name.lower(), name) for name in cameras],
            [
                LidarEntry(
                    channel=name.lower(),
                    source_name=name,
                    columns=tuple(columns),
                )
                for name, columns in (lidars or {}).items()
            ],
        )


class Calibration(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Where a sensor is on the vehicle and, of a camera, how it projects.

    Images of one camera share one; it is cheapest as the same object.

    Attributes:
        intrinsics: K (3, 3) of the images as they are; None: the sensor is no camera, or not
            calibrated.
        sensor2ego: (4, 4); None: not known.
        width: [px] of the images that it is for; 0: not stated, and likewise for ``height``.
        height: [px].
        dist: lens coefficients in OpenCV's order, of ``dist_model``.
        dist_model: a name of :data:`fuelrail.pipeline.transforms.lens.MODELS`, or "none".
        rolling_shutter: direction of the read-out, such as "left_to_right", or "none".

    """

    intrinsics: F64 | None = None
    sensor2ego: F64 | None = None
    width: int = 0
    height: int = 0
    dist: tuple[float, ...] = ()
    dist_model: str = "none"
    rolling_shutter: str = "none"

    def completed(self, fallback: Calibration) -> Calibration:
        """Return it with what it does not state from another one."""
        has_lens = self.dist_model != "none"
        return Calibration(
            intrinsics=fallback.intrinsics if self.intrinsics is None else self.intrinsics,
            sensor2ego=fallback.sensor2ego if self.sensor2ego is None else self.sensor2ego,
            width=self.width or fallback.width,
            height=self.height or fallback.height,
            dist=self.dist or fallback.dist,
            dist_model=self.dist_model if has_lens else fallback.dist_model,
            rolling_shutter=self.rolling_shutter,
        )


UNCALIBRATED: Final = Calibration()
"""The calibration of a camera of which nothing is known."""


class Image(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An image of one camera.

    Attributes:
        ref: where its bytes are.
        timestamp_ns: of the exposure, its middle if that is known.
        calibration: of the camera at that time.
        ego2global: (4, 4) at ``timestamp_ns``; None: from the clip's trajectory.
        width: [px]; 0: that of ``calibration``, and likewise for ``height``.
        height: [px].
        num_bytes: of the image; None: those of the file or range. Of a made image about as many,
            and it is needed.
        made: the source makes the bytes (:meth:`make_images`); ``extension`` is needed then.
        encoded_of: what the source encodes the image of, "raw" pixels or a frame of "video"; empty:
            its bytes are stored, so that a look at them can find damage.
        fault: why its bytes are no image, where the source knows that; the option damaged_image is
            for it.
        extension: ``jpg`` or ``png``; empty: that of the file.
        readout_ns: duration of the read-out.
        exposure_ns: duration of the exposure.
        token: the source's name for it.
        absent: why the source says not to use it; no policy refuses that. Empty: it is there.
        stays: time, size and calibration stay in the sample where the image is absent.

    """

    ref: str
    timestamp_ns: int
    calibration: Calibration = UNCALIBRATED
    ego2global: F64 | None = None
    width: int = 0
    height: int = 0
    num_bytes: int | None = None
    made: bool = False
    encoded_of: Literal["", "raw", "video"] = ""
    fault: str = ""
    extension: str = ""
    readout_ns: int | None = None
    exposure_ns: int | None = None
    token: str = ""
    absent: str = ""
    stays: bool = False

    @property
    def size(self) -> tuple[int, int]:
        """Width and height [px] that the image or its calibration states; 0: the head of the image
        is read.
        """
        return self.width or self.calibration.width, self.height or self.calibration.height


class Absent(msgspec.Struct, frozen=True, gc=False):
    """Stands for an image that a frame lacks, with the reason as the scan report counts it, such as
    "no message".

    ``ref`` is what is not there, where it has a name.
    """

    reason: str
    ref: str = ""


class Sweep(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A sweep of one lidar.

    ``ref`` is what the source's ``points`` takes. ``num_bytes`` is about that of the points as
    float32; None: that of the file ``ref``. ``absent`` is why the source says not to use it, empty:
    it is there.
    """

    ref: str
    timestamp_ns: int
    lidar2ego: F64
    ego2global: F64 | None = None
    num_bytes: int | None = None
    absent: str = ""


class BoxRows(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The boxes of one frame, as columns of M rows; None: not known of any.

    Attributes:
        centre: (M, 3) gravity centres [m], in ego at the frame's time, or in global
            (``in_global``).
        size_lwh: (M, 3) length along the box's x, width, height [m].
        rotation_wxyz: (M, 4) box to ego (to global); or None with ``yaw``.
        yaw: (M,) [rad] counter-clockwise from +x.
        category: the source's name of the class of each.
        track: the source's name of the track of each, unique in the clip or beyond it.
        velocity: (M, 3) [m/s] over ground, in the frame of ``centre``; None: from the neighbours in
            the track.
        num_lidar_pts: (M,), -1 unknown.
        num_radar_pts: (M,), -1 unknown.
        visibility: (M,) 1 to 4 as in nuScenes, -1 unknown.
        attribute: (M,) index into the source's ``box_attributes``, -1 none.
        in_global: centre, rotation and velocity are in global.
        unknown_visibility: texts of the visibility that have no level, with their numbers.

    """

    centre: Vectors
    size_lwh: Vectors
    category: Sequence[str]
    rotation_wxyz: Vectors | None = None
    yaw: Vectors | None = None
    track: Sequence[str] | None = None
    velocity: Vectors | None = None
    num_lidar_pts: Vectors | None = None
    num_radar_pts: Vectors | None = None
    visibility: Vectors | None = None
    attribute: Vectors | None = None
    in_global: bool = False
    unknown_visibility: Mapping[str, int] = {}


NO_BOXES: Final = BoxRows(
    centre=np.empty((0, 3)),
    size_lwh=np.empty((0, 3)),
    category=(),
    yaw=np.empty(0),
)
"""The boxes of a frame that is labelled, and has none."""


class ImageBoxRows(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """The 2-D boxes of one image, as columns of K rows; an image without labels has none of these.

    Attributes:
        box: (K, 4) left, top, right, bottom [px]; the centre of the top-left pixel is (0, 0).
        category: the source's name of the class of each.
        track: the source's name of the track of each, as in :class:`BoxRows`; None: not known of
            any.
        row: (K,) the row of the same object in the frame's boxes, -1 for none; None: not known of
            any.

    """

    box: Vectors
    category: Sequence[str]
    track: Sequence[str] | None = None
    row: Vectors | None = None


class FileMember(msgspec.Struct, frozen=True, gc=False):
    """A member that the source makes of whole files.

    ``name`` is the field, ``ref`` what the source's ``open`` takes, ``files`` are names below the
    root. ``hint`` ends the error for a file that is not there; empty: the frame has no such member
    then. ``num_bytes`` is about that of the member; 0: that of the files. ``is_estimate`` false:
    the member has as many bytes.
    """

    name: str
    ref: str
    files: Sequence[str]
    hint: str = ""
    num_bytes: int = 0
    is_estimate: bool = True


class Frame(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One moment: a sample, if the policy for missing cameras keeps it.

    ``images`` and ``sweeps`` are by channel. ``ego2global`` (4, 4) is at ``timestamp_ns``; None:
    from the clip's trajectory. ``boxes`` None: not labelled. ``boxes2d`` are by camera, of those
    that the source's ``image_boxes`` names; ``members`` are of its own ``channels``, and so are
    ``values``: texts, numbers and arrays, by the names of channels that
    :func:`~fuelrail.sharding.sources.adapter.channels.value_channel` made, or of a series the
    measurement at the frame's time, which the series keeps where the frame is left out.
    ``attributes`` are values of its own ``columns``. Motion is in ego axes [m/s, m/s^2, rad/s];
    without ``ego_velocity`` it is the difference of the neighbouring frames' poses.
    """

    timestamp_ns: int
    images: Mapping[str, Image | Absent]
    ego2global: F64 | None = None
    sweeps: Mapping[str, Sweep] = {}
    boxes: BoxRows | None = None
    boxes2d: Mapping[str, ImageBoxRows] = {}
    members: Sequence[Reference | FileMember] = ()
    values: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}
    token: str = ""
    is_key_frame: bool = True
    ego_velocity: Vectors | None = None
    ego_accel: Vectors | None = None
    ego_rates: Vectors | None = None

    def without(self, names: Collection[str]) -> Frame:
        """Return it without the images of cameras and the members of fields of these names."""
        images = {name: image for name, image in self.images.items() if name not in names}
        members = [member for member in self.members if member.name not in names]
        return msgspec.structs.replace(self, images=images, members=members)


class Clip(msgspec.Struct, frozen=True, kw_only=True):
    """One continuous drive, without its frames.

    ``series`` are measurements of sensors at their own rates, by the names of channels that
    :func:`~fuelrail.pipeline.channels.series.series_channel` made: times [ns] that ascend, (M,),
    and values (M, ...). ``name`` becomes the clip's id, as far as it is legal, unless ``id`` states
    one. ``files`` are names below the root whose sizes and times say whether the source has
    changed, for clips whose images are made. ``attributes`` are values of the source's ``columns``
    that all frames share, ``tags`` go into the metadata. ``split`` is the source's own.
    """

    name: str
    token: str = ""
    log_id: str = ""
    vehicle: str = ""
    split: str = ""
    tags: dict[str, Any] = {}
    attributes: dict[str, Any] = {}
    files: tuple[str, ...] = ()
    id: str = ""
    series: Mapping[str, tuple[Vectors, Vectors]] = {}


def thinned(times_ns: I64, rate: float) -> I64:
    """Keep at most ``rate`` times a second [Hz]: the first, then each a period later, less a
    tenth for jitter.
    """
    if not rate:
        return times_ns
    period = 1e9 / rate
    times_kept = []
    due = -np.inf
    for time in times_ns.tolist():
        if time >= due - period / 10:
            times_kept.append(time)
            due = time + period if time - due > period else due + period
    return np.array(times_kept, np.int64)
