"""KITTI raw: synchronised and rectified drives with oxts and tracklets."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from math import isfinite
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple
from xml.etree import ElementTree

import numpy as np
from msgspec import Meta

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import invert_rigid, move_points, rotation_matrices
from fuelrail.sharding.sources.adapter.boxes import boxes_by_key
from fuelrail.sharding.sources.adapter.channels import signals, signals_channel
from fuelrail.sharding.sources.adapter.frame import (
    NO_BOXES,
    Absent,
    BoxRows,
    Clip,
    Frame,
    Image,
    Sensors,
    Sweep,
)
from fuelrail.sharding.sources.adapter.poses import Trajectory, quaternions
from fuelrail.sharding.sources.adapter.source import FrameSettings, FrameSource
from fuelrail.sharding.sources.kitti.calibration import (
    CATEGORIES,
    LIDAR,
    POINT_COLUMNS,
    camera_calibration,
    category,
    numbers_of,
    read_numbers,
    read_points,
)
from fuelrail.sharding.sources.shared.arrow import names_in, read_file
from fuelrail.sharding.sources.shared.files import looks
from fuelrail.sharding.sources.shared.foreign import (
    parsing,
    read_text,
    read_xml,
)

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.sample.schema import F32, F64, I64
    from fuelrail.sharding.sources.shared.scan_table import Reference

COLOUR: Final = ("image_02", "image_03")
GRAY: Final = ("image_00", "image_01")
EARTH_M: Final = 6378137.0
EDGE_NS: Final = 100_000_000
_NO_TIME: Final = -(1 << 63)
"""Stands for the time of an empty line, as NaT is stored."""
"""The period of oxts: as far beyond its first and last row as a sensor's own time can be."""
_DATE: Final = re.compile(r"[0-9]{4}_[0-9]{2}_[0-9]{2}")
_DRIVE: Final = re.compile(r"[0-9]{4}_[0-9]{2}_[0-9]{2}_drive_[0-9]{4}_sync\Z")
_CALIBRATION: Final = (
    "calib_cam_to_cam.txt",
    "calib_velo_to_cam.txt",
    "calib_imu_to_velo.txt",
)
_DEPTH: Final = 4
_OXTS: Final = {
    "lat": "deg",
    "lon": "deg",
    "alt": "m",
    "roll": "rad",
    "pitch": "rad",
    "yaw": "rad",
    **dict.fromkeys(("vn", "ve", "vf", "vl", "vu"), "m/s"),
    **dict.fromkeys(("ax", "ay", "az", "af", "al", "au"), "m/s^2"),
    **dict.fromkeys(("wx", "wy", "wz", "wf", "wl", "wu"), "rad/s"),
    "pos_accuracy": "m",
    "vel_accuracy": "m/s",
    "navstat": "",
    "numsats": "",
    "posmode": "",
    "velmode": "",
    "orimode": "",
}
"""Columns and units, after ``dataformat.txt`` of the development kit."""
CAN: Final = signals_channel("can_oxts", _OXTS, "oxts")
_TRACKLETS: Final = "tracklet_labels.xml"


class KittiSettings(FrameSettings, frozen=True, kw_only=True):
    """Options of the source."""

    gray: Annotated[bool, Meta(description="true takes the two gray cameras too")] = False
    oxts: Annotated[
        bool,
        Meta(description="true stores the rows of oxts as the channel can_oxts"),
    ] = False


class _Layout(NamedTuple):
    """Folder of each drive, and of the calibration of each date."""

    drives: dict[str, str]
    calibrations: dict[str, str]


