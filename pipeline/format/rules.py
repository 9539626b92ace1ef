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
_BOX_LOW, _BOX_HIGH = np.array(
    ((-LARGEST_BOX, LARGEST_BOX),) * 3 + ((1e-6, LARGEST_BOX),) * 3 + ((-7.0, 7.0),)
).T
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
    other_rig = broken_rig(sample.geometry, sample.images, rig)
    for text in broken_calibration(sample.geometry) if other_rig is None else (other_rig,):
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


def are_sound(geometries: Sequence[Geometry], boxes: Sequence[Boxes], rig: Rig) -> bool:
    """Return whether no geometry and no boxes of many samples break a rule; one look at all of
    them is faster.
    """
    return not any(broken_calibration(_joined(geometries))) and (
        not boxes or not any(broken_boxes(_joined(boxes), rig))
    )


def _joined(records: Sequence[A]) -> A:
    """Join many records to one: each array is those of all records, joined along the first axis."""
    kind = type(records[0])
    return kind(
        **{
            f.name: np.concatenate([getattr(r, f.name) for r in records])
            for f in dataclasses.fields(kind)
        }
    )


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
        slot = channel if extension in IMAGE_EXTENSIONS else name
        if slot in slots:
            broken.append(
                Broken(
                    name,
                    f"the sample has '{slot}' twice; each field occurs once",
                )
            )
        slots.add(slot)
        if not (
            name in (META, GEOMETRY, BOXES)
            or name in rig.fields
            or name.startswith("x_")
            or (channel in rig.cameras and extension in IMAGE_EXTENSIONS)
            or (
                lidar_channel(name) in lidars
                and (extension == POINTS_EXTENSION or name.endswith(SWEEPS_FIELD))
            )
        ):
            channels = ", ".join([*rig.cameras, *lidars, *sorted(rig.fields)])
            broken.append(
                Broken(
                    name,
                    (
                        f"no such field: the channels are {channels}, and names of a user's own "
                        "begin with x_"
                    ),
                )
            )
    return tuple(broken)


@functools.lru_cache(maxsize=1024)
def unsafe_ending(name: str) -> str | None:
    """Return why a member of this field name is refused for one of :data:`UNSAFE_ENDINGS`; None
    where it has none.
    """
    ending = next(
        (part for part in name.lower().split(".")[1:] if part in UNSAFE_ENDINGS),
        None,
    )
    if ending is None:
        return None
    return (
        f"names with '.{ending}' are refused: a reader may run what the member holds; store "
        "plain data"
    )


def broken_meta(meta: Meta, geometry: Geometry, rig: Rig) -> Iterator[Broken]:
    """Yield the rules that a sample's metadata and its cameras' lens coefficients break;
    metadata names their model.
    """
    if meta.frame_idx >= meta.num_frames:
        yield Broken(
            META,
            (
                f"frame_idx is {meta.frame_idx} of {meta.num_frames} frames; allowed: 0 to "
                "num_frames - 1"
            ),
        )
    for channel in meta.cameras.keys() - set(rig.cameras):
        yield Broken(
            META,
            f"it describes camera {channel!r:.40}, which the manifest does not have",
        )
    valid = geometry.cam_valid.tolist()
    sizes = geometry.img_wh.tolist()
    counts = (~np.isnan(geometry.dist)).sum(1).tolist()
    for number, channel in enumerate(rig.cameras):
        camera = meta.cameras.get(channel)
        if camera is None:
            if valid[number]:
                yield Broken(
                    META,
                    f"it does not describe camera '{channel}', which has an image",
                )
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
            limit = MODELS[model][1][-1]
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
    bad = ((wh < 1) | (wh > LARGEST_IMAGE)).any(1)
    if bad.any():
        bad &= ~(is_absent & ((wh == -1) | (wh == 0)).all(1))
        yield from _first(
            bad,
            "img_wh",
            wh,
            f"1 to {LARGEST_IMAGE}, or -1 where there is no image",
        )
    intrinsics = geometry.intrinsics
    bad = ~((intrinsics >= _K_LOW) & (intrinsics <= _K_HIGH)).all((1, 2))
    if bad.any():
        unknown = np.isnan(intrinsics).all((1, 2))
        may_lack = is_absent | (unknown & np.isnan(geometry.cam2ego).all((1, 2)))
        bad &= ~(may_lack & unknown)
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
        is_broken = ~is_rigid[first : first + len(poses)]
        first += len(poses)
        if is_broken.any():
            is_unknown = may_be_nan[name] & np.isnan(poses).all((1, 2))
            yield from _first(is_broken & ~is_unknown, name, poses, _POSE_WORDS)
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
        parts = (
            rotation @ rotation.transpose(0, 2, 1),
            poses,
            geometry.intrinsics,
            geometry.img_wh,
        )
        values = np.concatenate([np.linalg.det(rotation), *[part.ravel() for part in parts]])
    return bool(((values >= low) & (values <= high)).all()) and not bool(
        (np.abs(motion) > LARGEST).any()
    )


