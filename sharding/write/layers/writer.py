"""Write a layer: any process writes any rows of the base, in any order; one of them finishes it.

The bytes of the finished layer depend on base, table and values alone: not on who wrote what, nor
on how often writing was interrupted.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.table import Channel
from fuelrail.pipeline.errors import (
    ConfigError,
    DatasetError,
    DatasetExistsError,
    MemberError,
    SchemaError,
)
from fuelrail.pipeline.format.codecs import DEFAULT_ZSTD_LEVEL
from fuelrail.pipeline.format.dataset import Dataset, open_dataset
from fuelrail.pipeline.format.layers import (
    INDEXED,
    NO_ROW,
    BaseEntry,
    LayerManifest,
    LayerView,
    check_layer_table,
    open_layer_data,
    read_rows,
)
from fuelrail.pipeline.format.manifest import MANIFEST_FILE, WORK_FOLDER
from fuelrail.pipeline.settings import convert
from fuelrail.pipeline.storage.files import open_lock
from fuelrail.pipeline.text import differences
from fuelrail.sharding.output.folder import check_out, open_output, read_json
from fuelrail.sharding.planning.recipe import ZSTD_VERSION, channel_codec
from fuelrail.sharding.write.layers.finish import (
    LayerRun,
    finish_layer,
    scalar_channels,
)
from fuelrail.sharding.write.layers.segments import (
    BYTES_PER_SEGMENT,
    ROWS_PER_SEGMENT,
    Blob,
    SegmentRow,
    Segments,
    publish_segment,
)
from fuelrail.sharding.write.packer import RawMember, ShardPacker
from fuelrail.sharding.write.read_buffer import ReadBuffer

if TYPE_CHECKING:
    from fuelrail.pipeline.sample.schema import Mask

_REUSED: Final = "rows that were published"
_OWN_RECIPE: Final = {"source", "tool", "zstd"}
_RUN_FILE: Final = f"{WORK_FOLDER}/layer.json"


class LayerWriter:
    """Writes rows of a layer; use it as a context manager, in as many processes as you like.

    ::

        with fr.LayerWriter("DATASET", "LAYERS/teacher", channels=[...]) as writer:
            writer.write(position, {"logits": logits})       # int: position in the base; str: key
        writer.finish()                                       # once, after all writers

    Rows are published 1,024 at a time, and what is left at the end of the ``with`` block. A process
    that ends before, killed or by an error, loses what is left: write those rows again. ``written``
    says which rows are there.

    Args:
        base: folder or URL of the base, or the open base.
        out: folder of the layer, or a URL that fsspec knows: new or empty, of a partial layer, or
            of a finished one, which is left as it is.
        channels: the table: entries, or dicts of their fields. Only ``name``, ``kind``, ``field``,
            ``law`` and what the kind needs must be given (FORMAT.md, section 2.1).
        name: name of the layer in its manifest; None: the last part of ``out``.
        view: what the values were computed from; by default the samples without augmentation.
        recipe: what else they depend on, as plain JSON types, such as ``{"teacher": DIGEST}``: kept
            in the manifest in ``provenance.recipe``. The names source, tool and zstd are taken.

    Raises ConfigError for a table that is broken, ConfigError with both sides where other writers
    of this folder had other arguments, DatasetExistsError where the folder holds something else.

    """

    def __init__(
        self,
        base: Dataset | str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        channels: Sequence[Channel | Mapping[str, Any]],
        name: str | None = None,
        view: LayerView | None = None,
        recipe: Mapping[str, Any] | None = None,
    ) -> None:
        self._base = base if isinstance(base, Dataset) else open_dataset(base)
        self._out = open_output(out)
        plain = (dict(channel) if isinstance(channel, Mapping) else channel for channel in channels)
        table = tuple(convert(channel, Channel, "channels") for channel in plain)
        if not table:
            raise ConfigError("channels is empty: a layer has at least one channel")
        entry = BaseEntry.from_dataset(self._base)
        check_layer_table(
            table,
            base=entry,
            where="channels",
            error=ConfigError,
            known_only=False,
        )
        table = tuple(
            msgspec.structs.replace(channel, codec=channel_codec(channel)) for channel in table
        )
        self._run = LayerRun(
            name=name or self._out.location.rpartition("/")[2],
            base=entry,
            channels=table,
            view=view or LayerView(),
            zstd=ZSTD_VERSION,
            recipe=dict(recipe or {}),
        )
        reserved = sorted({*self._run.recipe} & _OWN_RECIPE)
        if reserved:
            raise ConfigError(
                f"recipe has '{reserved[0]}', which a layer has of its own: give it another name"
            )
        self._scalars = scalar_channels(table)
        reserved = [name for name in self._scalars if name in INDEXED]
        if reserved:
            raise ConfigError(
                f"channel '{reserved[0]}' is a number for each sample, so a column of "
                f"attributes.parquet, which has {', '.join(INDEXED)} of its own: give it "
                "another name"
            )
        self._buffer = ReadBuffer()
        self._blobs = dict[int, Blob]()
        self._held = 0
        check_out(self._out)
        self.is_finished = self._out.size(MANIFEST_FILE) is not None
        self._check_run()
        self._segments = Segments(self._out, len(self._base))

    @property
    def channels(self) -> tuple[Channel, ...]:
        """The table."""
        return self._run.channels

    def written(self) -> Mask:
        """Return which positions of the base have a published row, of any writer: bool
        (num_samples,).
        """
        self._segments.update()
        # Checked afterwards: the process that finishes the layer removes the segments.
        self.is_finished = self._out.size(MANIFEST_FILE) is not None
        return self._segments.are_there() | self.is_finished

    def write(self, number_or_key: int | str, values: Mapping[str, Any]) -> None:
        """Take the values of one sample, by its position in the base or its key; optional ones may
        be left out.

        Values are as their kind has them (FORMAT.md, section 2.1). Raises SchemaError, with key and
        channel, for a value that is not as the table says; IndexError or KeyError for a sample that
        the base does not have.
        """
        if self.is_finished:
            raise DatasetError(
                f"layer '{self._out.shown}' is finished: a layer is written once; choose "
                "another folder"
            )
        position = self._base.position(number_or_key)
        row = self._base.index.row(position)
        table = {channel.name: channel for channel in self._run.channels}
        unknown = [name for name in values if name not in table]
        if unknown:
            raise SchemaError(
                f"the table has no channel {unknown[0]!r:.110}; it has: {', '.join(table)}",
                key=row.key,
            )
        sizes_by_camera = {sensor.name: sensor.sizes for sensor in self._run.base.sensors}
        encoded = []
        for name, channel in table.items():
            value = values.get(name)
            try:
                if value is None:
                    if not channel.optional:
                        raise SchemaError(
                            f"channel '{name}' is missing, and the table does not say optional"
                        )
                    continue
                data = KINDS[channel.kind].encode(value, channel)
                KINDS[channel.kind].check(data, channel)
                if channel.law.name == "image" and channel.law.camera is not None:
                    part = channel.law.fraction or 1
                    size = tuple(np.shape(value)[:2])
                    image_sizes = sizes_by_camera[channel.law.camera]
                    allowed = [
                        (-(-height // part), -(-width // part)) for width, height in image_sizes
                    ]
                    if allowed and size not in allowed:
                        raise SchemaError(
                            f"channel '{name}' has {list(size)} pixels (height, width); the stored "
                            f"images of '{channel.law.camera}' need "
                            f"{' or '.join(map(str, map(list, allowed)))}"
                        )
            except MemberError as error:
                raise type(error)(error.message, key=row.key, member=channel.field) from error
            encoded.append(RawMember(channel.field, channel.codec, data))
        file = io.BytesIO()
        packer = ShardPacker(
            file=file,
            number=0,
            level=DEFAULT_ZSTD_LEVEL,
            dictionary=None,
            buffer=self._buffer,
        )
        length = packer.add(
            row.key,
            clip_id=row.clip_id,
            frame=row.frame,
            timestamp_ns=row.timestamp_ns,
            members=encoded,
        )
        index_row = packer.close().rows[0]
        scalars = (values.get(name) for name in self._scalars)
        attributes = tuple(None if value is None else np.asarray(value).item() for value in scalars)
        span = file.getvalue()[:length]
        data = msgspec.msgpack.encode(SegmentRow(index_row, attributes, span))
        self._blobs[position] = Blob(position, data)
        self._held += len(data)
        if len(self._blobs) >= ROWS_PER_SEGMENT or self._held >= BYTES_PER_SEGMENT:
            self.flush()

    def flush(self) -> None:
        """Publish the rows that were taken since the last time.

        Raises DatasetError where another process has finished the layer without one of them.
        """
        if self._blobs:
            with self._out.writing(_REUSED), self._locked(fcntl.LOCK_SH):
                if not self.is_finished:
                    publish_segment(self._out, list(self._blobs.values()))
                elif (rows := read_rows(open_layer_data(self._out.location))) is not None:
                    lost = [
                        position for position in sorted(self._blobs) if rows[position] == NO_ROW
                    ]
                    if lost:
                        raise DatasetError(
                            f"layer '{self._out.shown}' was finished with partial=True "
                            "while this process held rows that it lacks, of positions "
                            f"{str(lost)[1:-1]:.100}: finish a layer after all writers"
                        )
        self._blobs.clear()
        self._held = 0

    def finish(self, *, partial: bool = False) -> LayerManifest:
        """Cut the published rows of all writers into shards; the layer can be opened afterwards.

        Done again, or by two processes at once, it does nothing more. Raises DatasetError where a
        sample has no row, unless ``partial`` allows it, and where one was written twice with
        different values.
        """
        self.flush()
        self._check_run()  # at a URL two first writers may not have seen each other
        with self._out.writing(_REUSED), self._locked():
            manifest = finish_layer(
                self._out,
                base=self._base,
                run=self._run,
                partial=partial,
            )
        self.is_finished = True
        return manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.flush()

    def _check_run(self) -> None:
        """Agree with the other writers of the folder on what is written."""
        stored_run = None
        if not self.is_finished:
            with self._out.writing(_REUSED), self._locked():
                remedy = "remove it, all writers make the same one"
                stored_run = read_json(self._out, _RUN_FILE, LayerRun, remedy)
                if stored_run is None and not self.is_finished:
                    with self._out.publish(_RUN_FILE) as file:
                        file.write(msgspec.json.encode(self._run))
                    return
        if stored_run is None:
            manifest: Any = open_layer_data(self._out.location).manifest
            recipe = {
                name: value for name, value in manifest.recipe.items() if name not in _OWN_RECIPE
            }
            zstd = manifest.recipe.get("zstd", "")
            stored_run = LayerRun(
                name=manifest.name,
                base=manifest.base,
                channels=manifest.channels,
                view=manifest.view,
                zstd=zstd,
                recipe=recipe,
            )
        if stored_run != self._run:
            stored_fields, current_fields = (
                {
                    **msgspec.to_builtins(run),
                    "channels": {
                        channel.name: msgspec.to_builtins(channel) for channel in run.channels
                    },
                }
                for run in (stored_run, self._run)
            )
            sides = (
                differences(stored_fields, current_fields, "there", "here")
                or "the order of its channels is another"
            )
            raise DatasetExistsError(
                f"'{self._out.shown}' holds another layer: {sides:.2000}; choose another folder"
            )

    @contextlib.contextmanager
    def _locked(self, how: int = fcntl.LOCK_EX) -> Iterator[None]:
        """Hold the lock of the folder, which ends with the process; ``is_finished`` is up to date
        inside.

        At a URL it is one of this machine's processes alone. Whatever another machine writes has
        the same bytes.
        """
        with contextlib.ExitStack() as stack:
            path = self._out.work / "lock"
            while True:
                try:
                    self._out.work.mkdir(parents=True, exist_ok=True)
                    file = stack.enter_context(os.fdopen(open_lock(path), "r+b"))
                except FileNotFoundError:  # the process that finishes the layer removes the folder
                    continue
                except PermissionError as error:
                    raise DatasetError(f"'{path}' cannot be used: {error.strerror}") from error
                except FileExistsError:  # as above, between two looks of mkdir
                    if self._out.work.exists():
                        raise
                    continue
                fcntl.flock(file, how)
                # The manifest is there before the lock's file is removed: a process that locks a
                # removed or a new file sees it.
                self.is_finished = self._out.size(MANIFEST_FILE) is not None
                if self.is_finished or os.fstat(file.fileno()).st_nlink:
                    break
            try:
                yield
            finally:
                if self.is_finished:  # the folder may have been made again for this lock
                    self._out.remove_work()
