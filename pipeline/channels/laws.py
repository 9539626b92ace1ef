"""Laws: what augmentation does to a channel's values, with the maths of
:mod:`fuelrail.pipeline.transforms`.

A law is a subclass of :class:`LawCode`, found by name in :data:`LAWS`. Packages add laws by the
entry point group ``fuelrail.laws``, whose entry points name ``LawCode`` objects.
Values are those of the kinds (:mod:`fuelrail.pipeline.channels.kinds`); axes in front of those that
a law moves are kept, so that values stacked over the frames of a window, which share one map, move
at once.

The roles of a law say which columns are what: groups of columns, or of a ``ragged`` channel groups
of one array each, whose last axis has the columns.

==============  ==================  ============================================================
law             role                columns of a group
==============  ==================  ============================================================
image_points    points              u, v [px]
image_points    boxes               u and v of the least corner, u and v of the largest corner [px]
image_points    visible             one, 1 where seen; made 0 by what the map leaves out of the image
ego_points      positions           x, y or x, y, z [m]
ego_points      vectors             the same, such as velocities
ego_boxes       boxes               x, y, z, length, width, height [m], yaw [rad]
ego_boxes       vectors             as above
ego_boxes       rotations           w, x, y, z of a unit quaternion, box to ego
ego_grid        vectors             as above; of each cell
ego_poses       positions, vectors  as above
ego_poses       yaws                one, radians from +x
ego_poses       rotations           as above
==============  ==================  ============================================================

``ego_poses`` without roles moves rigid 4x4 matrices, body to ego.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.plugins import Registry
from fuelrail.pipeline.channels.table import DTYPES
from fuelrail.pipeline.channels.warp import warp_grid, warp_image
from fuelrail.pipeline.errors import SchemaError
from fuelrail.pipeline.rigid import move_points
from fuelrail.pipeline.transforms.ego import IDENTITY, BevMap
from fuelrail.pipeline.transforms.lens import rectified_places

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.kinds import Value
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import F64
    from fuelrail.pipeline.transforms.image_map import ImageMap

    Array = NDArray[Any]

ROLES: Final[dict[str, dict[str, tuple[int, ...]]]] = {
    "image_points": {"points": (2,), "boxes": (4,), "visible": (1,)},
    "ego_points": {"positions": (2, 3), "vectors": (2, 3)},
    "ego_boxes": {"boxes": (7,), "vectors": (2, 3), "rotations": (4,)},
    "ego_grid": {"vectors": (2, 3)},
    "ego_poses": {
        "positions": (2, 3),
        "vectors": (2, 3),
        "yaws": (1,),
        "rotations": (4,),
    },
}
"""Law to role to the numbers of columns that a group may have."""
_CORNERS: Final = [0, 1, 2, 1, 2, 3, 0, 3]
"""The columns of a box, two for each of its corners in turn."""


@dataclass(frozen=True, slots=True)
class Motion:
    """The augmentation of one sample.

    Attributes:
        images: camera to the map of its image.
        ego: the map of the ego frame.
        sensor2ego: lidar to the lidar at its own time to ego at the sample's
            (`Geometry.lidar2keyego`), rigid (4, 4) float64; of the lidars in whose frame channels
            are.
    """

    images: Mapping[str, ImageMap] = field(default_factory=dict)
    ego: BevMap = IDENTITY
    sensor2ego: Mapping[str, F64] = field(default_factory=dict)


class LawCode:
    """The code of one law; this one changes nothing."""

    def broken(self, _channel: Channel, _table: Mapping[str, Channel]) -> Iterator[str]:
        """Yield what is wrong with the law of an entry; the mapping is the whole table by name."""
        return iter(())

    def move(self, value: Value, _channel: Channel, _motion: Motion) -> Value:
        """Return a channel's value moved as the sample is: a new one, or the same where nothing
        moves.

        Raises SchemaError for a value that the law cannot move.
        """
        return value

    def shape(
        self,
        shape: tuple[int, ...],
        _channel: Channel,
        _motion: Motion,
    ) -> tuple[int, ...]:
        """Return the shape of a moved raster, given the stored shape; what kinds stack where all
        values are missing.
        """
        return shape

    @property
    def moves(self) -> bool:
        """Whether it changes values at all."""
        return type(self).move is not LawCode.move


def _broken_roles(channel: Channel) -> Iterator[str]:
    """Yield the roles that the law does not have, and groups whose columns are missing, too few
    or integers.
    """
    law = channel.law
    sizes_by_role = ROLES[law.name]
    arrays = {spec.name: spec for spec in channel.arrays}
    names: list[str] = []
    for groups in law.roles.values():
        for group in groups:
            names += group
    repeated_names = sorted({name for name in names if names.count(name) > 1})
    if repeated_names:
        yield f"roles name {repeated_names} twice, and each is moved once: name them in one group"
    for role, groups in law.roles.items():
        if role not in sizes_by_role:
            yield f"law '{law.name}' has no role '{role}'; known: {', '.join(sizes_by_role)}"
            continue
        for group in groups:
            if channel.arrays:
                spec = arrays.get(group[0]) if len(group) == 1 else None
                if spec is None:
                    yield (
                        f"role '{role}' names {list(group)}; a group of a ragged channel is one "
                        "of its arrays"
                    )
                    continue
                dtype = spec.dtype
                size = spec.shape[-1] if spec.shape else 1
            else:
                absent = [name for name in group if name not in channel.columns]
                if absent:
                    yield (
                        f"role '{role}' names the columns {absent}; there are "
                        f"{list(channel.columns)}"
                    )
                    continue
                dtype = channel.dtype
                size = len(group)
            if size not in sizes_by_role[role]:
                yield (
                    f"role '{role}' has {size} columns in {list(group)}; allowed: "
                    f"{sizes_by_role[role]}"
                )
            if role != "visible" and not dtype.startswith("float"):
                yield f"role '{role}' needs floats; {list(group)} has dtype '{dtype}'"


def _needs_camera(channel: Channel, table: Mapping[str, Channel]) -> Iterator[str]:
    camera = channel.law.camera
    if camera is None:
        yield f"law '{channel.law.name}' needs its camera: give law.camera"
    elif camera not in table or table[camera].sensor != "camera":
        cameras = [entry.name for entry in table.values() if entry.sensor == "camera"]
        yield (
            f"law '{channel.law.name}' names the camera {camera!r:.80}; the table has: "
            f"{', '.join(cameras) or 'none'}"
        )
    elif channel.frame not in (None, f"image:{camera}"):
        frame = f"image:{camera}"
        yield (
            f"law '{channel.law.name}' of camera '{camera}' needs the frame '{frame}'; it is "
            f"{channel.frame!r:.80}"
        )


def _needs_ego(channel: Channel) -> Iterator[str]:
    if channel.frame != "ego":
        yield f"law '{channel.law.name}' needs the frame 'ego'; it is {channel.frame!r:.80}"


def _needs_roles(channel: Channel, *roles: str) -> Iterator[str]:
    if not set(roles) & channel.law.roles.keys():
        yield (
            f"law '{channel.law.name}' needs a role {' or '.join(map(repr, roles))}: it says "
            "what moves"
        )


def _broken_fill(channel: Channel) -> Iterator[str]:
    """Yield why the manifest's JSON cannot hold the fill, or why the dtype cannot."""
    fill = channel.law.fill
    if fill is None or channel.dtype not in DTYPES:
        return
    with np.errstate(over="ignore", invalid="ignore"):
        stored = np.float64(fill).astype(channel.dtype)
    is_value = not np.isinf(stored)
    if stored.dtype.kind in "iub":
        is_value = float(stored) == fill
    if not np.isfinite(fill) or not is_value:
        yield f"fill {fill} must be finite and a value of dtype '{channel.dtype}'"


