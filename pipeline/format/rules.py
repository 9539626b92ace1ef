"""What a sample may hold: the rules on values that dtypes and shapes do not cover, in one place.

The writer of shards refuses what breaks a rule, ``fuelrail verify --deep`` reports it, and the
loader treats it as a bad sample. The loader checks the arrays only (:func:`check_arrays`): names,
metadata and lens coefficients cannot make a batch wrong without a word, so they are left to the
other two. ``FORMAT.md`` states the rules, section 6.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError, SchemaError
from fuelrail.pipeline.format.tar import check_field
from fuelrail.pipeline.sample.schema import (
    BOXES,
    GEOMETRY,
    IMAGE_EXTENSIONS,
    META,
    POINTS_EXTENSION,
    SWEEPS_FIELD,
    Boxes,
    Geometry,
    Meta,
    Sample,
    Sweeps,
    lidar_channel,
)
from fuelrail.pipeline.transforms.lens import MODELS, UNBENT

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.sensors import LidarEntry
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import F32, F64, Mask
    from fuelrail.pipeline.format.manifest import Manifest

LARGEST: Final = 1e9
"""Bound of all lengths, speeds and coefficients.

A float64 resolves 0.1 micrometres at 1e9 m, 150 times the Earth's radius, and a product of three
such numbers is still a float32.
"""
LARGEST_BOX: Final = 1e6
"""Bound of a box's place and size [m]: a float32 has steps of 6 cm there."""
LARGEST_IMAGE: Final = 65_535
"""Bound of an image's width and height [px]: JPEG's."""
MOST_POINTS: Final = 1 << 24
"""Bound of the points of one sample's lidar: the largest sweeps have some 500,000."""
SKEW: Final = 1e-3
"""How far a rotation may be from orthonormal, and a quaternion from unit length: 10 cm at a
distance of 100 m.
"""
UNSAFE_ENDINGS: Final = frozenset(
    {"ckpt", "dill", "joblib", "pickle", "pkl", "pt", "pth"}
    | {"bat", "cmd", "com", "dll", "dylib", "exe", "jar", "js", "msi"}
    | {"ps1", "py", "pyc", "pyd", "scr", "sh", "so", "vbs"}
)
"""Endings of files that run, or whose usual reader runs what they hold; webdataset unpickles
some of them by itself.
"""

_MAX_SHOWN: Final = 160
_FOCAL = (1e-3, 1e6)
_LENGTH = (-1e6, 1e6)
_ZERO = (0.0, 0.0)
_UNIT = (1.0, 1.0)
_K_LOW, _K_HIGH = np.array(
    (
        (_FOCAL, _LENGTH, _LENGTH),
        (_ZERO, _FOCAL, _LENGTH),
        (_ZERO, _ZERO, _UNIT),
    ),
    np.float64,
).transpose(2, 0, 1)
_PLACE = (-LARGEST_BOX, LARGEST_BOX)
_SIZE = (1e-6, LARGEST_BOX)
_YAW = (-7.0, 7.0)
_BOX_LOW, _BOX_HIGH = np.array((_PLACE, _PLACE, _PLACE, _SIZE, _SIZE, _SIZE, _YAW)).T
_POSES: Final = (
    "cam2ego",
    "cam_ego2global",
    "ego2global",
    "lidar2ego",
    "lidar_ego2global",
)
_EYE: Final = np.eye(3)
_LAST_ROW: Final = np.array((0.0, 0.0, 0.0, 1.0))

A = TypeVar("A", "Geometry", "Boxes")

_BOUND_WORDS: Final = f"-{LARGEST:g} to {LARGEST:g}"
_K_WORDS: Final = (
    "finite rows (fx s cx), (0 fy cy), (0 0 1) with fx, fy from 0.001 to 1e6 and the rest "
    "within 1e6"
)
_POSE_WORDS: Final = (
    f"a rotation and a translation within {LARGEST:g} m, finite, with the last row 0 0 0 1"
)


