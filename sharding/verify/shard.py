"""The check of one shard: its digest, its tar structure, its samples' digests, and what it says
against the index.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pyarrow as pa

from fuelrail.pipeline.channels.kinds import KINDS
from fuelrail.pipeline.channels.selection import check_members
from fuelrail.pipeline.channels.table import Law
from fuelrail.pipeline.errors import (
    FrameError,
    FuelrailError,
    IndexFileError,
    ShardError,
)
from fuelrail.pipeline.format.codecs import suffix
from fuelrail.pipeline.format.dataset import (
    Dataset,
    check_digests,
    check_span,
    read_members,
)
from fuelrail.pipeline.format.index.attributes_file import ATTRIBUTES_FILE
from fuelrail.pipeline.format.index.row import IndexRow
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.layers import LayerManifest
from fuelrail.pipeline.format.rules import Rig, broken_rules, unsafe_ending
from fuelrail.pipeline.format.tar import (
    END_OF_ARCHIVE,
    FoundMember,
    check_key,
    iter_members,
)
from fuelrail.pipeline.format.zstd_frames import (
    Frame,
    decode_frame,
    is_framed,
    open_span,
    read_seek_table,
    span_bytes,
)
from fuelrail.pipeline.runtime.workers import one_at_a_time
from fuelrail.pipeline.sample.schema import (
    IMAGE_EXTENSIONS,
    META,
    decode_sample,
)
from fuelrail.pipeline.storage.files import open_file, read_file
from fuelrail.pipeline.text import repeated_key, shortened
from fuelrail.sharding.sources.shared.pictures import check_pixels
from fuelrail.sharding.write.layers.finish import scalar_channels
from fuelrail.sharding.write.packer import dali_index

if TYPE_CHECKING:
    from fuelrail.pipeline.format.index.shards import ShardEntry
    from fuelrail.pipeline.format.manifest import Manifest


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong: in which file, at which offset [bytes] and in which sample, where
    that is known.
    """

    file: str
    text: str
    offset: int | None = None
    key: str | None = None


