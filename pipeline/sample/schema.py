"""What one sample is: the members' contents, with dtypes, units and frames of reference.

Conventions (normative):

* time: integer nanoseconds; length m, angle rad, speed m/s
* a matrix ``a2b`` maps homogeneous column vectors of frame a to frame b: ``p_b = a2b @ p_a``
* ``ego``: x forward, y left, z up (ISO 8855); ``cam``: optical axes, x right, y down, z forward;
  ``lidar``: the sensor's own axes; ``global``: the data set's world, float64
* pixels: the centre of the top-left pixel is (0, 0)
* boxes: gravity centre, size l, w, h, yaw counter-clockwise from +x to +y, in ``ego`` at
  ``timestamp_ns``
* unknown is NaN or -1, never 0; a missing camera is an absent member and ``cam_valid`` 0, never a
  blank image

N is the number of cameras of the rig (order of the manifest), L of lidars, M of boxes. The array
fields below carry dtype and shape in their annotations, and those are what encoding and decoding
check.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Final, TypeAlias, TypeVar, get_type_hints

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.dtypes import F32 as F32  # noqa: TC001 - `_specs` evaluates all of these
from fuelrail.pipeline.dtypes import F64 as F64  # noqa: TC001
from fuelrail.pipeline.dtypes import I32, U8  # noqa: TC001
from fuelrail.pipeline.dtypes import I64 as I64  # noqa: TC001
from fuelrail.pipeline.dtypes import Mask as Mask
from fuelrail.pipeline.errors import MemberError, SchemaError
from fuelrail.pipeline.rigid import homogeneous, invert_rigid, rotation_matrices
from fuelrail.pipeline.sample.arrays import (
    Buffer,
    TensorSpec,
    read_layout,
    read_npy,
    write_npy,
    write_parts,
    write_stacked,
    write_tensors,
)
from fuelrail.pipeline.settings import explain

SCHEMA: Final = "fuelrail/1"
META: Final = "meta.json"
GEOMETRY: Final = "geometry.safetensors"
BOXES: Final = "boxes.safetensors"
IMAGE_EXTENSIONS: Final = ("jpg", "png")
POINTS_EXTENSION: Final = "npy"
SWEEPS_FIELD: Final = "_sweeps.safetensors"
"""Ends the field name of a lidar's earlier sweeps: ``lidar_top_sweeps.safetensors``."""
NUM_DIST: Final = 14
"""Slots for distortion coefficients, NaN padded."""

Int64: TypeAlias = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
"""An integer as index and arrays can hold it."""
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
"""A number of frames or of pixels, from 0."""

_MOST_FITTING: Final = 1024
_fitting: set[tuple[type, tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]]] = set()
"""What arrays of a record were found to be and passed: the same need no second look."""


class CameraMeta(msgspec.Struct, frozen=True, kw_only=True):
    """One camera of one sample, scalars: source token, exposure time [ns], stored image size
    [px].
    """

    token: str
    timestamp_ns: Int64
    width: Count
    height: Count
    dist_model: str = "none"
    rolling_shutter: str = "none"
    readout_ns: Int64 | None = None
    exposure_ns: Int64 | None = None


class Meta(msgspec.Struct, frozen=True, kw_only=True):
    """``meta.json``: identity and scalars of one sample.

    ``key`` is unique in the dataset; no neighbour is null.
    """

    schema: str
    dataset: str
    key: str
    sample_token: str
    clip_id: str
    clip_token: str
    clip_name: str
    log_id: str
    vehicle: str
    frame_idx: Count
    num_frames: Count
    prev_key: str | None
    next_key: str | None
    timestamp_ns: Int64
    is_key_frame: bool
    split: str
    cameras: dict[str, CameraMeta]
    tags: dict[str, Any] = {}
    stats: dict[str, float | Int64] = {}
    sync: dict[str, Any] = {}
    license: str | None = None

    @property
    def frame(self) -> int:
        """The frame's number in its clip, as batches and filters call it: ``frame_idx`` of the
        stored record.
        """
        return self.frame_idx


