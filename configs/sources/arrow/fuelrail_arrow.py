"""The adapter for rows that hold the bytes of images: Hugging Face `datasets` in Parquet or Arrow
files, Lance.

Each file's rows become rows of a manifest: a column of images becomes ``cam.NAME.path``, which
names where the bytes are. In an Arrow file that is a range of the file; else they are made by row
group, each read once for its rows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from msgspec import Meta

from fuelrail.pipeline.errors import ImageError, SourceError
from fuelrail.pipeline.sample.image_header import probe
from fuelrail.pipeline.text import shortened
from fuelrail.sharding.sources.adapter.classes import SOURCE
from fuelrail.sharding.sources.adapter.frame import Absent, Clip, Frame, Image
from fuelrail.sharding.sources.adapter.members import DAMAGED, LEFT_OUT
from fuelrail.sharding.sources.adapter.rows import attribute_types, may_be_attribute
from fuelrail.sharding.sources.shared.arrow import (
    byte_ranges,
    check_expanded,
    is_list,
    is_plain,
    open_mapped,
    open_parquet,
)
from fuelrail.sharding.sources.shared.foreign import parsing, read_json
from fuelrail.sharding.sources.shared.pictures import (
    EXTENSION_OF,
    HEAD_BYTES,
    examined,
    plain_or_damaged,
)
from fuelrail.sharding.sources.tables.columns import VALUE, attribute_type, is_known
from fuelrail.sharding.sources.tables.manifest import Manifest, ManifestSettings
from fuelrail.sharding.sources.tables.tables import CLIP, regrouped
from fuelrail.sharding.sources.tables.values import TIME_COLUMNS

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.arrays import Buffer
    from fuelrail.sharding.sources.shared.scan_table import ScanWriter
    from fuelrail.sharding.sources.source import Reads, ScanInfo
    from fuelrail.sharding.sources.tables.tables import TypeOf

_FRAMES: Final = "rows"
_NAME: Final = "_name"
_FAULTS: Final = "_faults"
_HIDDEN: Final[dict[str, type]] = {_NAME: str, _FAULTS: str}
"""Columns of each row: the sample's name in the source, and what is wrong with its images."""
_DEEPEST: Final = 3
_UNCOMPRESSED: Final = "write them without compression, or Parquet"
_ROW: Final = re.compile(r"(.+)#row=(\d{1,9})\.(\d{1,9})&(.+)\.(?:jpg|png)\Z", re.DOTALL)
_SPLIT: Final = re.compile(
    r"(?:^|[/_.-])(train|val|test|dev|eval)(?:ing|id|idation)?(?=[/_.-])", re.IGNORECASE
)
_SPLITS: Final = {"dev": "val", "eval": "val"}
_ENDINGS: Final = (".parquet", ".arrow")
_LANCE: Final = ".lance"
_ROWS: Final = 64
_GROUP: Final = 1024
"""Rows of a Lance dataset that are a clip where no column has clips, and of an Arrow file at
once.
"""
_OWN: Final = (CLIP, *TIME_COLUMNS[:3], "ego2global", "split", "log_id", "vehicle")


class ArrowSettings(ManifestSettings, frozen=True, kw_only=True):
    """Options of the adapter."""

    columns: Annotated[
        dict[str, str],
        Meta(
            description="column to its name in a manifest, as {drive: clip_id, img: cam.front, source: "
            "source}: clips, times, an image, a value (value.NAME), an attribute; "
            "sample_token: the sample's name; empty: leave out"
        ),
    ] = {}  # noqa: RUF012 - of a struct, which copies it


class _Feature(msgspec.Struct, frozen=True):
    """What Hugging Face states of a column."""

    kind: str = msgspec.field(name="_type", default="")
    names: list[str] = []


class _Info(msgspec.Struct, frozen=True):
    features: dict[str, Any] = {}


class _Stated(msgspec.Struct, frozen=True):
    info: _Info = _Info()


class _Part(NamedTuple):
    """Rows as they are stored: their group, the number in it of the first, and the file where it
    is mapped.
    """

    batch: pa.RecordBatch
    group: int
    first: int
    mapped: pa.Buffer | None = None


class _Columns(NamedTuple):
    """Columns of the manifest by those of the rows, types of attributes, and the names of
    labels.
    """

    targets: dict[str, str]
    attributes: dict[str, type]
    labels: list[str]


