"""Which class a category of a source is: the source's own names, nuScenes' ten, or a mapping
file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.settings import read_text
from fuelrail.sharding.sources.shared.foreign import read_yaml

if TYPE_CHECKING:
    from fuelrail.sharding.sources.shared.scan_report import ScanReport

SOURCE: Final = "source"
NUSCENES10: Final = "nuscenes10"
MAX_CLASSES: Final = 1 << 12

CLASSES: Final = (
    "car",
    "truck",
    "construction_vehicle",
    "bus",
    "trailer",
    "barrier",
    "motorcycle",
    "bicycle",
    "pedestrian",
    "traffic_cone",
)
"""The ten detection classes of nuScenes, in the order that mmdetection3d and its descendants
use.
"""

_OTHER_NAMES: Final = {
    "car": ("regular_vehicle", "vehicle", "type_vehicle", "van", "suv"),
    "truck": (
        "box_truck",
        "truck_cab",
        "pickup_truck",
        "medium_sized_truck",
        "semi_truck",
    ),
    "construction_vehicle": ("other_vehicle_construction_vehicle",),
    "bus": ("school_bus", "articulated_bus"),
    "trailer": ("vehicular_trailer", "towed_object"),
    "barrier": ("construction_barrier", "temporary_construction_barriers"),
    "bicycle": ("cyclist", "type_cyclist"),
    "pedestrian": (
        "person",
        "person_sitting",
        "pedestrian_with_object",
        "type_pedestrian",
        "official_signaler",
    ),
    "traffic_cone": ("construction_cone", "cone", "cones"),
}
_OF_OTHERS: Final = {
    name: class_name for class_name, names in _OTHER_NAMES.items() for name in (class_name, *names)
} | {"motorcycle": "motorcycle"}
"""Names that Argoverse 2, KITTI, PandaSet, T4 and Waymo have for the ten classes, with
underscores.
"""

ClassOption = str | dict[str, str | None]


def loaded(option: ClassOption) -> ClassOption:
    """Replace a mapping file of the option by its content; raise ConfigError for a file that has
    none.
    """
    if isinstance(option, dict) or option in (SOURCE, NUSCENES10):
        return option
    try:
        return read_yaml(
            read_text(Path(option)).encode(),
            f"'{option}'",
            dict[str, str | None],
        )
    except OSError as error:
        raise ConfigError(
            f"classes={option}: allowed are {SOURCE}, {NUSCENES10}, or a YAML file that "
            f"maps each category to a class; '{option}' cannot be read: {error.strerror}"
        ) from error
    except (SourceError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"classes={option}: the file must map each category to a class, or to null for "
            f"none: {error}"
        ) from error


def count_column(name: str) -> str:
    """Return the attribute that counts the boxes of a class."""
    slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"num_{slug or 'unnamed'}"


class ClassMap:
    """Category to number of its class, and the counts of those that have none.

    ``names`` are the classes. Of :data:`SOURCE` they are the source's own, in its order, then
    others as they come; of a mapping the classes in the order in which it names them first.
    """

    def __init__(self, option: ClassOption, categories: Sequence[str]) -> None:
        self._is_open = option == SOURCE
        self._mapping: Mapping[str, str | None] | None = (
            option if isinstance(option, dict) else None
        )
        if self._mapping is not None:
            self.names = list(
                dict.fromkeys(name for name in self._mapping.values() if name is not None)
            )
        else:
            self.names = list(dict.fromkeys(categories)) if self._is_open else list(CLASSES)
        self._labels: dict[str, int] = {}
        self._counts = Counter[str]()

    def labels(self, categories: Sequence[str], *, counted: bool = True) -> NDArray[np.int16]:
        """Return numbers of the classes (M,), -1 for none; count boxes in space (``counted``),
        not those in images.
        """
        numbers = self._labels
        for name in dict.fromkeys(categories):
            if name in numbers:
                continue
            label: str | None = name
            if self._is_open:
                if name not in self.names:
                    self.names.append(name)
                if len(self.names) > MAX_CLASSES:
                    raise SourceError(
                        f"the source has over {MAX_CLASSES} categories; map them with the "
                        "option classes=FILE"
                    )
            elif self._mapping is not None:
                label = self._mapping.get(name)
            else:
                slug = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
                label = _OF_OTHERS.get(slug)
            numbers[name] = -1 if label is None else self.names.index(label)
        if counted:
            self._counts.update(categories)
        return np.fromiter(map(numbers.__getitem__, categories), np.int16, len(categories))

    def report(self, report: ScanReport) -> None:
        """Add counts of boxes and of categories without a class; raises SourceError where no box
        has a class.
        """
        report.boxes = sum(self._counts.values())
        for name, count in self._counts.items():
            if self._labels[name] < 0:
                on_purpose = self._mapping is not None and name in self._mapping
                (report.outside_classes if on_purpose else report.unmapped)[name] = count
        if report.boxes and sum(report.unmapped.values()) == report.boxes:
            listed = ", ".join(
                f"{ascii(name)[1:-1]} {count:,}"
                for name, count in list(report.unmapped.items())[:12]
            )
            raise SourceError(
                f"none of the {report.boxes:,} boxes has a class, their categories are: "
                f"{listed}; the option classes=source keeps the source's own, classes=FILE "
                "maps them"
            )
