"""The tables as columns on disk, joined: each is read once, and its links to others become row numbers.

Which fields are kept, and what they link to, is a plan: one entry a table, in the order in which they are read. Links
to tables of few rows become row numbers as they are read; all links to a large table are joined at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import NUM_DIST
from fuelrail.sharding.sources.adapter.boxes import stable_id
from fuelrail.sharding.sources.nuscenes.tables import (
    Annotation,
    CalibratedSensor,
    EgoPose,
    Instance,
    LinkedRow,
    Log,
    Named,
    Record,
    SampleData,
    SampleRecord,
    Scene,
    Sensor,
    Visibility,
    check_finite,
    vectors,
)
from fuelrail.sharding.sources.shared.joins import Cut, Tokens, Wanted

if TYPE_CHECKING:
    from fuelrail.pipeline.storage.columns import Texts
    from fuelrail.sharding.sources.nuscenes.tables import Tables
    from fuelrail.sharding.sources.shared.joins import Database

_LARGE: Final = ("sample", "sample_data", "ego_pose", "instance", "sample_annotation")
"""Tables whose rows are too many to look up in memory."""


class Link(NamedTuple):
    """A field with the token of a row of the table ``to``.

    ``if_cut`` says what a cut-out source does where that row is not there: raise an error, ``drop`` the record, or
    ``clear`` the link. ``may_dangle``: the row number is -1 then, in any source.
    """

    to: str
    may_be_empty: bool = False
    may_dangle: bool = False
    if_cut: Literal["error", "drop", "clear"] = "error"


class Stored(NamedTuple):
    """How a table is stored: the type of its records, its columns and its links.

    A column's function makes an array (R, ...) or texts of R records. ``checked`` are columns of numbers that must be
    finite, and rotations.
    """

    record: type[Record]
    columns: Mapping[str, Callable[[list[Any]], Any]] = {}
    links: Mapping[str, Link] = {}
    checked: tuple[str, ...] = ()


def texts(field: str) -> Callable[[list[Any]], list[str]]:
    """Return what makes a column of texts."""
    get = attrgetter(field)
    return lambda records: list(map(get, records))


def numbers(field: str, dtype: type = np.int64) -> Callable[[list[Any]], NDArray[Any]]:
    """Return what makes a column of numbers."""
    get = attrgetter(field)
    return lambda records: np.fromiter(map(get, records), dtype, len(records))


def _vector(field: str, length: int) -> Callable[[list[Any]], NDArray[np.float64]]:
    get = attrgetter(field)
    return lambda records: vectors(list(map(get, records)), length)


def _point_counts(field: str) -> Callable[[list[Any]], NDArray[np.int32]]:
    """Return what makes a column of numbers of points, -1 for null and for negative ones."""
    get = attrgetter(field)
    # NaN stands for null; fmax takes the other.
    return lambda records: np.fmax(np.array(list(map(get, records)), np.float64), -1).astype(np.int32)


def coefficients(record: CalibratedSensor) -> tuple[float, ...]:
    """Return the lens coefficients of a row; none where all are 0."""
    stated = record.camera_distortion or ()
    return stated if any(stated) else ()


_NO_VECTOR: Final = (np.nan,) * 3
_NO_MATRIX: Final = (_NO_VECTOR,) * 3


def _lenses(records: list[CalibratedSensor]) -> NDArray[np.float64]:
    padded = [(*coefficients(record), *(np.nan,) * NUM_DIST)[:NUM_DIST] for record in records]
    return np.array(padded, np.float64).reshape(-1, NUM_DIST)


def _matrices(records: list[CalibratedSensor]) -> NDArray[np.float64]:
    stated = [record.camera_intrinsic if len(record.camera_intrinsic) == 3 else _NO_MATRIX for record in records]
    return np.array(stated, np.float64).reshape(-1, 3, 3)


_CALIBRATION: Final = {
    "sensor": Stored(Sensor),
    "calibrated_sensor": Stored(
        CalibratedSensor,
        {
            "translation": _vector("translation", 3),
            "rotation": _vector("rotation", 4),
            "intrinsics": _matrices,
            "dist": _lenses,
            "num_dist": lambda records: np.array([len(coefficients(record)) for record in records], np.int32),
        },
        {"sensor_token": Link("sensor")},
        checked=("translation", "rotation"),
    ),
}
_POSES: Final = {
    "ego_pose": Stored(EgoPose, {"translation": _vector("translation", 3), "rotation": _vector("rotation", 4)})
}
_FILES: Final = {
    "filename": texts("filename"),
    "timestamp": numbers("timestamp"),
    "is_valid": numbers("is_valid", np.bool_),
}
_NEIGHBOUR: Final[dict[Literal["sample", "sample_annotation"], dict[str, Link]]] = {
    table: dict.fromkeys(("prev", "next"), Link(table, may_be_empty=True, if_cut="clear"))
    for table in ("sample", "sample_annotation")
}
_ANNOTATION: Final = Stored(
    Annotation,
    {
        "translation": _vector("translation", 3),
        "size": _vector("size", 3),
        "rotation": _vector("rotation", 4),
        "num_lidar_pts": _point_counts("num_lidar_pts"),
        "num_radar_pts": _point_counts("num_radar_pts"),
    },
    {
        "sample_token": Link("sample", if_cut="drop"),
        "instance_token": Link("instance", if_cut="drop"),
        "visibility_token": Link("visibility", may_be_empty=True),
        "attribute_token": Link("attribute", may_be_empty=True),
    },
    checked=("translation", "size", "rotation"),
)
_SAMPLE: Final = Stored(
    SampleRecord, {"timestamp": numbers("timestamp")}, {"scene_token": Link("scene", if_cut="drop")}
)

SCENES: Final[dict[str, Stored]] = {"log": Stored(Log), "scene": Stored(Scene, {}, {"log_token": Link("log")})}
"""Scenes alone."""

KEYFRAMES: Final[dict[str, Stored]] = {
    **SCENES,
    "map": Stored(Record),
    **_CALIBRATION,
    "sample": _SAMPLE._replace(links={**_SAMPLE.links, **_NEIGHBOUR["sample"]}),
    "sample_data": Stored(
        SampleData,
        {
            **_FILES,
            "image_wh": lambda records: np.array(
                [(record.width or 0, record.height or 0) for record in records], np.int32
            ).reshape(-1, 2),
        },
        {
            "calibrated_sensor_token": Link("calibrated_sensor", if_cut="drop"),
            "sample_token": Link("sample", if_cut="drop"),
            "ego_pose_token": Link("ego_pose"),
        },
    ),
    **_POSES,
    "category": Stored(Named),
    "attribute": Stored(Named),
    "visibility": Stored(Visibility),
    "instance": Stored(
        Instance,
        {"id": lambda records: np.array([stable_id(record.token) for record in records], np.int64)},
        {"category_token": Link("category", if_cut="drop")},
    ),
    "sample_annotation": _ANNOTATION._replace(links={**_ANNOTATION.links, **_NEIGHBOUR["sample_annotation"]}),
}
"""nuScenes' keyframes."""

