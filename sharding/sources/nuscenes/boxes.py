"""nuScenes annotations as columns, and a scene's boxes.

A box in the tables: centre in global coordinates, size as width, length, height, rotation w, x, y,
z box to global. Velocity is not stored; it is the difference of the neighbouring annotations'
centres over their time, as the devkit's ``NuScenes.box_velocity`` has it.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.storage.columns import ROWS_AT_ONCE
from fuelrail.sharding.sources.adapter.boxes import velocities
from fuelrail.sharding.sources.adapter.classes import CLASSES
from fuelrail.sharding.sources.adapter.frame import BoxRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fuelrail.pipeline.sample.schema import I64
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.geometry import SceneRows
    from fuelrail.sharding.sources.nuscenes.joined import Joined

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
    **dict.fromkeys(
        (
            "animal",
            "human.pedestrian.personal_mobility",
            "human.pedestrian.stroller",
            "human.pedestrian.wheelchair",
            "movable_object.debris",
            "movable_object.pushable_pullable",
            "static_object.bicycle_rack",
            "vehicle.emergency.ambulance",
            "vehicle.emergency.police",
        )
    ),
}
"""Category to detection class (nuScenes detection task), None for those that are no detection
class.
"""

VISIBILITY: Final = {
    "v0-40": 1,
    "v40-60": 2,
    "v60-80": 3,
    "v80-100": 4,
    "none": 1,
    "partial": 2,
    "most": 3,
    "full": 4,
}
"""Visibility by nuScenes' levels and by T4's names for them, as t4-devkit equates both."""
NOT_STATED: Final = "not stated"
"""Stands in the scan report for the level of annotations without a visibility."""


class Annotations:
    """The annotations of joined tables, found by sample.

    ``columns`` and ``links`` are those of the table.
    """

    def __init__(self, joined: Joined, disk: Disk) -> None:
        self._joined = joined
        self._disk = disk
        self.columns = joined["sample_annotation"].columns
        self.links = joined["sample_annotation"].links
        self.attribute_names: list[str] = [record.name for record in joined["attribute"].records]
        self.categories: list[str] = [record.name for record in joined["category"].records]
        self._levels: list[str] = [record.level for record in joined["visibility"].records]
        # The last entry is for annotations without a visibility, which are row -1.
        self._visibility_code = np.array(
            [*(VISIBILITY.get(level, -1) for level in self._levels), -1],
            np.int8,
        )
        # Sort annotations by sample: rows of the table plus a sample's number times ``_radix``.
        num_samples = len(joined["sample"])
        self._radix = max(len(self), 1)
        order = self._disk.column(np.int64)
        for first in range(0, len(self), ROWS_AT_ONCE):
            sample = self.links["sample_token"][first : first + ROWS_AT_ONCE]
            numbers = np.arange(first, first + len(sample))
            order.append(sample * self._radix + numbers)
        self._order: I64 = order.values
        self._order.sort()
        starts = self._disk.column(np.int64)
        for first in range(0, num_samples + 1, ROWS_AT_ONCE):
            numbers = np.arange(first, min(first + ROWS_AT_ONCE, num_samples + 1))
            starts.append(np.searchsorted(self._order, numbers * self._radix))
        self._starts: I64 = starts.values
        self._disk.release()

    def __len__(self) -> int:
        return len(self._joined["sample_annotation"])

    def _find_rows(self, samples: I64) -> tuple[I64, I64]:
        """Return rows of the annotations of samples (S,), sample by sample, and their numbers
        (S,).
        """
        starts = self._starts[samples]
        ends = self._starts[samples + 1]
        rows = (
            np.concatenate(
                [self._order[start:end] for start, end in zip(starts, ends, strict=True)]
            )
            % self._radix
        )
        self._disk.used(4 * len(rows))
        return rows, ends - starts

    def scene_boxes(self, scene: SceneRows, attributes: Sequence[str]) -> list[BoxRows]:
        """Return the boxes of a scene's samples in global; ``attributes`` are the source's.

        Velocities are those that T4 states; the adapter follows tracks where a sample has none.
        nuScenes' are by the links between annotations.
        """
        rows, counts = self._find_rows(scene.samples)
        numbers = map(list(attributes).index, self.attribute_names)
        number = np.array([*numbers, -1], np.int64)
        visibility = self.links["visibility_token"][rows]
        stated = self.columns.get("velocity")
        category = self._joined["instance"].links["category_token"][
            self.links["instance_token"][rows]
        ]
        if stated is not None:
            velocity = stated[rows]
        else:
            neighbours = [self.links[name][rows] for name in ("prev", "next")]
            rows_needed = np.concatenate([rows, *neighbours])
            rows_used, place = np.unique(rows_needed, return_inverse=True)
            own_places, *linked = np.split(place, 3)
            prev = np.full(len(rows_used), -1)
            following = np.full(len(rows_used), -1)
            prev[own_places], following[own_places] = (
                np.where(link < 0, -1, linked_place)
                for link, linked_place in zip(neighbours, linked, strict=True)
            )
            sample = self.links["sample_token"][rows_used]
            velocity = velocities(
                self.columns["translation"][rows_used],
                scene.keyframes.timestamp_us[sample],
                prev,
                following,
            )[own_places]
        columns: dict[str, Any] = {
            "centre": self.columns["translation"][rows],
            "size_lwh": self.columns["size"][rows][:, [1, 0, 2]],
            "rotation_wxyz": self.columns["rotation"][rows],
            "category": [self.categories[row] for row in category.tolist()],
            "track": self._joined["instance"].tokens.take(self.links["instance_token"][rows]),
            "velocity": velocity,
            "num_lidar_pts": self.columns["num_lidar_pts"][rows],
            "num_radar_pts": self.columns["num_radar_pts"][rows],
            "visibility": self._visibility_code[visibility],
            "attribute": number[self.links["attribute_tokens"][rows]],
        }
        last = np.cumsum(counts)
        boxes = []
        bounds = zip((last - counts).tolist(), last.tolist(), strict=True)
        for first, end in bounds:
            part = slice(first, end)
            box_columns = {name: values[part] for name, values in columns.items()}
            if stated is not None and np.isnan(box_columns["velocity"]).all():
                box_columns["velocity"] = None
            unknown = visibility[part][box_columns["visibility"] < 0]
            levels = Counter([*self._levels, NOT_STATED][row] for row in unknown.tolist())
            boxes.append(BoxRows(**box_columns, in_global=True, unknown_visibility=levels))
        return boxes

    def rows_of(self, sample: int) -> I64:
        """Return rows of one sample's annotations, in the order of its boxes."""
        return self._find_rows(np.array([sample]))[0]

    def tokens_of(self, sample: int) -> dict[str, list[str]]:
        """Return tokens of one sample's annotations, of their instances and of their
        visibilities ("" for none).
        """
        rows = self.rows_of(sample)
        visibilities = self.links["visibility_token"][rows].tolist()
        levels = self._joined["visibility"].records
        return {
            "annotation": self._joined["sample_annotation"].tokens.take(rows),
            "instance": self._joined["instance"].tokens.take(self.links["instance_token"][rows]),
            "visibility": [levels[row].token if row >= 0 else "" for row in visibilities],
        }