class ArrowRows(Manifest):
    """Rows with the bytes of images: Hugging Face datasets (Parquet, Arrow files), Lance datasets.

    PATH is a file, or holds `.parquet`, `.arrow` or `.lance`, also in subfolders, as Hugging Face
    writes them. Lance needs `pip install './configs/sources/arrow[lance]'`.

    - Cameras: the feature `Image`, and JPEG or PNG bytes, alone or as `bytes` beside a `path`.
      Without bytes, `path` is read, below PATH.
    - Attributes: numbers, true and false, and texts that `columns` names (`{source: source}`). The
      first `ClassLabel` gives `manifest.classes`.
    - Channels: other texts, lists of texts, lists and arrays of numbers; and structs and lists of
      structs, as JSON texts.
    - Columns of a manifest, such as `ego2global`, mean the same; `columns` renames others to these:
      `{drive: clip_id, t: timestamp_ns, front_jpeg: cam.front, id: sample_token}`.
    - Without clips, a clip is a row group, a record batch, or 1,024 rows of Lance. Without times,
      one second a sample is counted; `sample_token` is FILE#ROW. Names of files and folders give
      splits (`train`, `val`, `validation`, `test`), if all have one.
    - Left out: `Audio`, lists of images, dates, names that cannot be attributes. Refused:
      compressed Arrow files (Feather's default), and URLs of files other than Parquet.
    """

    kind = "arrow"
    settings_type = ArrowSettings
    leaves_out = True
    settings: ArrowSettings

    def __init__(self, location: str, options: dict[str, Any]) -> None:
        folder, _, name = location.rstrip("/").rpartition("/")
        self._only = name if name.endswith(_LANCE) else None
        super().__init__(
            (folder or ("/" if location.startswith("/") else ".")) if self._only else location,
            options,
        )
        self._only = self._only or self.file
        self._files_of: dict[str, dict[str, None]] = {}
        self._last: tuple[str, int, str, pa.Array] | None = None
        self._num_images = 0
        self._num_damaged = 0
        self._names = {"frames": _FRAMES}
        self._has_video = False

    @cached_property
    def _listed(self) -> list[str]:
        """The files, and the folders of Lance datasets, below the root."""
        found = [self._only] if self._only else list(self._below("", _DEEPEST))
        if not found:
            raise SourceError(
                f"'{self.files.shown}' has no {', '.join((*_ENDINGS, _LANCE))}, also in its folders"
            )
        return found

    def _below(self, folder: str, depth: int) -> Iterator[str]:
        folders = set(self.files.folders(folder))
        for name in self.files.listed(folder):
            path = f"{folder}/{name}" if folder else name
            if name.endswith(_LANCE) or (name.endswith(_ENDINGS) and not name.startswith("cache-")):
                yield path
            elif name in folders and depth:
                yield from self._below(path, depth - 1)

    @cached_property
    def _known(self) -> _Columns:
        """What the columns become, by the first rows."""
        name = self._listed[0]
        where = f"table '{self.files.shown}/{name}'"
        with parsing(where):
            return self._learnt(next(iter(self._parts(name))).batch, where)

    def _learnt(self, batch: pa.RecordBatch, where: str) -> _Columns:
        about = (batch.schema.metadata or {}).get(b"huggingface", b"{}")
        features = read_json(about, where, _Stated).info.features
        stated = {
            key: msgspec.convert(one, _Feature)
            for key, one in features.items()
            if isinstance(one, dict)
        }
        targets: dict[str, str] = {}
        for field in batch.schema:
            feature = stated.get(field.name, _Feature())
            target = self._target(field.name, _plain_column(batch, field.name), feature.kind)
            if target in targets.values():
                raise SourceError(
                    f"{where}: two columns are {target}; the option columns gives names to columns"
                )
            if target:
                targets[field.name] = target
        if unknown := self.settings.columns.keys() - set(batch.schema.names):
            raise SourceError(
                f"{where} has no column '{min(unknown)}'; it has "
                f"{', '.join(batch.schema.names):.500}"
            )
        attributes = {
            target: attribute_type(where, pa.field(target, _plain_column(batch, key).type))
            for key, target in targets.items()
            if not is_known(target) and target not in _HIDDEN
        }
        labels = [
            key
            for key, one in stated.items()
            if one.kind == "ClassLabel" and targets.get(key) in attributes
        ]
        for key in labels[1:]:
            self.noted[
                (
                    f"names of the labels {shortened(key)} left out, the classes are those of "
                    f"{shortened(labels[0])}"
                )
            ] += 1
        if labels and self.settings.classes != SOURCE:
            raise SourceError(
                f"{where}: labels are numbers of the source's own classes: leave the option "
                "classes out"
            )
        return _Columns(targets, attributes, stated[labels[0]].names if labels else [])

    def _target(self, name: str, column: pa.Array, feature: str) -> str:
        """Return the column of the manifest that a column becomes; "" for one that is left out,
        and note it.
        """
        kind = column.type
        plain = re.sub(r"[^a-z0-9_]", "_", name.lower())[:100]
        asked = self.settings.columns.get(name)
        if asked is not None and not asked:
            return ""
        if not is_plain(kind):
            if asked:
                raise ValueError(f"column '{name}' of {kind} is not read: write plain values")
            self.noted[f"column {shortened(name)} left out, {shortened(kind)}"] += 1
            return ""
        if (data := _bytes_of(column)) is not None and (
            feature == "Image" or (not feature and _is_picture(data))
        ):
            camera = asked or (name if name.startswith("cam.") else plain)
            return f"cam.{re.sub(r'^cam[.]|[.](path|bytes)$', '', camera)}.path"
        if asked is not None:
            return _NAME if asked == "sample_token" else asked
        is_boxes = name == "boxes" and is_list(kind) and pa.types.is_struct(kind.value_type)
        is_time = name == "timestamp" and pa.types.is_timestamp(kind)
        if name in _OWN or ("." in name and is_known(name)) or is_boxes or is_time:
            return name
        is_number = (
            pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        )
        if is_number and may_be_attribute(plain):
            return plain
        is_value = (
            pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_nested(kind)
        )
        if is_value and "binary" not in str(kind):
            return f"{VALUE}{plain}"
        self.noted[f"column {shortened(name)} left out, {shortened(kind)}"] += 1
        return ""

    @property
    def _free(self) -> dict[str, type]:  # type: ignore[override]
        return self._known.attributes | _HIDDEN

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes: numbers, and the texts that the option ``columns`` names."""
        return attribute_types((), self._known.attributes)

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """ "clip" but for Arrow files, whose images are ranges of them."""
        return "random" if all(name.endswith(".arrow") for name in self._listed) else "clip"

    def category_names(self) -> Sequence[str]:
        """Return the names of the first column of labels (``ClassLabel``) that Hugging Face
        states.
        """
        return self._known.labels

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Write a row for each frame that is kept; all bytes of Parquet and Lance are read, for
        the heads of images.
        """
        self.depth = out.depth(self.settings.check_images, self.settings.damaged_image)
        self._files_of = {}
        self._num_images = 0
        self._num_damaged = 0
        if not {*TIME_COLUMNS} & {*self._known.targets.values()}:
            self.time_base = "order"
            self._is_unix = False
        return super().scan(out)

    def _parts(self, name: str) -> Iterator[_Part]:
        """Yield the rows of a file, some at a time: a group is a row group, a record batch, or
        1,024 rows of Lance.
        """
        for part in self._read_parts(name):
            # Before anything else: offsets and indices of a file may lead anywhere.
            part.batch.validate(full=True)
            yield part

    def _read_parts(self, name: str) -> Iterator[_Part]:
        if name.endswith(".parquet"):
            with open_parquet(self.files, name) as file:
                for group in range(file.metadata.num_row_groups):
                    first = 0
                    for batch in file.iter_batches(_ROWS, row_groups=[group], use_threads=False):
                        yield _Part(batch, group, first)
                        first += len(batch)
        elif name.endswith(".arrow"):
            with pa.memory_map(self._local(name)) as file:
                where = f"table '{self.files.shown}/{name}'"
                mapped = file.read_buffer()
                batches = open_mapped(mapped, where)
                if isinstance(batches, pa.RecordBatchFileReader):
                    batches = map(batches.get_batch, range(batches.num_record_batches))
                for group, batch in enumerate(batches):
                    batch.validate(full=True)
                    check_expanded(batch, where)
                    for first in range(0, max(len(batch), 1), _GROUP):
                        yield _Part(batch.slice(first, _GROUP), group, first, mapped)
        else:
            at = 0
            for batch in self._lance(name).to_batches(batch_size=_ROWS):
                while len(batch):
                    part = batch.slice(0, _GROUP - at % _GROUP)
                    yield _Part(part, at // _GROUP, at % _GROUP)
                    at = at + len(part)
                    batch = batch.slice(len(part))

    def _local(self, name: str) -> str:
        path = self.files.path(name)
        if path is None:
            raise SourceError(
                f"'{self.files.shown}/{name}' is at a URL, where Parquet alone is read: "
                "copy it here"
            )
        return path

    def _lance(self, name: str) -> Any:
        try:
            import lance
        except ImportError as error:
            raise SourceError(
                f"'{self.files.shown}/{name}' is a Lance dataset: pip install pylance"
            ) from error
        return lance.dataset(self._local(name))

    def _batches(self, name: str, types: TypeOf) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - the one table
        return regrouped(self._translated(), f"{self.files.shown}/{name}")

    def _translated(self) -> Iterator[pa.Table]:
        """Yield the rows as those of a manifest."""
        number = 0
        wanted = self._known.targets
        for name in self._listed:
            row = 0
            where = f"table '{self.files.shown}/{name}'"
            with parsing(where):
                for part in self._parts(name):
                    if lacking := wanted.keys() - set(part.batch.schema.names):
                        raise ValueError(
                            f"it has no column '{min(lacking)}', as '{self._listed[0]}' has"
                        )
                    yield self._table(name, part, row, number)
                    row = row + len(part.batch)
                    number = number + len(part.batch)

    def _table(self, name: str, part: _Part, row: int, number: int) -> pa.Table:
        """Return rows, the first of which is number ``row`` of the file, and ``number`` of all."""
        size = len(part.batch)
        out: dict[str, Any] = {CLIP: [f"{name}/{part.group}"] * size}
        out["timestamp_ns"] = (np.arange(number, number + size) + 1) * 1_000_000_000
        out[_NAME] = [f"{name}#{row + at}" for at in range(size)]
        faults: list[dict[str, str]] = [{} for _ in range(size)]
        if any(target in TIME_COLUMNS for target in self._known.targets.values()):
            del out["timestamp_ns"]
        for column, target in self._known.targets.items():
            values = _plain_column(part.batch, column)
            if (
                target.startswith("cam.")
                and target.endswith(".path")
                and (data := _bytes_of(values)) is not None
            ):
                out |= self._images(
                    name,
                    part=part,
                    column=column,
                    prefix=target.removesuffix("path"),
                    data=data,
                    faults=faults,
                )
            elif target.startswith(VALUE) and _is_json(values.type):
                texts = [
                    None if one is None else msgspec.json.encode(one).decode()
                    for one in values.to_pylist()
                ]
                out[target] = pa.array(texts, pa.string())
            else:
                out[target] = values.cast(pa.string()) if target in (CLIP, _NAME) else values
        for clip in out[CLIP] if isinstance(out[CLIP], list) else out[CLIP].to_pylist():
            self._files_of.setdefault(clip, {})[name] = None
        out[_FAULTS] = pa.array(
            [msgspec.json.encode(one).decode() if one else None for one in faults], pa.string()
        )
        return pa.table(out)

    def _images(
        self,
        name: str,
        part: _Part,
        column: str,
        prefix: str,
        data: pa.Array,
        faults: list[dict[str, str]],
    ) -> dict[str, pa.Array]:
        """Return the columns of a camera: where the bytes are, and what the heads of images say;
        note ``faults``.
        """
        values = _plain_column(part.batch, column)
        is_struct = pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0
        paths: list[str | None] = (
            pc.struct_field(values, "path").to_pylist() if is_struct else [None] * len(data)
        )
        found: dict[str, list[Any]] = {
            one: [None] * len(data) for one in ("path", "width", "height", "num_bytes")
        }
        ranges = byte_ranges(data, part.mapped, _UNCOMPRESSED) if part.mapped is not None else None
        for at, value in enumerate(data):
            found["path"][at] = paths[at]
            if not value.is_valid:
                continue
            self._num_images += 1
            if (
                ranges is not None and ranges[at][1]
            ):  # what is in the file is looked at as all files are
                found["path"][at] = f"{name}#{ranges[at][0]}+{ranges[at][1]}"
                continue
            view = memoryview(value.as_buffer()).cast("B")
            try:
                info = examined(
                    lambda begin, most, view=view: view[begin : begin + most], len(view), self.depth
                )
            except ImageError as error:
                faults[at][prefix[4:-1].lower()] = error.message
                found["path"][at] = None
                self._num_damaged += 1
                continue
            found["path"][at] = (
                f"{name}#row={part.group}.{part.first + at}&{column}.{EXTENSION_OF[info.format]}"
            )
            found["width"][at], found["height"][at], found["num_bytes"][at] = (
                info.width,
                info.height,
                len(view),
            )
        types = {"path": pa.string()}
        return {
            f"{prefix}{key}": pa.array(values, types.get(key, pa.int64()))
            for key, values in found.items()
        }

    def clips(self) -> Iterator[Clip]:
        """Yield the clips: of a column, else groups of rows; their split is that of the names of
        files.
        """
        splits = {
            name: found[1].lower() if (found := _SPLIT.search(name)) else ""
            for name in self._listed
        }
        for clip in super().clips():
            files = self._files_of[clip.name]
            split = splits[next(iter(files))] if all(splits.values()) else ""
            stamped = [name if name.endswith(_ENDINGS) else f"{name}/_versions" for name in files]
            yield msgspec.structs.replace(
                clip, files=tuple(stamped), split=clip.split or _SPLITS.get(split, split)
            )
        is_left_out = self.settings.damaged_image != "error"  # else each is a finding
        if is_left_out and self._num_damaged > self.settings.max_damaged * self._num_images:
            raise SourceError(
                f"{self._num_damaged} of {self._num_images} images are damaged, more than "
                f"the share of max_damaged={self.settings.max_damaged:g}"
            )

    def frames(self, clip: Clip) -> Iterator[Frame]:
        """Yield the clip's frames by time."""
        for frame in super().frames(clip):
            attributes = dict(frame.attributes)
            images = dict(frame.images)
            token = attributes.pop(_NAME)
            faults = attributes.pop(_FAULTS)
            for camera, image in frame.images.items():
                if isinstance(image, Image) and _ROW.match(image.ref):
                    images[camera] = msgspec.structs.replace(image, made=True)
            for camera, fault in (msgspec.json.decode(faults) if faults else {}).items():
                if self.settings.damaged_image == "error":
                    raise SourceError(
                        f"row '{self.files.shown}/{token}': image of {camera}: {fault}{LEFT_OUT}"
                    )
                images[camera] = Absent(DAMAGED, token or "")
            yield msgspec.structs.replace(
                frame, token=token or "", attributes=attributes, images=images
            )

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read images of Parquet and Lance: those of a row group and column at once."""
        wanted: dict[tuple[str, int, str], list[tuple[int, str]]] = {}
        for ref in refs:
            name, group, row, column = _ROW.fullmatch(ref).groups()  # type: ignore[union-attr]
            wanted.setdefault((name, int(group), column), []).append((int(row), ref))
        for (name, group, column), rows in wanted.items():
            with parsing(
                f"table '{self.files.shown}/{name}'",
                f"has no images in column '{shortened(column)}'",
            ):
                if name.endswith(".parquet"):
                    images = self._of_group(name, group, column).take([row for row, _ in rows])
                else:
                    places = [group * _GROUP + row for row, _ in rows]
                    images = _bytes_of(
                        _plain_column(self._lance(name).take(places, [column]), column)
                    )
            for (_, ref), data in zip(rows, images, strict=True):
                yield ref, plain_or_damaged(data.as_py() or b"")

    def _of_group(self, name: str, group: int, column: str) -> pa.Array:
        """Return the bytes of a row group; those of the last one are kept, for clips may be
        parts of it.
        """
        if self._last is None or self._last[:3] != (name, group, column):
            self._last = None
            with open_parquet(self.files, name) as file:
                table = file.read_row_group(group, [column], use_threads=False)
            table.validate(full=True)
            self._last = name, group, column, _bytes_of(_plain_column(table, column))
        return self._last[3]


def _plain_column(table: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    """Return a column in one piece, without dictionary and extension type."""
    column = table.column(name)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    column = column.storage if isinstance(column, pa.ExtensionArray) else column
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _bytes_of(column: pa.Array) -> pa.Array | None:
    """Return the bytes of a column of bytes, or of structs with such a field; None for another."""
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    return (
        column if pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type) else None
    )


def _is_picture(data: pa.Array) -> bool:
    """Return whether the first bytes there are, are those of an image."""
    first = next((value.as_buffer() for value in data if value.is_valid), None)
    with contextlib.suppress(ImageError):
        return (
            first is not None and probe(memoryview(first).cast("B")[: HEAD_BYTES[-1]]) is not None
        )
    return False


def _is_json(kind: pa.DataType) -> bool:
    """Return whether values are stored as JSON: structs, maps, and lists of them or of lists of
    texts.
    """
    depth = 0
    while is_list(kind):
        kind = kind.value_type
        depth = depth + 1
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return pa.types.is_nested(kind) or (is_text and depth > 1)
