"""Camera JPEGs by compiled code of our own: what it takes, and how it is called.

Optional: `load` says why not.

It decodes baseline 4:2:0 JPEGs at 1/2 and 1/4, to the same pixels as libjpeg-turbo, and resamples
while the rows are in cache (camera_jpeg.c). Every irregularity makes it decline, before it has
written anything: libjpeg-turbo then has the last word on what is decoded and what is refused. It
also writes baseline JPEGs again with restart markers at their rows of MCUs (add_restarts.c), and
cuts rows out of such files (restart_rows.c).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ImageError
from fuelrail.pipeline.native.build import (
    FOLDER,
    LIBRARY_NAME,
    source_crc,
)
from fuelrail.pipeline.transforms.image_map import ImageMap, scaled_size

if TYPE_CHECKING:
    from fuelrail.pipeline.dtypes import I64, U8
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo

REBUILD = "python -m fuelrail.pipeline.native"

RESTART_WRITER: Final = "fuelrail 2"
"""Name of the code that adds restart markers; the number changes where its bytes do."""

_FAULTS: Final = {
    -1: "its header is broken",
    -2: "its data end before the image does",
    -3: "its data hold a code that its Huffman tables do not",
    -4: "its data hold coefficients that no 8-bit image has",
    -5: "a restart marker or the end marker is missing, or not where it should be",
}
"""Faults of a damaged file: what add_restarts.c returns, in words."""

_MCU_PX = 16
_MIN_SCALE = 0.5
"""The least scale from decoded picture to output.

Below, bilinear interpolation would alias, and the code's windows end.
"""


Picture: TypeAlias = "NDArray[Any]"
"""uint8 (height, width, 3 or 4), channels interleaved, the fourth without meaning.

OpenCV's stubs know no dtype.
"""

_KEEP_BYTES = 64 << 20
"""Scratch arrays up to this size are kept by each thread."""


class Scratch(threading.local):
    """Named arrays of the calling thread that only grow; contents are undefined."""

    def __init__(self) -> None:
        self.arrays: dict[str, Picture] = {}

    def take(
        self,
        name: str,
        height: int,
        width: int,
        channels: int,
    ) -> Picture:
        """Return an uninitialised uint8 (height, width, channels)."""
        num_bytes = height * width * channels
        array = self.arrays.get(name)
        if array is None or array.size < num_bytes:
            array = np.empty(num_bytes, np.uint8)
            if num_bytes <= _KEEP_BYTES:
                self.arrays[name] = array
        return array[:num_bytes].reshape(height, width, channels)


class _Resize(ctypes.Structure):
    """`Resize` of output.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("scale_x", "offset_x", "scale_y", "offset_y")),
        *((name, ctypes.c_int32) for name in ("width", "height", "left", "top", "right", "bottom")),
        *((name, ctypes.c_int64) for name in ("plane_stride", "row_stride")),
        ("planes", ctypes.c_void_p),
    )


