"""Images and sweeps of a manifest's rows: files, bytes of files, members of tars, and frames of
video.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.storage.filesystem import is_url
from fuelrail.sharding.sources.adapter.frame import FRAME, Absent, Image, Sweep
from fuelrail.sharding.sources.adapter.members import is_inside
from fuelrail.sharding.sources.adapter.videos import Videos
from fuelrail.sharding.sources.shared.pictures import EXTENSION_OF
from fuelrail.sharding.sources.shared.tars import Member, tar_members
from fuelrail.sharding.sources.tables.calibration import shared
from fuelrail.sharding.sources.tables.columns import is_path

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.sharding.sources.adapter.frame import Calibration
    from fuelrail.sharding.sources.shared.files import SourceFiles
    from fuelrail.sharding.sources.tables.values import Rows


class Paths:
    """What the paths of a manifest refer to."""

    def __init__(
        self,
        files: SourceFiles,
        root: str,
        *,
        only_keyframes: bool,
        ignore_zeros: bool,
    ) -> None:
        """Take ``files``, those below the folder or URL ``root``."""
        folder = Path(root.removeprefix("file://"))
        roots = [root] if is_url(root) else [str(folder.absolute()), str(folder.resolve())]
        self._roots = [f"{folder_root.rstrip('/')}/" for folder_root in roots]
        self._files = files
        self._shown = files.shown
        self._ignore_zeros = ignore_zeros
        self._members_of = lru_cache(maxsize=4)(self._list_members)
        self.videos = Videos(files, self.inside, only_keyframes=only_keyframes)

    def inside(self, path: str) -> str:
        """Return a path below the root, also of one that names the root; raises SourceError for
        one elsewhere.
        """
        path = path.removeprefix("file://")
        below = next(
            (folder_root for folder_root in self._roots if path.startswith(folder_root)),
            "",
        )
        name = path.removeprefix(below)
        is_absolute = name.startswith("/") or "://" in name
        if is_absolute or ".." in name.split("/"):
            raise SourceError(
                f"'{path}' is not inside the source '{self._shown}', below which paths are; "
                "the option root=FOLDER_OR_URL names another folder or URL that all of them "
                "are below"
            )
        return name

    def videos_of(self, tables: Iterable[Rows]) -> tuple[str, ...]:
        """Return the names of the existing videos in the paths of these rows."""
        names: dict[str, None] = {}
        for rows in tables:
            for column in filter(is_path, rows.batch.schema.names):
                videos = [
                    text.partition(FRAME)[0]
                    for text in rows.texts(column)
                    if text and FRAME in text
                ]
                with contextlib.suppress(SourceError):  # which the row's own check reports
                    names.update((self.inside(name), None) for name in videos)
        return tuple(
            name for name in names if is_inside(name) and self._files.facts(name) is not None
        )

    def reference(self, rows: Rows, row: int, path: str) -> str:
        """Return the reference of a path: of a file, of bytes in one, or of a member of a tar."""
        name, _, rest = path.partition("#")
        if rest.startswith("pts="):
            rows.fail(
                row,
                "path",
                f"'{path}': frames of a video are named by their numbers, as in {name}{FRAME}12",
            )
        if path.startswith("tar:"):
            tar = self._inside(rows, row, name.removeprefix("tar:"))
            if not rest:
                rows.fail(row, "path", f"'{path}' must be tar:FILE#MEMBER")
            member = self._members_of(tar).get(rest)
            if member is None:
                rows.fail(row, "path", f"the tar '{tar}' has no member '{rest}'")
            return f"{tar}#{member.offset}+{member.length}"
        return self._inside(rows, row, path)

    def _list_members(self, tar: str) -> dict[str, Member]:
        members = tar_members(self._files, tar, ignore_zeros=self._ignore_zeros)
        return {member.name: member for member in members}

    def _inside(self, rows: Rows, row: int, path: str) -> str:
        try:
            return self.inside(path)
        except SourceError as error:
            rows.fail(row, "path", str(error))


class RowFiles:
    """Images and sweeps of the rows of a table, whose columns begin with ``prefix``."""

    def __init__(
        self,
        where: Paths,
        rows: Rows,
        prefix: str,
        times: I64,
        *,
        is_calibrated: bool = True,
    ) -> None:
        """Take ``is_calibrated``: images need a calibration, as they do where a column has one."""
        self._where = where
        self.rows = rows
        self.times = times
        stated = (f"{prefix}{name}" in rows for name in ("intrinsics", "fx"))
        self._is_calibrated = (
            is_calibrated or any(stated) or rows.poses(f"{prefix}cam2ego") is not None
        )
        self._paths = rows.texts(f"{prefix}path")
        self._times_ns: list[int] = times.tolist()
        self._poses = shared(rows.poses(f"{prefix}ego2global"), len(rows))
        self._bytes = (
            rows.integers(f"{prefix}num_bytes", unknown=-1).tolist()
            if f"{prefix}num_bytes" in rows
            else None
        )
        self._ranges = None
        if f"{prefix}byte_offset" in rows:
            offsets = rows.integers(f"{prefix}byte_offset", unknown=-1).tolist()
            self._ranges = list(
                zip(
                    offsets,
                    rows.integers(f"{prefix}byte_length", unknown=-1).tolist(),
                    strict=True,
                )
            )
        self._prefix = prefix

    def _ref(self, row: int, path: str) -> str:
        if self._ranges is not None and self._ranges[row][0] >= 0:
            offset, length = self._ranges[row]
            if length < 1:
                self.rows.fail(
                    row,
                    f"{self._prefix}byte_length",
                    f"{length} must be over 0",
                )
            return f"{self._where.reference(self.rows, row, path)}#{offset}+{length}"
        if "#" in path or ":" in path or ".." in path or path[0] == "/":
            return self._where.reference(self.rows, row, path)
        return path

    def image(self, row: int, calibration: Calibration) -> Image | Absent:
        """Return the image of a row; absent where it has no path."""
        path = self._paths[row]
        if not path:
            return Absent("no path")
        has_intrinsics = calibration.intrinsics is not None
        has_pose = calibration.sensor2ego is not None
        if self._is_calibrated and not (has_intrinsics and has_pose):
            lacking = "pose in ego (cam2ego, or sensor2ego in calibration)"
            if not has_intrinsics:
                lacking = "intrinsics"
            raise SourceError(
                f"table '{self.rows.table}', row {self.rows.first + row}: the camera of "
                f"'{path}' has no {lacking}"
            )
        num_bytes = -1 if self._bytes is None else self._bytes[row]
        is_frame = FRAME in path
        file = path.partition("#")[2] if path.startswith("tar:") else path
        extension = file.rpartition(".")[2].lower()
        image = Image(
            ref=path if is_frame else self._ref(row, path),
            timestamp_ns=self._times_ns[row],
            calibration=calibration,
            ego2global=self._poses[row],
            num_bytes=None if num_bytes < 0 else num_bytes,
            extension=EXTENSION_OF.get(extension, ""),
        )
        if not is_frame:
            return image
        if self._ranges is not None and self._ranges[row][0] >= 0:
            text = f"'{image.ref}' is a frame of a video, not bytes of a file"
            self.rows.fail(row, f"{self._prefix}byte_offset", text)
        try:
            return self._where.videos.completed(image)
        except SourceError as error:
            self.rows.fail(row, f"{self._prefix}path", str(error))

    def sweep(self, row: int, calibration: Calibration) -> Sweep | None:
        """Return the sweep of a row; None where it has no path."""
        path = self._paths[row]
        lidar2ego = calibration.sensor2ego
        if not path:
            return None
        where = f"table '{self.rows.table}', row {self.rows.first + row}"
        extension = path.rpartition(".")[2].lower()
        if extension in EXTENSION_OF or FRAME in path:
            raise SourceError(
                f"{where}: '{path}' is an image, but its sensor has no intrinsics: it is "
                "not calibrated"
            )
        if lidar2ego is None:
            raise SourceError(
                f"{where}: the lidar of '{path}' has no pose in ego (lidar2ego, or sensor2ego)"
            )
        ref = self._ref(row, path)
        return Sweep(
            ref=ref,
            timestamp_ns=self._times_ns[row],
            lidar2ego=lidar2ego,
            ego2global=self._poses[row],
        )