class Kitti(FrameSource[KittiSettings]):
    """KITTI raw drives (..._sync): two colour cameras, lidar, oxts and tracklets at 10 Hz.

    PATH holds drives (`2011_09_26_drive_0001_sync`) and their dates' calibration, as unzipped, also
    nested. A drive is a clip with the cameras `image_02` and `image_03`, the lidar, and boxes where
    there is `tracklet_labels.xml`. Files of one number are a sample; a number that a sensor lacks
    is a hole.

    - Ego is the IMU. Its pose comes from oxts by Mercator's projection, scaled at the drive's first
      row, in metres east, north and up from there. The pose is interpolated at each sensor's time;
      up to 0.1 s outside the rows it follows the measured velocity.
    - Images are rectified (K is from `P_rect`, whose fourth column shifts the camera) and PNG, not
      for GPU decoders. Points are not compensated for ego's motion.
    - Each sensor has its own times, in a local time without a zone, so they do not count from 1970.
      Empty times are counted: without the lidar's, a frame has a camera's time and no sweep;
      without an image's, no image; without that of oxts, the row is left out.
    """

    kind = "kitti"
    settings_type = KittiSettings
    time_base = "local_time"
    ego_origin = "imu"
    license = "CC BY-NC-SA 3.0"

    def sensors(self) -> Sensors:
        """Return the colour cameras, with the option also the gray ones."""
        return Sensors.from_names(self._cameras, {LIDAR: POINT_COLUMNS})

    @property
    def _cameras(self) -> tuple[str, ...]:
        if self.settings.gray:
            return (*COLOUR, *GRAY)
        return COLOUR

    def category_names(self) -> tuple[str, ...]:
        """Return the classes of the object benchmark."""
        return CATEGORIES

    def clips(self) -> Iterator[Clip]:
        """Yield the drives, by name."""
        for name, folder in sorted(self._layout.drives.items()):
            calibration = self._layout.calibrations.get(name[:10])
            files = [] if calibration is None else [f"{calibration}{file}" for file in _CALIBRATION]
            yield Clip(
                name=name,
                log_id=name[:10],
                files=(*files, f"{folder}/oxts/timestamps.txt"),
            )

    @cached_property
    def _layout(self) -> _Layout:
        """Drives and calibrations in any folder: each zip brings a folder of the date."""
        layout = _Layout({}, {})
        waiting = [("", 0)]
        while waiting:
            folder, depth = waiting.pop()
            prefix = f"{folder}/" if folder else ""
            names = self.files.listed(folder)
            folder_name = PurePosixPath(folder or self.location.rstrip("/")).name
            if _CALIBRATION[0] in names and (date := _DATE.match(folder_name)):
                layout.calibrations.setdefault(date[0], prefix)
            if _DRIVE.match(folder_name) and "oxts" in names:
                if not folder:
                    raise SourceError(
                        f"'{self.files.shown}' is one drive; give the folder that holds it"
                    )
                if folder_name in layout.drives:
                    raise SourceError(
                        f"drive {folder_name} is there twice: '{self.files.shown}/{folder}' and "
                        f"'{self.files.shown}/{layout.drives[folder_name]}'"
                    )
                layout.drives[folder_name] = folder
            elif depth < _DEPTH:
                inside = [name for name in names if _DATE.match(name) and "." not in name]
                waiting += [(f"{prefix}{name}", depth + 1) for name in reversed(inside)]
        return layout

    def poses(self, clip: Clip) -> Trajectory:
        """Return poses of oxts, in metres east, north and up of its first row, by Mercator's
        projection scaled there.

        One row more at each end, 0.1 s away by the measured velocity: sensors fire up to 0.1 s
        before the first row.
        """
        folder = self._layout.drives[clip.name]
        times, rows = self._oxts_of(folder)
        return Trajectory(
            *with_edges(times, rows, oxts_poses(rows)),
            f"'{self.files.shown}/{folder}/oxts/data'",
        )

    @cached_property
    def _oxts_of(self) -> Callable[[str], tuple[I64, F64]]:
        """Times (P,) and rows (P, 30) of a drive's oxts; those of the last one are kept."""
        return lru_cache(maxsize=1)(self._read_oxts)

    def _read_oxts(self, folder: str) -> tuple[I64, F64]:
        name = f"{folder}/oxts/data"
        files = names_in(self.files, folder, "oxts", "data")
        numbers = numbers_of(files, ["txt"])
        if not numbers:
            raise SourceError(f"'{self.files.shown}/{name}' has no rows of oxts")
        stated = self._read_times(f"{folder}/oxts/timestamps.txt", max(numbers))
        rows = [number for number in sorted(numbers) if stated[number] != _NO_TIME]
        if not rows:
            raise SourceError(f"'{self.files.shown}/{name}' has no row with a time")
        if len(rows) < len(numbers):
            self.noted["rows of oxts without a time, left out"] += len(numbers) - len(rows)

        def read_row(number: int) -> list[float]:
            file = f"{name}/{numbers[number]}"
            text = read_file(self.files, file)
            try:
                row = list(map(float, text.split()))
            except ValueError:
                row = []
            is_complete = len(row) == len(_OXTS)
            if not is_complete or not all(map(isfinite, row)):
                raise SourceError(
                    f"file '{self.files.shown}/{file}' has not {len(_OXTS)} finite numbers: "
                    f"{text[:60]!r}"
                )
            return row

        return stated[rows], np.array(looks(read_row, rows))

    def _read_times(self, name: str, last: int) -> I64:
        """Read a file of times [ns], ``_NO_TIME`` for an empty line, as some published drives have.

        Raises SourceError where one is invalid, or the file ends before ``last``.
        """
        where = f"file '{self.files.shown}/{name}'"
        lines = read_text(read_file(self.files, name), where).splitlines()
        try:
            times = np.array([line.strip() for line in lines], "datetime64[ns]")
        except ValueError as error:
            raise SourceError(
                f"{where}: {error}; wanted are lines such as 2011-09-26 13:02:25.951199337"
            ) from error
        if last >= len(times):
            raise SourceError(
                f"{where} has {len(times)} rows, the sensor has a file of number {last}"
            )
        return times.astype(np.int64)

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield a frame for each number that a camera has, at the lidar's time, or else the
        first camera's.
        """
        folder = self._layout.drives[clip.name]
        calibration = self._layout.calibrations.get(clip.name[:10])
        if calibration is None:
            raise SourceError(
                f"drive {clip.name} has no calibration: the file {_CALIBRATION[0]} of "
                f"{clip.name[:10]} is nowhere in '{self.files.shown}'"
            )
        cams, velo, imu = (
            read_numbers(self.files, f"{calibration}{name}") for name in _CALIBRATION
        )
        (velo_shift,) = velo.matrix("T", 1, 3)
        velo2cam = velo.transform(velo.matrix("R", 3, 3), velo_shift)
        (imu_shift,) = imu.matrix("T", 1, 3)
        imu2velo = imu.transform(imu.matrix("R", 3, 3), imu_shift)
        rectification = cams.matrix("R_rect_00", 3, 3)
        cam2rect = cams.transform(rectification, np.zeros(3))
        ego2rect = cam2rect @ velo2cam @ imu2velo
        calibrations = {}
        for name in self._cameras:
            projection = cams.matrix(f"P_rect_{name[-2:]}", 3, 4)
            calibrations[name] = camera_calibration(projection, ego2rect)
        lidar2ego = invert_rigid(imu2velo)
        files = {
            name: numbers_of(names_in(self.files, folder, name, "data"), ["png", "jpg"])
            for name in self._cameras
        }
        sweep_files = names_in(self.files, folder, "velodyne_points", "data")
        scans = numbers_of(sweep_files, ["bin"])
        numbers = sorted(set().union(*files.values()))
        if not numbers:
            raise SourceError(
                f"drive '{self.files.shown}/{folder}' has no images in {' or '.join(self._cameras)}"
            )
        times = {
            name: self._read_times(f"{folder}/{name}/timestamps.txt", max(names))
            for name, names in files.items()
            if names
        }
        reference = next(iter(times.values()))
        if "velodyne_points" in self.files.listed(folder):
            reference = self._read_times(
                f"{folder}/velodyne_points/timestamps.txt",
                max(*numbers, *scans),
            )
        elif numbers[-1] >= len(reference):
            raise SourceError(
                f"drive '{self.files.shown}/{folder}' has no time of frame {numbers[-1]}"
            )
        without_time = {number for number in numbers if reference[number] == _NO_TIME}
        for number in without_time:
            timed = [stamps[number] for stamps in times.values() if number < len(stamps)]
            reference[number] = next((time for time in timed if time != _NO_TIME), _NO_TIME)
        lacking = [number for number in numbers if reference[number] == _NO_TIME]
        if lacking:
            self.noted["frames without any time, left out"] += len(lacking)
            numbers = [number for number in numbers if reference[number] != _NO_TIME]
        num_replaced = len(without_time) - len(lacking)
        if num_replaced:
            self.noted["frames without a time of their own, which have a camera's"] += num_replaced
        boxes = self._read_tracklets(folder, invert_rigid(lidar2ego))
        members: list[list[Reference]] = [[] for _ in numbers]
        if self.settings.oxts:
            times_ns = reference[numbers].tolist()
            members = signals(CAN, *self._oxts_of(folder), times_ns)
        for index, number in enumerate(numbers):
            images: dict[str, Image | Absent] = {}
            for name, names in files.items():
                if number not in names:
                    continue
                ref = f"{folder}/{name}/data/{names[number]}"
                image_ns = int(times[name][number])
                images[name] = Absent("no time", ref)
                if image_ns != _NO_TIME:
                    images[name] = Image(
                        ref=ref,
                        timestamp_ns=image_ns,
                        calibration=calibrations[name],
                    )
            sweep = Sweep(
                ref=f"{folder}/velodyne_points/data/{scans.get(number)}",
                timestamp_ns=int(reference[number]),
                lidar2ego=lidar2ego,
                absent="no time" if number in without_time else "",
            )
            yield Frame(
                timestamp_ns=int(reference[number]),
                images=images,
                sweeps={LIDAR: sweep} if number in scans else {},
                boxes=None if boxes is None else boxes.get(number, NO_BOXES),
                members=members[index],
            )

    @property
    def channels(self) -> tuple[Channel, ...]:  # type: ignore[override]  # by the options
        """The channels of oxts, with the option."""
        if self.settings.oxts:
            return (CAN,)
        return ()

    def points(self, ref: str) -> F32:
        """Read points (P, 4), not compensated for ego's motion during the sweep."""
        return read_points(self.files, ref)

    def _read_tracklets(self, folder: str, ego2lidar: F64) -> dict[int, BoxRows] | None:
        """Read boxes by frame number; None without tracklets.

        Their places are bottom centres in the lidar's frame.
        """
        if _TRACKLETS not in self.files.listed(folder):
            return None
        name = f"{folder}/{_TRACKLETS}"
        tracks = []
        builder = ElementTree.TreeBuilder()
        problem = "is not as tracklets are"
        where = f"file '{self.files.shown}/{name}'"
        read_xml(read_file(self.files, name), where, builder, problem)
        with parsing(where, problem):
            for item in builder.close().iterfind("tracklets/item"):
                poses = item.findall("poses/item")
                place = [
                    [float(pose_item.findtext(tag, "")) for pose_item in poses]
                    for tag in ("tx", "ty", "tz", "rz")
                ]
                size = [[float(item.findtext(tag, ""))] * len(poses) for tag in ("l", "w", "h")]
                first = int(item.findtext("first_frame", ""))
                kind = category(item.findtext("objectType", "unknown"))
                tracks.append(
                    (
                        kind,
                        np.arange(first, first + len(poses)),
                        np.array(place + size),
                    )
                )
        lidar2ego = invert_rigid(ego2lidar)
        if not tracks:
            return {}
        x, y, z, yaw, length, width, height = np.concatenate(
            [numbers for _, _, numbers in tracks], 1
        )
        half = yaw / 2
        none = np.zeros(len(x))
        rotations = np.stack([np.cos(half), none, none, np.sin(half)], 1)
        turned = lidar2ego[:3, :3] @ rotation_matrices(rotations)
        categories: list[str] = []
        track: list[str] = []
        for number, (kind, frame_numbers, _) in enumerate(tracks):
            categories += [kind] * len(frame_numbers)
            track += [str(number)] * len(frame_numbers)
        centre = np.stack([x, y, z + height / 2], 1)
        rows = BoxRows(
            centre=move_points(centre, lidar2ego),
            size_lwh=np.stack([length, width, height], 1),
            rotation_wxyz=quaternions(turned),
            category=categories,
            track=track,
        )
        return boxes_by_key(
            rows,
            np.concatenate([frame_numbers for _, frame_numbers, _ in tracks]),
        )


