"""`fuelrail.view`: a sample's cameras side by side, with its boxes drawn where the batch's matrices put them.

Chosen channels, of the dataset or of layers, are drawn on the image that they belong to: rasters of law ``image`` as
colours, boxes and points of law ``image_points``. All others are named below, with their value where it is short.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import cv2
import msgspec
import numpy as np
from msgspec import Meta

from fuelrail.loaders.batch.assemble import assemble
from fuelrail.loaders.config import Transforms
from fuelrail.loaders.decode import make_decoder
from fuelrail.loaders.records import BatchSlot, DecodedSample
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.channels.laws import LAWS, Motion
from fuelrail.pipeline.channels.selection import select
from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.layers import NO_ROW, open_layer
from fuelrail.pipeline.settings import Settings, check_types, make_options, resolve_fields
from fuelrail.pipeline.text import shown
from fuelrail.pipeline.transforms.image import ImageAugment  # noqa: TC001 - msgspec resolves it

if TYPE_CHECKING:
    import os
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.sample.schema import Boxes, Sample

NEAR_M: Final = 0.2
"""Edges are cut where they come nearer to the camera than this."""
ABOVE_M: Final = 51.2
"""The view from above reaches this far along x and y."""

_GAP_PX: Final = 4
_COLUMNS: Final = 3
_ON_IMAGES: Final = ("image", "image_points")
_SHORT: Final = 8
_MOST_TEXT: Final = 160
# Corner numbers as Boxes.corners gives them: bit 2 = rear, bit 1 = right, bit 0 = bottom.
_EDGES: Final = tuple((a, a | bit) for bit in (1, 2, 4) for a in range(8) if not a & bit)
_FRONT: Final = ((0, 3), (1, 2))
# Colours of equal lightness that stay apart on road scenes, for classes in turn (RGB).
_PALETTE: Final = (
    (255, 158, 0), (0, 207, 191), (255, 99, 71), (138, 180, 248), (233, 150, 250),
    (255, 217, 61), (120, 220, 120), (255, 140, 180), (180, 200, 210), (200, 160, 120),
)  # fmt: skip
# Seen from above, the rig unrolled: left to right in front, left to right behind.
_PLACES: Final = ("cam_front_left", "cam_front", "cam_front_right", "cam_back_left", "cam_back", "cam_back_right")


def _parse_layers(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",")]
    if not all(name and place for name, _, place in pairs):
        raise ConfigError("it must be NAME=PATH, several of them separated by commas, such as teacher=layers/teacher")
    return {name: place for name, _, place in pairs}


class ViewOptions(Settings, frozen=True, kw_only=True):
    """Options of `fuelrail.view`, and the flags of ``fuelrail view``."""

    image: (
        Annotated[ImageAugment, Meta(description="image settings (default: crop 704x256 from the bottom of the image)")]
        | None
    ) = None
    train: Annotated[bool, Meta(description="augment as a loader does, for this seed and epoch")] = False
    seed: Annotated[int, Meta(ge=0, description="seed of the augmentation")] = 0
    epoch: Annotated[int, Meta(ge=0, description="epoch of the augmentation")] = 0
    channels: Annotated[tuple[str, ...], Meta(description="channels of the dataset to draw, too")] = ()
    layers: (
        Annotated[
            dict[str, str],
            Meta(description="layers to draw, too", extra={"parse": _parse_layers, "metavar": "NAME=PATH,..."}),
        ]
        | None
    ) = None
    output: (
        Annotated[str, Meta(description="picture to write (default: contact_sheet.png)", extra={"metavar": "PNG"})]
        | None
    ) = None

    def __post_init__(self) -> None:
        resolve_fields(self)
        check_types(self, ConfigError)


class ViewReport(NamedTuple):
    """A sample drawn: its key, its numbers of cameras and boxes, and the picture, uint8 [H, W, 3], RGB.

    ``channels`` names those that the sample has, of all that were asked for.
    """

    key: str
    num_cameras: int
    num_boxes: int
    sheet: NDArray[np.uint8]
    channels: tuple[str, ...] = ()

    def as_text(self) -> str:
        """Return a line on what was drawn."""
        channels = f", {', '.join(self.channels)}" if self.channels else ""
        return f"{shown(self.key)}: {self.num_cameras} cameras, {self.num_boxes} boxes{channels}"


def view(
    dataset: str | os.PathLike[str],
    key: str | None = None,
    options: ViewOptions | None = None,
    **changes: Any,  # noqa: ANN401 - fields of ViewOptions
) -> ViewReport:
    """Draw a sample's cameras and boxes as a loader delivers them; ``key`` None: the first sample of the dataset.

    ``fuelrail.view("DATASET", output="sample.png")`` takes the fields of :class:`ViewOptions` as keywords; without
    ``output`` nothing is written. Raises ConfigError, and DatasetErrors for a sample or a layer that cannot be read.
    """
    options = make_options(ViewOptions, options, changes)
    output = None if options.output is None else Path(options.output)
    if output is not None and output.suffix.lower() != ".png":
        raise ConfigError(f"output {options.output!r} must end with .png")
    opened = open_dataset(dataset)
    reader = SampleReader(opened)
    row = 0 if key is None else reader.find(key)
    sample = reader.sample(row)
    image = msgspec.structs.replace(options.image or Transforms().image, train=options.train)
    cameras = [camera.channel for camera in opened.manifest.cameras]
    try:
        batch = decode_single(sample, cameras, image, seed=options.seed, epoch=options.epoch, row=row)
        maps = image.draw(sample.geometry.img_wh.tolist(), seed=options.seed, epoch=options.epoch, sample=row)
        values = _values(opened, row, options, Motion(dict(zip(cameras, maps, strict=True))))
        sheet = contact_sheet(
            batch["img"][0].numpy(),
            batch["ego2img"][0].numpy(),
            cameras,
            sample.boxes,
            opened.manifest.classes,
            values,
            ida_mat=batch["ida_mat"][0].numpy(),
            points=points_in_ego(sample),
        )
        encoded = b"" if output is None else cv2.imencode(".png", sheet[..., ::-1])[1].tobytes()
    except MemoryError as error:
        num_bytes = len(cameras) * 3 * image.height * image.width
        raise ConfigError(
            f"no memory to draw {len(cameras)} cameras of {image.width}x{image.height} pixels, {num_bytes} bytes and "
            "the same for the sheet: give image settings with a smaller height and width"
        ) from error
    if output is not None:
        try:
            output.write_bytes(encoded)
        except OSError as error:
            raise ConfigError(f"output '{output}' cannot be written: {error.strerror}") from error
    num_boxes = 0 if sample.boxes is None else len(sample.boxes.boxes3d)
    return ViewReport(sample.key, len(sample.images), num_boxes, sheet, tuple(channel.name for channel, _ in values))


def _values(dataset: Dataset, row: int, options: ViewOptions, motion: Motion) -> list[tuple[Channel, Any]]:
    """Return the channels that the sample has, of those asked for, with values that lie on the images as drawn."""
    found: list[tuple[Channel, Any]] = []
    if options.channels:
        chosen = select(dataset.manifest.channels, options.channels, dataset.location)
        values = dataset.read(row, options.channels)
        found += [(one, values[one.name]) for one in chosen if one.name in values and one.sensor is None]
    for name, place in (options.layers or {}).items():
        layer = open_layer(name, place, dataset, "mask")
        at = layer.row(row)
        values = {} if at == NO_ROW else layer.data.read(at)
        stored = zip(layer.channels, layer.manifest.channels, strict=True)
        found += [(one, values[own.name]) for one, own in stored if own.name in values]
    return [
        (one, LAWS[one.law.name].move(value, one, motion) if one.law.name in _ON_IMAGES else value)
        for one, value in found
    ]


def decode_single(
    sample: Sample, cameras: Sequence[str], image: ImageAugment, *, seed: int, epoch: int, row: int
) -> dict[str, Any]:
    """Decode and assemble one sample as a batch of one, through the loader's own decoder and matrices.

    ``row`` is the sample's in the index: with the seed and the epoch it decides the augmentation, as in the loader.
    """
    maps = image.draw(sample.geometry.img_wh.tolist(), seed=seed, epoch=epoch, sample=row)
    images = np.zeros((1, len(cameras), 3, image.height, image.width), np.uint8)
    decoder = make_decoder("auto")
    for number, (channel, image_map) in enumerate(zip(cameras, maps, strict=True)):
        if channel in sample.images:
            decoder.decode_into(sample.images[channel], image_map, images[0, number])
    return assemble([DecodedSample(BatchSlot(epoch, 0, images), 0, 0, True, sample, maps)])


def contact_sheet(
    images: NDArray[np.uint8],
    ego2img: NDArray[np.floating[Any]],
    cameras: Sequence[str],
    boxes: Boxes | None,
    classes: Sequence[str],
    values: Sequence[tuple[Channel, Any]] = (),
    *,
    ida_mat: NDArray[np.floating[Any]] | None = None,
    points: NDArray[np.floating[Any]] | None = None,
) -> NDArray[np.uint8]:
    """Draw N camera images, values of channels and boxes on them; nearer boxes hide those behind them.

    Args:
        images: uint8 [N, 3, H, W], RGB.
        ego2img: [N, 4, 4], ego to (u d, v d, d, 1) of those images.
        cameras: their channels.
        boxes: in ego, or None.
        classes: names that the boxes' labels number.
        values: channels and their values; those on images as the images are.
        ida_mat: [N, 4, 4], stored to drawn pixels: a mirrored or rotated image says so in its caption.
        points: [P, 3] in ego: they and the boxes are drawn from above too, beside the cameras; None: they are not.

    Returns:
        uint8 [H', W', 3], RGB, cameras in three columns.

    """
    corners = None if boxes is None else boxes.corners().astype(np.float64)
    tiles = {}
    for number, channel in enumerate(cameras):
        tile = np.ascontiguousarray(images[number].transpose(1, 2, 0))
        for entry, value in values:
            if entry.law.camera == channel and entry.law.name in _ON_IMAGES:
                _draw_value(tile, entry, value)
        if boxes is not None and corners is not None:
            plain, projection = tile.copy(), ego2img[number].astype(np.float64)
            depths = corners.mean(1) @ projection[2, :3] + projection[2, 3]
            for box in np.argsort(-depths):
                _hide_behind(tile, plain, corners[box], projection)
                _draw_box(tile, corners[box], projection, _colour(int(boxes.label[box])))
        _caption(tile, channel if ida_mat is None else f"{channel}{_turned(ida_mat[number])}")
        tiles[channel] = tile
    placed = [c for c in _PLACES if c in tiles] if set(tiles) <= set(_PLACES) else list(tiles)
    sheet = _grid([tiles[channel] for channel in placed])
    if points is not None:
        sheet = np.concatenate([sheet, _from_above(len(sheet), boxes, corners, points)], 1)
    parts = [sheet] if boxes is None else [sheet, _legend(sheet.shape[1], boxes, classes)]
    parts += [_line(sheet.shape[1], channel, value) for channel, value in values]
    return np.concatenate(parts)


def project_segment(
    start: NDArray[np.float64], end: NDArray[np.float64], ego2img: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Project the part of a segment (two points in ego, metres) that lies at least NEAR_M in front of a camera.

    Returns two pixels (u, v), centre-origin, or None where all of it is behind.
    """
    a, b = (ego2img @ np.append(point, 1.0) for point in (start, end))
    if a[2] < NEAR_M and b[2] < NEAR_M:
        return None
    if a[2] < NEAR_M or b[2] < NEAR_M:
        cut = a + (b - a) * (NEAR_M - a[2]) / (b[2] - a[2])
        a, b = (cut, b) if a[2] < NEAR_M else (a, cut)
    return a[:2] / a[2], b[:2] / b[2]


