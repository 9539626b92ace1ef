"""The tables as columns on disk, joined: each is read once, and its links to others become row
numbers.

Which fields are kept, and what they link to, is a plan: one entry a table, in the order in which
they are read. Links to tables of few rows become row numbers as they are read; all links to a large
table are joined at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.sample.schema import I64, NUM_DIST, Mask
from fuelrail.pipeline.storage.columns import Column
from fuelrail.sharding.sources.nuscenes.tables import (
    Log,
    Named,
    Record,
    Scene,
    Sensor,
    Visibility,
    check_finite,
    vectors,
)
from fuelrail.sharding.sources.shared.joins import Cut, TextFilter, Tokens

if TYPE_CHECKING:
    from fuelrail.pipeline.storage.columns import Disk
    from fuelrail.sharding.sources.nuscenes.tables import Tables

_LARGE: Final = (
    "sample",
    "sample_data",
    "ego_pose",
    "instance",
    "sample_annotation",
)
"""Tables whose rows are too many to look up in memory."""


class Link(NamedTuple):
    """A field with the token of a row of the table ``to``.

    ``if_cut`` says what a cut-out source does where that row is not there: raise an error, ``drop``
    the record, or ``clear`` the link.
    """

    to: str
    may_be_empty: bool = False
    if_cut: Literal["error", "drop", "clear"] = "error"


class Field(NamedTuple):
    """A field of records: its type in JSON, and what makes an array (R, ...) or texts of its
    values in R records.
    """

    type: Any
    column: Callable[[list[Any]], Any]
    default: Any = msgspec.NODEFAULT


def _stack_numbers(dtype: DTypeLike) -> Callable[[list[Any]], Any]:
    return lambda values: np.fromiter(values, dtype, len(values))


def _stack_vectors(length: int) -> Callable[[list[Any]], Any]:
    return lambda values: vectors(values, length)


def _stack_velocities(values: list[Any]) -> Any:
    nothing = (np.nan,) * 3
    return vectors([value or nothing for value in values], 3)


def _stack_sides(values: list[int | None]) -> Any:
    return np.array([value or 0 for value in values], np.int32)


def _stack_point_counts(values: list[int | None]) -> Any:
    """Return numbers of points, -1 for null and for negative ones."""
    # NaN stands for null; fmax takes the other.
    numbers = np.array(values, np.float64)
    return np.fmax(numbers, -1).astype(np.int32)


def _stack_intrinsics(values: list[Sequence[Sequence[float]]]) -> Any:
    """Return K (R, 3, 3), NaN for what is not a camera."""
    nothing = (np.nan,) * 9
    flat = [(*rows[0], *rows[1], *rows[2]) if len(rows) == 3 else nothing for rows in values]
    return vectors(flat, 9).reshape(-1, 3, 3)


def _stack_lenses(values: list[Sequence[float] | None]) -> Any:
    """Return the number of lens coefficients, none where all are 0, and then these, as (R, 15)."""
    lenses = [value if value and any(value) else () for value in values]
    rows = []
    for lens in lenses:
        padded = (*lens, *(np.nan,) * NUM_DIST)
        rows.append((len(lens), *padded[:NUM_DIST]))
    return vectors(rows, 1 + NUM_DIST)


_Vector3 = tuple[float, float, float]
_Vector4 = tuple[float, float, float, float]
_Points = Annotated[int, msgspec.Meta(ge=-(2**31), lt=2**31)] | None
_COLUMNS: Final = {
    "timestamp": Field(int, _stack_numbers(np.int64)),  # [us]
    "filename": Field(str, list),
    # T4 marks data to be ignored with false.
    "is_valid": Field(bool, _stack_numbers(np.bool_), True),
    "width": Field(int | None, _stack_sides, 0),
    "height": Field(int | None, _stack_sides, 0),
    "translation": Field(_Vector3, _stack_vectors(3)),
    "rotation": Field(_Vector4, _stack_vectors(4)),
    "size": Field(_Vector3, _stack_vectors(3)),  # width, length, height
    # [m/s] in global (T4); null is unknown.
    "velocity": Field(_Vector3 | None, _stack_velocities, None),
    "num_lidar_pts": Field(_Points, _stack_point_counts, -1),
    "num_radar_pts": Field(_Points, _stack_point_counts, -1),
    "camera_intrinsic": Field(tuple[_Vector3, ...], _stack_intrinsics),
    # Of T4, in OpenCV's order.
    "camera_distortion": Field(tuple[float, ...] | None, _stack_lenses, ()),
}
_CHECKED: Final = ("translation", "rotation", "size")
_LINKS: Final = {
    "log_token": Link("log"),
    "scene_token": Link("scene", if_cut="drop"),
    "sensor_token": Link("sensor"),
    "calibrated_sensor_token": Link("calibrated_sensor", if_cut="drop"),
    "sample_token": Link("sample", if_cut="drop"),
    "ego_pose_token": Link("ego_pose"),
    "category_token": Link("category", if_cut="drop"),
    "instance_token": Link("instance", if_cut="drop"),
    "visibility_token": Link("visibility", may_be_empty=True),
    "attribute_tokens": Link("attribute", may_be_empty=True),
}


class Stored(NamedTuple):
    """How a table is stored: its columns, and the fields that link to other tables.

    ``record`` has the fields that records of a table of few rows are asked for. ``optional`` are
    links that records may lack, ``may_dangle`` those whose row is -1 where it is not there, in any
    source. ``keyframes``: other rows are left out. Fields that are not named are allowed, and
    ignored.
    """

    columns: tuple[str, ...] = ()
    links: tuple[str, ...] = ()
    record: type[Record] = Record
    optional: tuple[str, ...] = ()
    may_dangle: tuple[str, ...] = ()
    keyframes: bool = False

    def link(self, table: str, field: str) -> Link:
        """Return a link of this table, whose name is ``table``: prev and next are to its own
        rows.
        """
        return _LINKS.get(field) or Link(table, may_be_empty=True, if_cut="clear")


_ATTRIBUTES: Final = "attribute_tokens"


@cache
def _make_record_type(table: str, stored: Stored) -> Any:
    """Return the type of a table's records."""
    fields: list[Any] = [
        (name, _COLUMNS[name].type, _COLUMNS[name].default) for name in stored.columns
    ]
    for name in stored.links:
        kind, nothing = (tuple[str, ...], ()) if name == _ATTRIBUTES else (str, "")
        fields.append(
            (
                name,
                kind,
                nothing if name in stored.optional else msgspec.NODEFAULT,
            )
        )
    fields += [("is_key_frame", bool)] if stored.keyframes else []
    return msgspec.defstruct(
        table,
        fields,
        bases=(stored.record,),
        frozen=True,
        gc=False,
        kw_only=True,
    )


