"""The boxes of a clip's frames: categories to classes, global to ego, and velocities along
tracks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, rotation_matrices
from fuelrail.pipeline.sample.schema import F64, I64, Boxes, Mask, encode_parts
from fuelrail.sharding.sources.adapter.poses import (
    FARTHEST_M,
    are_unit,
    quaternions,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I32, U8
    from fuelrail.sharding.sources.adapter.classes import ClassMap
    from fuelrail.sharding.sources.adapter.frame import BoxRows
    from fuelrail.sharding.sources.shared.scan_report import ScanReport


MAX_GAP_S: Final = 1.5
"""Largest time between two annotations that a velocity is taken from; twice that for a centred
difference.
"""


class ClipBoxes(NamedTuple):
    """The boxes of F frames. ``encoded`` is None of a frame that is not labelled."""

    encoded: list[bytes | None]
    num_boxes: list[int]
    class_counts: I64
    """(F, K): the number of boxes of each class."""


def clip_boxes(
    rows: Sequence[BoxRows | None],
    timestamp_ns: I64,
    ego2global: F64,
    classes: ClassMap,
    report: ScanReport,
) -> ClipBoxes:
    """Return the boxes of a clip's frames in ego, whose times are (F,) [ns] and whose poses are (F,
    4, 4).

    What is done box by box is done for the whole clip at once. Raises SourceError for columns of
    other lengths, sizes that are not positive, and rotations that are none.
    """
    labelled = [
        (number, frame_boxes) for number, frame_boxes in enumerate(rows) if frame_boxes is not None
    ]
    counts = np.array([len(frame_boxes.category) for _, frame_boxes in labelled], np.int64)
    if not labelled:
        return ClipBoxes(
            encoded=[None] * len(rows),
            num_boxes=[0] * len(rows),
            class_counts=np.zeros((len(rows), len(classes.names)), np.int64),
        )
    frame = np.repeat(
        np.array([number_of_frame for number_of_frame, _ in labelled], np.int64),
        counts,
    )
    for _, frame_boxes in labelled:
        for text, number in frame_boxes.unknown_visibility.items():
            report.unknown_visibility[text] = report.unknown_visibility.get(text, 0) + number
    columns = in_ego(
        labelled,
        frame=frame,
        timestamp_ns=timestamp_ns,
        ego2global=ego2global,
    )
    columns["label"] = classes.labels(
        [name for _, frame_boxes in labelled for name in frame_boxes.category]
    )
    columns["valid"], num_unknown = validity(columns["num_lidar_pts"], columns["num_radar_pts"])
    report.unknown_points += num_unknown
    encoded: list[bytes | None] = [None] * len(rows)
    for (number_of_frame, _), data in zip(
        labelled,
        encode_parts(Boxes(**columns), counts.tolist()),
        strict=True,
    ):
        encoded[number_of_frame] = data
    num_classes = len(classes.names) + 1
    class_counts = np.bincount(
        frame * num_classes + columns["label"] + 1,
        minlength=len(rows) * num_classes,
    )
    num_boxes = np.bincount(frame, minlength=len(rows)).tolist()
    class_counts = class_counts.reshape(len(rows), num_classes)
    return ClipBoxes(
        encoded=encoded,
        num_boxes=num_boxes,
        class_counts=class_counts[:, 1:],  # the first column is of no class
    )


def in_ego(
    labelled: Sequence[tuple[int, BoxRows]],
    frame: I64,
    timestamp_ns: I64,
    ego2global: F64,
) -> dict[str, NDArray[Any]]:
    """Return columns of boxes but label and validity; ``labelled`` are numbers of frames with their
    boxes.

    ``frame`` (M,) is the number of each box's frame, whose times (F,) [ns] and poses (F, 4, 4) are
    given.
    """
    counts = [len(frame_boxes.category) for _, frame_boxes in labelled]
    column = partial(_join_column, labelled, frame)
    in_global = np.repeat(
        np.array([frame_boxes.in_global for _, frame_boxes in labelled], np.bool_),
        counts,
    )
    to_ego = invert_rigid(ego2global)[frame]
    centre = column("centre", np.float64, 3)
    size = column("size_lwh", np.float64, 3)
    turn_to_ego = to_ego[:, :3, :3]
    stated2ego = np.where(in_global[:, None, None], turn_to_ego, np.eye(3))
    moved = _turn_vectors(turn_to_ego, centre) + to_ego[:, :3, 3]
    centre_in_ego = np.where(in_global[:, None], moved, centre)
    stated_rotation = _make_rotations(
        column("rotation_wxyz", np.float64, 4), column("yaw", np.float64)
    )
    rotation = stated2ego @ stated_rotation
    is_sound = (np.abs(centre) <= FARTHEST_M).all(1)
    is_sound &= (size <= FARTHEST_M).all(1)
    is_sound &= (size > 0).all(1)
    is_sound &= np.isfinite(rotation).all((1, 2))
    bad = ~is_sound
    if bad.any():
        row = int(np.argmax(bad))
        raise SourceError(
            f"frame {int(frame[row])}: a box has the centre {centre[row].tolist()} and the "
            f"size {size[row].tolist()}, or its rotation is not of unit length; wanted are "
            f"numbers up to {FARTHEST_M:g}, sizes over 0, unit quaternions w, x, y, z"
        )
    track: list[str] = []
    for _, frame_boxes in labelled:
        track += frame_boxes.track or [""] * len(frame_boxes.category)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(track))}
    tracks = np.fromiter(map(numbers.__getitem__, track), np.int64, len(track))
    has_track = tracks != numbers.get("", -1)
    velocity = _turn_vectors(stated2ego, column("velocity", np.float64, 3))
    is_unstated = np.array([frame_boxes.velocity is None for _, frame_boxes in labelled], np.bool_)
    follow = has_track & np.repeat(is_unstated, counts)
    if follow.any():
        box2global = ego2global[frame]
        turned = _turn_vectors(box2global[:, :3, :3], centre)
        in_world = turned + box2global[:, :3, 3]
        in_world[in_global] = centre[in_global]
        # The rows before and after each row in its track.
        before = np.full(len(tracks), -1, np.int64)
        after = np.full(len(tracks), -1, np.int64)
        order = np.argsort(tracks, kind="stable")
        first = order[:-1]
        last = order[1:]
        same = tracks[first] == tracks[last]
        before[last[same]] = first[same]
        after[first[same]] = last[same]
        speed = velocities(
            in_world,
            timestamp_us=timestamp_ns[frame] // 1000,
            prev=before,
            following=after,
        )
        speed_in_ego = _turn_vectors(turn_to_ego, speed)
        velocity[follow] = speed_in_ego[follow]
    ids = np.array([stable_id(name) if name else -1 for name in numbers], np.int64)
    quaternion = quaternions(rotation)
    is_negative = quaternion[:, :1] < 0
    quaternion = np.where(is_negative, -quaternion, quaternion)
    yaw = np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0])
    boxes3d = np.concatenate([centre_in_ego, size, yaw[:, None]], 1)
    return {
        "boxes3d": boxes3d.astype(np.float32),
        "rotation_wxyz": quaternion.astype(np.float32),
        "velocity": velocity.astype(np.float32),
        "instance_id": ids[tracks],
        "num_lidar_pts": column("num_lidar_pts", np.int32, unknown=-1),
        "num_radar_pts": column("num_radar_pts", np.int32, unknown=-1),
        "visibility": column("visibility", np.int8, unknown=-1),
        "attribute": column("attribute", np.int16, unknown=-1),
    }


def _turn_vectors(matrices: F64, vectors: F64) -> F64:
    """Return each vector (M, 3), turned by its own matrix (M, 3, 3)."""
    return np.asarray(np.einsum("mij,mj->mi", matrices, vectors))


def _join_column(
    labelled: Sequence[tuple[int, BoxRows]],
    frame: I64,
    name: str,
    kind: type,
    *shape: int,
    unknown: float = np.nan,
) -> NDArray[Any]:
    """Return one column of all boxes as this type, as `in_ego` takes ``labelled`` and ``frame``."""
    all_stated = [getattr(frame_boxes, name) for _, frame_boxes in labelled]
    if all(stated is None for stated in all_stated):
        return np.full((len(frame), *shape), unknown, kind)
    parts = []
    frames_and_columns = zip(labelled, all_stated, strict=True)
    for (number_of_frame, frame_boxes), stated in frames_and_columns:
        count = len(frame_boxes.category)
        part_shape = (count, *shape)
        part = np.full(part_shape, unknown)
        if stated is not None:
            part = np.asarray(stated, np.float64)
        if not count and not part.size:
            part = part.reshape(0, *shape)
        if part.shape != part_shape:
            raise SourceError(
                f"frame {number_of_frame}: {name} of boxes is {list(part.shape)}, wanted "
                f"{list(part_shape)}"
            )
        parts.append(part)
    values = np.concatenate(parts)
    if issubclass(kind, np.integer):
        limits = np.iinfo(kind)
        bad = ~((values >= limits.min) & (values <= limits.max))
        if bad.any():
            row = int(np.argmax(bad))
            raise SourceError(
                f"frame {int(frame[row])}: {name} of a box is {values[row]:g}, out of range; "
                "unknown is -1"
            )
    return values.astype(kind)


def _make_rotations(wxyz: F64, yaw: F64) -> F64:
    """Return rotation matrices (M, 3, 3) of quaternions, or of yaw where those are NaN; NaN for
    a wrong one.
    """
    cos = np.cos(yaw)
    sin = np.sin(yaw)
    yaw_rotations = np.zeros((len(yaw), 3, 3))
    yaw_rotations[:, 0, 0] = cos
    yaw_rotations[:, 0, 1] = -sin
    yaw_rotations[:, 1, 0] = sin
    yaw_rotations[:, 1, 1] = cos
    yaw_rotations[:, 2, 2] = 1
    is_unit = are_unit(wxyz)
    quaternions = np.where(is_unit[:, None], wxyz, [1.0, 0, 0, 0])
    full = rotation_matrices(quaternions)
    full[~is_unit] = np.nan
    is_yaw: Mask = np.asarray(np.isnan(wxyz).all(1))
    return np.where(is_yaw[:, None, None], yaw_rotations, full)


def rows_by_key(keys: NDArray[np.integer[Any]]) -> dict[int, NDArray[np.intp]]:
    """Return the numbers of the rows with each key, ascending, by key."""
    order = np.argsort(keys, kind="stable")
    distinct, starts = np.unique(keys[order], return_index=True)
    parts = np.split(order, starts)[1:]
    return dict(zip(distinct.tolist(), parts, strict=True))


def boxes_by_key(boxes: BoxRows, keys: NDArray[np.integer[Any]]) -> dict[int, BoxRows]:
    """Return the boxes (M) with each key, such as the number of a frame, in their order;
    ``keys`` are (M,).
    """
    arrays = dict[str, NDArray[Any]]()
    texts = dict[str, Sequence[str]]()
    for name, column in msgspec.structs.asdict(boxes).items():
        if name in ("category", "track") and column is not None:
            texts[name] = column
        elif name not in ("in_global", "unknown_visibility") and column is not None:
            arrays[name] = np.asarray(column)
    boxes_of_key = {}
    for key, part in rows_by_key(keys).items():
        columns: dict[str, Any] = {name: column[part] for name, column in arrays.items()}
        for name, text_column in texts.items():
            columns[name] = [text_column[row] for row in part.tolist()]
        boxes_of_key[key] = msgspec.structs.replace(boxes, **columns)
    return boxes_of_key


def velocities(
    centre: F64,
    timestamp_us: I64,
    prev: I64,
    following: I64,
) -> F64:
    """Return the velocity (A, 3) [m/s] in the centres' frame: centred, one-sided at a track's ends,
    else NaN.

    ``prev`` and ``following`` are row numbers, -1 for none. Where the time spanned is over 1.5 s (3
    s centred) or not positive, the velocity is unknown: NaN.
    """
    rows = np.arange(len(centre))
    first = np.where(prev < 0, rows, prev)
    last = np.where(following < 0, rows, following)
    span_s = (timestamp_us[last] - timestamp_us[first]) * 1e-6
    is_centred = (prev >= 0) & (following >= 0)
    limit_s = np.where(is_centred, 2 * MAX_GAP_S, MAX_GAP_S)
    usable = (span_s > 0) & (span_s <= limit_s)
    velocity = np.full(centre.shape, np.nan)
    moved = centre[last] - centre[first]
    velocity[usable] = moved[usable] / span_s[usable, None]
    return velocity


def validity(lidar: I32, radar: I32) -> tuple[U8, int]:
    """Return ``valid`` of boxes (M,) by their numbers of points, -1 unknown, and how many are 1
    because it is unknown.

    1 where a point is known, or the number of lidar points is not. An unknown number of radar
    points says nothing, for most datasets count lidar points alone.
    """
    has_point = (lidar > 0) | (radar > 0)
    is_unknown = ~has_point & (lidar < 0)
    is_valid = has_point | is_unknown
    return is_valid.astype(np.uint8), int(np.count_nonzero(is_unknown))


def stable_id(token: str) -> int:
    """Return the 63-bit number of a track's token, the same on every machine."""
    return xxhash.xxh3_64_intdigest(token.encode()) >> 1