def oxts_poses(rows: F64) -> F64:
    """Return IMU to metres east, north and up of the first row (P, 4, 4), for rows (P, 30) of oxts.

    Mercator's projection, scaled by the cosine of the first row's latitude; roll, pitch and yaw
    about x, y and z, yaw first, from east (the development kit's convertOxtsToPose).
    """
    latitude, longitude, altitude, roll, pitch, yaw = rows[:, :6].T
    scale = np.cos(np.radians(latitude[0])) * EARTH_M
    east = scale * np.radians(longitude)
    from_south = np.radians(90 + latitude)
    north = scale * np.log(np.tan(from_south / 2))
    shape = (len(rows), 1, 1)
    poses = np.tile(np.eye(4), shape)
    for angle, (a, b) in ((yaw, (0, 1)), (pitch, (2, 0)), (roll, (1, 2))):
        cos = np.cos(angle)
        sin = np.sin(angle)
        turn = np.tile(np.eye(3), shape)
        turn[:, a, a] = cos
        turn[:, b, b] = cos
        turn[:, b, a] = sin
        turn[:, a, b] = -sin
        poses[:, :3, :3] = poses[:, :3, :3] @ turn
    place = np.stack([east, north, altitude], 1)
    poses[:, :3, 3] = place - place[0]
    return poses


def with_edges(times: I64, rows: F64, poses: F64) -> tuple[I64, F64]:
    """Add a pose before the first and one after the last, 0.1 s away at their velocity and rates
    of turn.
    """
    ends = []
    for end, sign in ((0, -1), (-1, 1)):
        seconds = sign * EDGE_NS * 1e-9
        north = rows[end, 6]
        east = rows[end, 7]
        up = rows[end, 10]
        rates = rows[end, 17:20]
        speed = max(float(np.linalg.norm(rates)), 1e-12)
        half = speed * seconds / 2
        moved = poses[end].copy()
        axis = rates / speed
        quaternion = np.array([np.cos(half), *(axis * np.sin(half))])
        moved[:3, :3] = moved[:3, :3] @ rotation_matrices(quaternion)
        moved[:3, 3] += np.array([east, north, up]) * seconds
        ends.append(moved)
    first = ends[0][None]
    last = ends[1][None]
    return (
        np.concatenate([times[:1] - EDGE_NS, times, times[-1:] + EDGE_NS]),
        np.concatenate([first, poses, last]),
    )