@dataclass(frozen=True, slots=True, eq=False)
class Geometry:
    """``geometry.safetensors``: where every sensor was, and how its pixels map, at its own time.

    Derived matrices are computed here, in float64, and never stored. :meth:`stack` puts samples
    together: the fields and the derived matrices then have leading axes, such as [B] or [B, T].
    """

    cam_valid: Annotated[U8, "u1", "N"]  #: 1 where the image member exists
    cam_timestamp_ns: Annotated[I64, "i8", "N"]  #: mid-exposure if known, else trigger
    img_wh: Annotated[I32, "i4", "N", 2]  #: stored image (width, height) [px]
    intrinsics: Annotated[F64, "f8", "N", 3, 3]  #: K of the stored image
    dist: Annotated[
        F64, "f8", "N", NUM_DIST
    ]  #: coefficients of the camera's dist_model, NaN padded
    cam2ego: Annotated[F64, "f8", "N", 4, 4]  #: static extrinsic
    cam_ego2global: Annotated[F64, "f8", "N", 4, 4]  #: ego pose at cam_timestamp_ns
    ego2global: Annotated[F64, "f8", 4, 4]  #: ego pose at the sample's timestamp_ns
    lidar2ego: Annotated[F64, "f8", "L", 4, 4]
    lidar_ego2global: Annotated[F64, "f8", "L", 4, 4]  #: ego pose at lidar_timestamp_ns
    lidar_timestamp_ns: Annotated[I64, "i8", "L"]
    ego_velocity: Annotated[F64, "f8", 3]  #: [m/s] over ground, ego axes, NaN unknown
    ego_accel: Annotated[F64, "f8", 3]  #: [m/s^2] ego axes, NaN unknown
    ego_rates: Annotated[F64, "f8", 3]  #: [rad/s] ego axes, NaN unknown

    @classmethod
    def stack(cls, geometries: Sequence[Geometry], *leading: int) -> Geometry:
        """Stack samples of one rig, with these leading axes; without any, one axis of all samples.

        Of the lidars, only those that every sample has are kept.
        """
        num_lidars = min(len(geometry.lidar2ego) for geometry in geometries)

        def stacked(name: str) -> NDArray[Any]:
            values = [getattr(geometry, name) for geometry in geometries]
            if name.startswith("lidar"):
                values = [value[:num_lidars] for value in values]
            array = np.array(values)
            if leading:
                return array.reshape(*leading, *array.shape[1:])
            return array

        return cls(**{name: stacked(name) for name, _, _ in ARRAYS[cls]})

    def of_cameras(self, rows: Sequence[int]) -> Geometry:
        """Return it with these rows of the cameras alone."""
        first = rows[0] if rows else 0
        end = first + len(rows)
        selector: Any = list(rows)
        if selector == list(range(first, end)):
            selector = slice(first, end)  # a view, which costs a fraction of a copy
        arrays = []
        for name, _, shape in ARRAYS[Geometry]:
            array = getattr(self, name)
            arrays.append(array[selector] if shape[0] == "N" else array)
        return Geometry(*arrays)

    def cam2keyego(self, key2global: F64 | None = None) -> F64:
        """Return (N, 4, 4): each camera at its exposure to ego at the sample's time, through both
        ego poses.

        ``key2global`` is the ego pose of another sample to end in; it broadcasts over the leading
        axes.
        """
        origin = self.ego2global if key2global is None else key2global
        global2ego = invert_rigid(origin)
        cam2global = self.cam_ego2global @ self.cam2ego
        return np.asarray(global2ego[..., None, :, :] @ cam2global)

    def ego2cam(self) -> F64:
        """Return (N, 4, 4): ego at the sample's time to each camera at its exposure."""
        return invert_rigid(self.cam2keyego())

    def ego2img(self) -> F64:
        """Return (N, 4, 4): ego at the sample's time to homogeneous pixels (u d, v d, d, 1) of
        the stored image.
        """
        cam2img = homogeneous(self.intrinsics)
        return np.asarray(cam2img @ self.ego2cam())

    def lidar2keyego(self, lidar: int = 0) -> F64:
        """Return (4, 4): one lidar at its own time to ego at the sample's time."""
        lidar2ego = self.lidar2ego[..., lidar, :, :]
        lidar_ego2global = self.lidar_ego2global[..., lidar, :, :]
        lidar2global = lidar_ego2global @ lidar2ego
        global2ego = invert_rigid(self.ego2global)
        return np.asarray(global2ego @ lidar2global)

    def lidar2img(self, lidar: int = 0) -> F64:
        """Return (N, 4, 4): one lidar at its own time to homogeneous pixels, by both ego poses
        (as mmdet3d's).
        """
        lidar2ego = self.lidar2keyego(lidar)
        return np.asarray(self.ego2img() @ lidar2ego[..., None, :, :])