class Rig(NamedTuple):
    """The parts of a dataset's samples, from the manifest."""

    cameras: tuple[str, ...]
    lidars: tuple[tuple[str, int], ...]
    """Channel and number of columns of each."""
    num_classes: int
    num_attributes: int
    fields: frozenset[str] = frozenset()
    """Field names of the channels other than cameras, lidars and boxes."""

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> Rig:
        """Make the rig of a manifest."""
        cameras = [camera.channel for camera in manifest.cameras]
        return cls.make(
            cameras,
            manifest.lidars,
            classes=manifest.classes,
            attributes=manifest.attributes,
            extra=manifest.extra_channels,
        )

    @classmethod
    def make(
        cls,
        cameras: Iterable[str],
        lidars: Iterable[LidarEntry],
        classes: Sequence[str],
        attributes: Sequence[str],
        extra: Iterable[Channel] = (),
    ) -> Rig:
        """Make the rig of these cameras, lidars, names and other channels."""
        columns = tuple((lidar.channel, len(lidar.columns)) for lidar in lidars)
        fields = frozenset(channel.field for channel in extra)
        return cls(
            cameras=tuple(cameras),
            lidars=columns,
            num_classes=len(classes),
            num_attributes=len(attributes),
            fields=fields,
        )


class Broken(NamedTuple):
    """One rule that a sample breaks: in which member, and how."""

    member: str
    text: str


def check_arrays(sample: Sample, rig: Rig) -> None:
    """Raise SchemaError, with key and member, for the first rule on arrays that a sample breaks."""
    for member, text in broken_arrays(sample, rig):
        raise SchemaError(text, key=sample.key, member=member)


def check_sample(sample: Sample, names: Sequence[str], rig: Rig) -> None:
    """Raise SchemaError, with key and member, for the first rule that a sample breaks.

    ``names`` are the field names of its members as the index has them.
    """
    for member, text in broken_rules(sample, names, rig):
        raise SchemaError(text, key=sample.key, member=member)


def broken_rules(sample: Sample, names: Sequence[str], rig: Rig) -> Iterator[Broken]:
    """Yield all rules that a sample breaks; arguments as of :func:`check_sample`."""
    yield from broken_names(tuple(names), rig)
    arrays = list(broken_arrays(sample, rig))
    yield from arrays
    # Where an array is broken, cameras may not be those of the rig.
    if not any(broken.member == GEOMETRY for broken in arrays):
        yield from broken_meta(sample.meta, sample.geometry, rig)


def broken_arrays(sample: Sample, rig: Rig) -> Iterator[Broken]:
    """Yield the rules on geometry, boxes and points that a sample breaks."""
    mismatch = broken_rig(sample.geometry, sample.images, rig)
    if mismatch is not None:
        yield Broken(GEOMETRY, mismatch)
    else:
        for text in broken_calibration(sample.geometry):
            yield Broken(GEOMETRY, text)
    if sample.boxes is not None:
        for text in broken_boxes(sample.boxes, rig):
            yield Broken(BOXES, text)
    for channel, points in sample.points.items():
        for text in broken_points(points, channel, rig):
            yield Broken(f"{channel}.{POINTS_EXTENSION}", text)
    for channel, sweeps in sample.sweeps.items():
        for text in broken_sweeps(sweeps, channel, rig):
            yield Broken(channel + SWEEPS_FIELD, text)


def are_sound(
    geometries: Sequence[Geometry],
    boxes: Sequence[Boxes],
    rig: Rig,
) -> bool:
    """Return whether no geometry and no boxes of many samples break a rule; one look at all of
    them is faster.
    """
    if any(broken_calibration(_joined(geometries))):
        return False
    return not boxes or not any(broken_boxes(_joined(boxes), rig))


def _joined(records: Sequence[A]) -> A:
    """Join many records to one: each array is those of all records, joined along the first axis."""
    kind = type(records[0])
    arrays = {}
    for field in dataclasses.fields(kind):
        parts = [getattr(record, field.name) for record in records]
        arrays[field.name] = np.concatenate(parts)
    return kind(**arrays)


