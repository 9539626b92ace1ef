"""What messages say, in neutral terms, and the types that say it. Quaternions are w, x, y, z."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.schema import F64, I64, Mask

VIDEOS: Final = frozenset({"foxglove_msgs/CompressedVideo", "foxglove.CompressedVideo"})
RAWS: Final = frozenset({"sensor_msgs/Image"})
PICTURES: Final = (
    VIDEOS
    | RAWS
    | {
        "sensor_msgs/CompressedImage",
        "foxglove_msgs/CompressedImage",
        "foxglove.CompressedImage",
    }
)
CALIBRATIONS: Final = frozenset(
    {
        "sensor_msgs/CameraInfo",
        "foxglove_msgs/CameraCalibration",
        "foxglove.CameraCalibration",
    }
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
POSES: Final = frozenset(
    {
        "nav_msgs/Odometry",
        "geometry_msgs/PoseStamped",
        "geometry_msgs/PoseWithCovarianceStamped",
    }
)
FIXES: Final = frozenset({"sensor_msgs/NavSatFix"})
MARKS: Final = frozenset(
    {
        "vision_msgs/Detection2DArray",
        "foxglove_msgs/ImageAnnotations",
        "foxglove.ImageAnnotations",
    }
)
UNKNOWN: Final = "unknown"
_LINE_LOOP: Final = 2
CLOUDS: Final = frozenset({"sensor_msgs/PointCloud2", "foxglove.PointCloud"})


class Picture(msgspec.Struct, frozen=True, gc=False):
    """The head of a picture: its bytes are ``length`` from ``offset`` on in the message.

    ``width``, ``height`` and ``step`` are of a raw one: 0 of others. ``encoding`` is that of a raw
    one, or the format as the message states it;
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


class CameraInfo(NamedTuple):
    """What CameraInfo says: ``k`` (9,), ``r`` (9,) and ``p`` (12,) by rows, ``d``; ``roi`` is x,
    y, width, height.
    """

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
    """The frame ``child`` in the frame ``parent`` at a time: rotation w, x, y, z, translation
    [m].
    """

    parent: str
    child: str
    stamp_ns: int
    wxyz: tuple[float, float, float, float]
    xyz: tuple[float, float, float]


class Edges(NamedTuple):
    """Edges of one parent and child, as columns of N in the order of recording; ``row`` numbers
    their messages.
    """

    parent: str
    child: str
    row: I64
    stamp_ns: I64
    wxyz: F64
    xyz: F64

    def rows(self, chosen: NDArray[np.intp] | Mask) -> Edges:
        """Return some of the rows."""
        return Edges(
            parent=self.parent,
            child=self.child,
            row=self.row[chosen],
            stamp_ns=self.stamp_ns[chosen],
            wxyz=self.wxyz[chosen],
            xyz=self.xyz[chosen],
        )

    @classmethod
    def from_pairs(cls, edges: Iterable[tuple[int, Edge]]) -> list[Edges]:
        """Return columns of edges with the numbers of their messages, by parent and child."""
        by_frames: dict[tuple[str, str], list[tuple[int, Edge]]] = {}
        for row, edge in edges:
            by_frames.setdefault(edge[:2], []).append((row, edge))
        return [
            cls(
                parent=parent,
                child=child,
                row=np.array([row for row, _ in pairs], np.int64),
                stamp_ns=np.array([edge.stamp_ns for _, edge in pairs], np.int64),
                wxyz=np.array([edge.wxyz for _, edge in pairs], np.float64),
                xyz=np.array([edge.xyz for _, edge in pairs], np.float64),
            )
            for (parent, child), pairs in by_frames.items()
        ]

    @classmethod
    def joined(cls, parts: Iterable[Edges]) -> list[Edges]:
        """Join edges of the same parent and child, in the order of recording."""
        by_frames: dict[tuple[str, str], list[Edges]] = {}
        for part in parts:
            by_frames.setdefault(part[:2], []).append(part)
        joined_edges = []
        for frames, pair_parts in by_frames.items():
            columns = zip(*(part[2:] for part in pair_parts), strict=True)
            pair_edges = cls(*frames, *(np.concatenate(column) for column in columns))
            recording_order = np.argsort(pair_edges.row, kind="stable")
            joined_edges.append(pair_edges.rows(recording_order))
        return joined_edges


class Marks(NamedTuple):
    """Boxes in a picture: left, top, right, bottom [px], where 0 is the left edge of the first
    pixel; category, track.

    A category that is not stated is "unknown", and a track "".
    """

    stamp_ns: int
    box: list[tuple[float, float, float, float]]
    category: list[str]
    track: list[str]

    @classmethod
    def from_shapes(
        cls,
        stamp_ns: int,
        shapes: Sequence[Shape],
        texts: Sequence[str],
    ) -> Marks:
        """Return the bounds of closed lines; where there are as many texts, these name lines
        without a category.
        """
        loops = [shape for shape in shapes if shape.kind == _LINE_LOOP and shape.x]
        names = texts if len(texts) == len(loops) else [""] * len(loops)
        box = []
        for loop in loops:
            low = (min(loop.x), min(loop.y))
            high = (max(loop.x), max(loop.y))
            box.append((*low, *high))

        def find_text(loop: Shape, keys: tuple[str, ...]) -> str:
            return next(
                (loop.metadata[key] for key in keys if loop.metadata.get(key)),
                "",
            )

        category = [
            find_text(loop, ("category", "class", "label")) or name
            for loop, name in zip(loops, names, strict=True)
        ]
        stamps = (stamp_ns, *(loop.stamp_ns for loop in shapes))
        return cls(
            next(filter(None, stamps), 0),
            box,
            [name or UNKNOWN for name in category],
            [find_text(loop, ("track", "track_id", "id")) for loop in loops],
        )


class Shape(NamedTuple):
    """A PointsAnnotation of foxglove: kind, vertices [px], and its metadata."""

    stamp_ns: int
    kind: int
    x: list[float]
    y: list[float]
    metadata: dict[str, str]


class PointField(NamedTuple):
    """A column of a point cloud; ``kind`` is numpy's code of its type."""

    name: str
    offset: int
    kind: str


class Cloud(NamedTuple):
    """A point cloud: rows of ``width`` points, ``step`` bytes each; ``row_step`` bytes a row;
    ``pose`` moves them.
    """

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