def box_corners(boxes3d: F32, rotation_wxyz: F32) -> F32:
    """Return the corners (M, 8, 3) of boxes (M, 7) with rotations (M, 4), in the frame of the
    boxes.

    Order: x front to back outermost, then y left to right, then z top to bottom.
    """
    centres = boxes3d[:, None, :3]
    sizes = boxes3d[:, None, 3:6]
    signs = np.array(list(itertools.product((1, -1), repeat=3)), np.float32)
    offsets = signs / 2 * sizes
    rotation = rotation_matrices(rotation_wxyz)
    turned_offsets = np.einsum("mij,mkj->mki", rotation, offsets)
    return np.asarray(turned_offsets + centres, np.float32)


@dataclass(frozen=True, slots=True, eq=False)
class Boxes:
    """``boxes.safetensors``: 3-D annotations of one sample, in ego at the sample's
    ``timestamp_ns``.
    """

    boxes3d: Annotated[F32, "f4", "M", 7]  #: x, y, z of the gravity centre, l, w, h [m], yaw [rad]
    rotation_wxyz: Annotated[F32, "f4", "M", 4]  #: full rotation, box to ego
    velocity: Annotated[F32, "f4", "M", 3]  #: [m/s] over ground, ego axes, NaN unknown
    label: Annotated[
        NDArray[np.int16], "i2", "M"
    ]  #: index into the manifest's classes, -1 outside them
    instance_id: Annotated[I64, "i8", "M"]  #: stable hash of the source's track id
    num_lidar_pts: Annotated[I32, "i4", "M"]  #: -1 unknown
    num_radar_pts: Annotated[I32, "i4", "M"]  #: -1 unknown
    visibility: Annotated[NDArray[np.int8], "i1", "M"]  #: 1 to 4 as in nuScenes, -1 unknown
    attribute: Annotated[
        NDArray[np.int16], "i2", "M"
    ]  #: index into the manifest's attributes, -1 none
    valid: Annotated[U8, "u1", "M"]  #: lidar + radar points > 0, or unknown

    def corners(self) -> F32:
        """Return the corners in ego, (M, 8, 3), as `box_corners` orders them."""
        return box_corners(self.boxes3d, self.rotation_wxyz)


@dataclass(frozen=True, slots=True, eq=False)
class Sweeps:
    """``{lidar}_sweeps.safetensors``: a lidar's S sweeps before the sample's own one, the latest
    first.

    Each is as it was measured, in the lidar's frame at its own time: nothing is moved or left out.
    """

    num_points: Annotated[I64, "i8", "S"]  #: of each sweep; together P
    timestamp_ns: Annotated[I64, "i8", "S"]
    lidar2global: Annotated[F64, "f8", "S", 4, 4]  #: each at its own time
    points: Annotated[
        F32, "f4", "P", "C"
    ]  #: one sweep after the other, columns as the manifest names them


@dataclass(frozen=True, slots=True, repr=False)
class Sample:
    """One decoded sample: metadata parsed, images still encoded (views of the shard), points as
    arrays.

    ``images`` maps channel to encoded bytes, rig order, absent cameras left out; ``points`` maps
    lidar channel to float32 (P, C) in the lidar's own frame, columns as the manifest names them;
    ``extra`` holds user members by field; ``sweeps`` maps lidar channel to its earlier sweeps,
    where they are stored.
    """

    key: str
    meta: Meta
    geometry: Geometry
    boxes: Boxes | None
    images: Mapping[str, Buffer]
    points: Mapping[str, F32]
    extra: Mapping[str, Buffer]
    sweeps: Mapping[str, Sweeps] = field(default_factory=dict)

    def of_cameras(self, rows: Sequence[int], num_cameras: int) -> Sample:
        """Return it with these cameras of a rig, of which the images are; raises SchemaError for
        another rig.
        """
        num_stored = len(self.geometry.cam_valid)
        if num_stored != num_cameras:
            raise SchemaError(
                f"it is of {num_stored} cameras, the manifest has {num_cameras}",
                key=self.key,
                member=GEOMETRY,
            )
        return replace(self, geometry=self.geometry.of_cameras(rows))

    def __repr__(self) -> str:
        """Name what is in it: its arrays would fill pages."""
        parts = [f"images {', '.join(self.images) or 'none'}"]
        if self.boxes is None:
            parts.append("no boxes")
        else:
            parts.append(f"{len(self.boxes.boxes3d)} boxes")
        for name, points in self.points.items():
            parts.append(f"{len(points):,} points of {name}")
        parts += self.extra
        return f"Sample({self.key}: {'; '.join(parts)})"