T4_KEYFRAMES: Final[dict[str, Stored]] = {
    **{name: stored for name, stored in KEYFRAMES.items() if name != "map"},
    "sample": _SAMPLE,
    "sample_annotation": _ANNOTATION._replace(
        columns={
            **_ANNOTATION.columns,
            "velocity": lambda records: vectors([record.velocity or _NO_VECTOR for record in records], 3),
        },
        links={
            **_ANNOTATION.links,
            **{f"{name}_token": Link(name, may_be_empty=True, may_dangle=True) for name in ("visibility", "attribute")},
        },
    ),
}
"""T4's: its scenes are ordered by time and its tracks by their instances, whatever prev and next say."""

SWEEPS: Final[dict[str, Stored]] = {
    **_CALIBRATION,
    "sample_data": Stored(
        LinkedRow,
        {**_FILES, "is_key_frame": numbers("is_key_frame", np.bool_), "sample_token": texts("sample_token")},
        {
            "calibrated_sensor_token": Link("calibrated_sensor", may_dangle=True),
            "prev": Link("sample_data", may_be_empty=True, may_dangle=True),
            "ego_pose_token": Link("ego_pose"),
        },
    ),
    **_POSES,
}
"""All files of some sensors."""


class Table:
    """A table's rows: their tokens, their columns, and for each link the rows of the other table.

    ``columns`` are arrays (R, ...) or :class:`Texts`; ``links`` are row numbers (R,), -1 for none, and
    ``link_texts`` the tokens of those to large tables. ``records`` are those of a table of few rows.
    """

    def __init__(self, name: str, stored: Stored, database: Database) -> None:
        self.name, self.tokens, self.records = name, Tokens(name, database), list[Any]()
        made = {field: make([]) for field, make in stored.columns.items()}
        self._parts: dict[str, Any] = {
            field: database.texts() if isinstance(one, list) else database.column(one.dtype, one.shape[1:])
            for field, one in made.items()
        }
        self.link_texts = {field: database.texts() for field, link in stored.links.items() if link.to in _LARGE}
        self._found = {field: database.column(np.int64) for field in stored.links if field not in self.link_texts}
        self.columns: dict[str, Any] = {}
        self.links: dict[str, NDArray[np.int64]] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, records: list[Any], own: list[str], columns: Mapping[str, Any], found: Mapping[str, Any]) -> None:
        """Add records with their tokens, columns, and rows of tables of few rows (``found``)."""
        self.tokens.append(own)
        if self.name not in _LARGE:
            self.records += records
        for parts, values in ((self._parts, columns), (self._found, found)):
            for field, value in values.items():
                parts[field].append(value)
        for field, tokens in self.link_texts.items():
            tokens.append(list(map(attrgetter(field), records)))

    def close(self) -> None:
        """Make arrays of the columns: all records are there."""
        self.columns = {field: getattr(part, "values", part) for field, part in self._parts.items()}
        self.links = {field: part.values for field, part in self._found.items()}