def points_in_ego(sample: Sample) -> NDArray[np.floating[Any]]:
    """Return the points of the first lidar, [P, 3] in ego at the sample's time; none where there is no lidar."""
    if not sample.points:
        return np.zeros((0, 3))
    lidar2ego = sample.geometry.lidar2ego[0]
    points = next(iter(sample.points.values()))[:, :3].astype(np.float64)
    return np.asarray(points @ lidar2ego[:3, :3].T + lidar2ego[:3, 3])


def _turned(ida_mat: NDArray[np.floating[Any]]) -> str:
    """What an image went through that is easily taken for a fault: a mirror, a rotation of half a degree or more."""
    # Rotation after mirror: (-cos, sin; sin, cos) if mirrored, else (cos, sin; -sin, cos), of v that points down.
    mirrored, (c, d) = bool(np.linalg.det(ida_mat[:2, :2]) < 0), ida_mat[1, :2]
    degrees = math.degrees(math.atan2(c if mirrored else -c, d))
    return f"{'  mirrored' if mirrored else ''}{f'  {degrees:+.1f} deg' if abs(degrees) >= 0.5 else ''}"


def _hide_behind(
    tile: NDArray[np.uint8], plain: NDArray[np.uint8], corners: NDArray[np.float64], ego2img: NDArray[np.float64]
) -> None:
    """Restore the picture inside a box's outline: what lies behind it is not seen."""
    found = np.append(corners, np.ones((len(corners), 1)), 1) @ ego2img.T
    if found[:, 2].min() < NEAR_M:
        return
    pixels = found[:, :2] / found[:, 2:3]
    if np.abs(pixels).max() > 20 * max(tile.shape):
        return
    inside = np.zeros(tile.shape[:2], np.uint8)
    cv2.fillConvexPoly(inside, cv2.convexHull(pixels.round().astype(np.int32)), 1)
    tile[inside > 0] = plain[inside > 0]