A = TypeVar("A", Geometry, Boxes, Sweeps)


def encode_meta(meta: Meta) -> bytes:
    """Serialise ``meta.json``: UTF-8, keys in schema order, no white space."""
    return msgspec.json.encode(meta)


_meta_decoder = msgspec.json.Decoder(Meta)


def decode_meta(data: Buffer) -> Meta:
    """Parse ``meta.json``; raises SchemaError with the path of what is wrong."""
    try:
        meta = _meta_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SchemaError(explain(error, data, Meta)) from error
    if meta.schema != SCHEMA:
        raise SchemaError(f"schema {meta.schema!r}; this version reads {SCHEMA!r}")
    return meta


def encode_arrays(record: Geometry | Boxes | Sweeps) -> bytes:
    """Serialise geometry, boxes or sweeps as safetensors; every dtype and shape is checked
    (SchemaError).
    """
    kind = type(record)
    arrays = {name: getattr(record, name) for name, _, _ in ARRAYS[kind]}
    _check_once(kind, arrays)
    return write_tensors(arrays)


def encode_stacked(record: Geometry | Boxes | Sweeps) -> list[bytes]:
    """Do :func:`encode_arrays` for many records of the same shapes, whose arrays all have one
    more axis in front.
    """
    kind = type(record)
    arrays = {name: getattr(record, name) for name, _, _ in ARRAYS[kind]}
    first_record = {name: array[0] for name, array in arrays.items()}
    _check_once(kind, first_record)
    return write_stacked(arrays)


def encode_parts(record: Boxes, counts: Sequence[int]) -> list[bytes]:
    """Do :func:`encode_arrays` for many records whose rows follow each other; ``counts`` are
    rows of each.
    """
    arrays = {name: getattr(record, name) for name, _, _ in ARRAYS[Boxes]}
    _check_once(Boxes, arrays)
    return write_parts(arrays, counts)


def decode_arrays(data: Buffer, to: type[A]) -> A:
    """Parse a ``.safetensors`` member into read-only views; raises SchemaError."""
    layout = read_layout(data)
    if to not in layout.fits:
        _check(to, layout.specs)
        layout.fits.add(to)
    return to(**layout.views(data))  # type: ignore[arg-type]


def _specs(
    record: type,
) -> tuple[tuple[str, np.dtype[Any], tuple[int | str, ...]], ...]:
    """Name, dtype and shape of each array of a record, from its annotations; equal letters are
    equal sizes.
    """
    hints = get_type_hints(record, include_extras=True)
    specs = []
    for name, hint in hints.items():
        code, *shape = hint.__metadata__
        dtype = np.dtype(f"<{code}")
        specs.append((name, dtype, tuple(shape)))
    return tuple(specs)


ARRAYS: Final = {record: _specs(record) for record in (Geometry, Boxes, Sweeps)}
"""Name, dtype and shape of each array of a record; a text in a shape stands for a length that
varies.
"""


def _check_once(
    kind: type[Geometry | Boxes | Sweeps],
    arrays: Mapping[str, NDArray[Any]],
) -> None:
    layout = tuple((array.dtype, array.shape) for array in arrays.values())
    if (kind, layout) not in _fitting:
        _check(kind, arrays)
        if len(_fitting) == _MOST_FITTING:
            _fitting.clear()
        _fitting.add((kind, layout))


def _check(
    record: type[Geometry | Boxes | Sweeps],
    arrays: Mapping[str, NDArray[Any] | TensorSpec],
) -> None:
    specs = ARRAYS[record]
    if len(arrays) != len(specs):
        names = [name for name, _, _ in specs]
        unknown = sorted(arrays.keys() - set(names))
        if unknown:
            raise SchemaError(f"unknown array '{unknown[0]}'; known: {', '.join(names)}")
    sizes: dict[str, int] = {}
    for name, dtype, shape in specs:
        array = arrays.get(name)
        if array is None:
            raise SchemaError(f"array '{name}' is missing")
        stored_shape = array.shape
        expected_sizes: list[int] = []
        for axis, size in enumerate(shape):
            if isinstance(size, str):  # a letter: the size that its first array has
                stored_size = stored_shape[axis] if axis < len(stored_shape) else -1
                size = sizes.setdefault(size, stored_size)
            expected_sizes.append(size)
        if array.dtype != dtype or stored_shape != tuple(expected_sizes):
            raise SchemaError(
                f"array '{name}' is {array.dtype}{list(stored_shape)}; wanted "
                f"{dtype}{expected_sizes}"
            )