@functools.lru_cache(maxsize=1024)
def broken_names(names: tuple[str, ...], rig: Rig) -> tuple[Broken, ...]:
    """Return the rules that the field names of a sample's members break."""
    broken: list[Broken] = []
    slots: set[str] = set()
    lidars = [channel for channel, _ in rig.lidars]
    for name in names:
        channel, _, extension = name.partition(".")
        try:
            check_field(name)
        except ConfigError as error:
            broken.append(Broken(name, str(error)))
            continue
        # A camera has one image, of any extension.
        is_image = extension in IMAGE_EXTENSIONS
        slot = channel if is_image else name
        if slot in slots:
            text = f"the sample has '{slot}' twice; each field occurs once"
            broken.append(Broken(name, text))
        slots.add(slot)
        is_cloud = extension == POINTS_EXTENSION or name.endswith(SWEEPS_FIELD)
        if not (
            name in (META, GEOMETRY, BOXES)
            or name in rig.fields
            or name.startswith("x_")
            or (is_image and channel in rig.cameras)
            or (is_cloud and lidar_channel(name) in lidars)
        ):
            channels = ", ".join([*rig.cameras, *lidars, *sorted(rig.fields)])
            text = (
                f"no such field: the channels are {channels}, and names of a user's own "
                "begin with x_"
            )
            broken.append(Broken(name, text))
    return tuple(broken)


@functools.lru_cache(maxsize=1024)
def unsafe_ending(name: str) -> str | None:
    """Return why a member of this field name is refused for one of :data:`UNSAFE_ENDINGS`; None
    where it has none.
    """
    _, *endings = name.lower().split(".")
    for ending in endings:
        if ending in UNSAFE_ENDINGS:
            return (
                f"names with '.{ending}' are refused: a reader may run what the member holds; "
                "store plain data"
            )
    return None


def broken_meta(meta: Meta, geometry: Geometry, rig: Rig) -> Iterator[Broken]:
    """Yield the rules that a sample's metadata and its cameras' lens coefficients break;
    metadata names their model.
    """
    if meta.frame_idx >= meta.num_frames:
        text = (
            f"frame_idx is {meta.frame_idx} of {meta.num_frames} frames; allowed: 0 to "
            "num_frames - 1"
        )
        yield Broken(META, text)
    for channel in meta.cameras.keys() - set(rig.cameras):
        text = f"it describes camera {channel!r:.40}, which the manifest does not have"
        yield Broken(META, text)
    valid = geometry.cam_valid.tolist()
    sizes = geometry.img_wh.tolist()
    is_coefficient = ~np.isnan(geometry.dist)
    counts = is_coefficient.sum(1).tolist()
    for number, channel in enumerate(rig.cameras):
        camera = meta.cameras.get(channel)
        if camera is None:
            if valid[number]:
                text = f"it does not describe camera '{channel}', which has an image"
                yield Broken(META, text)
            continue
        width, height = sizes[number]
        if valid[number] and (width, height) != (camera.width, camera.height):
            text = (
                f"the image of {channel} is {camera.width} x {camera.height}; {GEOMETRY} has "
                f"{width} x {height}"
            )
            yield Broken(META, text)
        model = camera.dist_model
        count = counts[number]
        limit = 0
        if model != UNBENT:
            if model not in MODELS:
                models = ", ".join((UNBENT, *MODELS))
                text = f"the dist_model of {channel} is {model!r:.40}; known: {models}"
                yield Broken(META, text)
                continue
            _, num_coefficients = MODELS[model]
            limit = num_coefficients[-1]
        if np.isnan(geometry.dist[number, :count]).any():
            text = f"dist of {channel} has NaN before a coefficient"
            yield Broken(GEOMETRY, f"{text}: NaN may only follow the last one")
        elif count > limit:
            text = f"dist of {channel} has {count} coefficients; dist_model {model!r} has {limit}"
            yield Broken(GEOMETRY, f"{text} at most")