class ShardCheck:
    """The check of one plain tar; ``dataset`` is None where the index cannot be read."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        shard: tuple[int, ShardEntry],
        dataset: Dataset | None,
        *,
        deep: bool,
    ) -> None:
        self.number, self.shard = shard
        self.num_samples = self.num_images = 0
        self.faults: list[Fault] = []
        self._folder = folder
        self._dataset = dataset
        self._deep = deep
        self._manifest = manifest
        self._rig = Rig.from_manifest(manifest)
        self.sizes: dict[str, set[tuple[int, int]]] = {
            camera.channel: set() for camera in manifest.cameras
        }
        """The sizes (w, h) [px] of the images that were decoded, by camera."""
        self._unsafe: set[str] = set()

    def run(self) -> ShardCheck:
        """Check the file; returns itself."""
        shard = self.shard
        try:
            with open_file(self._folder / shard.name) as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except ValueError:  # how mmap says it
            self._fault(f"is empty, the manifest says {shard.bytes} bytes")
        except OSError as error:
            self._fault(f"cannot be read: {error.strerror}")
        else:
            self._check(shard, view)
        return self

    def _fault(
        self,
        text: str,
        offset: int | None = None,
        key: str | None = None,
    ) -> None:
        self.faults.append(
            Fault(
                file=self.shard.name,
                text=text,
                offset=offset,
                key=key,
            )
        )

    def _check(self, shard: ShardEntry, view: memoryview) -> None:
        self._check_file(shard, view)
        members: dict[int, FoundMember] = {}
        readable = len(view)
        try:
            for member in iter_members(view, shard=shard.name):
                members[member.offset] = member
        except ShardError as error:
            self._fault(error.message, error.offset, error.key)
            readable = error.offset or 0
        if self._dataset is None:
            return
        position = 0
        rows = list[IndexRow]()
        for row in self._rows(self._dataset):
            if not self._continues(row, position):
                return
            rows.append(row)
            span = view[position : position + row.length]
            self._check_members(row, members, readable)
            if self._is_intact(row, span):
                self._check_content(row, span)
            position += row.length
            self.num_samples += 1
        if position + len(END_OF_ARCHIVE) != shard.bytes:
            self._fault(f"the index covers {position} bytes of {shard.bytes}", position)
        for member in members.values():
            self._fault(
                f"member '{member.name}' is not in the index",
                member.header_offset,
            )
        name = shard.idx_name
        text = dali_index(rows)
        with contextlib.suppress(OSError):  # reported already, with the other files
            if not self.faults and read_file(self._folder / name, len(text)) != text:
                self.faults.append(Fault(name, f"does not list the members of {shard.name}"))

    def _check_file(self, shard: ShardEntry, view: memoryview) -> None:
        if len(view) != shard.bytes:
            self._fault(f"has {len(view)} bytes, the manifest says {shard.bytes}")
        elif hashlib.sha256(view).hexdigest() != shard.sha256:
            self._fault("SHA-256 does not match the manifest")

    def _continues(self, row: IndexRow, position: int) -> bool:
        """Return whether a row's span begins where the one before ends."""
        if row.shard == self.number and row.offset == position:
            return True
        text = (
            f"the index has it in shard number {row.shard} at {row.offset}, not in "
            f"{self.number} at {position}"
        )
        self._fault(text, position, row.key)
        return False

    def _rows(self, dataset: Dataset) -> Iterator[IndexRow]:
        first = self.shard.first_sample
        for row in range(first, first + self.shard.num_samples):
            try:
                yield dataset.index.row(row)
            except IndexFileError as error:
                self.faults.append(Fault(INDEX_FILE, str(error)))
                return

    def _check_members(
        self,
        row: IndexRow,
        members: dict[int, FoundMember],
        readable: int,
    ) -> None:
        for entry in row.members:
            text = None if entry.name in self._unsafe else unsafe_ending(entry.name)
            if text is not None:
                self._unsafe.add(entry.name)  # reported once a shard
                self._fault(f"member '{entry.name}': {text}", row.offset, row.key)
            offset = row.offset + entry.offset
            name = f"{row.key}.{entry.name}{suffix(entry.codec)}"
            member = members.pop(offset, None)
            if offset < readable and (
                member is None or (member.name, member.length) != (name, entry.stored_bytes)
            ):
                actual = (
                    "nothing" if member is None else f"'{member.name}' of {member.length} bytes"
                )
                text = (
                    f"the index says '{name}' of {entry.stored_bytes} bytes at {offset}; the "
                    f"tar has {actual} there"
                )
                self._fault(text, row.offset, row.key)

    def _is_intact(self, row: IndexRow, span: memoryview) -> bool:
        try:
            check_span(row, span, self.shard.name)
        except ShardError as error:
            self._fault(error.message, row.offset, row.key)
            return False
        return True

    def _check_content(self, row: IndexRow, span: memoryview) -> None:
        if not self._deep:
            return
        _, _, stored_bytes, raw_bytes = row.columns()
        with one_at_a_time(sum(stored_bytes) + sum(raw_bytes)):
            try:
                check_key(row.key)
                dictionary = None if self._dataset is None else self._dataset.dictionary
                name = self.shard.name
                check_digests(
                    row,
                    open_span(row, span, name) if is_framed(name) else span,
                    name,
                )
                members = read_members(row, span, name, dictionary=dictionary)
                if isinstance(self._manifest, LayerManifest):
                    self._check_layer(row, members)
                    return
                sample = decode_sample(row.key, members, self._rig.fields)
                meta = sample.meta
                twice = repeated_key(bytes(members[META]), meta)
                if twice is not None:
                    self._fault(
                        f"member '{META}': the key '{shortened(twice)}' occurs twice in an object",
                        row.offset,
                        row.key,
                    )
                for field, stated, expected in (
                    ("key", meta.key, row.key),
                    ("clip_id", meta.clip_id, row.clip_id),
                    ("frame_idx", meta.frame_idx, row.frame),
                    ("timestamp_ns", meta.timestamp_ns, row.timestamp_ns),
                    ("split", meta.split, self.shard.split),
                    ("dataset", meta.dataset, self._manifest.name),
                ):
                    if stated != expected:
                        self._fault(
                            f"meta.json has the {field} {stated!r}, index and manifest have "
                            f"{expected!r}",
                            row.offset,
                            row.key,
                        )
                for member, text in broken_rules(
                    sample, [entry.name for entry in row.members], self._rig
                ):
                    self._fault(f"member '{member}': {text}", row.offset, row.key)
                sizes = {
                    name: (camera.width, camera.height)
                    for name, camera in meta.cameras.items()
                    if name in sample.images
                }
                for member, text in check_members(
                    members,
                    self._manifest.extra_channels,
                    sizes,
                    deep=True,
                ):
                    self._fault(f"member '{member}': {text}", row.offset, row.key)
                for entry in row.members:
                    channel, _, extension = entry.name.partition(".")
                    if extension in IMAGE_EXTENSIONS and entry.name not in self._rig.fields:
                        camera = meta.cameras.get(channel)
                        size = None if camera is None else (camera.width, camera.height)
                        check_pixels(
                            members[entry.name],
                            extension,
                            size,
                            key=row.key,
                            member=entry.name,
                        )
                        self.num_images += 1
                        if size is not None and channel in self.sizes:
                            self.sizes[channel].add(size)
            except FuelrailError as error:
                self._fault(str(error), row.offset, row.key)

    @cached_property
    def _stated(self) -> pa.Table:
        """The columns of ``attributes.parquet`` that repeat members, of the shard's rows; those
        that there are.
        """
        assert self._dataset is not None
        file = self._dataset.attributes_file()
        first = self.shard.first_sample
        try:
            names_known = file.schema(len(self._dataset.index)).names if file.exists else []
        except IndexFileError:  # a fault of that file, which is reported once, not for each sample
            return pa.table({})
        names = [name for name in scalar_channels(self._manifest.channels) if name in names_known]
        if not names:
            return pa.table({})
        return pa.Table.from_batches(
            file.batches(names, range(first, first + self.shard.num_samples))
        )

    def _check_layer(self, row: IndexRow, members: Mapping[str, memoryview]) -> None:
        """Check the members of a layer's row against its table; the stored images are those of
        the base.
        """
        fixed = [
            msgspec.structs.replace(channel_entry, law=Law("fixed"))
            for channel_entry in self._manifest.channels
        ]
        for member, text in check_members(members, fixed, {}, deep=True):
            self._fault(f"member '{member}': {text}", row.offset, row.key)
        number = self.num_samples
        for channel in fixed:
            if channel.name in self._stated.column_names:
                data = members.get(channel.field)
                value = None
                if data is not None:
                    value = KINDS[channel.kind].decode(data, channel).item()
                stated = self._stated[channel.name][number].as_py()
                if stated != value and not (stated != stated and value != value):
                    text = (
                        f"row {number} has the {channel.name} {shortened(stated)}, "
                        f"{channel.field} has {shortened(value)}"
                    )
                    self.faults.append(Fault(ATTRIBUTES_FILE, text, key=row.key))
        fields = {channel_entry.field for channel_entry in fixed}
        for member in members:
            if member not in fields:
                self._fault(
                    f"member '{member}': the table has no such channel",
                    row.offset,
                    row.key,
                )