def _from_above(
    size_px: int, boxes: Boxes | None, corners: NDArray[np.float64] | None, points: NDArray[np.floating[Any]]
) -> NDArray[np.uint8]:
    """Draw points and boxes within ``ABOVE_M`` of ego from above: ahead is up, each box with its heading."""
    pane = np.full((size_px, size_px, 3), 24, np.uint8)
    scale, middle = size_px / (2 * ABOVE_M), size_px / 2

    def pixels(xy: NDArray[np.floating[Any]]) -> NDArray[np.int32]:
        return np.stack([middle - xy[..., 1] * scale, middle - xy[..., 0] * scale], -1).round().astype(np.int32)

    near = points[(np.abs(points[:, :2]) < ABOVE_M * 0.999).all(1)]
    at = pixels(near)
    height = np.clip((near[:, 2:3] + 1.0) / 4.0, 0.0, 1.0)  # from the ground to three metres
    pane[np.clip(at[:, 1], 0, size_px - 1), np.clip(at[:, 0], 0, size_px - 1)] = 70 + 150 * height
    for radius in (20, 40):
        cv2.circle(pane, (int(middle), int(middle)), round(radius * scale), (70, 70, 70), 1, cv2.LINE_AA)
        _caption(pane[int(middle - radius * scale) :, int(middle) :], f"{radius} m")
    if boxes is not None and corners is not None:
        for box, label in zip(corners, boxes.label.tolist(), strict=True):
            if np.abs(box[:, :2]).max() < ABOVE_M:
                outline = box[[0, 2, 6, 4], :2]  # the upper or lower face, around
                cv2.polylines(pane, [pixels(outline)], True, _colour(label), 1, cv2.LINE_AA)
                centre, front = box[:, :2].mean(0), box[:4, :2].mean(0)
                line = pixels(np.stack([centre, front + 0.5 * (front - centre)]))
                cv2.line(pane, line[0].tolist(), line[1].tolist(), _colour(label), 2, cv2.LINE_AA)
    ego = np.array([[2.5, 0.0], [-1.0, 1.0], [-1.0, -1.0]])
    cv2.fillConvexPoly(pane, pixels(ego), (255, 255, 255), cv2.LINE_AA)
    _caption(pane, "from above [ego]")
    return pane


