"""nuScenes annotations as columns, and one sample's boxes in ego.

A box in the tables: centre in global coordinates, size as width, length, height, rotation w, x, y, z box to global.
Velocity is not stored; it is the difference of the neighbouring annotations' centres over their time, as the
devkit's ``NuScenes.box_velocity`` has it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.rigid import rotation_matrices
from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE
from fuelrail.sharding.sources.adapter.boxes import stable_id, velocities
from fuelrail.sharding.sources.adapter.classes import CLASSES
from fuelrail.sharding.sources.adapter.frame import StoredBoxes
from fuelrail.sharding.sources.nuscenes.tables import (
    Annotation,
    Instance,
    Named,
    Visibility,
    check_finite,
    vectors,
)
from fuelrail.sharding.sources.shared.joins import Tokens

if TYPE_CHECKING:
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Cut, Database

CATEGORIES: Final[dict[str, str | None]] = {
    **{name: name for name in CLASSES},  # T4, Lyft
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
    **dict.fromkeys((
        "animal", "human.pedestrian.personal_mobility", "human.pedestrian.stroller", "human.pedestrian.wheelchair",
        "movable_object.debris", "movable_object.pushable_pullable", "static_object.bicycle_rack",
        "vehicle.emergency.ambulance", "vehicle.emergency.police",
    )),
}  # fmt: skip
"""Category to detection class (nuScenes detection task), None for those that are no detection class."""

_COLUMNS: Final[dict[str, tuple[type, tuple[int, ...]]]] = {
    "visibility": (np.int32, ()),
    "attribute": (np.int16, ()),
    "translation": (np.float64, (3,)),
    "size_wlh": (np.float64, (3,)),
    "rotation": (np.float64, (4,)),
    "num_lidar_pts": (np.int32, ()),
    "num_radar_pts": (np.int32, ()),
}
"""Columns of annotations; ``visibility`` and ``attribute`` are rows of those tables."""

_AS_THEY_ARE: Final = ("num_lidar_pts", "num_radar_pts", "attribute")
VISIBILITY: Final = {
    "v0-40": 1, "v40-60": 2, "v60-80": 3, "v80-100": 4,
    "none": 1, "partial": 2, "most": 3, "full": 4,
}  # fmt: skip
"""Visibility by nuScenes' levels and by T4's names for them, as t4-devkit equates both."""
NOT_STATED: Final = "not stated"
"""Stands in the scan report for the level of annotations without a visibility."""


class Annotations:
    """All annotations of a dataroot as columns on disk, found by sample.

    ``columns``: those of `_COLUMNS`, and as rows ``sample``, ``instance``, and ``prev`` and ``next``, -1 for none.
    """

    def __init__(
        self,
        tables: Tables,
        database: Database,
        samples: Tokens,
        timestamp_us: NDArray[np.int64],
        cut: Cut,
    ) -> None:
        """Read tables category, attribute, visibility, instance and sample_annotation; raises SourceError."""
        self._database, self._timestamp_us, self._cut = database, timestamp_us, cut
        attributes = tables.all("attribute", Named)
        self.attribute_names = [record.name for record in attributes]
        self._attributes = Tokens("attribute", database, [record.token for record in attributes])
        visibilities = tables.all("visibility", Visibility)
        self._levels = [record.level for record in visibilities]
        self._visibilities = Tokens("visibility", database, [record.token for record in visibilities])
        # The last entry is for annotations without a visibility, which are row -1.
        self._visibility_code = np.array([*(VISIBILITY.get(level, -1) for level in self._levels), -1], np.int8)
        self._read_instances(tables)
        self._read(tables, samples)
        self._sort_by_sample(len(samples))

    def __len__(self) -> int:
        return len(self.columns["sample"])

    def _read_instances(self, tables: Tables) -> None:
        """Read the tracks: category and id of each."""
        categories = tables.all("category", Named)
        tokens = Tokens("category", self._database, [record.token for record in categories])
        self.categories = [record.name for record in categories]
        self._instances = Tokens("instance", self._database)
        category, number = self._database.column(np.int32), self._database.column(np.int64)
        for whole in tables.read("instance", Instance):
            piece = self._cut.kept(whole, "instance", category_token=tokens)
            own = [record.token for record in piece]
            self._instances.append(own)
            linked = [record.category_token for record in piece]
            where = {"table": "instance", "column": "category_token", "owners": own}
            category.append(tokens.resolve(linked, may_be_empty=False, **where))
            number.append([stable_id(token) for token in own])
        self._instances.check_unique()
        self._instance_category: NDArray[np.int32] = category.values
        self._instance_id: NDArray[np.int64] = number.values

    def _read(self, tables: Tables, samples: Tokens) -> None:
        """Read ``sample_annotation`` into columns; links become row numbers."""
        self._tokens = tokens = Tokens("sample_annotation", self._database)
        links = {name: self._database.texts() for name in ("sample_token", "instance_token", "prev", "next")}
        columns = {name: self._database.column(kind, shape) for name, (kind, shape) in _COLUMNS.items()}
        for piece in tables.read("sample_annotation", Annotation):
            records = self._cut.kept(piece, "sample_annotation", sample_token=samples, instance_token=self._instances)
            own = [record.token for record in records]
            tokens.append(own)
            links["sample_token"].append([record.sample_token for record in records])
            links["instance_token"].append([record.instance_token for record in records])
            links["prev"].append([record.prev for record in records])
            links["next"].append([record.next for record in records])
            for name, values in self._columns_of(records, own).items():
                columns[name].append(values)
        tokens.check_unique()
        self.columns: dict[str, NDArray[Any]] = {name: column.values for name, column in columns.items()}
        for name, to in (("sample_token", samples), ("instance_token", self._instances)):
            self.columns[name.removesuffix("_token")] = to.resolve_all(
                links[name], may_be_empty=False, table="sample_annotation", column=name, owners=tokens
            )
        for name in ("prev", "next"):
            self.columns[name] = tokens.resolve_all(
                links[name], table="sample_annotation", column=name, owners=tokens, cut=self._cut
            )

    def _columns_of(self, records: list[Annotation], own: list[str]) -> dict[str, Any]:
        of: dict[str, Any] = {"table": "sample_annotation", "owners": own}
        visibilities = [record.visibility_token for record in records]
        # An annotation has one attribute or none; should it have several, the first counts.
        attributes = [record.attribute_tokens[0] if record.attribute_tokens else "" for record in records]
        found: dict[str, Any] = {
            "visibility": self._visibilities.resolve(visibilities, column="visibility_token", **of),
            "attribute": self._attributes.resolve(attributes, column="attribute_tokens", **of),
            "translation": vectors([record.translation for record in records], 3),
            "size_wlh": vectors([record.size for record in records], 3),
            "rotation": vectors([record.rotation for record in records], 4),
            "num_lidar_pts": _point_counts([record.num_lidar_pts for record in records]),
            "num_radar_pts": _point_counts([record.num_radar_pts for record in records]),
        }
        for name in ("translation", "size_wlh", "rotation"):
            check_finite(found[name], own, table="sample_annotation", column=name)
        return found

    def _sort_by_sample(self, num_samples: int) -> None:
        """Sort annotations by sample into ``_order``: rows of the table plus a sample's number times ``_radix``."""
        self._radix = max(len(self), 1)
        order = self._database.column(np.int64)
        for first in range(0, len(self), ROWS_AT_ONCE):
            sample = self.columns["sample"][first : first + ROWS_AT_ONCE]
            order.append(sample * self._radix + np.arange(first, first + len(sample)))
        self._order: NDArray[np.int64] = order.values
        self._order.sort()
        starts = self._database.column(np.int64)
        for first in range(0, num_samples + 1, ROWS_AT_ONCE):
            numbers = np.arange(first, min(first + ROWS_AT_ONCE, num_samples + 1))
            starts.append(np.searchsorted(self._order, numbers * self._radix))
        self._starts: NDArray[np.int64] = starts.values
        self._database.release()

    def _velocity(self, rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the velocity of the boxes in global (M, 3), from the neighbouring annotations of their tracks."""
        links = [self.columns[name][rows] for name in ("prev", "next")]
        needed, place = np.unique(np.concatenate([rows, *links]), return_inverse=True)
        own, *linked = np.split(place, 3)
        prev, following = np.full((2, len(needed)), -1)
        prev[own], following[own] = (np.where(link < 0, -1, at) for link, at in zip(links, linked, strict=True))
        sample = self.columns["sample"][needed]
        return velocities(self.columns["translation"][needed], self._timestamp_us[sample], prev, following)[own]

    def of_samples(
        self, samples: NDArray[np.int64], ego_wxyz: NDArray[np.float64], ego_xyz: NDArray[np.float64]
    ) -> list[StoredBoxes | None]:
        """Return the boxes of samples in ego, whose global poses are rotations (S, 4) and translations (S, 3).

        What is done box by box is done for all samples at once.
        """
        starts, ends = self._starts[samples], self._starts[samples + 1]
        rows = np.concatenate([self._order[start:end] for start, end in zip(starts, ends, strict=True)]) % self._radix
        self._database.used(4 * len(rows))
        columns = {name: self.columns[name][rows] for name in _COLUMNS}
        instance, visibility = self.columns["instance"][rows], columns["visibility"]
        last = np.cumsum(ends - starts)
        parts = [slice(*bounds) for bounds in zip((last - (ends - starts)).tolist(), last.tolist(), strict=True)]
        ego2global, left = rotation_matrices(ego_wxyz), _left_factors(ego_wxyz)
        rotation_wxyz = columns["rotation"] / np.linalg.norm(columns["rotation"], axis=1, keepdims=True)
        centre = columns["translation"] - np.repeat(ego_xyz, ends - starts, axis=0)
        velocity = self._velocity(rows)
        for number, part in enumerate(parts):
            # Row vectors times R are columns times R^T: global to ego.
            centre[part] = centre[part] @ ego2global[number]
            velocity[part] = velocity[part] @ ego2global[number]
            rotation_wxyz[part] = rotation_wxyz[part] @ left[number].T
        rotation_wxyz = np.where(rotation_wxyz[:, :1] < 0, -rotation_wxyz, rotation_wxyz)
        rotation = rotation_matrices(rotation_wxyz)
        yaw = np.arctan2(rotation[:, 1, 0], rotation[:, 0, 0])
        length_width_height = columns["size_wlh"][:, [1, 0, 2]]
        stored = {
            "boxes3d": np.concatenate([centre, length_width_height, yaw[:, None]], 1).astype(np.float32),
            "rotation_wxyz": rotation_wxyz.astype(np.float32),
            "velocity": velocity.astype(np.float32),
            "visibility": self._visibility_code[visibility],
            "instance_id": self._instance_id[instance],
            **{name: columns[name] for name in _AS_THEY_ARE},
        }
        category = [self.categories[row] for row in self._instance_category[instance].tolist()]
        unknown = [level if level not in VISIBILITY else "" for level in (*self._levels, NOT_STATED)]  # -1 is the last
        is_unknown = np.array(list(map(bool, unknown)), np.bool_)[visibility]
        found: list[StoredBoxes | None] = []
        for part in parts:
            counts: dict[str, int] = {}
            if is_unknown[part].any():
                counts = Counter(unknown[row] for row in visibility[part][is_unknown[part]].tolist())
            own = {name: values[part] for name, values in stored.items()}
            found.append(StoredBoxes(columns=own, category=category[part], unknown_visibility=counts))
        return found

    def rows_of(self, sample: int) -> NDArray[np.int64]:
        """Return rows of one sample's annotations in ``columns``, in the order of its boxes."""
        first, last = self._starts[sample : sample + 2].tolist()
        found: NDArray[np.int64] = self._order[first:last] % self._radix
        self._database.used(len(found))
        return found

    def tokens_of(self, sample: int) -> dict[str, list[str]]:
        """Return tokens of one sample's annotations, of their instances and of their visibilities ("" for none)."""
        rows = self.rows_of(sample)
        visibilities = self.columns["visibility"][rows].tolist()
        return {
            "annotation": self._tokens.take(rows),
            "instance": self._instances.take(self.columns["instance"][rows]),
            "visibility": [self._visibilities[row] if row >= 0 else "" for row in visibilities],
        }


def _point_counts(stated: list[int | None]) -> NDArray[np.int32]:
    """Return numbers of points, -1 for null and for negative ones."""
    return np.fmax(np.array(stated, np.float64), -1).astype(np.int32)  # NaN stands for null; fmax takes the other


def _left_factors(frame_wxyz: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return matrices (S, 4, 4) of frames (S, 4): ``rotation @ matrix.T`` is conj(frame) * rotation.

    The Hamilton product: a rotation in global as seen in the frame.
    """
    w, x, y, z = (frame_wxyz / np.linalg.norm(frame_wxyz, axis=1, keepdims=True)).T
    rows = [w, x, y, z, -x, w, z, -y, -y, -z, w, x, -z, y, -x, w]
    return np.stack(rows, -1).reshape(-1, 4, 4)