def broken_rig(geometry: Geometry, images: Collection[str], rig: Rig) -> str | None:
    """Return why the geometry does not match the manifest's rig and the images present; None
    where it does.
    """
    present = [int(channel in images) for channel in rig.cameras]
    valid = geometry.cam_valid.tolist()
    if valid != present:
        return (
            f"cam_valid is {_value_text(valid)}, but of the cameras "
            f"{', '.join(rig.cameras)} these have an image: {_value_text(present)}"
        )
    if len(geometry.lidar2ego) != len(rig.lidars):
        return f"of {len(geometry.lidar2ego)} lidars, the manifest has {len(rig.lidars)}"
    return None


def broken_calibration(geometry: Geometry) -> Iterator[str]:
    """Yield the rules that calibration, poses and motion of a sample break, or of several joined
    by :func:`_joined`.
    """
    if _is_whole(geometry):
        return
    is_absent = geometry.cam_valid == 0
    may_lack = is_absent
    wh = geometry.img_wh
    is_outside = (wh < 1) | (wh > LARGEST_IMAGE)
    bad = is_outside.any(1)
    if bad.any():
        is_unknown = ((wh == -1) | (wh == 0)).all(1)
        bad &= ~(is_absent & is_unknown)
        yield from _first(
            bad,
            "img_wh",
            wh,
            f"1 to {LARGEST_IMAGE}, or -1 where there is no image",
        )
    intrinsics = geometry.intrinsics
    is_inside = (intrinsics >= _K_LOW) & (intrinsics <= _K_HIGH)
    bad = ~is_inside.all((1, 2))
    if bad.any():
        is_unknown = np.isnan(intrinsics).all((1, 2))
        has_no_place = np.isnan(geometry.cam2ego).all((1, 2))
        may_lack = is_absent | (is_unknown & has_no_place)
        bad &= ~(may_lack & is_unknown)
        yield from _first(bad, "intrinsics", intrinsics, _K_WORDS)
    # All of a pose is NaN where it may be unknown: that of a camera without a picture, without a
    # calibration, and that of a lidar without a sweep.
    no_sweep = geometry.lidar_timestamp_ns < 0
    may_be_nan = {
        "cam2ego": may_lack,
        "cam_ego2global": is_absent,
        "ego2global": False,
        "lidar2ego": no_sweep,
        "lidar_ego2global": no_sweep,
    }
    # One call for all of them: for small arrays the call is most of the cost.
    is_rigid = are_rigid(_poses(geometry))
    first = 0
    for name in _POSES:
        poses = getattr(geometry, name).reshape(-1, 4, 4)
        end = first + len(poses)
        bad = ~is_rigid[first:end]
        first = end
        if bad.any():
            is_unknown = may_be_nan[name] & np.isnan(poses).all((1, 2))
            bad &= ~is_unknown
            yield from _first(bad, name, poses, _POSE_WORDS)
    for name in ("dist", "ego_velocity", "ego_accel", "ego_rates"):
        values: F64 = getattr(geometry, name)
        bad = np.abs(values) > LARGEST  # NaN is not: it means unknown
        if bad.any():
            yield from _first(bad, name, values, f"{_BOUND_WORDS}, or NaN where it is unknown")


def _is_whole(geometry: Geometry) -> bool:
    """Return whether nothing is broken and no calibration, pose or size is unknown, as in almost
    every sample.

    For small arrays the call is most of the cost, so all values are compared in one.
    """
    poses = _poses(geometry)
    rotation = poses[:, :3, :3]
    motion = np.concatenate(
        (
            geometry.dist.ravel(),
            geometry.ego_velocity,
            geometry.ego_accel,
            geometry.ego_rates,
        )
    )
    low, high = _whole_bounds(len(poses), len(geometry.img_wh))
    with np.errstate(all="ignore"):
        square = rotation @ rotation.transpose(0, 2, 1)
        determinants = np.linalg.det(rotation)
    values = np.concatenate(
        (
            determinants,
            square.ravel(),
            poses.ravel(),
            geometry.intrinsics.ravel(),
            geometry.img_wh.ravel(),
        )
    )
    is_inside = (values >= low) & (values <= high)
    is_fast = np.abs(motion) > LARGEST
    return bool(is_inside.all()) and not bool(is_fast.any())