def _list_tokens(records: list[Any], field: str) -> list[str]:
    """Return the tokens of a link, "" for none; of several attributes the first counts."""
    field_tokens = list(map(attrgetter(field), records))
    if field == _ATTRIBUTES:
        return [tokens[0] if tokens else "" for tokens in field_tokens]
    return field_tokens


_POSE: Final = ("translation", "rotation")
_FILE: Final = ("filename", "timestamp", "is_valid")
_FILE_LINKS: Final = (
    "calibrated_sensor_token",
    "sample_token",
    "ego_pose_token",
)
_BOX: Final = (*_POSE, "size", "num_lidar_pts", "num_radar_pts")
_BOX_LINKS: Final = (
    "sample_token",
    "instance_token",
    "visibility_token",
    _ATTRIBUTES,
)
_OPTIONAL: Final = ("visibility_token", _ATTRIBUTES)
_CALIBRATION: Final = {
    "sensor": Stored(record=Sensor),
    "calibrated_sensor": Stored(
        (*_POSE, "camera_intrinsic", "camera_distortion"), ("sensor_token",)
    ),
}
SCENES: Final = {
    "log": Stored(record=Log),
    "scene": Stored(links=("log_token",), record=Scene),
}
"""Scenes alone."""
KEYFRAMES: Final = {
    **SCENES,
    **_CALIBRATION,
    "map": Stored(),
    "sample": Stored(("timestamp",), ("scene_token", "prev", "next")),
    "sample_data": Stored((*_FILE, "width", "height"), _FILE_LINKS, keyframes=True),
    "ego_pose": Stored(_POSE),
    "category": Stored(record=Named),
    "attribute": Stored(record=Named),
    "visibility": Stored(record=Visibility),
    "instance": Stored(links=("category_token",)),
    "sample_annotation": Stored(_BOX, (*_BOX_LINKS, "prev", "next"), optional=_OPTIONAL),
}
"""nuScenes' keyframes."""
T4_KEYFRAMES: Final = {
    **{name: stored for name, stored in KEYFRAMES.items() if name != "map"},
    "sample": Stored(("timestamp",), ("scene_token",)),
    "sample_annotation": Stored(
        (*_BOX, "velocity"),
        _BOX_LINKS,
        optional=_OPTIONAL,
        may_dangle=_OPTIONAL,
    ),
}
"""T4's: its samples are ordered by time and its tracks by their instances, whatever prev and
next say.
"""
SWEEPS: Final = {
    **_CALIBRATION,
    "sample_data": Stored(
        _FILE,
        ("calibrated_sensor_token", "prev", "ego_pose_token"),
        optional=("prev",),
        may_dangle=("calibrated_sensor_token", "prev"),
    ),
    "ego_pose": Stored(_POSE),
}
"""All files of some sensors."""