def _move_roles(
    value: Value,
    channel: Channel,
    moves: Mapping[str, Callable[[Array], Array]],
) -> Value:
    """Return a copy of the value in which each group of columns with a role is moved, in
    float64.
    """
    is_dict = isinstance(value, dict)
    moved: Any = dict(value) if is_dict else value.copy()
    for role, move in moves.items():
        for group in channel.law.roles.get(role, ()):
            if is_dict:
                name = group[0]
                array = moved[name]
                moved_array = move(array.astype(np.float64))
                moved[name] = moved_array.astype(array.dtype)
            else:
                columns = [channel.columns.index(name) for name in group]
                array = moved[..., columns]
                moved[..., columns] = move(array.astype(np.float64))
    return moved


def _affine(linear: F64, shift: F64 | None = None) -> Callable[[Array], Array]:
    """Return the function that moves points (..., 2 or 3); of two columns the third is 0 and
    left out.
    """

    def move(points: Array) -> Array:
        size = points.shape[-1]
        linear_part = linear[:size, :size]
        moved: Array = points @ linear_part.T
        if shift is None:
            return moved
        return moved + shift[:size]

    return move


class _ImageLaw(LawCode):
    """A raster that lies on the image of a camera."""

    def broken(self, channel: Channel, table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _needs_camera(channel, table)
        if channel.kind not in ("image", "array") or channel.axes[:2] != ("height", "width"):
            yield (
                "law 'image' moves kind image or array with the axes height, width first; not "
                f"{list(channel.axes)}"
            )
        if channel.law.fraction is not None and channel.law.fraction < 1:
            yield f"fraction {channel.law.fraction} must be 1 or more"
        yield from _broken_fill(channel)

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        law = channel.law
        return warp_image(
            value,
            _image_map(channel, motion),
            linear=law.interpolation == "linear",
            fill=law.fill or 0.0,
            fraction=law.fraction or 1,
        )

    def shape(
        self,
        shape: tuple[int, ...],
        channel: Channel,
        motion: Motion,
    ) -> tuple[int, ...]:
        width, height = _image_map(channel, motion).out_wh
        return (height, width, *shape[2:])


class _ImagePointsLaw(LawCode):
    """Points and boxes on the image of a camera."""

    def broken(self, channel: Channel, table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _needs_camera(channel, table)
        yield from _broken_roles(channel)
        yield from _needs_roles(channel, "points", "boxes")

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        """Move points through the map; clip boxes to what the crops leave, then tighten them about
        their turned corners.

        A box or point of which nothing is left keeps the place where it falls, cut off at the
        output's border. A number of role ``visible`` becomes 0 where nothing is left of its row's
        boxes and points, or of its own point.
        """
        image_map = _image_map(channel, motion)
        matrix = image_map.centre_matrix()
        linear = matrix[:2, :2]
        shift = matrix[:2, 2]
        left, top, right, bottom = image_map.visible
        low = np.asarray((left - 0.5, top - 0.5))
        high = np.asarray((right - 0.5, bottom - 0.5))
        width, height = image_map.out_wh
        end = np.asarray((width - 0.5, height - 0.5))
        inside_masks: list[Array] = []

        def points(rows: Array) -> Array:
            places = rows.reshape(-1, 2)
            if image_map.lens is not None:
                places = rectified_places(places, image_map.lens)
            moved = places @ linear.T + shift
            is_in_source = (places >= low) & (places <= high)
            is_in_output = (moved >= -0.5) & (moved <= end)
            is_seen = np.all(is_in_source & is_in_output, axis=-1)
            inside_masks.append(is_seen.reshape(rows.shape[:-1]))
            return moved.reshape(rows.shape)

        def boxes(rows: Array) -> Array:
            box_rows = rows.reshape(-1, 4)
            corners: Array = box_rows[:, _CORNERS].reshape(-1, 2)
            if image_map.lens is not None:
                corners = rectified_places(corners, image_map.lens)
            corners = corners.reshape(-1, 4, 2)
            smallest = np.clip(corners.min(1), low, high)
            largest = np.clip(corners.max(1), low, high)
            clipped = np.concatenate((smallest, largest), 1)
            clipped_corners = clipped[:, _CORNERS].reshape(-1, 4, 2)
            moved = clipped_corners @ linear.T + shift
            first = np.clip(moved.min(1), -0.5, end)
            last = np.clip(moved.max(1), -0.5, end)
            is_left_by_crops = (largest > smallest).all(-1)
            is_in_output = (last > first).all(-1)
            is_visible = is_left_by_crops & is_in_output
            inside_masks.append(is_visible.reshape(rows.shape[:-1]))
            return np.concatenate((first, last), 1).reshape(rows.shape)

        def visible(rows: Array) -> Array:
            shape = rows.shape[:-1] if rows.ndim > 1 else rows.shape
            flags = rows.reshape(shape)
            masks = []
            for inside in inside_masks:
                if inside.shape[: flags.ndim] == shape:
                    inner_axes = tuple(range(flags.ndim, inside.ndim))
                    masks.append(inside.any(inner_axes))
            if masks:
                flags = flags * np.any(masks, axis=0)
            return flags.reshape(rows.shape)

        moves = {
            "points": points,
            "boxes": boxes,
            "visible": visible,
        }
        return _move_roles(value, channel, moves)


def _image_map(channel: Channel, motion: Motion) -> ImageMap:
    camera = channel.law.camera or ""
    image_map = motion.images.get(camera)
    if image_map is None:
        raise SchemaError(
            f"channel '{channel.name}' moves with the image of camera '{camera}', which has "
            "no map here"
        )
    return image_map


class _EgoPointsLaw(LawCode):
    """Points and vectors in the frame of ego or of a lidar."""

    def broken(self, channel: Channel, table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _broken_roles(channel)
        yield from _needs_roles(channel, "positions", "vectors")
        frame = channel.frame or ""
        sensor = frame.removeprefix("sensor:")
        is_sensor = sensor != frame and sensor in table
        is_lidar = is_sensor and table[sensor].sensor == "lidar"
        if frame != "ego" and not is_lidar:
            yield (
                "law 'ego_points' needs the frame 'ego' or that of a lidar of the table; it is "
                f"{channel.frame!r:.80}"
            )

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        if motion.ego == IDENTITY:
            return value
        frame = channel.frame or "ego"
        sensor = frame.removeprefix("sensor:")
        if frame != "ego" and sensor not in motion.sensor2ego:
            raise SchemaError(
                f"channel '{channel.name}' is in the frame of '{sensor}', whose place is unknown"
            )
        frame2ego = np.eye(4) if frame == "ego" else motion.sensor2ego[sensor]
        linear, shift = motion.ego.in_frame(frame2ego)
        moves = {
            "positions": _affine(linear, shift),
            "vectors": _affine(linear),
        }
        return _move_roles(value, channel, moves)


class _EgoBoxesLaw(LawCode):
    """Boxes in the frame of ego."""

    def broken(self, channel: Channel, _table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _needs_ego(channel)
        yield from _broken_roles(channel)
        yield from _needs_roles(channel, "boxes", "vectors", "rotations")

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        ego = motion.ego
        if ego == IDENTITY:
            return value

        def boxes(rows: Array) -> Array:
            moved = ego.boxes3d(rows.reshape(-1, 7))
            return moved.reshape(rows.shape)

        moves = {
            "boxes": boxes,
            "vectors": _affine(ego.matrix[:3, :3]),
            "rotations": ego.rotations,
        }
        return _move_roles(value, channel, moves)


class _EgoGridLaw(LawCode):
    """A raster on the ground about ego, or a grid of the space about it."""

    def broken(self, channel: Channel, _table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _needs_ego(channel)
        yield from _broken_roles(channel)
        yield from _broken_fill(channel)
        extent = channel.law.extent_m or ()
        space = [name for name in ("x", "y", "z") if name in channel.axes]
        if space[:2] != ["x", "y"] or channel.kind not in ("array", "image"):
            yield (
                "law 'ego_grid' moves kind array or image with the axes x and y (and z); not "
                f"{list(channel.axes)}"
            )
        num_axes = len(space)
        if len(extent) != 2 * num_axes or not np.isfinite(extent).all():
            yield f"extent_m {list(extent)} must have {2 * num_axes} finite borders in m"
            return
        lows = extent[:num_axes]
        highs = extent[num_axes:]
        if any(low == high for low, high in zip(lows, highs, strict=True)):
            yield f"extent_m {list(extent)} is empty"

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        if motion.ego == IDENTITY:
            return value
        law = channel.law
        turned = value
        if law.roles:
            # Before cells move: the fill of cells outside the extent is not a vector that was
            # measured.
            linear = motion.ego.matrix[:3, :3]
            turned = _move_roles(value, channel, {"vectors": _affine(linear)})
        return warp_grid(
            turned,
            channel.axes,
            law.extent_m or (),
            motion.ego,
            linear=law.interpolation == "linear",
            fill=law.fill or 0.0,
        )


class _EgoPosesLaw(LawCode):
    """Poses of bodies in the frame of ego."""

    def broken(self, channel: Channel, _table: Mapping[str, Channel]) -> Iterator[str]:
        yield from _needs_ego(channel)
        yield from _broken_roles(channel)
        if channel.law.roles:
            return
        is_float = channel.dtype.startswith("float")
        if channel.shape[-2:] != (4, 4) or not is_float:
            yield (
                "law 'ego_poses' without roles moves 4x4 matrices of floats; the shape is "
                f"{list(channel.shape)}"
            )

    def move(self, value: Value, channel: Channel, motion: Motion) -> Value:
        ego = motion.ego
        if ego == IDENTITY:
            return value
        matrix = ego.matrix
        linear = matrix[:3, :3]
        shift = matrix[:3, 3]
        if channel.law.roles:
            moves = {
                "positions": _affine(linear, shift),
                "vectors": _affine(linear),
                "yaws": ego.yaws,
                "rotations": ego.rotations,
            }
            return _move_roles(value, channel, moves)
        # The body is mirrored with its world: its own left and right are exchanged, so that its
        # axes stay a rotation.
        side = -1.0 if ego.flip_x != ego.flip_y else 1.0
        mirror = np.diag((1.0, side, 1.0))
        rotation = linear / ego.scale
        moved = value.astype(np.float64)
        moved[..., :3, 3] = move_points(moved[..., :3, 3], matrix)
        moved[..., :3, :3] = rotation @ moved[..., :3, :3] @ mirror
        return moved.astype(value.dtype)


LAWS: Final = Registry(
    "law",
    "fuelrail.laws",
    {
        "fixed": LawCode(),
        "image": _ImageLaw(),
        "image_points": _ImagePointsLaw(),
        "ego_points": _EgoPointsLaw(),
        "ego_boxes": _EgoBoxesLaw(),
        "ego_grid": _EgoGridLaw(),
        "ego_poses": _EgoPosesLaw(),
        "classes": LawCode(),
    },
    LawCode,
)
"""All laws by name."""