@functools.lru_cache(maxsize=256)
def _whole_bounds(num_poses: int, num_cameras: int) -> tuple[F64, F64]:
    """Return the lowest and the highest of the values that :func:`_is_whole` compares, float64."""
    pose = np.full((2, 4, 4), LARGEST)
    pose[0] *= -1
    pose[:, 3] = _LAST_ROW
    square = np.array((_EYE - SKEW / 2, _EYE + SKEW / 2))  # rounding decides nothing then
    bounds = (
        np.full((2, num_poses), [[np.finfo(np.float64).tiny], [np.inf]]),
        np.tile(square.reshape(2, -1), num_poses),
        np.tile(pose.reshape(2, -1), num_poses),
        np.tile(np.array((_K_LOW, _K_HIGH)).reshape(2, -1), num_cameras),
        np.full((2, 2 * num_cameras), [[1], [LARGEST_IMAGE]]),
    )
    low, high = np.concatenate(bounds, axis=1)
    return low, high


def _poses(geometry: Geometry) -> F64:
    """Return all poses, (P, 4, 4), in the order of :data:`_POSES`."""
    return np.concatenate([getattr(geometry, name).reshape(-1, 4, 4) for name in _POSES])


def are_rigid(poses: F64) -> Mask:
    """Return which of (P, 4, 4) matrices are finite rigid transforms within :data:`LARGEST`;
    bool (P,).
    """
    with np.errstate(all="ignore"):  # NaN and infinity compare as they should: to False
        rotation = poses[:, :3, :3]
        skew = np.abs(rotation @ rotation.transpose(0, 2, 1) - _EYE).max((1, 2))
        return np.asarray(
            (skew <= SKEW)
            & (np.linalg.det(rotation) > 0)
            & (np.abs(poses[:, :3, 3]) <= LARGEST).all(1)
            & (poses[:, 3] == _LAST_ROW).all(1)
        )


def broken_boxes(boxes: Boxes, rig: Rig) -> Iterator[str]:
    """Yield each broken rule: where it is broken, for which array, and what is allowed."""
    with np.errstate(all="ignore"):
        quaternion = boxes.rotation_wxyz
        length = np.sqrt(np.einsum("mi,mi->m", quaternion, quaternion))
    if _are_whole(boxes, length, rig):
        return
    visibility = boxes.visibility
    box_words = f"x y z within {LARGEST_BOX:g} m, sizes from 1e-06 to {LARGEST_BOX:g} m, yaw from -7 to 7 rad, all finite"  # noqa: E501
    for bad, name, words in (
        (
            ~((boxes.boxes3d >= _BOX_LOW) & (boxes.boxes3d <= _BOX_HIGH)),
            "boxes3d",
            box_words,
        ),
        (
            ~(np.abs(length - 1) <= SKEW),
            "rotation_wxyz",
            "quaternions of length 1",
        ),
        (
            np.abs(boxes.velocity) > LARGEST,
            "velocity",
            f"{_BOUND_WORDS}, or NaN where it is unknown",
        ),
        (
            _outside(boxes.label, rig.num_classes - 1),
            "label",
            f"-1 to {rig.num_classes - 1}, as the manifest's classes",
        ),
        (
            _outside(visibility, 4) | (visibility == 0),
            "visibility",
            "-1 (unknown) or 1 to 4",
        ),
        (
            _outside(boxes.attribute, rig.num_attributes - 1),
            "attribute",
            f"-1 to {rig.num_attributes - 1}, as the manifest's attributes",
        ),
        (boxes.num_lidar_pts < -1, "num_lidar_pts", "-1 (unknown) or more"),
        (boxes.num_radar_pts < -1, "num_radar_pts", "-1 (unknown) or more"),
        (boxes.valid > 1, "valid", "0 or 1"),
    ):
        if bad.any():
            yield from _first(bad, name, getattr(boxes, name), words)


def _are_whole(boxes: Boxes, length: F32, rig: Rig) -> bool:
    """Return whether boxes break no rule, in few calls; ``length`` are those of their
    quaternions.
    """
    integers = (
        boxes.label,
        boxes.visibility,
        boxes.attribute,
        boxes.num_lidar_pts,
        boxes.num_radar_pts,
        boxes.valid,
    )
    values = np.array((*boxes.boxes3d.T, length, *integers), np.float64)
    low, high = _box_bounds(rig.num_classes, rig.num_attributes)
    return bool(
        ((values >= low) & (values <= high)).all()
        and boxes.visibility.all()
        and not (np.abs(boxes.velocity) > LARGEST).any()
    )


@functools.lru_cache(maxsize=64)
def _box_bounds(num_classes: int, num_attributes: int) -> tuple[F64, F64]:
    """Return the lowest and the highest of the values that :func:`_are_whole` compares, float64
    (14, 1).
    """
    low = (*_BOX_LOW, 1 - SKEW / 2, -1, -1, -1, -1, -1, 0)
    high = (
        *_BOX_HIGH,
        1 + SKEW / 2,
        num_classes - 1,
        4,
        num_attributes - 1,
        np.inf,
        np.inf,
        1,
    )
    return np.array(low)[:, None], np.array(high)[:, None]


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
    text = str(value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
