"""Camera JPEGs by compiled code of our own: what it takes, and how it is called. Optional: `load` says why not.

It decodes baseline 4:2:0 JPEGs at 1/2 and 1/4, to the same pixels as libjpeg-turbo, and resamples while the rows are in
cache (camera_jpeg.c). Every irregularity makes it decline, before it has written anything: libjpeg-turbo then has the
last word on what is decoded and what is refused.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fuelrail.loaders.decode.native.build import FOLDER, LIBRARY_NAME, source_crc
from fuelrail.pipeline.transforms.image_map import ImageMap, scaled_size

if TYPE_CHECKING:
    from fuelrail.loaders.decode.jpeg import Picture, Scratch
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.pipeline.sample.image_header import ImageInfo

REBUILD = "python -m fuelrail.loaders.decode.native"

_MCU_PX = 16
_MIN_SCALE = 0.5
"""Of the output to the decoded picture. Below, bilinear interpolation would alias, and the code's windows end."""


class _Resize(ctypes.Structure):
    """`Resize` of output.h."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("scale_x", "offset_x", "scale_y", "offset_y")),
        *((name, ctypes.c_int32) for name in ("width", "height", "left", "top", "right", "bottom")),
        *((name, ctypes.c_int64) for name in ("plane_stride", "row_stride")),
        ("planes", ctypes.c_void_p),
    )


class CameraJpeg:
    """The library, for all threads; ctypes lets go of the GIL."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        common = (pointer, pointer, size, pointer, size, number, number, number)
        self._context_bytes = _function(library, "camera_jpeg_context_bytes", size)()
        self._scratch_bytes = _function(library, "camera_jpeg_scratch_bytes", size, size, number, number, number)
        self._resized = _function(library, "camera_jpeg_resized", number, *common, ctypes.POINTER(_Resize))
        self._picture = _function(library, "camera_jpeg_picture", number, *common, number, number, pointer, size)
        self._cut_rows = _function(library, "restart_rows_cut", None, pointer, number)
        self._local = threading.local()

    def cut_rows(self, table: NDArray[np.int64]) -> None:
        """Cut rows out of JPEGs with restart markers: one file a row of the table, as ``RestartRows`` lists them.

        The last column becomes the number of bytes written to the file's room, 0 where it cannot be cut.
        """
        self._cut_rows(table.ctypes.data, len(table))

    @staticmethod
    def takes(info: ImageInfo, factor: int) -> bool:
        """Whether a file of this header, decoded at 1/factor, is worth a try."""
        return (
            factor in (2, 4)
            and info.subsampling == "4:2:0"
            and info.num_components == 3
            and not info.progressive
            and info.restart_interval in (0, -(-info.width // _MCU_PX))
        )

    def resize(
        self,
        encoded: Buffer,
        info: ImageInfo,
        factor: int,
        image_map: ImageMap,
        out: NDArray[np.uint8],
        scratch: Scratch,
    ) -> bool:
        """Decode at 1/factor and sample bilinearly into planes ``out``; False, and nothing written, where it declines.

        ``image_map`` is that of the decoded picture (`ImageMap.of_scaled`).
        """
        a, b, tx, c, d, ty = image_map.coefficients
        if b or c or not (abs(a) > _MIN_SCALE and abs(d) > _MIN_SCALE):
            return False
        covered = image_map.covered_output()
        if covered[0] >= covered[2]:
            return False
        _, height, width = out.shape
        wanted = _Resize(a, tx, d, ty, width, height, *covered, out.strides[0], out.strides[1], out.ctypes.data)
        return self._call(self._resized, encoded, info, factor, scratch, (width, height), ctypes.byref(wanted))

    def picture(
        self, encoded: Buffer, info: ImageInfo, factor: int, rows: tuple[int, int], scratch: Scratch
    ) -> Picture | None:
        """Return the picture at 1/factor, RGBX (h, w, 4) in scratch; only rows [first, last) have meaning.

        None where it declines.
        """
        width, height = scaled_size(info.width, 1, factor), scaled_size(info.height, 1, factor)
        first, last = max(0, rows[0]), min(height, rows[1])
        if first >= last:
            return None
        picture = scratch.take("decoded", height, width, 4)
        place = picture.ctypes.data, picture.strides[0]
        return (
            picture if self._call(self._picture, encoded, info, factor, scratch, (0, 0), first, last, *place) else None
        )

    def _call(
        self,
        function: ctypes._NamedFuncPointer,
        encoded: Buffer,
        info: ImageInfo,
        factor: int,
        scratch: Scratch,
        out_wh: tuple[int, int],
        *arguments: object,
    ) -> bool:
        """Call with the arguments that both functions begin with, whose memory lives as long; whether it was done."""
        context: NDArray[np.uint8] | None = getattr(self._local, "context", None)
        if context is None:
            context = self._local.context = np.zeros(self._context_bytes, np.uint8)
        room = scratch.take("native", 1, self._scratch_bytes(len(encoded), info.width, *out_wh), 1)
        data = np.frombuffer(encoded, np.uint8)
        declined = function(
            context.ctypes.data,
            room.ctypes.data,
            room.size,
            data.ctypes.data,
            data.size,
            info.width,
            info.height,
            factor,
            *arguments,
        )
        return not declined


def _function(library: ctypes.CDLL, name: str, result: type | None, *arguments: type) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


def open_library(path: Path) -> CameraJpeg | str:
    """Open a library that was built from the sources beside us; else say why it cannot be used, and what to do."""
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
    """The installed library, or why there is none."""
    return open_library(FOLDER / LIBRARY_NAME)