class JoinedTable:
    """A table's rows: their tokens, their columns, and for each link the rows of the other table.

    ``columns`` are arrays (R, ...) or :class:`Texts`; ``links`` are row numbers (R,), -1 for none,
    and ``link_texts`` the tokens of those to large tables. ``records`` are those of a table of few
    rows.
    """

    def __init__(self, name: str, stored: Stored, disk: Disk) -> None:
        self.name = name
        self.stored = stored
        self.tokens = Tokens(name, disk)
        self.records = list[Any]()
        self.to = {field: stored.link(name, field) for field in stored.links}
        self.link_texts = {
            field: disk.texts() for field, link in self.to.items() if link.to in _LARGE
        }
        self.columns: dict[str, Any] = {}
        for field in stored.columns:
            empty = _COLUMNS[field].column([])
            is_numeric = isinstance(empty, np.ndarray)
            self.columns[field] = (
                disk.column(empty.dtype, empty.shape[1:]) if is_numeric else disk.texts()
            )
        self.links: dict[str, Any] = {
            field: disk.column(np.int64) for field in self.to.keys() - self.link_texts
        }

    def __len__(self) -> int:
        return len(self.tokens)

    def append(self, records: list[Any], rows: Mapping[str, I64]) -> None:
        """Add records and the rows of tables of few rows that they link to; raises SourceError
        for bad numbers.
        """
        tokens_added = list(map(_TOKEN, records))
        self.tokens.append(tokens_added)
        if self.name not in _LARGE:
            self.records += records
        for field, column in self.columns.items():
            values_read = list(map(attrgetter(field), records))
            values = _COLUMNS[field].column(values_read)
            if field in _CHECKED and self.name != "ego_pose":
                check_finite(
                    values,
                    owners=tokens_added,
                    table=self.name,
                    column=field,
                )
            column.append(values)
        for field, tokens in self.link_texts.items():
            tokens.append(_list_tokens(records, field))
        for field, row_numbers in rows.items():
            self.links[field].append(row_numbers)

    def close(self) -> None:
        """Make arrays of the numbers: all records are there."""
        for columns in (self.columns, self.links):
            columns.update(
                {
                    field: column.values
                    for field, column in columns.items()
                    if isinstance(column, Column)
                }
            )


def all_sensors(sensors: Sequence[Sensor]) -> Mask:
    """Return which sensors are cameras, lidars or radars."""
    return np.array(
        [sensor.modality in ("camera", "lidar", "radar") for sensor in sensors],
        np.bool_,
    )


