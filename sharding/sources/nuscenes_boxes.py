"""nuScenes annotations as columns, and one sample's boxes in ego.

A box in the tables: centre in global coordinates, size as width, length, height, rotation w, x, y, z box to global.
Velocity is not stored; it is the difference of the neighbouring annotations' centres over their time, as the
devkit's ``NuScenes.box_velocity`` has it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import xxhash

from fuelrail.pipeline.schema import Boxes, rotation_matrices
from fuelrail.sharding.sources.nuscenes_tables import (
    Annotation,
    Instance,
    Named,
    Tokens,
    Visibility,
    check_finite,
    read_all,
    read_table,
    strings,
)

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

CLASSES: Final = (
    "car", "truck", "construction_vehicle", "bus", "trailer", "barrier", "motorcycle", "bicycle", "pedestrian",
    "traffic_cone",
)  # fmt: skip
"""The ten detection classes, in the order that mmdetection3d and its descendants use."""

DETECTION_CLASS: Final = {
    "movable_object.barrier": "barrier",
    "vehicle.bicycle": "bicycle",
    "vehicle.bus.bendy": "bus",
    "vehicle.bus.rigid": "bus",
    "vehicle.car": "car",
    "vehicle.construction": "construction_vehicle",
    "vehicle.motorcycle": "motorcycle",
    "human.pedestrian.adult": "pedestrian",
    "human.pedestrian.child": "pedestrian",
    "human.pedestrian.construction_worker": "pedestrian",
    "human.pedestrian.police_officer": "pedestrian",
    "movable_object.trafficcone": "traffic_cone",
    "vehicle.trailer": "trailer",
    "vehicle.truck": "truck",
}
"""Category to detection class (nuScenes detection task); the other nine categories have none: label -1."""

MAX_GAP_S: Final = 1.5
"""Largest time between two annotations that a velocity is taken from; twice that for a centred difference."""

_VISIBILITY: Final = {"v0-40": 1, "v40-60": 2, "v60-80": 3, "v80-100": 4}


class Annotations:
    """All annotations of a dataroot, sorted by sample."""

    def __init__(self, folder: Path, samples: Tokens, timestamp_us: NDArray[np.int64]) -> None:
        """Read tables category, attribute, visibility, instance and sample_annotation; raises SourceError."""
        categories = read_all(folder, "category", Named)
        attributes = read_all(folder, "attribute", Named)
        instances = read_all(folder, "instance", Instance)
        self.attribute_names = [record.name for record in attributes]
        self._attributes = Tokens.of("attribute", attributes)
        self._instances = Tokens.of("instance", instances)
        category_of = Tokens.of("category", categories).need(
            strings(record.category_token for record in instances),
            table="instance",
            column="category_token",
            owners=self._instances.array,
        )
        labels = [CLASSES.index(DETECTION_CLASS[c.name]) if c.name in DETECTION_CLASS else -1 for c in categories]
        self._instance_label = np.array(labels, np.int16)[category_of] if len(instances) else np.empty(0, np.int16)
        self._instance_id = np.array([_stable_id(record.token) for record in instances], np.int64)
        visibilities = read_all(folder, "visibility", Visibility)
        self._visibilities = Tokens.of("visibility", visibilities)
        self._visibility_code = np.array([_VISIBILITY.get(record.level, -1) for record in visibilities] + [-1], np.int8)
        self._sample: NDArray[np.int64]
        self._columns: dict[str, NDArray[Any]]
        self._read(folder, samples)
        self._derive(timestamp_us)
        order = np.argsort(self._sample, kind="stable")
        self._columns = {name: column[order] for name, column in self._columns.items()}
        self._starts = np.searchsorted(self._sample[order], np.arange(len(samples) + 1))

    def __len__(self) -> int:
        return len(self._sample)

    def _read(self, folder: Path, samples: Tokens) -> None:
        """Read ``sample_annotation`` into columns; links become row numbers."""
        pieces: list[dict[str, NDArray[Any]]] = []
        tokens: dict[str, list[pa.Array]] = {"token": [], "prev": [], "next": []}
        for records in read_table(folder, "sample_annotation", Annotation):
            owners = strings(r.token for r in records)
            of = {"table": "sample_annotation", "owners": owners}
            # An annotation has one attribute or none; should it have several, the first counts.
            attributes = strings(next(iter(r.attribute_tokens), "") for r in records)
            visibilities = strings(r.visibility_token for r in records)
            pieces.append(
                {
                    "sample": samples.need(strings(r.sample_token for r in records), column="sample_token", **of),
                    "instance": self._instances.need(
                        strings(r.instance_token for r in records), column="instance_token", **of
                    ),
                    "visibility": self._visibilities.resolve(visibilities, column="visibility_token", **of),
                    "attribute": self._attributes.resolve(attributes, column="attribute_tokens", **of),
                    "translation": np.array([r.translation for r in records], np.float64).reshape(-1, 3),
                    "size_wlh": np.array([r.size for r in records], np.float64).reshape(-1, 3),
                    "rotation": np.array([r.rotation for r in records], np.float64).reshape(-1, 4),
                    "num_lidar_pts": np.array([r.num_lidar_pts for r in records], np.int32),
                    "num_radar_pts": np.array([r.num_radar_pts for r in records], np.int32),
                }
            )
            tokens["token"].append(owners)
            tokens["prev"].append(strings(r.prev for r in records))
            tokens["next"].append(strings(r.next for r in records))
        read = {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
        own = pa.concat_arrays(tokens["token"])
        rows = Tokens("sample_annotation", own)
        for name in ("prev", "next"):
            read[name] = rows.resolve(
                pa.concat_arrays(tokens[name]), table="sample_annotation", column=name, owners=own
            )
        for name in ("translation", "size_wlh", "rotation"):
            check_finite(read[name], own, table="sample_annotation", column=name)
        self._sample = read.pop("sample")
        self._columns = read

    def _derive(self, timestamp_us: NDArray[np.int64]) -> None:
        """Replace links by what they lead to, and take velocities from the neighbouring annotations."""
        columns = self._columns
        instance = columns.pop("instance")
        columns["label"] = self._instance_label[instance]
        columns["instance_id"] = self._instance_id[instance]
        columns["visibility"] = self._visibility_code[columns["visibility"]]
        columns["attribute"] = columns["attribute"].astype(np.int16)
        columns["velocity"] = velocities(
            columns["translation"], timestamp_us[self._sample], columns.pop("prev"), columns.pop("next")
        )

    def of_sample(self, sample: int, ego_wxyz: NDArray[np.float64], ego_xyz: NDArray[np.float64]) -> Boxes:
        """The boxes of one sample in ego, whose pose in global is rotation (4,) and translation (3,)."""
        here = slice(self._starts[sample], self._starts[sample + 1])
        columns = {name: column[here] for name, column in self._columns.items()}
        ego2global = rotation_matrices(ego_wxyz)
        rotation_wxyz = relative_rotations(ego_wxyz, columns["rotation"])
        rotation = rotation_matrices(rotation_wxyz)
        yaw = np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0])
        # Row vectors times R are columns times R^T: global to ego.
        centre = (columns["translation"] - ego_xyz) @ ego2global
        length_width_height = columns["size_wlh"][:, [1, 0, 2]]
        points = columns["num_lidar_pts"] + columns["num_radar_pts"]
        return Boxes(
            boxes3d=np.concatenate([centre, length_width_height, yaw[:, None]], 1).astype(np.float32),
            rotation_wxyz=rotation_wxyz.astype(np.float32),
            velocity=(columns["velocity"] @ ego2global).astype(np.float32),
            label=columns["label"],
            instance_id=columns["instance_id"],
            num_lidar_pts=columns["num_lidar_pts"],
            num_radar_pts=columns["num_radar_pts"],
            visibility=columns["visibility"],
            attribute=columns["attribute"],
            valid=(points > 0).astype(np.uint8),
        )


def velocities(
    centre: NDArray[np.float64], timestamp_us: NDArray[np.int64], prev: NDArray[np.int64], following: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Velocity (A, 3) [m/s] in the centres' frame: centred difference, one-sided at a track's ends, else NaN.

    ``prev`` and ``following`` are row numbers, -1 for none. Where the time spanned is over 1.5 s (3 s centred) or not
    positive, the velocity is unknown: NaN.
    """
    own = np.arange(len(centre))
    first, last = np.where(prev < 0, own, prev), np.where(following < 0, own, following)
    span_s = (timestamp_us[last] - timestamp_us[first]) * 1e-6
    limit_s = np.where((prev >= 0) & (following >= 0), 2 * MAX_GAP_S, MAX_GAP_S)
    usable = (span_s > 0) & (span_s <= limit_s)
    found = np.full(centre.shape, np.nan)
    found[usable] = (centre[last] - centre[first])[usable] / span_s[usable, None]
    return found


def relative_rotations(frame_wxyz: NDArray[np.float64], rotation_wxyz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rotations (M, 4) in global as seen in a frame (4,): conj(frame) * rotation, Hamilton product, with w >= 0."""
    w, x, y, z = frame_wxyz / np.linalg.norm(frame_wxyz)
    left = np.array([[w, x, y, z], [-x, w, z, -y], [-y, -z, w, x], [-z, y, -x, w]])
    product = rotation_wxyz / np.linalg.norm(rotation_wxyz, axis=1, keepdims=True) @ left.T
    return np.asarray(np.where(product[:, :1] < 0, -product, product), np.float64)


def _stable_id(token: str) -> int:
    """63-bit number of a track's token, the same on every machine."""
    return xxhash.xxh3_64_intdigest(token.encode()) >> 1