class _Job(ctypes.Structure):
    """`Job` of camera_jpeg.c; one without a factor is declined."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("size", ctypes.c_size_t),
        *((name, ctypes.c_int32) for name in ("width", "height", "factor", "declined")),
        ("wanted", _Resize),
    )


class ScaledImage(NamedTuple):
    """A file to decode at 1/``factor``, the map of the decoded picture (`ImageMap.of_scaled`),
    and its planes.
    """

    encoded: Buffer
    info: ImageInfo
    factor: int
    image_map: ImageMap
    out: U8


class CameraJpeg:
    """The library, for all threads; ctypes lets go of the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer = ctypes.c_void_p
        size = ctypes.c_size_t
        number = ctypes.c_int
        common = (pointer, pointer, size)
        self._context_bytes = _function(library, "camera_jpeg_context_bytes", size)()
        self._scratch_bytes = _function(
            library,
            "camera_jpeg_scratch_bytes",
            size,
            size,
            number,
            number,
            number,
        )
        self._resized = _function(library, "camera_jpeg_resized", None, *common, pointer, number)
        self._picture = _function(
            library,
            "camera_jpeg_picture",
            number,
            *common,
            pointer,
            size,
            *(number,) * 5,
            pointer,
            size,
        )
        self._cut_rows = _function(library, "restart_rows_cut", None, pointer, number)
        self._restart_scratch_bytes = _function(library, "add_restarts_scratch_bytes", size, size)
        self._restart_room_bytes = _function(library, "add_restarts_room_bytes", size, size)
        self._add_restarts = _function(
            library, "add_restarts", ctypes.c_int64, *common, pointer, size, pointer, size
        )
        self._local = threading.local()

    def cut_rows(self, table: I64) -> None:
        """Cut rows out of JPEGs with restart markers: one file a row of the table, as
        ``RestartRows`` lists them.

        The last column becomes the number of bytes written to the file's room, 0 where it cannot be
        cut.
        """
        self._cut_rows(table.ctypes.data, len(table))

    def add_restarts(self, encoded: Buffer, scratch: Scratch) -> bytes | None:
        """Return a JPEG with a restart marker at each row of MCUs.

        Coefficients, Huffman codes and all segments of the header stay as they are; a DC table
        that lacks codes for some levels gets them. None for a file that is left as it is:
        progressive, of several scans, without tables of its own, with a DC table that has no room,
        or with up to 7 stray bytes after a segment's data. Raises ImageError for a damaged file.
        """
        data = np.frombuffer(encoded, np.uint8)
        room = scratch.take("restarts", 1, self._restart_room_bytes(data.size), 1).ravel()
        num_bytes = self._add_restarts(
            *self._memory(self._restart_scratch_bytes(data.size), scratch),
            *(data.ctypes.data, data.size, room.ctypes.data, room.size),
        )
        if num_bytes < 0:
            raise ImageError(f"JPEG is damaged: {_FAULTS[num_bytes]}")
        if num_bytes:
            return room[:num_bytes].tobytes()
        return None

    @staticmethod
    def takes(info: ImageInfo, factor: int) -> bool:
        """Return whether a file of this header is worth a try at 1/factor."""
        return (
            factor in (2, 4)
            and info.subsampling == "4:2:0"
            and info.num_components == 3
            and not info.progressive
            and info.restart_interval in (0, -(-info.width // _MCU_PX))
        )

    def resize(self, images: Sequence[ScaledImage], scratch: Scratch) -> list[bool]:
        """Decode and sample bilinearly into planes; False, and nothing written, for each that it
        declines.

        One call for several images: a thread that comes back for the GIL after each of them may
        wait for it as often.
        """
        files = [np.frombuffer(image.encoded, np.uint8) for image in images]
        jobs = _jobs(len(images))(*map(_job, images, files))
        room_bytes = [
            self._scratch_bytes(job.size, job.width, job.wanted.width, job.wanted.height)
            for job in jobs
        ]
        self._resized(
            *self._memory(max(room_bytes, default=0), scratch),
            ctypes.addressof(jobs),
            len(jobs),
        )
        return [not job.declined for job in jobs]

    def picture(
        self,
        encoded: Buffer,
        info: ImageInfo,
        factor: int,
        rows: tuple[int, int],
        scratch: Scratch,
    ) -> Picture | None:
        """Return the picture at 1/factor, RGBX (h, w, 4) in scratch; only rows [first, last) have
        meaning.

        None where it declines.
        """
        width = scaled_size(info.width, 1, factor)
        height = scaled_size(info.height, 1, factor)
        first = max(0, rows[0])
        last = min(height, rows[1])
        if first >= last:
            return None
        picture = scratch.take("decoded", height, width, 4)
        data = np.frombuffer(encoded, np.uint8)
        declined = self._picture(
            *self._memory(self._scratch_bytes(data.size, info.width, 0, 0), scratch),
            *(data.ctypes.data, data.size, info.width, info.height, factor),
            *(first, last, picture.ctypes.data, picture.strides[0]),
        )
        return None if declined else picture

    def _memory(self, room_bytes: int, scratch: Scratch) -> tuple[int, int, int]:
        """Return context and scratch memory of the calling thread, which its next call takes
        too.
        """
        context: U8 | None = getattr(self._local, "context", None)
        if context is None:
            context = self._local.context = np.zeros(self._context_bytes, np.uint8)
        room = scratch.take("native", 1, room_bytes, 1)
        return context.ctypes.data, room.ctypes.data, room.size


@cache
def _jobs(number: int) -> type[ctypes.Array[_Job]]:
    return _Job * number


def _job(image: ScaledImage, data: U8) -> _Job:
    """Return job of an image with the file ``data``; an empty one, which is declined, for what
    the code does not do.
    """
    a, b, tx, c, d, ty = image.image_map.coefficients
    covered = image.image_map.covered_output()
    does = (
        not b and not c and abs(a) > _MIN_SCALE and abs(d) > _MIN_SCALE and covered[0] < covered[2]
    )
    if not does or not CameraJpeg.takes(image.info, image.factor):
        return _Job()
    _, height, width = image.out.shape
    left, top, right, bottom = covered
    plane_stride, row_stride, _ = image.out.strides
    resize = _Resize(
        scale_x=a,
        offset_x=tx,
        scale_y=d,
        offset_y=ty,
        width=width,
        height=height,
        left=left,
        top=top,
        right=right,
        bottom=bottom,
        plane_stride=plane_stride,
        row_stride=row_stride,
        planes=image.out.ctypes.data,
    )
    return _Job(
        data=data.ctypes.data,
        size=data.size,
        width=image.info.width,
        height=image.info.height,
        factor=image.factor,
        declined=0,
        wanted=resize,
    )


def _function(
    library: ctypes.CDLL,
    name: str,
    result: type | None,
    *arguments: type,
) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype = result
    function.argtypes = arguments
    return function


def open_library(path: Path) -> CameraJpeg | str:
    """Open a library that was built from the sources beside us; else say why it cannot be used,
    and what to do.
    """
    if not path.is_file():
        return f"it was not built: install a C compiler (Debian package gcc), then run {REBUILD}"
    try:
        library = ctypes.CDLL(str(path))
        built_from = _function(library, "camera_jpeg_source_crc", ctypes.c_uint32)()
        runs_here = _function(library, "camera_jpeg_runs_here", ctypes.c_int)()
    except (OSError, AttributeError) as error:
        return f"its library cannot be loaded ({error}): run {REBUILD}"
    if built_from != source_crc():
        return f"its library was built from other sources: run {REBUILD}"
    if not runs_here:
        return "this processor has no AVX2 and BMI2, which it needs"
    return CameraJpeg(library)


@cache
def load() -> CameraJpeg | str:
    """Load the installed library, or return why there is none."""
    return open_library(FOLDER / LIBRARY_NAME)