class _FramedCheck(ShardCheck):
    """The check of one shard in the frame layout: the same, frame by frame, and the seek table."""

    def _check(self, shard: ShardEntry, view: memoryview) -> None:
        self._check_file(shard, view)
        table: list[Frame] | None = None
        try:
            table = read_seek_table(view, shard=shard.name)
        except ShardError as error:
            self._fault(error.message, error.offset)
        if self._dataset is None:
            for frame in (table or [])[:-1]:
                self._read_members(
                    view[frame.offset : frame.offset + frame.stored_bytes],
                    frame,
                )
            return
        position = 0
        for number, row in enumerate(self._rows(self._dataset)):
            if not self._continues(row, position):
                return
            stored = view[position : position + row.length]
            frame = Frame(row.offset, row.length, span_bytes(row))
            if table is not None and (number >= len(table) or table[number] != frame):
                text = f"{table[number]}" if number < len(table) else "no such frame"
                self._fault(
                    f"the index has {frame}, the seek table {text}",
                    position,
                    row.key,
                )
            if self._is_intact(row, stored):
                with one_at_a_time(frame.raw_bytes):
                    members = self._read_members(stored, frame, row.key)
                if members is not None:
                    by_offset = {row.offset + member.offset: member for member in members}
                    self._check_members(row, by_offset, row.offset + frame.raw_bytes)
                    for member in by_offset.values():
                        self._fault(
                            f"member '{member.name}' is not in the index",
                            position,
                            row.key,
                        )
                    self._check_content(row, stored)
            position += row.length
            self.num_samples += 1
        if table is None:
            return
        last = table[-1] if table else Frame(0, 0, 0)
        table_end = (last.offset, last.raw_bytes)
        if table_end != (position, len(END_OF_ARCHIVE)):
            self._fault(
                f"the index covers {position} bytes of frames, the archive's end is at "
                f"{last.offset}",
                position,
            )
            return
        try:
            end = decode_frame(
                view[position : position + last.stored_bytes],
                last.raw_bytes,
                shard=self.shard.name,
                offset=position,
            )
        except ShardError as error:
            self._fault(error.message, error.offset)
            return
        if end != END_OF_ARCHIVE:
            self._fault("the last frame is not the end of the archive", position)

    def _read_members(
        self,
        stored: memoryview,
        frame: Frame,
        key: str | None = None,
    ) -> list[FoundMember] | None:
        """Return the members in a frame; None where it cannot be decoded."""
        try:
            raw = decode_frame(
                stored,
                frame.raw_bytes,
                shard=self.shard.name,
                offset=frame.offset,
                key=key,
            )
            return list(iter_members(raw, shard=self.shard.name, closed=False))
        except FrameError as error:
            self._fault(error.message, error.offset, key)
        except ShardError as error:
            self._fault(
                f"{error.message}, {error.offset} bytes into the decoded frame",
                frame.offset,
                key,
            )
        return None


def make_check(
    folder: Path,
    manifest: Manifest,
    shard: tuple[int, ShardEntry],
    dataset: Dataset | None,
    *,
    deep: bool,
) -> ShardCheck:
    """Return the check that fits a shard, which is given with its number."""
    check = _FramedCheck if is_framed(shard[1].name) else ShardCheck
    return check(folder, manifest, shard, dataset, deep=deep)