class Joined:
    """The tables of a plan, joined.

    ``wanted`` says of all sensors (S,) whose rows of ``sample_data`` are kept; all plans but
    `SWEEPS` keep keyframes.
    """

    def __init__(
        self,
        tables: Tables,
        disk: Disk,
        plan: Mapping[str, Stored],
        select_sensors: Callable[[Sequence[Sensor]], Mask] = all_sensors,
        cut: Cut | None = None,
    ) -> None:
        """Read all tables of the plan; raise SourceError for what is wrong in them, and for
        links that dangle.
        """
        self._cut = cut or Cut(is_on=False)
        self._wanted = select_sensors
        self._tables: dict[str, JoinedTable] = {}
        poses = TextFilter()
        for name, stored in plan.items():
            table = self._tables[name] = JoinedTable(name, stored, disk)
            for piece in tables.read(name, _make_record_type(name, stored)):
                records: list[Any] = piece
                if name == "ego_pose":
                    # nuScenes has a pose for each of 2.6 million rows, and few are of keyframes.
                    records = poses.select(records, list(map(_TOKEN, records)))
                elif stored.keyframes:
                    records = [record for record in records if record.is_key_frame]
                added = self._add_records(table, records)
                if name == "sample_data":
                    poses.add([record.ego_pose_token for record in added])
            table.close()
            if name not in _LARGE:
                table.tokens.check_unique()
            elif name == "sample" and not len(table):
                raise SourceError(f"table '{tables.path(name)}' has no rows: nothing to shard")
        for name in _LARGE:
            into = []
            for source in self._tables.values():
                into += [(source, field) for field, link in source.to.items() if link.to == name]
            if not into:
                continue
            target = self[name].tokens
            # Tokens are compared with themselves too, to find one that is there twice; of poses
            # not all are there.
            self_links = [] if name == "ego_pose" else [target]
            rows_found = target.rows_of(
                *self_links, *(source.link_texts[field] for source, field in into)
            )
            link_rows = rows_found[len(self_links) :]
            for (source, field), rows in zip(into, link_rows, strict=True):
                link = source.to[field]
                source.links[field] = rows
                if field not in source.stored.may_dangle:
                    target.check(
                        rows,
                        source.link_texts[field],
                        table=source.name,
                        column=field,
                        owners=source.tokens,
                        may_be_empty=link.may_be_empty,
                        cut=self._cut if link.if_cut == "clear" else None,
                        remedy="" if link.if_cut == "error" else self._cut.remedy,
                    )

    def __getitem__(self, name: str) -> JoinedTable:
        return self._tables[name]

    def _add_records(self, table: JoinedTable, records: list[Any]) -> list[Any]:
        """Add what is wanted of some records, and return it."""
        required = {
            field: self[link.to].tokens for field, link in table.to.items() if link.if_cut == "drop"
        }
        records = self._cut.select(records, table.name, **required)
        tokens_added = list(map(_TOKEN, records))
        rows = dict[str, I64]()
        for field in table.links:
            link = table.to[field]
            tokens = _list_tokens(records, field)
            rows[field] = self[link.to].tokens.find(tokens)
            if field not in table.stored.may_dangle:
                self[link.to].tokens.check(
                    rows[field],
                    tokens,
                    table=table.name,
                    column=field,
                    owners=tokens_added,
                    may_be_empty=link.may_be_empty,
                    remedy="" if link.if_cut == "error" else self._cut.remedy,
                )
        if table.name == "sample_data":
            calibrated = rows["calibrated_sensor_token"]
            is_wanted = (calibrated >= 0) & self._is_wanted[calibrated]
            records = list(itertools.compress(records, is_wanted.tolist()))
            rows = {field: row_numbers[is_wanted] for field, row_numbers in rows.items()}
        table.append(records, rows)
        return records

    @cached_property
    def _is_wanted(self) -> Mask:
        """Which rows of ``calibrated_sensor`` are of a wanted sensor."""
        sensors = self["calibrated_sensor"].links["sensor_token"]
        is_wanted = self._wanted(self["sensor"].records)
        return np.asarray(is_wanted[sensors])


_TOKEN: Final = attrgetter("token")
