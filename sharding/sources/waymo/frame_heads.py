"""What the scan needs of a ``Frame`` message, of which pictures and range images are skipped.

Numbers of fields are those of ``dataset.proto`` and ``label.proto``
(github.com/waymo-research/waymo-open-dataset).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import msgspec
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.adapter.boxes import boxes_by_key
from fuelrail.sharding.sources.adapter.frame import (
    NO_BOXES,
    BoxRows,
    Calibration,
    Image,
    ImageBoxRows,
)
from fuelrail.sharding.sources.adapter.poses import OPTICAL2FLU
from fuelrail.sharding.sources.shared.protobuf import (
    BYTES,
    FIXED64,
    MAX_HEAD,
    VARINT,
    alike,
    doubles,
    field_places,
    fields,
    numbers,
    varint,
)
from fuelrail.sharding.sources.waymo.maps import (
    FRAME_MAP,
    FRAME_MAP_OFFSET,
    place,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import U8
    from fuelrail.pipeline.sample.schema import F64, I64
    from fuelrail.sharding.sources.shared.protobuf import Fail, FieldPlace
    from fuelrail.sharding.sources.shared.windows import FileWindow
    from fuelrail.sharding.sources.waymo.records import FileRecord

CAMERAS: Final = {
    1: "FRONT",
    2: "FRONT_LEFT",
    3: "FRONT_RIGHT",
    4: "SIDE_LEFT",
    5: "SIDE_RIGHT",
}
LABEL_TYPES: Final = ("unknown", "vehicle", "pedestrian", "sign", "cyclist")
SHUTTERS: Final = (
    "none",
    "top_to_bottom",
    "left_to_right",
    "bottom_to_top",
    "right_to_left",
    "none",
)

(
    _FRAME_CONTEXT,
    _FRAME_TIME,
    _FRAME_POSE,
    _FRAME_IMAGES,
    _FRAME_LASERS,
    _FRAME_LABELS,
) = range(1, 7)
_FRAME_CAMERA_LABELS: Final = 8
_FRAME_NAMES: Final = {
    _FRAME_CONTEXT: "context",
    _FRAME_TIME: "timestamp_micros",
    _FRAME_POSE: "pose",
    _FRAME_IMAGES: "images",
    _FRAME_LASERS: "lasers",
    _FRAME_LABELS: "laser_labels",
    _FRAME_CAMERA_LABELS: "camera_labels",
    FRAME_MAP_OFFSET: "map_pose_offset",
}
"""The fields that are read; all but the time are bytes."""
(
    _IMAGE_NAME,
    _IMAGE_JPEG,
    _IMAGE_POSE,
    _,
    _IMAGE_TIME,
    _IMAGE_SHUTTER,
    _IMAGE_TRIGGER,
    _IMAGE_DONE,
) = range(1, 9)
_BOX_KEYS: Final = np.array([number << 3 | FIXED64 for number in range(1, 8)], np.uint8)
_POSE: Final = struct.Struct("<" + "xd" * 16)
_POSE_KEYS: Final = bytes([1 << 3 | FIXED64]) * 16
_DOUBLE: Final = struct.Struct("<d")
_POSE_HEAD: Final = bytes([_IMAGE_POSE << 3 | BYTES, 0x80 | _POSE.size & 0x7F, _POSE.size >> 7])
_VELOCITY_KEY: Final = _IMAGE_POSE + 1 << 3 | BYTES
_TIMES: Final = struct.Struct("<" + "xd" * 4)
_TIMES_KEYS: Final = bytes(
    number << 3 | FIXED64 for number in (_IMAGE_TIME, _IMAGE_SHUTTER, _IMAGE_TRIGGER, _IMAGE_DONE)
)
_TAIL_POSE: Final = 3 + _POSE.size
_LEAST_TAIL: Final = _TAIL_POSE + 2 + _TIMES.size
_CONTEXT_BEGIN: Final = 44
_AFTER_JPEG: Final = 320
_LABELS_AHEAD: Final = 1024


class ImageHead(msgspec.Struct, frozen=True, gc=False):
    """A picture: where its JPEG is in the file, the pose of the vehicle (16 numbers), and times
    [s].
    """

    name: str
    offset: int
    num_bytes: int
    pose: tuple[float, ...]
    pose_timestamp: float
    shutter: float
    trigger: float
    done: float


class FrameHead(NamedTuple):
    """A frame; ``context`` are the bytes of the message, ``labels`` a message each; bytes of all
    range images.

    ``camera_labels`` are a message for each camera that has labels in its image. ``map_span`` is
    where in the file the features of the map are, None without; ``map_offset`` [m] is to be added
    to places in global for those of the map.
    """

    timestamp_us: int
    pose: tuple[float, ...]
    context: bytes
    images: list[ImageHead]
    labels: list[bytes]
    laser_bytes: int
    camera_labels: list[bytes]
    map_span: tuple[int, int] | None = None
    map_offset: tuple[float, float, float] = (0.0, 0.0, 0.0)


def read_frame(
    window: FileWindow,
    record: FileRecord,
    context: bytes | None,
    *,
    boxes2d: bool = False,
    has_map: bool = False,
) -> FrameHead:
    """Read a record that is a frame; ``context`` of the frame before it is not read again where it
    is the same.

    Labels in images are read with ``boxes2d`` alone, and what is of the map with ``has_map``.

    Raises SourceError for what is not a frame.
    """
    place = f"{window.where}: record {record.number}"
    try:
        head = _read_frame_head(
            window,
            record=record,
            context=context,
            boxes2d=boxes2d,
            has_map=has_map,
        )
    except (ValueError, struct.error) as error:
        raise SourceError(
            f"{place} is not a Frame of the Waymo Open Dataset: {error}; files of the "
            "motion dataset (Scenario) and of tf.Example have other messages"
        ) from error
    names = [image.name for image in head.images]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SourceError(f"{place} has two images of {min(twice)}")
    return head


def _read_frame_head(
    window: FileWindow,
    record: FileRecord,
    context: bytes | None,
    *,
    boxes2d: bool,
    has_map: bool,
) -> FrameHead:
    time = -1
    pose = None
    images = []
    labels = []
    laser_bytes = 0
    camera_labels = []
    map_span = None
    map_offset = (0.0, 0.0, 0.0)
    for field in field_places(window, record.start, record.end):
        wire = VARINT if field.number == _FRAME_TIME else BYTES
        if field.wire != wire and field.number in _FRAME_NAMES:
            raise ValueError(f"field {field.number} is not {_FRAME_NAMES[field.number]}")
        length = field.end - field.start
        if field.number == _FRAME_CONTEXT:
            # The name of the segment is in it.
            begin = window.read(field.start, min(_CONTEXT_BEGIN, length))
            if context is None or length != len(context) or not context.startswith(begin):
                context = window.read(field.start, length, 256)
        elif field.number == _FRAME_TIME:
            time = field.value
        elif field.number == _FRAME_POSE:
            pose = transform(window.read(field.start, length))
        elif field.number == _FRAME_IMAGES:
            image = _read_image(window, field)
            if image is not None:
                images.append(image)
        elif field.number == _FRAME_LASERS:
            laser_bytes += length
        elif field.number == _FRAME_LABELS:
            labels.append(window.read(field.start, length, _LABELS_AHEAD))
        elif field.number == _FRAME_CAMERA_LABELS and boxes2d:
            camera_labels.append(window.read(field.start, length))
        elif field.number == FRAME_MAP and has_map:
            # The message begins before its key and its length.
            num_length_bytes = max(-(-length.bit_length() // 7), 1)
            key = field.start - 1 - num_length_bytes
            map_span = key if map_span is None else map_span[0], field.end
        elif field.number == FRAME_MAP_OFFSET and has_map:
            map_offset = place(window.read(field.start, length))
    if context is None:
        raise ValueError("it has no context")
    if time <= 0:
        raise ValueError("it has no timestamp_micros")
    if pose is None:
        raise ValueError("it has no pose")
    return FrameHead(
        timestamp_us=time,
        pose=pose,
        context=context,
        images=images,
        labels=labels,
        laser_bytes=laser_bytes,
        camera_labels=camera_labels,
        map_span=map_span,
        map_offset=map_offset,
    )


def _read_image(window: FileWindow, place: FieldPlace) -> ImageHead | None:
    """Return the head of an image, of 0 bytes where it is empty; None for an unknown camera, or
    one without all.
    """
    name = 0
    offset = place.start
    num_bytes = 0
    pose = None
    usual = _read_usual_image(window, place)
    if usual is not None:
        return usual
    times = dict.fromkeys((_IMAGE_TIME, _IMAGE_SHUTTER, _IMAGE_TRIGGER, _IMAGE_DONE), float("nan"))
    for number, wire, value in _iter_image_fields(window, place):
        if number == _IMAGE_NAME and isinstance(value, int):
            name = value
        elif number == _IMAGE_JPEG and isinstance(value, tuple):
            offset, num_bytes = value
        elif number == _IMAGE_POSE and isinstance(value, bytes):
            pose = transform(value)
        elif number in times and wire == FIXED64 and isinstance(value, bytes):
            times[number] = _DOUBLE.unpack(value)[0]
    if name not in CAMERAS or (not num_bytes and pose is None):
        return None
    if pose is None:
        raise ValueError(f"the image of {CAMERAS[name]} has no pose")
    if not times[_IMAGE_TIME] > 0:
        raise ValueError(f"the image of {CAMERAS[name]} has no pose_timestamp")
    return ImageHead(
        name=CAMERAS[name],
        offset=offset,
        num_bytes=num_bytes,
        pose=pose,
        pose_timestamp=times[_IMAGE_TIME],
        shutter=times[_IMAGE_SHUTTER],
        trigger=times[_IMAGE_TRIGGER],
        done=times[_IMAGE_DONE],
    )


def _read_usual_image(window: FileWindow, place: FieldPlace) -> ImageHead | None:
    """Return an image whose fields are those of the dataset's own files, in their order; None
    for another.
    """
    head = window.read(place.start, MAX_HEAD)
    has_name = len(head) >= MAX_HEAD and head[0] == _IMAGE_NAME << 3
    if not has_name or head[2] != _IMAGE_JPEG << 3 | BYTES:
        return None
    length, used = varint(head, 3)
    offset = place.start + used
    tail = window.read(
        offset + length,
        max(0, min(place.end - offset - length, _AFTER_JPEG)),
        MAX_HEAD,
    )
    has_pose = tail[:3] == _POSE_HEAD and tail[3:_TAIL_POSE:9] == _POSE_KEYS
    if len(tail) < _LEAST_TAIL or not has_pose:
        return None
    position = _TAIL_POSE + 2 + tail[_TAIL_POSE + 1]
    times_keys = (
        tail[position : position + _TIMES.size : 9] if position + _TIMES.size <= len(tail) else b""
    )
    if (
        head[1] not in CAMERAS
        or not length
        or tail[_TAIL_POSE] != _VELOCITY_KEY
        or times_keys != _TIMES_KEYS
    ):
        return None
    pose_timestamp, shutter, trigger, done = _TIMES.unpack_from(tail, position)
    if not pose_timestamp > 0:
        return None
    return ImageHead(
        name=CAMERAS[head[1]],
        offset=offset,
        num_bytes=length,
        pose=_POSE.unpack_from(tail, 3),
        pose_timestamp=pose_timestamp,
        shutter=shutter,
        trigger=trigger,
        done=done,
    )


def _iter_image_fields(
    window: FileWindow, place: FieldPlace
) -> Iterator[tuple[int, int, int | bytes | tuple[int, int]]]:
    """Yield number, wire type and value of each field of an image; for the JPEG its place and
    length.
    """
    for field in field_places(window, place.start, place.end):
        length = field.end - field.start
        if field.number == _IMAGE_JPEG and field.wire == BYTES:
            yield field.number, field.wire, (field.start, length)
            rest = place.end - field.end
            if rest <= _AFTER_JPEG:
                yield from fields(window.read(field.end, rest))
                return
        elif field.wire == VARINT:
            yield field.number, field.wire, field.value
        elif field.number <= _IMAGE_DONE:  # what comes behind may be large, as labels of pixels are
            yield field.number, field.wire, window.read(field.start, length)


def transform(data: bytes) -> tuple[float, ...]:
    """Return the 16 numbers of a ``Transform``, row by row; raise ValueError for another number
    of them.
    """
    if len(data) == _POSE.size and data[::9] == _POSE_KEYS:
        return _POSE.unpack(data)
    numbers_read = tuple(doubles(data, 1))
    if len(numbers_read) != 16:
        raise ValueError(f"a transform of {len(numbers_read)} numbers")
    return numbers_read


def read_context(data: bytes) -> tuple[str, dict[str, Calibration], dict[str, str]]:
    """Name of the segment, calibrations by camera, and ``time_of_day``, ``location``,
    ``weather``.
    """
    name = ""
    calibrations = {}
    stats = {}
    for number, wire, value in fields(data):
        if wire != BYTES or isinstance(value, int):
            continue
        if number == 1:
            name = value.decode()
        elif number == 2:
            plain: dict[int, Any] = {field: part for field, _, part in fields(value)}
            lens = doubles(value, 2)
            camera = CAMERAS.get(plain.get(1, 0), f"camera {plain.get(1, 0)}")
            if len(lens) != 9 or 3 not in plain:
                raise ValueError(
                    f"the calibration of {camera} has {len(lens)} intrinsics, wanted are 9, "
                    "and an extrinsic"
                )
            mount = np.array(transform(plain[3])).reshape(4, 4)
            shutter = plain.get(6, 0)
            size = (plain.get(4, 0), plain.get(5, 0))
            calibration = camera_calibration(lens, mount, size, shutter)
            if camera in calibrations:
                raise ValueError(f"two calibrations of {camera}")
            calibrations[camera] = calibration
        elif number == 4:
            texts = {2: "time_of_day", 3: "location", 4: "weather"}
            stats = {
                texts[n]: v.decode()
                for n, _, v in fields(value)
                if n in texts and isinstance(v, bytes)
            }
    return name, calibrations, stats


def camera_calibration(
    lens: Sequence[float],
    extrinsic: F64,
    size: tuple[int, int],
    shutter: int,
) -> Calibration:
    """Return the calibration of a camera: K is that of pixels whose centres are integers.

    ``lens`` are f_u, f_v, c_u, c_v (the left edge of the first pixel is 0), k1, k2, p1, p2, k3;
    ``extrinsic`` is the camera (x forward) to the vehicle.
    """
    fu, fv, cu, cv = lens[:4]
    direction = SHUTTERS[shutter] if 0 <= shutter < len(SHUTTERS) else "none"
    intrinsics = np.array(
        [
            [fu, 0, cu - 0.5],
            [0, fv, cv - 0.5],
            [0, 0, 1],
        ]
    )
    return Calibration(
        intrinsics=intrinsics,
        sensor2ego=extrinsic @ OPTICAL2FLU,
        width=size[0],
        height=size[1],
        dist=tuple(lens[4:9]),
        dist_model="opencv_radtan",
        rolling_shutter=direction,
    )


def image_of(
    calibration: Calibration,
    ref: str,
    pose: F64,
    pose_timestamp: float,
    shutter_times: Sequence[float],
) -> Image:
    """Return an image of a camera at a pose of the vehicle (4, 4).

    ``shutter_times`` are shutter, trigger and read-out done [s]: the time from trigger to done is
    the sum of exposure and read-out (``dataset.proto``). Times of the dataset, float64 since 1970,
    are exact to 0.2 us, its clock to 1 us.
    """
    shutter, trigger, done = shutter_times
    exposure_ns = round(shutter * 1e9) if shutter > 0 else None
    readout_s = done - trigger - shutter
    has_readout = exposure_ns is not None and done - trigger > shutter
    return Image(
        ref=ref,
        timestamp_ns=round(pose_timestamp * 1e6) * 1000,
        calibration=calibration,
        ego2global=pose,
        extension="jpg",
        exposure_ns=exposure_ns,
        readout_ns=round(readout_s * 1e6) * 1000 if has_readout else None,
    )


def label_type(kind: int) -> str:
    """Return the category of a type of labels."""
    if 0 <= kind < len(LABEL_TYPES):
        return LABEL_TYPES[kind]
    return f"type {kind}"


def box_rows(
    boxes: F64,
    category: list[str],
    track: list[str],
    num_points: I64,
) -> BoxRows:
    """Make boxes (M, 7) in ego: centre x, y, z [m], width, length, height [m], heading [rad]."""
    return BoxRows(
        centre=boxes[:, :3],
        size_lwh=boxes[:, [4, 3, 5]],
        yaw=boxes[:, 6],
        category=category,
        track=track,
        num_lidar_pts=num_points,
    )


def image_rows(boxes: F64, category: list[str], track: list[str]) -> ImageBoxRows:
    """Make boxes (K, 4) of centre and sides along x and y [px]; pixel 0 is the left edge of the
    first one.
    """
    centre = boxes[:, :2] - 0.5
    half = boxes[:, 2:] / 2
    return ImageBoxRows(
        box=np.concatenate([centre - half, centre + half], 1),
        category=category,
        track=track,
    )


def read_labels(
    frames: Sequence[Sequence[bytes]],
    where: str,
    *,
    camera_synced: bool,
) -> Iterator[BoxRows]:
    """Yield boxes of the ``laser_labels`` of each frame; with ``camera_synced`` those that a camera
    sees, at that time.

    Raises SourceError, naming ``where`` and the record, for what is not a label.
    """
    counts = [len(labels) for labels in frames]
    flat = [label for labels in frames for label in labels]
    frame = np.repeat(np.arange(len(frames)), counts)
    boxes = np.zeros((len(flat), 7))
    kinds = np.zeros(len(flat), np.int64)
    num_points = np.full(len(flat), -1)
    track = [""] * len(flat)
    has_label = np.zeros(len(flat), np.bool_)

    def fail(row: int, error: str) -> NoReturn:
        raise SourceError(f"{where}: record {frame[row]}: {error}")

    for rows, table, places in alike(flat, fail):
        place = places.get(12 if camera_synced else 1)
        if place is None:
            if not camera_synced:
                fail(int(rows[0]), "a label without a box")
            continue
        has_label[rows] = True
        boxes[rows] = _read_boxes(table[:, place], rows, fail)
        if 3 in places:
            kinds[rows] = numbers(table[:, places[3]])
        if 7 in places:
            num_points[rows] = numbers(table[:, places[7]])
        if 4 in places:
            for row in rows.tolist():
                track[row] = flat[row][places[4]].decode()
    label_rows = np.flatnonzero(has_label)
    category = list(map(label_type, kinds[label_rows].tolist()))
    names = [track[row] for row in label_rows.tolist()]
    boxes_of_frame = boxes_by_key(
        box_rows(
            boxes[label_rows],
            category=category,
            track=names,
            num_points=num_points[label_rows],
        ),
        frame[label_rows],
    )
    for number in range(len(frames)):
        yield boxes_of_frame.get(number, NO_BOXES)


def read_camera_labels(data: bytes) -> tuple[str, ImageBoxRows]:
    """Read a message ``CameraLabels``: the camera and its boxes; raise ValueError where it is
    none.
    """
    name = 0
    boxes = []
    category = []
    track = []
    for number, _, value in fields(data):
        if number == 1 and isinstance(value, int):
            name = value
        elif number == 2 and isinstance(value, bytes):
            label: dict[int, Any] = {field: part for field, _, part in fields(value)}
            values: dict[int, Any] = {
                field: part for field, wire, part in fields(label.get(1, b"")) if wire == FIXED64
            }
            if not values.keys() >= {1, 2, 4, 5}:
                raise ValueError(f"a label of camera {name} without a box")
            # The label's length is along x.
            sides = [_DOUBLE.unpack(values[field])[0] for field in (1, 2, 5, 4)]
            boxes.append(sides)
            category.append(label_type(label.get(3, 0)))
            track.append(label[4].decode() if 4 in label else "")
    if name not in CAMERAS:
        raise ValueError(f"labels of the unknown camera {name}")
    corners = np.array(boxes, np.float64).reshape(-1, 4)
    return CAMERAS[name], image_rows(corners, category, track)


def _read_boxes(data: U8, rows: NDArray[np.intp], fail: Fail) -> F64:
    """Return boxes (N, 7) of the messages (N, B), whose numbers for ``fail`` are ``rows`` (N,)."""
    is_usual = data.shape[1] == len(_BOX_KEYS) * 9
    if is_usual and (data[:, ::9] == _BOX_KEYS).all():
        numbers = data.reshape(len(data), -1, 9)[:, :, 1:]  # without their keys
        return np.ascontiguousarray(numbers).view("<f8")[..., 0]
    table = np.empty((len(data), len(_BOX_KEYS)))
    for index, row in enumerate(data):
        try:
            values = {number: doubles(row.tobytes(), number) for number in range(1, 8)}
        except ValueError as error:
            fail(int(rows[index]), str(error))
        missing = [number for number, value in values.items() if not value]
        if missing:
            fail(int(rows[index]), f"a box without field {missing[0]}")
        table[index] = [value[-1] for value in values.values()]
    return table
