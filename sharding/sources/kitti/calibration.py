"""What KITTI's layouts share: calibration files, the chain of transforms, and sweeps.

After Geiger et al., "Vision meets Robotics" (IJRR 2013): a point x of the IMU is seen by rectified
camera i at ``P_rect_i R_rect_0 T_velo2cam T_imu2velo x``. P_rect_i = K [I | K^-1 p], where p is its
fourth column, so the centre of the camera is K^-1 p away from that of camera 0. Ego is the IMU: x
forward, y left, z up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.rigid import homogeneous, invert_rigid
from fuelrail.sharding.sources.adapter.frame import Calibration
from fuelrail.sharding.sources.adapter.poses import nearest_rigid
from fuelrail.sharding.sources.shared.arrow import read_file
from fuelrail.sharding.sources.shared.foreign import read_text

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import F32, F64
    from fuelrail.sharding.sources.shared.files import SourceFiles

CATEGORIES: Final = (
    "Car",
    "Van",
    "Truck",
    "Pedestrian",
    "Person_sitting",
    "Cyclist",
    "Tram",
    "Misc",
)
LIDAR: Final = "velodyne"
_DIGITS: Final = 19
"""More digits than a number of 64 bits has."""
POINT_COLUMNS: Final = ("x", "y", "z", "intensity")


class Numbers(NamedTuple):
    """The numbers of a file by key, and the file as messages name it."""

    values: dict[str, list[float]]
    where: str

    def matrix(self, key: str, rows: int, columns: int) -> F64:
        """Return the numbers of a key as a matrix (rows, columns); raise SourceError for another
        number of them.
        """
        values_of_key = self.values.get(key)
        if values_of_key is None:
            raise SourceError(f"{self.where} has no line '{key}:'; it has {', '.join(self.values)}")
        is_complete = len(values_of_key) == rows * columns
        if not is_complete or not np.isfinite(values_of_key).all():
            raise SourceError(
                f"{self.where}: '{key}' is {values_of_key}, wanted are {rows * columns} "
                "finite numbers"
            )
        return np.array(values_of_key).reshape(rows, columns)

    def transform(self, rotation: F64, translation: F64) -> F64:
        """Return the nearest rigid transform (4, 4); raise SourceError where the rotation is
        none.
        """
        matrix = homogeneous(rotation)
        matrix[:3, 3] = translation
        (fitted,), (sound,) = nearest_rigid(matrix[None])
        if not sound:
            raise SourceError(f"{self.where}: {rotation.tolist()} is not a rotation")
        return np.asarray(fitted)


def read_numbers(files: SourceFiles, name: str) -> Numbers:
    """Read the lines ``KEY: NUMBER NUMBER ...`` of a text file; skip others."""
    numbers = {}
    for line in read_text(read_file(files, name), f"file '{files.shown}/{name}'").splitlines():
        key, _, rest = line.partition(" ")
        try:
            numbers[key.removesuffix(":")] = [float(text) for text in rest.split()]
        except ValueError:
            continue  # such as the time of the calibration
    return Numbers(numbers, f"file '{files.shown}/{name}'")


def camera_calibration(projection: F64, ego2rect: F64) -> Calibration:
    """Return the calibration of the camera of P_rect (3, 4); ``ego2rect`` (4, 4) leads to rectified
    camera 0.
    """
    shift = np.eye(4)
    shift[:3, 3] = np.linalg.solve(projection[:, :3], projection[:, 3])
    return Calibration(
        intrinsics=projection[:, :3],
        sensor2ego=invert_rigid(shift @ ego2rect),
    )


def read_points(files: SourceFiles, name: str) -> F32:
    """Read points (P, 4): x, y, z [m] in the lidar's frame, reflectance 0 to 1."""
    data = read_file(files, name)
    if len(data) % 16:
        raise SourceError(
            f"file '{files.shown}/{name}' has {len(data)} bytes, not a multiple of 16: it "
            "is cut off"
        )
    return np.frombuffer(data, "<f4").reshape(-1, 4)


def category(name: str) -> str:
    """Return the name of a class in the object benchmark; tracklets have "Person (sitting)"."""
    return "Person_sitting" if name == "Person (sitting)" else name


def numbers_of(names: Sequence[str], suffixes: Sequence[str]) -> dict[int, str]:
    """Return the files whose names are a number with one of the suffixes, by number."""
    name_of_number = {}
    for name in names:
        stem, dot, suffix = name.rpartition(".")
        is_number = stem.isdecimal() and len(stem) < _DIGITS
        if dot and is_number and suffix.lower() in suffixes:
            name_of_number[int(stem)] = name
    return name_of_number