def _draw_box(
    tile: NDArray[np.uint8], corners: NDArray[np.float64], ego2img: NDArray[np.float64], colour: tuple[int, int, int]
) -> None:
    height, width = tile.shape[:2]
    for a, b in (*_EDGES, *_FRONT):
        segment = project_segment(corners[a], corners[b], ego2img)
        # Far outside the picture OpenCV's fixed-point coordinates would overflow.
        if segment is None or max(np.abs(p).max() for p in segment) > 20 * max(width, height):
            continue
        first, second = ((round(float(u) * 16), round(float(v) * 16)) for u, v in segment)
        cv2.line(tile, first, second, colour, 1, cv2.LINE_AA, shift=4)


def _draw_value(tile: NDArray[np.uint8], channel: Channel, value: Any) -> None:  # noqa: ANN401
    """Draw a value of law ``image`` or ``image_points`` on the image that it lies on."""
    if channel.law.name == "image":
        raster = np.asarray(value)
        colours, seen = _coloured(raster, channel.law.fill or 0.0)
        tile[seen] = (tile[seen].astype(np.uint16) + colours[seen]) // 2
        return
    limit = 20 * max(tile.shape)
    for boxes in _groups(value, channel, "boxes"):
        for at, corners in enumerate(boxes[np.abs(boxes).max(-1, initial=0) < limit].tolist()):
            u, v, right, bottom = (round(side * 16) for side in corners)
            cv2.rectangle(tile, (u, v), (right, bottom), _colour(at), 1, cv2.LINE_AA, shift=4)
    for points in _groups(value, channel, "points"):
        for at, point in enumerate(points[np.abs(points).max(-1, initial=0) < limit].tolist()):
            cv2.circle(tile, (round(point[0] * 16), round(point[1] * 16)), 32, _colour(at), -1, cv2.LINE_AA, shift=4)