@functools.lru_cache(maxsize=256)
def _whole_bounds(num_poses: int, num_cameras: int) -> tuple[F64, F64]:
    """Return the lowest and the highest of the values that :func:`_is_whole` compares, float64."""
    determinant = np.array((np.finfo(np.float64).tiny, np.inf))
    square = np.array((_EYE - SKEW / 2, _EYE + SKEW / 2))  # rounding decides nothing then
    pose = np.full((2, 4, 4), LARGEST)
    pose[0] *= -1
    pose[:, 3] = _LAST_ROW
    intrinsics = np.array((_K_LOW, _K_HIGH))
    side = np.array((1, LARGEST_IMAGE))
    bounds = (
        np.tile(determinant.reshape(2, -1), num_poses),
        np.tile(square.reshape(2, -1), num_poses),
        np.tile(pose.reshape(2, -1), num_poses),
        np.tile(intrinsics.reshape(2, -1), num_cameras),
        np.tile(side.reshape(2, -1), 2 * num_cameras),
    )
    low, high = np.concatenate(bounds, axis=1)
    return low, high


def _poses(geometry: Geometry) -> F64:
    """Return all poses, (P, 4, 4), in the order of :data:`_POSES`."""
    arrays = [getattr(geometry, name) for name in _POSES]
    return np.concatenate([array.reshape(-1, 4, 4) for array in arrays])


def are_rigid(poses: F64) -> Mask:
    """Return which of (P, 4, 4) matrices are finite rigid transforms within :data:`LARGEST`;
    bool (P,).
    """
    with np.errstate(all="ignore"):  # NaN and infinity compare as they should: to False
        rotation = poses[:, :3, :3]
        translation = poses[:, :3, 3]
        last_row = poses[:, 3]
        square = rotation @ rotation.transpose(0, 2, 1)
        skew = np.abs(square - _EYE).max((1, 2))
        return np.asarray(
            (skew <= SKEW)
            & (np.linalg.det(rotation) > 0)
            & (np.abs(translation) <= LARGEST).all(1)
            & (last_row == _LAST_ROW).all(1)
        )


def broken_boxes(boxes: Boxes, rig: Rig) -> Iterator[str]:
    """Yield each broken rule: where it is broken, for which array, and what is allowed."""
    with np.errstate(all="ignore"):
        quaternion = boxes.rotation_wxyz
        length = np.sqrt(np.einsum("mi,mi->m", quaternion, quaternion))
    if _are_whole(boxes, length, rig):
        return
    last_class = rig.num_classes - 1
    last_attribute = rig.num_attributes - 1
    bad_masks = {
        "boxes3d": ~((boxes.boxes3d >= _BOX_LOW) & (boxes.boxes3d <= _BOX_HIGH)),
        "rotation_wxyz": ~(np.abs(length - 1) <= SKEW),
        "velocity": np.abs(boxes.velocity) > LARGEST,
        "label": _outside(boxes.label, last_class),
        "visibility": _outside(boxes.visibility, 4) | (boxes.visibility == 0),
        "attribute": _outside(boxes.attribute, last_attribute),
        "num_lidar_pts": boxes.num_lidar_pts < -1,
        "num_radar_pts": boxes.num_radar_pts < -1,
        "valid": boxes.valid > 1,
    }
    words = {
        "boxes3d": (
            f"x y z within {LARGEST_BOX:g} m, sizes from 1e-06 to {LARGEST_BOX:g} m, "
            "yaw from -7 to 7 rad, all finite"
        ),
        "rotation_wxyz": "quaternions of length 1",
        "velocity": f"{_BOUND_WORDS}, or NaN where it is unknown",
        "label": f"-1 to {last_class}, as the manifest's classes",
        "visibility": "-1 (unknown) or 1 to 4",
        "attribute": f"-1 to {last_attribute}, as the manifest's attributes",
        "num_lidar_pts": "-1 (unknown) or more",
        "num_radar_pts": "-1 (unknown) or more",
        "valid": "0 or 1",
    }
    for name, bad in bad_masks.items():
        if bad.any():
            yield from _first(bad, name, getattr(boxes, name), words[name])


