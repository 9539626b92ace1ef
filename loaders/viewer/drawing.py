"""Draw camera images with boxes and values on them, one beside the other; and lidar and boxes
from above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.channels.logits import Logits
from fuelrail.pipeline.sample.schema import box_corners

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.dtypes import F64, I32, U8, Mask

NEAR_M: Final = 0.2
"""Edges are cut where they come nearer to the camera than this."""
ABOVE_M: Final = 51.2
"""The view from above reaches this far along x and y."""
ON_IMAGES: Final = ("image", "image_points")
"""Laws of channels whose values are drawn on an image."""

OUTLINE: Final = [0, 2, 6, 4]
"""Corners of a box around its upper face: what is seen from above."""

_GAP_PX: Final = 4
_DARK: Final = 24
_COLUMNS: Final = 3
_FONT_SCALE: Final = 0.45
_SHORT: Final = 8
_MOST_TEXT: Final = 160
_MOST_SHAPES: Final = 500
"""Boxes, and points, of a group of a channel on an image."""
# Corner numbers as Boxes.corners gives them: bit 2 = rear, bit 1 = right, bit 0 = bottom.
_EDGES: Final = (
    (0, 1),
    (2, 3),
    (4, 5),
    (6, 7),
    (0, 2),
    (1, 3),
    (4, 6),
    (5, 7),
    (0, 4),
    (1, 5),
    (2, 6),
    (3, 7),
)
_FRONT: Final = ((0, 3), (1, 2))
_WHITE: Final = (255, 255, 255)
_TEXT_COLOUR: Final = (230, 230, 230)
# Colours of equal lightness that stay apart on road scenes, for classes in turn (RGB).
_PALETTE: Final = (
    (255, 158, 0),
    (0, 207, 191),
    (255, 99, 71),
    (138, 180, 248),
    (233, 150, 250),
    (255, 217, 61),
    (120, 220, 120),
    (255, 140, 180),
    (180, 200, 210),
    (200, 160, 120),
)
# Seen from above, the rig unrolled: left to right in front, left to right behind.
_PLACES: Final = (
    "cam_front_left",
    "cam_front",
    "cam_front_right",
    "cam_back_left",
    "cam_back",
    "cam_back_right",
)


class DrawnBoxes(NamedTuple):
    """Boxes to draw: ``corners`` float64 [M, 8, 3] in ego, as `Boxes.corners` orders them, and
    ``label`` [M].
    """

    corners: F64
    label: NDArray[np.integer]


class DrawnFrame(NamedTuple):
    """The images of one moment: ``images`` are N of uint8 [3, H, W], RGB, whose sizes may differ.

    ``ego2img`` [N, 4, 4] leads from ego to (u d, v d, d, 1) of these images, ``boxes`` are drawn by
    it, and of ``ida_mat`` [N, 4, 4], stored to drawn pixels, the captions say whether an image is
    mirrored or rotated. ``title`` is written into the captions too.
    """

    images: Sequence[U8]
    ego2img: NDArray[np.floating[Any]]
    boxes: DrawnBoxes | None = None
    ida_mat: NDArray[np.floating[Any]] | None = None
    title: str = ""


def contact_sheet(
    frames: Sequence[DrawnFrame],
    cameras: Sequence[str],
    classes: Sequence[str],
    values: Sequence[tuple[Channel, Any]] = (),
    *,
    points: NDArray[np.floating[Any]] | None = None,
    key: int = 0,
) -> U8:
    """Draw a sample: camera images with boxes and values of channels; nearer boxes hide those
    behind them.

    Args:
        frames: one frame, whose cameras are placed in three columns; or those of a temporal window,
            which are placed beside each other, each camera in a row of its own.
        cameras: the channels of the N images.
        classes: names that the boxes' labels number.
        values: channels and their values; those on images as the images of frame ``key`` are.
        points: [P, 3] in ego of frame ``key``: they and the boxes are drawn from above too; None:
            they are not.
        key: which frame is the sample's own.

    Returns:
        uint8 [H', W', 3], RGB.

    """
    tiles_of_frames = []
    for number, frame in enumerate(frames):
        values_of_frame = values if number == key else ()
        tiles_of_frames.append(_draw_tiles(frame, cameras, values_of_frame))
    order = placed(cameras)
    tiles: list[U8] = []
    for camera in order:
        tiles += [frame_tiles[camera] for frame_tiles in tiles_of_frames]
    sheet = _join_grid(tiles, _COLUMNS if len(frames) == 1 else len(frames))
    boxes = frames[key].boxes
    if points is not None:
        # Of one frame the pane is as high as the sheet.
        height = len(sheet)
        rows = 2 if len(frames) == 1 else len(order)
        size_px = min(height, 2 * height // rows)
        pane = _draw_from_above(size_px, boxes, points)
        pane = _pad(pane, below=height - size_px)
        sheet = np.concatenate([sheet, pane], 1)
    width = sheet.shape[1]
    parts = [sheet]
    if boxes is not None:
        legend = np.full((26, width, 3), _DARK, np.uint8)
        left = 10
        for label in sorted(set(boxes.label.tolist())):
            name = classes[label] if label >= 0 else "other"
            count = int((boxes.label == label).sum())
            text = f"{name} {count}"
            text_width, _ = _text_size(text)
            cv2.rectangle(
                legend,
                (left, 7),
                (left + 12, 19),
                color=colour_of(label),
                thickness=cv2.FILLED,
            )
            _write(legend, text, (left + 18, 18), _TEXT_COLOUR)
            left += 18 + text_width + 24
        parts.append(legend)
    for channel, value in values:
        parts.append(_strip(width, f"{channel.name}: {value_text(channel, value)}"))
    return np.concatenate(parts)


def placed(cameras: Sequence[str]) -> list[str]:
    """Return cameras in the order in which they are drawn: around the vehicle, if all of them are
    known.
    """
    if set(cameras) <= set(_PLACES):
        return [channel for channel in _PLACES if channel in cameras]
    return list(cameras)


def stack(sheets: Sequence[tuple[str, U8]]) -> U8:
    """Place sheets below each other, each with its title above."""
    width = max(sheet.shape[1] for _, sheet in sheets)
    parts = []
    for title, sheet in sheets:
        parts.append(_strip(width, title))
        parts.append(_pad(sheet, right=width - sheet.shape[1]))
    return np.concatenate(parts)


def _pad(picture: U8, *, below: int = 0, right: int = 0) -> U8:
    margins = ((0, below), (0, right), (0, 0))
    return np.pad(picture, margins, constant_values=_DARK)


def png(sheet: U8) -> bytes:
    """Return a picture, uint8 [H, W, 3], RGB, as the bytes of a PNG file."""
    bgr = sheet[..., ::-1]
    _, encoded = cv2.imencode(".png", bgr)
    return encoded.tobytes()


def _draw_tiles(
    frame: DrawnFrame,
    cameras: Sequence[str],
    values: Sequence[tuple[Channel, Any]],
) -> dict[str, U8]:
    tiles = {}
    for number, channel in enumerate(cameras):
        image = frame.images[number]
        tile = np.ascontiguousarray(image.transpose(1, 2, 0))
        for entry, value in values:
            if entry.law.camera == channel and entry.law.name in ON_IMAGES:
                _draw_value(tile, entry, value)
        projection = frame.ego2img[number].astype(np.float64)
        has_camera = np.isfinite(projection).all()  # else the clip lacks it
        if frame.boxes is not None and has_camera:
            plain = tile.copy()
            size_px = max(tile.shape)
            corners = frame.boxes.corners
            for box, lines in project_boxes(corners, projection, size_px):
                # Restore the picture inside the box's outline: what lies behind it is not seen.
                outline = project_corners(corners[box], projection, size_px)
                if outline is not None:
                    inside = np.zeros(tile.shape[:2], np.uint8)
                    hull = cv2.convexHull(outline.round().astype(np.int32))
                    cv2.fillConvexPoly(inside, hull, 1)
                    tile[inside > 0] = plain[inside > 0]
                label = int(frame.boxes.label[box])
                fixed = np.round(lines * 16).astype(int)
                for start, end in fixed.tolist():
                    cv2.line(
                        tile,
                        start,
                        end,
                        color=colour_of(label),
                        lineType=cv2.LINE_AA,
                        shift=4,
                    )
        caption = f"{channel}{frame.title}"
        if frame.ida_mat is not None:
            caption += turn_text(frame.ida_mat[number])
        _write_caption(tile, caption)
        tiles[channel] = tile
    return tiles


def corners_by_yaw(boxes3d: NDArray[np.floating[Any]]) -> F64:
    """Return the corners [M, 8, 3] of boxes [M, 7], turned by their yaw alone, as those of a batch
    are.
    """
    half = boxes3d[:, 6] / 2
    zero = np.zeros(len(boxes3d))
    rotation_wxyz = np.stack(
        [np.cos(half), zero, zero, np.sin(half)],
        axis=1,
    )
    return box_corners(boxes3d, rotation_wxyz).astype(np.float64)


def project_boxes(
    corners: F64,
    ego2img: F64,
    size_px: int,
) -> Iterator[tuple[int, F64]]:
    """Yield each box that is seen, the farthest first: its number, and its edges with a cross
    in its front, [K, 2, 2].

    ``corners`` are [M, 8, 3] in ego. Pixels (u, v) are centre-origin; edges of more than 20
    ``size_px``, the image's longer side, away are left out.
    """
    forward = ego2img[2, :3]
    depths = corners @ forward + ego2img[2, 3]
    box_depths = corners.mean(1) @ forward
    for box in np.argsort(-box_depths).tolist():
        if depths[box].max(initial=-np.inf) < NEAR_M:
            continue
        lines = []
        for a, b in (*_EDGES, *_FRONT):
            segment = project_segment(corners[box, a], corners[box, b], ego2img)
            if segment is None:
                continue
            # Far outside the picture OpenCV's fixed-point coordinates would overflow.
            if np.abs(segment).max() <= 20 * size_px:
                lines.append(segment)
        if lines:
            yield box, np.array(lines)


def project_segment(
    start: F64,
    end: F64,
    ego2img: F64,
) -> tuple[F64, F64] | None:
    """Project the part of a segment (two points in ego, metres) that lies at least NEAR_M in front
    of a camera.

    Returns two pixels (u, v), centre-origin, or None where all of it is behind.
    """
    a = ego2img @ np.append(start, 1.0)
    b = ego2img @ np.append(end, 1.0)
    is_a_near = a[2] < NEAR_M
    is_b_near = b[2] < NEAR_M
    if is_a_near and is_b_near:
        return None
    if is_a_near or is_b_near:
        way = b - a
        cut = a + way * (NEAR_M - a[2]) / way[2]
        if is_a_near:
            a = cut
        else:
            b = cut
    return a[:2] / a[2], b[:2] / b[2]


def project_corners(corners: F64, ego2img: F64, size_px: int) -> F64 | None:
    """Project the corners of a box, [8, 2] pixels, whose convex hull hides what lies behind it.

    None where it hides nothing: a corner is behind the camera, or more than 20 ``size_px`` away.
    """
    ones = np.ones((len(corners), 1))
    projected = np.append(corners, ones, 1) @ ego2img.T
    if projected[:, 2].min() < NEAR_M:
        return None
    pixels = projected[:, :2] / projected[:, 2:3]
    if np.abs(pixels).max() <= 20 * size_px:
        return pixels
    return None


def seen_boxes(
    corners: F64,
    ego2img: F64,
    size: NDArray[np.integer[Any]],
) -> list[dict[str, Any]]:
    """Return each box that a camera with images of this (width, height) sees, the farthest first,
    for others to draw: its number ``box``, its ``lines`` [K, 4] in pixels (u, v, u, v), and the
    ``hull`` [M, 2] of it that hides what lies behind, or None. None are seen where ``ego2img`` is
    not known.
    """
    if not np.isfinite(ego2img).all():
        return []
    size_px = int(size.max())
    boxes: list[dict[str, Any]] = []
    for box, lines in project_boxes(corners, ego2img, size_px):
        pixels = project_corners(corners[box], ego2img, size_px)
        hull = None
        if pixels is not None:
            outline = cv2.convexHull(pixels.astype(np.float32))
            hull = outline[:, 0].round(1)
        flat_lines = lines.reshape(-1, 4).round(3)
        boxes.append({"box": box, "lines": flat_lines, "hull": hull})
    return boxes


def shapes_on_image(
    channel: Channel,
    value: Any,
    size: NDArray[np.integer[Any]],
) -> dict[str, Any]:
    """Return what others draw of a channel on an image of this (width, height): of a raster its
    ``width`` in widths of the image, beyond which its last pixels may lie; else ``boxes`` (left,
    top, right, bottom) and ``points`` in pixels.
    """
    if channel.law.name == "image":
        raster_width = np.asarray(value).shape[1]
        width_px = raster_width * (channel.law.fraction or 1)
        return {"width": width_px / max(int(size[0]), 1)}
    shapes: dict[str, Any] = {}
    for role in ("boxes", "points"):
        shapes[role] = []
        for group in groups_of(value, channel, role):
            finite = group[np.isfinite(group).all(1)]
            shapes[role] += finite[:_MOST_SHAPES].round(2).tolist()
    return shapes


def turn_text(ida_mat: NDArray[np.floating[Any]]) -> str:
    """Return those changes of an image that look like faults: a mirror, a rotation of half a
    degree or more.
    """
    # Rotation after mirror: (-cos, sin; sin, cos) if mirrored, else (cos, sin; -sin, cos), of v
    # that points down.
    is_mirrored = np.linalg.det(ida_mat[:2, :2]) < 0
    sine, cosine = ida_mat[1, :2]
    text = ""
    if is_mirrored:
        text = "  mirrored"
    else:
        sine = -sine
    degrees = math.degrees(math.atan2(sine, cosine))
    if abs(degrees) >= 0.5:
        text += f"  {degrees:+.1f} deg"
    return text


def _draw_from_above(
    size_px: int,
    boxes: DrawnBoxes | None,
    points: NDArray[np.floating[Any]],
) -> U8:
    """Draw points and boxes within ``ABOVE_M`` of ego from above: ahead is up, each box with its
    heading.
    """
    pane = np.full((size_px, size_px, 3), _DARK, np.uint8)
    scale = size_px / (2 * ABOVE_M)
    middle = size_px / 2

    def pixels(xy: NDArray[np.floating[Any]]) -> I32:
        column = middle - xy[..., 1] * scale
        row = middle - xy[..., 0] * scale
        places = np.stack([column, row], -1)
        return places.round().astype(np.int32)

    distances = np.abs(points[:, :2])
    is_near = (distances < ABOVE_M * 0.999).all(1)
    near = points[is_near]
    places = np.clip(pixels(near), 0, size_px - 1)
    columns = places[:, 0]
    rows = places[:, 1]
    heights = (near[:, 2:3] + 1.0) / 4.0  # from the ground to three metres
    pane[rows, columns] = 70 + 150 * np.clip(heights, 0.0, 1.0)
    for radius in (20, 40):
        cv2.circle(
            pane,
            center=(int(middle), int(middle)),
            radius=round(radius * scale),
            color=(70, 70, 70),
            lineType=cv2.LINE_AA,
        )
        top = int(middle - radius * scale)
        _write_caption(pane[top:, int(middle) :], f"{radius} m")
    if boxes is not None:
        for box, label in zip(boxes.corners, boxes.label.tolist(), strict=True):
            corners = box[:, :2]
            is_near = np.abs(corners).max() < ABOVE_M
            if not is_near:
                continue
            colour = colour_of(label)
            cv2.polylines(
                pane,
                [pixels(corners[OUTLINE])],
                isClosed=True,
                color=colour,
                lineType=cv2.LINE_AA,
            )
            centre = corners.mean(0)
            front = corners[:4].mean(0)
            ahead = front + 0.5 * (front - centre)
            start, end = pixels(np.stack([centre, ahead])).tolist()
            cv2.line(
                pane,
                start,
                end,
                color=colour,
                thickness=2,
                lineType=cv2.LINE_AA,
            )
    ego = np.array(
        [
            [2.5, 0.0],
            [-1.0, 1.0],
            [-1.0, -1.0],
        ]
    )
    cv2.fillConvexPoly(pane, pixels(ego), _WHITE, cv2.LINE_AA)
    _write_caption(pane, "from above [ego]")
    return pane


def _draw_value(tile: U8, channel: Channel, value: Any) -> None:
    """Draw a value of law ``image`` or ``image_points`` on the image that it lies on."""
    if channel.law.name == "image":
        mask, colours = colour_raster(np.asarray(value), channel.law.fill or 0.0)
        pixels = tile[mask].astype(np.uint16)
        tile[mask] = (pixels + colours[mask]) // 2
        return
    limit = 20 * max(tile.shape)
    for boxes in groups_of(value, channel, "boxes"):
        is_near = np.abs(boxes).max(-1, initial=0) < limit
        for number, sides in enumerate(boxes[is_near].tolist()):
            left, top, right, bottom = (round(side * 16) for side in sides)
            cv2.rectangle(
                tile,
                (left, top),
                (right, bottom),
                colour_of(number),
                lineType=cv2.LINE_AA,
                shift=4,
            )
    for points in groups_of(value, channel, "points"):
        is_near = np.abs(points).max(-1, initial=0) < limit
        for number, point in enumerate(points[is_near].tolist()):
            u, v = (round(coordinate * 16) for coordinate in point[:2])
            cv2.circle(
                tile,
                center=(u, v),
                radius=32,
                color=colour_of(number),
                thickness=cv2.FILLED,
                lineType=cv2.LINE_AA,
                shift=4,
            )


def colour_raster(raster: NDArray[Any], fill: float) -> tuple[Mask, U8]:
    """Return where a raster has values, [H, W], and these as colours, uint8 [H, W, 3]: labels by
    palette, numbers from blue to red.
    """
    if raster.ndim == 3:
        everywhere = np.ones(raster.shape[:2], bool)
        return everywhere, raster.astype(np.uint8)
    if raster.dtype.kind != "f":
        palette = np.array(_PALETTE, np.uint8)
        colours = palette[raster.astype(np.int64) % len(palette)]
        return raster != fill, colours
    mask = np.isfinite(raster) & (raster != fill)
    numbers = raster[mask].astype(np.float64)
    low = float(numbers.min()) if numbers.size else 0.0
    high = float(numbers.max()) if numbers.size else 1.0
    share = (raster - low) / max(high - low, 1e-9)
    levels = np.where(mask, share, 0.0) * 255
    bgr = cv2.applyColorMap(levels.astype(np.uint8), cv2.COLORMAP_TURBO)
    return mask, np.asarray(bgr, np.uint8)[..., ::-1]


def grid_from_above(channel: Channel, value: NDArray[Any]) -> NDArray[Any]:
    """Return a value of law ``ego_grid`` as a raster that is seen from above, ahead up, left left.

    Of cells over each other the topmost one is seen that has a value, of several numbers in a cell
    the largest one; three bytes are a colour.
    """
    space = [name for name in ("x", "y", "z") if name in channel.axes]
    extent_m = np.reshape(channel.law.extent_m or (), (2, len(space)))
    axes = [channel.axes.index(name) for name in space]
    raster = np.moveaxis(value, axes, range(len(space)))
    for axis in range(len(space)):
        if extent_m[0, axis] < extent_m[1, axis]:
            raster = np.flip(raster, axis)
    if "z" in space:
        fill = channel.law.fill or 0
        has_value = np.isfinite(raster) & (raster != fill)
        topmost = has_value.argmax(2)[:, :, None]
        raster = np.take_along_axis(raster, topmost, 2)[:, :, 0]
    is_colour = raster.dtype == np.uint8 and raster.shape[2:] == (3,)
    if raster.ndim > 2 and not is_colour:
        numbers_of_cells = raster.reshape(*raster.shape[:2], -1)
        raster = numbers_of_cells.max(2)
    return raster


def groups_of(value: Any, channel: Channel, role: str) -> Iterator[F64]:
    """Yield the groups of columns (M, K) that play a role."""
    for group in channel.law.roles.get(role, ()):
        if isinstance(value, dict):
            columns = value[group[0]]
        else:
            columns = value[..., [channel.columns.index(name) for name in group]]
        numbers = np.asarray(columns, np.float64)
        yield numbers.reshape(-1, columns.shape[-1])


def value_text(channel: Channel, value: Any) -> str:
    """Return a channel's value where it is short, else its form."""
    value = value.parts if isinstance(value, Logits) else value
    if isinstance(value, str | list):
        if isinstance(value, str):
            return value
        return " | ".join(value)
    if isinstance(value, dict):
        return ", ".join(
            f"{name} {list(np.shape(array_part))}" for name, array_part in value.items()
        )
    array = np.asarray(value)
    if array.size <= _SHORT and array.dtype.kind in "biuf":
        return str(array.tolist())
    return f"{channel.kind} {array.dtype} {list(array.shape)}"