def _coloured(raster: NDArray[Any], fill: float) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Return colours (H, W, 3) of a raster and where it has values: labels by palette, numbers from blue to red."""
    if raster.ndim == 3:
        return raster.astype(np.uint8), np.ones(raster.shape[:2], bool)
    seen = np.isfinite(raster) & (raster != fill)
    if raster.dtype.kind != "f":
        return np.array(_PALETTE, np.uint8)[raster.astype(np.int64) % len(_PALETTE)], seen
    known = raster[seen].astype(np.float64)
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
    share = np.where(seen, (raster - low) / max(high - low, 1e-9), 0.0)
    coloured = np.asarray(cv2.applyColorMap((share * 255).astype(np.uint8), cv2.COLORMAP_TURBO), np.uint8)
    return coloured[..., ::-1], seen


def _groups(value: Any, channel: Channel, role: str) -> Iterator[NDArray[np.float64]]:  # noqa: ANN401
    """Yield the groups of columns (M, K) that play a role."""
    for group in channel.law.roles.get(role, ()):
        found = (
            value[group[0]] if isinstance(value, dict) else value[..., [channel.columns.index(one) for one in group]]
        )
        yield np.asarray(found, np.float64).reshape(-1, found.shape[-1])


def _line(width: int, channel: Channel, value: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    """Return a strip that names a channel, with its value where it is short."""
    if isinstance(value, str):
        text = value
    elif isinstance(value, dict):
        text = ", ".join(f"{name} {list(np.shape(one))}" for name, one in value.items())
    else:
        array = np.asarray(value)
        is_short = array.size <= _SHORT and array.dtype.kind in "biuf"
        text = str(array.tolist()) if is_short else f"{channel.kind} {array.dtype} {list(array.shape)}"
    strip = np.full((22, width, 3), 24, np.uint8)
    ascii_only = f"{channel.name}: {text}"[:_MOST_TEXT].encode("ascii", "replace").decode()
    cv2.putText(strip, ascii_only, (10, 15), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (230, 230, 230), 1, cv2.LINE_AA)
    return strip


def _colour(label: int) -> tuple[int, int, int]:
    return (255, 255, 255) if label < 0 else _PALETTE[label % len(_PALETTE)]


def _caption(tile: NDArray[np.uint8], text: str) -> None:
    (width, height), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)
    tile[: height + 9, : width + 10] //= 3
    cv2.putText(tile, text, (5, height + 4), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (255, 255, 255), 1, cv2.LINE_AA)


def _grid(tiles: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    height, width = tiles[0].shape[:2]
    columns = min(_COLUMNS, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    sheet = np.full((rows * (height + _GAP_PX) + _GAP_PX, columns * (width + _GAP_PX) + _GAP_PX, 3), 24, np.uint8)
    for number, tile in enumerate(tiles):
        top = _GAP_PX + number // columns * (height + _GAP_PX)
        left = _GAP_PX + number % columns * (width + _GAP_PX)
        sheet[top : top + height, left : left + width] = tile
    return sheet


def _legend(width: int, boxes: Boxes, classes: Sequence[str]) -> NDArray[np.uint8]:
    strip = np.full((26, width, 3), 24, np.uint8)
    left = 10
    for label in sorted(set(boxes.label.tolist())):
        text = f"{classes[label] if label >= 0 else 'other'} {int((boxes.label == label).sum())}"
        cv2.rectangle(strip, (left, 7), (left + 12, 19), _colour(label), -1)
        cv2.putText(strip, text, (left + 18, 18), cv2.FONT_HERSHEY_SIMPLEX, 0.45, (230, 230, 230), 1, cv2.LINE_AA)
        left += 18 + cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, 0.45, 1)[0][0] + 24
    return strip
