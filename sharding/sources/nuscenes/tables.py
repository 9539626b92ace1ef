"""nuScenes' thirteen JSON tables, read strictly and piece by piece.

A full ``sample_data.json`` has 2.6 million records: a table is decoded in pieces, each checked
against its record type, and so small that text and records stay in a core's cache (with pieces of
half a megabyte a scan takes a tenth longer). What stays of a piece is for the caller to say; of the
large tables only columns do, and those on disk (:mod:`fuelrail.pipeline.storage.columns`).

Layout of the tables:
https://github.com/nutonomy/nuscenes-devkit/blob/master/docs/schema_nuscenes.md
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec
import numpy as np

from fuelrail.pipeline.channels.sensors import choose_cameras
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.settings import explain
from fuelrail.sharding.sources.adapter.poses import are_unit
from fuelrail.sharding.sources.shared.files import check_most, check_no_pointer
from fuelrail.sharding.sources.shared.foreign import (
    parsing,
    read_json,
    without_nan,
)
from fuelrail.sharding.sources.shared.windows import open_file

if TYPE_CHECKING:
    from typing import BinaryIO

    from fuelrail.pipeline.sample.schema import F64, Mask
    from fuelrail.pipeline.storage.columns import Texts
    from fuelrail.sharding.sources.shared.files import SourceFiles

TABLES: Final = (
    "attribute",
    "calibrated_sensor",
    "category",
    "ego_pose",
    "instance",
    "log",
    "map",
    "sample",
    "sample_annotation",
    "sample_data",
    "scene",
    "sensor",
    "visibility",
)
_PIECE_BYTES: Final = 1 << 18
_MOST_RECORD: Final = 16 << 20
_AHEAD: Final = 8 << 20
"""What a request at a URL asks for at least."""


class Record(msgspec.Struct, frozen=True, gc=False):
    """What every record has. Columns that are not named in a type are allowed and ignored."""

    token: str


class Log(Record, frozen=True, gc=False):
    """Table ``log``."""

    vehicle: str
    location: str
    logfile: str = ""


class Scene(Record, frozen=True, gc=False):
    """Table ``scene``; the test split has no descriptions."""

    name: str
    log_token: str
    nbr_samples: int
    description: str = ""


class Sensor(Record, frozen=True, gc=False):
    """Table ``sensor``."""

    channel: str
    modality: str


def select_sensors(
    sensors: Sequence[Sensor],
    cameras: Sequence[str],
    where: str,
    *,
    radars: bool,
) -> Mask:
    """Return which sensors are lidars, of these cameras (none: all), or ``radars``; ConfigError
    for an unknown one.
    """
    named = dict.fromkeys(
        sensor.channel.lower() for sensor in sensors if sensor.modality == "camera"
    )
    cameras_kept = choose_cameras(list(named), cameras or None, where)
    kinds = ("lidar", "radar") if radars else ("lidar",)
    return np.array(
        [
            sensor.modality in kinds
            or (sensor.modality == "camera" and sensor.channel.lower() in cameras_kept)
            for sensor in sensors
        ],
        np.bool_,
    )


class Named(Record, frozen=True, gc=False):
    """Tables ``category`` and ``attribute``."""

    name: str


class Visibility(Record, frozen=True, gc=False):
    """Table ``visibility``."""

    level: str


R = TypeVar("R", bound=Record)
T = TypeVar("T")
_FLOAT_TIME: Final = re.compile(rb'("timestamp"\s*:\s*)([0-9]+\.[0-9]+)')
_FIRST_US = 946_684_800_000_000
_LAST_US = 4_102_444_800_000_000


class Tables:
    """The tables of one version of a dataroot, JSON files in ``folder`` below the root of
    ``files``.
    """

    def __init__(self, files: SourceFiles, folder: str) -> None:
        self.files = files
        self.folder = folder

    def check(self) -> None:
        """Raise SourceError unless all thirteen tables are there; name every one that is
        missing.
        """
        names = self.files.listed(self.folder)
        missing = [f"{table}.json" for table in TABLES if f"{table}.json" not in names]
        if missing:
            raise SourceError(
                f"nuScenes tables in '{self.files.shown}/{self.folder}': "
                f"{', '.join(missing)} missing; a dataroot has all {len(TABLES)} tables"
            )

    def path(self, table: str) -> str:
        """Return the file of a table, as messages show it."""
        return f"{self.files.shown}/{self.folder}/{table}.json"

    def beside(self, name: str, kind: type[T], problem: str) -> T | None:
        """Return a JSON file beside the tables, None where it is not there; raise SourceError
        with the ``problem`` of another one.
        """
        if name not in self.files.listed(self.folder):
            return None
        where = f"'{self.files.shown}/{self.folder}/{name}'"
        return read_json(
            self.files.read(f"{self.folder}/{name}"),
            where=where,
            kind=kind,
            problem=problem,
        )

    def read(self, table: str, kind: type[R]) -> Iterator[list[R]]:
        """Yield a table's records in pieces, in order; raise SourceError where it is not a list
        of such records.
        """
        path = self.path(table)
        strict = msgspec.json.Decoder(list[kind]).decode  # type: ignore[valid-type]
        count = 0
        piece = b""

        def decode(data: bytes) -> list[R]:
            nonlocal piece
            piece = data
            try:
                return strict(data)
            except msgspec.ValidationError:
                # Lyft has fractions of microseconds.
                piece = _FLOAT_TIME.sub(
                    lambda time: time[1] + str(round(float(time[2]))).encode(), data
                )
                if piece == data:
                    raise
                return strict(piece)
            except msgspec.DecodeError:
                piece, num_nan = without_nan(data)  # null is unknown here, as NaN is
                if not num_nan:
                    raise
                return strict(piece)

        with (
            parsing(f"table '{path}'", "is not JSON"),
            open_file(self.files, f"{self.folder}/{table}.json", _AHEAD) as file,
        ):
            try:
                for records in _decode_pieces(file, path, decode):
                    yield records
                    count += len(records)
            except msgspec.ValidationError as error:
                fault = explain(error, piece, list[kind])  # type: ignore[valid-type]
                raise SourceError(
                    f"table '{path}', counted from record {count}: {fault}"
                ) from error

    def all(self, table: str, kind: type[R]) -> list[R]:
        """Return all records of a small table."""
        return [record for piece in self.read(table, kind) for record in piece]


def _decode_pieces(
    file: BinaryIO,
    path: str,
    decode: Callable[[bytes], list[R]],
) -> Iterator[list[R]]:
    """Cut a JSON list of objects into lists of whole objects, and decode those.

    A piece ends between two records: ``}``, white space, ``,``, white space, ``{``. A cut inside a
    string that happens to hold these characters leaves an unterminated string, is not valid JSON,
    and the piece grows instead.
    """
    start = file.read(_PIECE_BYTES)
    check_no_pointer(start, f"table '{path}'")
    body = start.removeprefix(b"\xef\xbb\xbf").lstrip()
    if not body.startswith(b"["):
        raise SourceError(f"table '{path}' is not a JSON list")
    pending = body[1:]
    while more := file.read(_PIECE_BYTES):
        # The last "}" that is followed by a comma and the next record.
        end = len(pending)
        while (end := pending.rfind(b"}", 0, end)) > 0:
            rest = pending[end + 1 : end + 64].lstrip()
            next_record = rest[1:].lstrip()
            if rest.startswith(b",") and next_record.startswith(b"{"):
                break
        if end > 0:
            cut = end + 1
            try:
                records = decode(b"".join((b"[", memoryview(pending)[:cut], b"]")))
            except msgspec.ValidationError:
                raise
            except (msgspec.DecodeError, UnicodeDecodeError):
                pass
            else:
                yield records
                pending = pending[cut:].lstrip()[1:]
        pending += more
        check_most(len(pending), f"a record of table '{path}'", _MOST_RECORD)
    yield decode(b"[" + pending)


def check_time(timestamp_us: int, token: str) -> None:
    """Raise SourceError for a sample's time that is not between the years 2000 and 2100: its
    unit is another one.
    """
    if not _FIRST_US <= timestamp_us <= _LAST_US:
        raise SourceError(
            f"table 'sample': row '{token}' has the timestamp {timestamp_us}, which is not "
            "between the years 2000 and 2100: times are in microseconds since 1970, not in "
            "seconds or nanoseconds"
        )


def vectors(values: Sequence[tuple[float, ...]], length: int) -> F64:
    """Return vectors of some length as an array (N, length), twice as fast as numpy's own way."""
    packed = struct.pack(f"{length * len(values)}d", *itertools.chain.from_iterable(values))
    return np.frombuffer(packed, np.float64).reshape(-1, length)


def check_finite(
    values: F64,
    owners: Sequence[str] | Texts,
    *,
    table: str,
    column: str,
) -> None:
    """Raise SourceError naming the first row that holds NaN or infinity, or a rotation without
    unit length.
    """
    wrong = ~np.isfinite(values).all(axis=1)
    if column == "rotation":
        wrong |= ~are_unit(values)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise SourceError(
            f"table '{table}': row '{owners[row]}' has the {column} {values[row].tolist()}"
        )