def value_in_words(channel: Channel, value: Any) -> str:
    """Return the form of a value, and its first and last numbers."""
    lines = [value_text(channel, value)]
    parts = value if isinstance(value, dict) else {"": value}
    for name, part in parts.items():
        array = np.asarray(part)
        is_long = array.dtype.kind in "biuf" and array.size > _SHORT
        if is_long and channel.kind != "image":
            numbers = np.array2string(
                array,
                threshold=24,
                edgeitems=2,
                precision=4,
            )
            lines.append(f"{name} {numbers}")
    return "\n".join(lines)


def _strip(width: int, text: str) -> U8:
    strip = np.full((22, width, 3), _DARK, np.uint8)
    ascii_only = text[:_MOST_TEXT].encode("ascii", "replace").decode()
    _write(strip, ascii_only, (10, 15), _TEXT_COLOUR)
    return strip


def _write(
    picture: U8,
    text: str,
    place: tuple[int, int],
    colour: tuple[int, int, int],
) -> None:
    cv2.putText(
        picture,
        text,
        place,
        fontFace=cv2.FONT_HERSHEY_SIMPLEX,
        fontScale=_FONT_SCALE,
        color=colour,
        lineType=cv2.LINE_AA,
    )


def _text_size(text: str) -> tuple[int, int]:
    (width, height), _ = cv2.getTextSize(
        text,
        fontFace=cv2.FONT_HERSHEY_SIMPLEX,
        fontScale=_FONT_SCALE,
        thickness=1,
    )
    return width, height


def colour_of(label: int) -> tuple[int, int, int]:
    """Return the colour of a class, RGB; white of a label that is none."""
    if label < 0:
        return 255, 255, 255
    return _PALETTE[label % len(_PALETTE)]


def _write_caption(tile: U8, text: str) -> None:
    width, height = _text_size(text)
    tile[: height + 9, : width + 10] //= 3
    _write(tile, text, (5, height + 4), _WHITE)


def _join_grid(tiles: Sequence[U8], columns: int) -> U8:
    step_down = max(tile.shape[0] for tile in tiles) + _GAP_PX
    step_right = max(tile.shape[1] for tile in tiles) + _GAP_PX
    columns = min(columns, len(tiles))
    rows = math.ceil(len(tiles) / columns)
    height = rows * step_down + _GAP_PX
    width = columns * step_right + _GAP_PX
    sheet = np.full((height, width, 3), _DARK, np.uint8)
    for number, tile in enumerate(tiles):
        row, column = divmod(number, columns)
        top = _GAP_PX + row * step_down
        left = _GAP_PX + column * step_right
        bottom = top + tile.shape[0]
        right = left + tile.shape[1]
        sheet[top:bottom, left:right] = tile
    return sheet
