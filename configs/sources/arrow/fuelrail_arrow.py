"""The adapter for rows that hold the bytes of images: Hugging Face `datasets` in Parquet or Arrow
files, Lance.

Each file's rows become rows of a manifest: a column of images becomes ``cam.NAME.path``, which
names where the bytes are. In an Arrow file that is a range of the file; else they are made by row
group, each read once for its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cached_property, partial
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
"""Folders below one another that are looked into."""
_UNCOMPRESSED: Final = "write them without compression, or Parquet"
_ROW_REF: Final = re.compile(r"(.+)#row=(\d{1,9})\.(\d{1,9})&(.+)\.(?:jpg|png)\Z", re.DOTALL)
_SPLIT: Final = re.compile(
    r"(?:^|[/_.-])(train|val|test|dev|eval)(?:ing|id|idation)?(?=[/_.-])", re.IGNORECASE
)
_SPLITS: Final = {"dev": "val", "eval": "val"}
_ENDINGS: Final = (".parquet", ".arrow")
_LANCE: Final = ".lance"
_BATCH_ROWS: Final = 64
_CLIP_ROWS: Final = 1024
"""Rows of a Lance dataset that are a clip where no column has clips, and of an Arrow file at
once.
"""
_OF_MANIFEST: Final = (CLIP, *TIME_COLUMNS[:3], "ego2global", "split", "log_id", "vehicle")
"""Columns that mean the same as in a manifest."""


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
    """The features of the columns, by name; those that are objects are :class:`_Feature`."""

    features: dict[str, Any] = {}


class _SchemaMetadata(msgspec.Struct, frozen=True):
    """What Hugging Face writes into the schema of a file."""

    info: _Info = _Info()


class _Part(NamedTuple):
    """Rows as they are stored: their group, the number in it of the first, and the file where it
    is mapped.
    """

    batch: pa.RecordBatch
    group: int
    first: int
    mapped: pa.Buffer | None = None


class _Layout(NamedTuple):
    """Columns of the manifest by those of the rows, types of attributes, and the names of
    classes.
    """

    targets: dict[str, str]
    attributes: dict[str, type]
    classes: list[str]


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
        # A Lance dataset is a folder: the root is the one that holds it.
        folder, slash, name = location.rstrip("/").rpartition("/")
        dataset = name if name.endswith(_LANCE) else None
        if dataset:
            location = folder or slash or "."
        super().__init__(location, options)
        self._only = dataset or self.file
        self._files_of_clip: dict[str, dict[str, None]] = {}
        self._groups: dict[tuple[str, int, str], pa.Array] = {}
        self._num_images = 0
        self._num_damaged = 0
        self._names = {"frames": _FRAMES}
        self._has_video = False

    @cached_property
    def _file_names(self) -> list[str]:
        """The files, and the folders of Lance datasets, below the root."""
        if self._only:
            return [self._only]
        names = list(self._walk("", _DEEPEST))
        if not names:
            raise SourceError(
                f"'{self.files.shown}' has no {', '.join((*_ENDINGS, _LANCE))}, also in its folders"
            )
        return names

    def _walk(self, folder: str, depth: int) -> Iterator[str]:
        """Yield the files in a folder and in those below it, ``depth`` of them deep."""
        folders = set(self.files.folders(folder))
        for name in self.files.listed(folder):
            path = f"{folder}/{name}" if folder else name
            is_file = name.endswith(_ENDINGS) and not name.startswith("cache-")
            if is_file or name.endswith(_LANCE):
                yield path
            elif name in folders and depth:
                yield from self._walk(path, depth - 1)

    @cached_property
    def _layout(self) -> _Layout:
        """What the columns become, by the first rows."""
        name = self._file_names[0]
        where = f"table '{self.files.shown}/{name}'"
        with parsing(where):
            part = next(iter(self._read_parts(name)))
            return self._make_layout(part.batch, where)

    def _make_layout(self, batch: pa.RecordBatch, where: str) -> _Layout:
        text = (batch.schema.metadata or {}).get(b"huggingface", b"{}")
        metadata = read_json(text, where, _SchemaMetadata)
        features: dict[str, _Feature] = {}
        for name, fields in metadata.info.features.items():
            if isinstance(fields, dict):
                features[name] = msgspec.convert(fields, _Feature)
        targets: dict[str, str] = {}
        for name in batch.schema.names:
            feature = features.get(name, _Feature())
            target = self._choose_target(name, _read_column(batch, name), feature.kind)
            if target in targets.values():
                raise SourceError(
                    f"{where}: two columns are {target}; the option columns gives names to columns"
                )
            if target:
                targets[name] = target
        unknown = self.settings.columns.keys() - set(batch.schema.names)
        if unknown:
            raise SourceError(
                f"{where} has no column '{min(unknown)}'; it has "
                f"{', '.join(batch.schema.names):.500}"
            )
        attributes: dict[str, type] = {}
        for name, target in targets.items():
            if not is_known(target) and target not in _HIDDEN:
                field = pa.field(target, _read_column(batch, name).type)
                attributes[target] = attribute_type(where, field)
        labels = [name for name, feature in features.items() if feature.kind == "ClassLabel"]
        labels = [name for name in labels if targets.get(name) in attributes]
        if not labels:
            return _Layout(targets, attributes, [])
        for name in labels[1:]:
            note = (
                f"names of the labels {shortened(name)} left out, the classes are those of "
                f"{shortened(labels[0])}"
            )
            self.noted[note] += 1
        if self.settings.classes != SOURCE:
            raise SourceError(
                f"{where}: labels are numbers of the source's own classes: leave the option "
                "classes out"
            )
        return _Layout(targets, attributes, features[labels[0]].names)

    def _choose_target(self, name: str, column: pa.Array, feature: str) -> str:
        """Return the column of the manifest that a column becomes; "" for one that is left out,
        and note it.
        """
        kind = column.type
        plain_name = re.sub(r"[^a-z0-9_]", "_", name.lower())[:100]
        option = self.settings.columns.get(name)
        note = f"column {shortened(name)} left out, {shortened(kind)}"
        if option == "":
            return ""
        if not is_plain(kind):
            if option:
                raise ValueError(f"column '{name}' of {kind} is not read: write plain values")
            self.noted[note] += 1
            return ""
        data = _find_bytes(column)
        if data is not None and (feature == "Image" or (not feature and _is_picture(data))):
            camera = name if name.startswith("cam.") else plain_name
            stem = re.sub(r"^cam[.]|[.](path|bytes)$", "", option or camera)
            return f"cam.{stem}.path"
        if option == "sample_token":
            return _NAME
        if option:
            return option
        is_boxes = name == "boxes" and is_list(kind) and pa.types.is_struct(kind.value_type)
        is_time = name == "timestamp" and pa.types.is_timestamp(kind)
        is_of_sensor = "." in name and is_known(name)
        if name in _OF_MANIFEST or is_of_sensor or is_boxes or is_time:
            return name
        is_number = (
            pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
        )
        if is_number and may_be_attribute(plain_name):
            return plain_name
        is_value = (
            pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_nested(kind)
        )
        if is_value and "binary" not in str(kind):
            return f"{VALUE}{plain_name}"
        self.noted[note] += 1
        return ""

    @property
    def _has_times(self) -> bool:
        """Whether a column has the times of samples."""
        return any(target in TIME_COLUMNS for target in self._layout.targets.values())

    @property
    def _free(self) -> dict[str, type]:  # type: ignore[override]
        return self._layout.attributes | _HIDDEN

    @property
    def attribute_types(self) -> dict[str, type]:
        """Columns of attributes: numbers, and the texts that the option ``columns`` names."""
        return attribute_types((), self._layout.attributes)

    @property
    def reads(self) -> Reads:  # type: ignore[override]
        """ "clip" but for Arrow files, whose images are ranges of them."""
        return "random" if all(name.endswith(".arrow") for name in self._file_names) else "clip"

    def category_names(self) -> Sequence[str]:
        """Return the names of the first column of labels (``ClassLabel``) that Hugging Face
        states.
        """
        return self._layout.classes

    def scan(self, out: ScanWriter) -> ScanInfo:
        """Write a row for each frame that is kept; all bytes of Parquet and Lance are read, for
        the heads of images.
        """
        self.depth = out.depth(self.settings.check_images, self.settings.damaged_image)
        self._files_of_clip = {}
        self._num_images = 0
        self._num_damaged = 0
        if not self._has_times:
            self.time_base = "order"
            self._is_unix = False
        return super().scan(out)

    def _read_parts(self, name: str) -> Iterator[_Part]:
        """Yield the rows of a file, some at a time: a group is a row group, a record batch, or
        1,024 rows of Lance.
        """
        if name.endswith(".parquet"):
            parts = self._read_parquet(name)
        elif name.endswith(".arrow"):
            parts = self._read_arrow(name)
        else:
            parts = self._read_lance(name)
        for part in parts:
            # Before anything else: offsets and indices of a file may lead anywhere.
            part.batch.validate(full=True)
            yield part

    def _read_parquet(self, name: str) -> Iterator[_Part]:
        with open_parquet(self.files, name) as file:
            for group in range(file.metadata.num_row_groups):
                batches = file.iter_batches(_BATCH_ROWS, row_groups=[group], use_threads=False)
                first = 0
                for batch in batches:
                    yield _Part(batch, group, first)
                    first += len(batch)

    def _read_arrow(self, name: str) -> Iterator[_Part]:
        with pa.memory_map(self._find_local(name)) as file:
            where = f"table '{self.files.shown}/{name}'"
            mapped = file.read_buffer()
            batches = open_mapped(mapped, where)
            if isinstance(batches, pa.RecordBatchFileReader):
                batches = map(batches.get_batch, range(batches.num_record_batches))
            for group, batch in enumerate(batches):
                batch.validate(full=True)
                check_expanded(batch, where)
                for first in range(0, max(len(batch), 1), _CLIP_ROWS):
                    yield _Part(batch.slice(first, _CLIP_ROWS), group, first, mapped)

    def _read_lance(self, name: str) -> Iterator[_Part]:
        num_rows = 0
        for batch in self._open_lance(name).to_batches(batch_size=_BATCH_ROWS):
            while len(batch):
                group, first = divmod(num_rows, _CLIP_ROWS)
                rows = batch.slice(0, _CLIP_ROWS - first)
                yield _Part(rows, group, first)
                num_rows += len(rows)
                batch = batch.slice(len(rows))

    def _find_local(self, name: str) -> str:
        """Return the path of a file on this machine."""
        path = self.files.path(name)
        if path is None:
            raise SourceError(
                f"'{self.files.shown}/{name}' is at a URL, where Parquet alone is read: "
                "copy it here"
            )
        return path

    def _open_lance(self, name: str) -> Any:
        try:
            import lance
        except ImportError as error:
            raise SourceError(
                f"'{self.files.shown}/{name}' is a Lance dataset: pip install pylance"
            ) from error
        return lance.dataset(self._find_local(name))

    def _batches(self, name: str, types: TypeOf) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - the one table
        return regrouped(self._read_tables(), f"{self.files.shown}/{name}")

    def _read_tables(self) -> Iterator[pa.Table]:
        """Yield the rows of all files as those of a manifest."""
        num_rows = 0
        columns = self._layout.targets.keys()
        for name in self._file_names:
            num_rows_of_file = 0
            with parsing(f"table '{self.files.shown}/{name}'"):
                for part in self._read_parts(name):
                    missing = columns - set(part.batch.schema.names)
                    if missing:
                        raise ValueError(
                            f"it has no column '{min(missing)}', as '{self._file_names[0]}' has"
                        )
                    yield self._make_table(name, part, row=num_rows_of_file, number=num_rows)
                    num_rows_of_file += len(part.batch)
                    num_rows += len(part.batch)

    def _make_table(self, name: str, part: _Part, *, row: int, number: int) -> pa.Table:
        """Return rows, the first of which is number ``row`` of the file, and ``number`` of all."""
        size = len(part.batch)
        table: dict[str, Any] = {CLIP: [f"{name}/{part.group}"] * size}
        if not self._has_times:
            table["timestamp_ns"] = (np.arange(number, number + size) + 1) * 1_000_000_000
        table[_NAME] = [f"{name}#{row + offset}" for offset in range(size)]
        faults: list[dict[str, str]] = [{} for _ in range(size)]
        for column, target in self._layout.targets.items():
            values = _read_column(part.batch, column)
            is_camera = target.startswith("cam.") and target.endswith(".path")
            data = _find_bytes(values) if is_camera else None
            if data is not None:
                table |= self._find_images(
                    name,
                    part,
                    column=column,
                    data=data,
                    prefix=target.removesuffix("path"),
                    faults=faults,
                )
            elif target.startswith(VALUE) and _is_json(values.type):
                texts = [_to_json(value) for value in values.to_pylist()]
                table[target] = pa.array(texts, pa.string())
            elif target in (CLIP, _NAME):
                table[target] = values.cast(pa.string())
            else:
                table[target] = values
        clips = table[CLIP]
        for clip in clips if isinstance(clips, list) else clips.to_pylist():
            self._files_of_clip.setdefault(clip, {})[name] = None
        texts = [_to_json(faults_of_row or None) for faults_of_row in faults]
        table[_FAULTS] = pa.array(texts, pa.string())
        return pa.table(table)

    def _find_images(
        self,
        name: str,
        part: _Part,
        *,
        column: str,
        data: pa.Array,
        prefix: str,
        faults: list[dict[str, str]],
    ) -> dict[str, pa.Array]:
        """Return the columns of a camera: where the bytes are, and what the heads of images say;
        note ``faults``.
        """
        camera = prefix.removeprefix("cam.").removesuffix(".").lower()
        values = _read_column(part.batch, column)
        paths: list[str | None] = [None] * len(data)
        if pa.types.is_struct(values.type) and values.type.get_field_index("path") >= 0:
            paths = pc.struct_field(values, "path").to_pylist()
        widths: list[int | None] = [None] * len(data)
        heights: list[int | None] = [None] * len(data)
        sizes: list[int | None] = [None] * len(data)
        ranges = [(0, 0)] * len(data)
        if part.mapped is not None:
            ranges = byte_ranges(data, part.mapped, _UNCOMPRESSED)
        for row, value in enumerate(data):
            if not value.is_valid:
                continue
            self._num_images += 1
            offset, length = ranges[row]
            if length:  # what is in the file is looked at as all files are
                paths[row] = f"{name}#{offset}+{length}"
                continue
            view = memoryview(value.as_buffer()).cast("B")
            try:
                info = examined(partial(_read_range, view), len(view), self.depth)
            except ImageError as error:
                faults[row][camera] = error.message
                paths[row] = None
                self._num_damaged += 1
                continue
            extension = EXTENSION_OF[info.format]
            paths[row] = f"{name}#row={part.group}.{part.first + row}&{column}.{extension}"
            widths[row] = info.width
            heights[row] = info.height
            sizes[row] = len(view)
        return {
            f"{prefix}path": pa.array(paths, pa.string()),
            f"{prefix}width": pa.array(widths, pa.int64()),
            f"{prefix}height": pa.array(heights, pa.int64()),
            f"{prefix}num_bytes": pa.array(sizes, pa.int64()),
        }

    def clips(self) -> Iterator[Clip]:
        """Yield the clips: of a column, else groups of rows; their split is that of the names of
        files.
        """
        splits: dict[str, str] = {}
        for name in self._file_names:
            match = _SPLIT.search(name)
            splits[name] = match[1].lower() if match else ""
        for clip in super().clips():
            files = list(self._files_of_clip[clip.name])
            split = splits[files[0]] if all(splits.values()) else ""
            # Of a Lance dataset, which is a folder, its versions say whether it has changed.
            stamped = [name if name.endswith(_ENDINGS) else f"{name}/_versions" for name in files]
            yield msgspec.structs.replace(
                clip,
                files=tuple(stamped),
                split=clip.split or _SPLITS.get(split, split),
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
            faults = attributes.pop(_FAULTS) or "{}"
            for camera, image in frame.images.items():
                if isinstance(image, Image) and _ROW_REF.match(image.ref):
                    images[camera] = msgspec.structs.replace(image, made=True)
            for camera, fault in msgspec.json.decode(faults).items():
                if self.settings.damaged_image == "error":
                    raise SourceError(
                        f"row '{self.files.shown}/{token}': image of {camera}: {fault}{LEFT_OUT}"
                    )
                images[camera] = Absent(DAMAGED, token or "")
            yield msgspec.structs.replace(
                frame,
                token=token or "",
                attributes=attributes,
                images=images,
            )

    def make_images(self, refs: Sequence[str]) -> Iterator[tuple[str, Buffer]]:
        """Read images of Parquet and Lance: those of a row group and column at once."""
        rows_of_group: dict[tuple[str, int, str], list[tuple[int, str]]] = {}
        for ref in refs:
            name, group, row, column = _ROW_REF.fullmatch(ref).groups()  # type: ignore[union-attr]
            rows_of_group.setdefault((name, int(group), column), []).append((int(row), ref))
        for (name, group, column), rows in rows_of_group.items():
            where = f"table '{self.files.shown}/{name}'"
            with parsing(where, f"has no images in column '{shortened(column)}'"):
                if name.endswith(".parquet"):
                    images = self._read_group(name, group, column).take([row for row, _ in rows])
                else:
                    numbers = [group * _CLIP_ROWS + row for row, _ in rows]
                    table = self._open_lance(name).take(numbers, [column])
                    images = _find_bytes(_read_column(table, column))
            for (_, ref), data in zip(rows, images, strict=True):
                yield ref, plain_or_damaged(data.as_py() or b"")

    def _read_group(self, name: str, group: int, column: str) -> pa.Array:
        """Return the bytes of a row group; those of the last one are kept, for clips may be
        parts of it.
        """
        key = (name, group, column)
        if key not in self._groups:
            self._groups.clear()
            with open_parquet(self.files, name) as file:
                table = file.read_row_group(group, [column], use_threads=False)
            table.validate(full=True)
            self._groups[key] = _find_bytes(_read_column(table, column))
        return self._groups[key]


def _read_column(table: pa.RecordBatch | pa.Table, name: str) -> pa.Array:
    """Return a column in one piece, without dictionary and extension type."""
    column = table.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _find_bytes(column: pa.Array) -> pa.Array | None:
    """Return the bytes of a column of bytes, or of structs with such a field; None for another."""
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.flatten()[column.type.get_field_index("bytes")]
    is_binary = pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)
    return column if is_binary else None


def _read_range(view: memoryview, offset: int, length: int) -> memoryview:
    return view[offset : offset + length]


def _is_picture(data: pa.Array) -> bool:
    """Return whether the first value that is not null begins as an image does."""
    first = next((value.as_buffer() for value in data if value.is_valid), None)
    if first is None:
        return False
    try:
        return probe(memoryview(first).cast("B")[: HEAD_BYTES[-1]]) is not None
    except ImageError:
        return False


def _to_json(value: Any) -> str | None:
    """Return a value as JSON text; None for null."""
    return None if value is None else msgspec.json.encode(value).decode()


def _is_json(kind: pa.DataType) -> bool:
    """Return whether values are stored as JSON: structs, maps, and lists of them or of lists of
    texts.
    """
    depth = 0
    while is_list(kind):
        kind = kind.value_type
        depth += 1
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    return pa.types.is_nested(kind) or (is_text and depth > 1)
