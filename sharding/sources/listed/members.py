"""Images and sweeps of a manifest's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.frames.frame import Absent, Image, Sweep
from fuelrail.sharding.sources.listed.tars import Tars

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.sharding.sources.files import SourceFiles
    from fuelrail.sharding.sources.listed.calibration import Calibration
    from fuelrail.sharding.sources.listed.values import Rows

_EXTENSIONS: Final = {".jpg": "jpg", "jpeg": "jpg", ".png": "png"}


class Paths:
    """What the paths of a manifest refer to."""

    def __init__(self, files: SourceFiles) -> None:
        self._root, self._tars = files.shown, Tars(files)

    def reference(self, rows: Rows, row: int, path: str) -> str:
        """Return the reference of a path: of a file, of bytes in one, or of a member of a tar."""
        name, hash_, rest = path.partition("#")
        if hash_ and rest.startswith(("frame=", "pts=")):
            rows.fail(
                row, "path", f"'{path}' is a frame of a video, which this version does not read from tables: write the "
                "frames as images; the extra fuelrail[video] is for formats of logs"
            )  # fmt: skip
        if path.startswith("tar:"):
            tar = name.removeprefix("tar:")
            if not rest or tar.startswith("/") or ".." in tar.split("/"):
                rows.fail(row, "path", f"'{path}' must be tar:FILE#MEMBER, with a FILE inside the source")
            member = self._tars.find(tar, rest)
            if member is None:
                rows.fail(row, "path", f"the tar '{tar}' has no member '{rest}'")
            return f"{tar}#{member.offset}+{member.length}"
        return path.removeprefix(f"{self._root}/")


class RowFiles:
    """Images and sweeps of the rows of a table, whose columns begin with ``prefix``."""

    def __init__(self, where: Paths, rows: Rows, prefix: str, times: NDArray[np.int64]) -> None:
        self._where, self.rows, self.times = where, rows, times
        self._paths = rows.texts(f"{prefix}path")
        self._times_ns: list[int] = times.tolist()
        self._poses = rows.poses(f"{prefix}ego2global")
        self._bytes = rows.integers(f"{prefix}num_bytes", unknown=-1).tolist() if f"{prefix}num_bytes" in rows else None
        self._ranges = None
        if f"{prefix}byte_offset" in rows:
            offsets = rows.integers(f"{prefix}byte_offset", unknown=-1).tolist()
            self._ranges = list(zip(offsets, rows.integers(f"{prefix}byte_length", unknown=-1).tolist(), strict=True))
        self._prefix = prefix

    def _ref(self, row: int, path: str) -> str:
        if self._ranges is not None and self._ranges[row][0] >= 0:
            offset, length = self._ranges[row]
            if length < 1:
                self.rows.fail(row, f"{self._prefix}byte_length", f"{length} must be over 0")
            return f"{path}#{offset}+{length}"
        if "#" in path or path.startswith(("/", "tar:")):
            return self._where.reference(self.rows, row, path)
        return path

    def _pose(self, row: int) -> NDArray[np.float64] | None:
        return None if self._poses is None or np.isnan(self._poses[row, 0, 0]) else self._poses[row]

    def image(self, row: int, found: Calibration, calibrated: int) -> Image | Absent:
        """Return the image of a row; absent where it has no path. ``calibrated`` is the row of its calibration."""
        path = self._paths[row]
        if not path:
            return Absent("no path")
        intrinsics, cam2ego = found.intrinsics[calibrated], found.sensor2ego[calibrated]
        if intrinsics is None or cam2ego is None:
            what = "intrinsics" if intrinsics is None else "pose in ego (cam2ego, or sensor2ego in calibration)"
            raise SourceError(
                f"table '{self.rows.table}', row {self.rows.first + row}: the camera of '{path}' has no {what}"
            )
        num_bytes = -1 if self._bytes is None else self._bytes[row]
        name = path.partition("#")[2] if path.startswith("tar:") else path
        return Image(
            ref=self._ref(row, path), timestamp_ns=self._times_ns[row], intrinsics=intrinsics, cam2ego=cam2ego,
            ego2global=self._pose(row), width=found.width[calibrated], height=found.height[calibrated],
            num_bytes=None if num_bytes < 0 else num_bytes, dist=found.dist[calibrated],
            dist_model=found.dist_model[calibrated], extension=_EXTENSIONS.get(name[-4:].lower(), ""),
        )  # fmt: skip

    def sweep(self, row: int, found: Calibration, calibrated: int) -> Sweep | None:
        """Return the sweep of a row; None where it has no path."""
        path, lidar2ego = self._paths[row], found.sensor2ego[calibrated]
        if not path:
            return None
        where = f"table '{self.rows.table}', row {self.rows.first + row}"
        if path[-4:].lower() in _EXTENSIONS:
            raise SourceError(f"{where}: '{path}' is an image, but its sensor has no intrinsics: it is not calibrated")
        if lidar2ego is None:
            raise SourceError(f"{where}: the lidar of '{path}' has no pose in ego (lidar2ego, or sensor2ego)")
        ref = self._ref(row, path)
        return Sweep(ref=ref, timestamp_ns=self._times_ns[row], lidar2ego=lidar2ego, ego2global=self._pose(row))