def encode_points(points: F32) -> bytes:
    """Serialise one sweep (P, C) float32 as ``.npy``."""
    if points.dtype != np.float32 or points.ndim != 2:
        raise SchemaError(f"points are {points.dtype}{list(points.shape)}; wanted float32 [P, C]")
    return write_npy(points)


def decode_points(data: Buffer) -> F32:
    """Parse one sweep: read-only float32 (P, C); raises SchemaError."""
    points = read_npy(data)
    if points.dtype != np.dtype("<f4") or points.ndim != 2:
        raise SchemaError(f"points are {points.dtype}{list(points.shape)}; wanted float32 [P, C]")
    return points  # type: ignore[return-value]


def lidar_channel(name: str) -> str:
    """Return channel of a lidar's member: ``lidar_top`` of ``lidar_top.npy`` and
    ``lidar_top_sweeps.safetensors``.
    """
    if name.endswith(SWEEPS_FIELD):
        return name.removesuffix(SWEEPS_FIELD)
    return name.partition(".")[0]


def decode_sweeps(data: Buffer) -> Sweeps:
    """Parse a lidar's earlier sweeps; raises SchemaError, also where the points are not as many
    as stated.
    """
    sweeps = decode_arrays(data, Sweeps)
    counts = sweeps.num_points.tolist()
    if min(counts, default=0) < 0 or sum(counts) != len(sweeps.points):
        raise SchemaError(f"num_points {counts} are not those of {len(sweeps.points)} points")
    return sweeps


def decode_member(name: str, data: Buffer) -> Any:
    """Decode one member by its field name: Meta, Geometry, Boxes, Sweeps, points (P, C); the bytes
    of all others.

    Raises SchemaError for what does not match the schema.
    """
    if name == META:
        return decode_meta(data)
    if name == GEOMETRY:
        return decode_arrays(data, Geometry)
    if name == BOXES:
        return decode_arrays(data, Boxes)
    if name.endswith(SWEEPS_FIELD):
        return decode_sweeps(data)
    is_user = name.startswith("x_")
    is_points = name.endswith(f".{POINTS_EXTENSION}")
    if is_points and not is_user:
        return decode_points(data)
    return bytes(data)


def decode_sample(
    key: str,
    members: Mapping[str, Buffer],
    fields: Collection[str] = (),
) -> Sample:
    """Build a Sample from its decoded members (field name without codec suffix to raw bytes).

    ``fields`` are the members of channels that a sample has beyond cameras, lidars and boxes: they
    stay raw, in ``extra``.

    Raises SchemaError, naming key and member, where a member does not match the schema, a needed
    one is absent, or ``meta.json`` is that of another sample.
    """
    images: dict[str, Buffer] = {}
    points: dict[str, F32] = {}
    extra: dict[str, Buffer] = {}
    sweeps: dict[str, Sweeps] = {}
    parts: dict[str, Any] = {META: None, GEOMETRY: None, BOXES: None}
    for name, data in members.items():
        channel, _, extension = name.partition(".")
        try:
            if name in parts:
                parts[name] = decode_member(name, data)
            elif name in fields or channel.startswith("x_"):
                extra[name] = data
            elif name.endswith(SWEEPS_FIELD):
                sweeps[lidar_channel(name)] = decode_sweeps(data)
            elif extension in IMAGE_EXTENSIONS:
                if channel in images:
                    raise SchemaError(f"camera '{channel}' has two images; one is allowed")
                images[channel] = data
            elif extension == POINTS_EXTENSION:
                points[channel] = decode_points(data)
            else:
                extra[name] = data
        except MemberError as error:
            raise type(error)(error.message, key=key, member=name) from error
    for part_name in (META, GEOMETRY):
        if parts[part_name] is None:
            raise SchemaError("the member is missing", key=key, member=part_name)
    if parts[META].key != key:
        raise SchemaError(
            f"key {parts[META].key!r} is not the sample's key",
            key=key,
            member=META,
        )
    return Sample(
        key=key,
        meta=parts[META],
        geometry=parts[GEOMETRY],
        boxes=parts[BOXES],
        images=images,
        points=points,
        extra=extra,
        sweeps=sweeps,
    )