def all_sensors(sensors: Sequence[Sensor]) -> NDArray[np.bool_]:
    """Want the rows of each sensor."""
    return np.ones(len(sensors), np.bool_)


class Joined:
    """The tables of a plan, joined.

    ``wanted`` says which sensors' rows of ``sample_data`` are kept (S,), of all sensors; all plans but `SWEEPS` keep
    keyframes only.
    """

    def __init__(
        self,
        tables: Tables,
        database: Database,
        plan: Mapping[str, Stored],
        wanted: Callable[[Sequence[Sensor]], NDArray[np.bool_]] = all_sensors,
        cut: Cut | None = None,
    ) -> None:
        """Read all tables of the plan; raise SourceError for what is wrong in them, and for links that dangle."""
        self._plan, self._cut, self._wanted = plan, cut or Cut(is_on=False), wanted
        self._tables: dict[str, Table] = {}
        poses = Wanted()
        for name, stored in plan.items():
            table = self._tables[name] = Table(name, stored, database)
            for piece in tables.read(name, stored.record):
                records: list[Any] = piece
                if name == "ego_pose":  # of one for each of nuScenes' 2.6 million rows, few are of keyframes
                    records = poses.kept(piece, list(map(_TOKEN, piece)))
                elif name == "sample_data" and stored.record is SampleData:
                    records = [record for record in piece if record.is_key_frame]
                added = self._add(table, stored, records)
                if name == "sample_data":
                    poses.add(list(map(_POSE, added)))
            table.close()
            if name not in _LARGE:
                table.tokens.check_unique()
            elif name == "sample" and not len(table):
                raise SourceError(f"table '{tables.path(name)}' has no rows: nothing to shard")
        for name in _LARGE:
            self._join(name)

    def __getitem__(self, name: str) -> Table:
        return self._tables[name]

    def _add(self, table: Table, stored: Stored, records: list[Any]) -> list[Any]:
        """Add what is wanted of some records, and return it."""
        needed = {field: self[link.to].tokens for field, link in stored.links.items() if link.if_cut == "drop"}
        records = self._cut.kept(records, table.name, **needed)
        own = list(map(_TOKEN, records))
        found: dict[str, NDArray[np.int64]] = {}
        for field, link in stored.links.items():
            if link.to not in _LARGE:
                tokens, rows = list(map(attrgetter(field), records)), self[link.to].tokens
                found[field] = rows.find(tokens)
                if not link.may_dangle:
                    where = {"table": table.name, "column": field, "owners": own}
                    rows.check(found[field], tokens, may_be_empty=link.may_be_empty, **where)
        if table.name == "sample_data":
            calibrated = found["calibrated_sensor_token"]
            at = np.flatnonzero((calibrated >= 0) & self._of_wanted_sensor[calibrated])
            records, own = [records[row] for row in at.tolist()], [own[row] for row in at.tolist()]
            found = {field: rows[at] for field, rows in found.items()}
        columns = {field: make(records) for field, make in stored.columns.items()}
        for field in stored.checked:
            check_finite(columns[field], own, table=table.name, column=field)
        table.append(records, own, columns, found)
        return records

    @cached_property
    def _of_wanted_sensor(self) -> NDArray[np.bool_]:
        """Which rows of ``calibrated_sensor`` are of a wanted sensor."""
        return self._wanted(self["sensor"].records)[self["calibrated_sensor"].links["sensor_token"]]

    def _join(self, name: str) -> None:
        """Make row numbers of all links to a large table."""
        into = [
            (self[table], field, link)
            for table, stored in self._plan.items()
            for field, link in stored.links.items()
            if link.to == name
        ]
        if not into:
            return
        target = self[name].tokens
        # Tokens are compared with themselves too, to find one that is there twice; of poses not all are there.
        own: list[Texts] = [] if name == "ego_pose" else [target]
        found = target.rows_of(*own, *(table.link_texts[field] for table, field, _ in into))
        for (table, field, link), rows in zip(into, found[len(own) :], strict=True):
            if not link.may_dangle:
                target.check(
                    rows, table.link_texts[field], may_be_empty=link.may_be_empty, table=table.name, column=field,
                    owners=table.tokens, cut=self._cut if link.if_cut == "clear" else None,
                )  # fmt: skip
            table.links[field] = rows


_TOKEN: Final = attrgetter("token")
_POSE: Final = attrgetter("ego_pose_token")