def _are_whole(boxes: Boxes, length: F32, rig: Rig) -> bool:
    """Return whether boxes break no rule, in few calls; ``length`` are those of their
    quaternions.
    """
    rows = (
        *boxes.boxes3d.T,
        length,
        boxes.label,
        boxes.visibility,
        boxes.attribute,
        boxes.num_lidar_pts,
        boxes.num_radar_pts,
        boxes.valid,
    )
    values = np.array(rows, np.float64)
    low, high = _box_bounds(rig.num_classes, rig.num_attributes)
    is_inside = (values >= low) & (values <= high)
    if not is_inside.all() or not boxes.visibility.all():
        return False
    is_fast = np.abs(boxes.velocity) > LARGEST
    return not is_fast.any()


@functools.lru_cache(maxsize=64)
def _box_bounds(num_classes: int, num_attributes: int) -> tuple[F64, F64]:
    """Return the lowest and the highest of the values that :func:`_are_whole` compares, float64
    (14, 1).
    """
    bounds = {
        "length": (1 - SKEW / 2, 1 + SKEW / 2),
        "label": (-1, num_classes - 1),
        "visibility": (-1, 4),
        "attribute": (-1, num_attributes - 1),
        "num_lidar_pts": (-1, np.inf),
        "num_radar_pts": (-1, np.inf),
        "valid": (0, 1),
    }
    low, high = np.array(list(bounds.values())).T
    all_low = np.concatenate((_BOX_LOW, low))
    all_high = np.concatenate((_BOX_HIGH, high))
    return all_low[:, None], all_high[:, None]


def _outside(numbers: NDArray[Any], last: int) -> Mask:
    return np.asarray((numbers < -1) | (numbers > last))


def broken_points(points: F32, channel: str, rig: Rig) -> Iterator[str]:
    """Yield the rules that the points (P, C) of one lidar break."""
    columns = dict(rig.lidars)
    num_columns = columns.get(channel)
    if num_columns is None:
        yield f"the manifest has no lidar '{channel}', only {', '.join(columns) or 'none'}"
    elif points.shape[1] != num_columns:
        yield f"its points have {points.shape[1]} columns, the manifest has {num_columns}"
    elif len(points) > MOST_POINTS:
        yield f"it has {len(points)} points; {MOST_POINTS} at most are allowed"


def broken_sweeps(sweeps: Sweeps, channel: str, rig: Rig) -> Iterator[str]:
    """Yield the rules that the earlier sweeps of one lidar break."""
    yield from broken_points(sweeps.points, channel, rig)
    poses = sweeps.lidar2global
    if len(poses):
        yield from _first(~are_rigid(poses), "lidar2global", poses, _POSE_WORDS)


def _first(
    bad: Mask,
    name: str,
    values: NDArray[Any],
    words: str,
) -> Iterable[str]:
    """Return a text on the first row of an array that is bad; ``bad`` has its shape, or that of
    its first axes.
    """
    if not bad.any():
        return ()
    row = int(np.argwhere(bad)[0, 0])
    return (f"{name}[{row}] is {_value_text(values[row])}; allowed: {words}",)


def _value_text(value: object) -> str:
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    text = str(value)
    if len(text) > _MAX_SHOWN:
        return f"{text[:_MAX_SHOWN]}..."
    return text
