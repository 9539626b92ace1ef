"""Sample number to sample: the span from storage, checked, and its members parsed; images stay
encoded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fuelrail.loaders.storage import open_storage
from fuelrail.loaders.storage.layers import LayeredStorage
from fuelrail.pipeline.channels.laws import LAWS
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import OrderError, SchemaError
from fuelrail.pipeline.format.dataset import Dataset, read_members
from fuelrail.pipeline.format.rules import Rig, check_arrays
from fuelrail.pipeline.format.zstd_frames import is_framed
from fuelrail.pipeline.sample.schema import (
    GEOMETRY,
    META,
    SWEEPS_FIELD,
    Sample,
    decode_sample,
    lidar_channel,
)

if TYPE_CHECKING:
    from fuelrail.loaders.storage.protocol import LayeredSpan
    from fuelrail.pipeline.channels.kinds import Value
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.index.row import IndexRow


class FetchedSpan(NamedTuple):
    """A sample's index row and its bytes as stored."""

    row: IndexRow
    span: LayeredSpan


class SampleReader:
    """Reads single samples of an open dataset, by row of its index. Thread-safe.

    ``storage`` None: the one that fits the place of the dataset, which checks every span against
    its xxh3 digest. Without ``points`` lidar members are not decoded, without ``sweeps`` not those
    of earlier sweeps; and with neither that nor ``extra`` are user members. Of further channels
    only ``channels``, entries of the dataset's table or of layers that ``storage`` has, are read;
    they stay raw, in ``Sample.extra``. ``cameras`` are the cameras whose images are read, and of
    which samples are; None: all. ``batch_names`` are other names for them, in whose order they come.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        storage: LayeredStorage | None = None,
        points: bool = True,
        sweeps: bool = True,
        extra: bool = True,
        channels: Sequence[Channel] = (),
        cameras: Sequence[str] | None = None,
        batch_names: Sequence[str] | None = None,
    ) -> None:
        self._dataset = dataset
        self.storage = LayeredStorage(open_storage(dataset)) if storage is None else storage
        rig = Rig.from_manifest(dataset.manifest)
        self.cameras = [camera for camera in rig.cameras if cameras is None or camera in cameras]
        if batch_names is not None:
            self.cameras = list(cameras or ())
        self.batch_names = list(batch_names or self.cameras)
        """The names of the cameras in a batch."""
        self.camera_rows = tuple(map(rig.cameras.index, self.cameras))
        """Rows of the cameras in the dataset's rig."""
        self._num_cameras = len(rig.cameras)
        self._rig = rig._replace(cameras=tuple(self.cameras))
        self.lidars = [lidar.channel for lidar in dataset.manifest.lidars]
        self.channels = tuple(channels)
        self.moving = tuple(channel for channel in channels if LAWS[channel.law.name].moves)
        """Those whose values follow the augmentation."""
        self._fields = frozenset(channel.field for channel in channels)
        self.needs_lidar = False
        """Whether a sample is bad where the first lidar has no pose."""
        self.num_frames: int | None = None
        """How many of the rows that are read for a sample are its frames; None: all of them."""
        self.timed: tuple[Channel, ...] = ()
        """The channels that are read of the other rows, at times of their own."""
        other_cameras = {*rig.cameras} - {*self.cameras}
        names_read = set()
        for name in dataset.index.names:
            is_selected = name in self._fields
            is_read = name.partition(".")[0] not in other_cameras
            if name in rig.fields:
                is_read = is_selected
            if lidar_channel(name) in self.lidars:
                is_read &= points or is_selected
            if name.endswith(SWEEPS_FIELD):
                is_read &= sweeps
            if name.startswith("x_"):
                is_read &= extra
            if is_read:
                names_read.add(name)
        self._wanted = frozenset(names_read)
        self._left_out: frozenset[str] = frozenset()
        if not self.storage.needs_whole_spans:
            self._left_out = frozenset(dataset.index.names) - self._wanted

    def fetch(self, index: int) -> FetchedSpan:
        """Return a sample's stored bytes; raises OrderError outside the dataset, ShardError for
        bad bytes.
        """
        row = self.row(index)
        return FetchedSpan(row, self.storage.span(index, row))

    def row(self, index: int) -> IndexRow:
        """Return the row of the index for the part of a sample that is read; raise OrderError
        outside the dataset.

        Lidars and channels that are not selected are not in it: its span ends with the last member
        that may be read.
        """
        row = self._dataset.index.row(index)
        if not self._left_out or is_framed(self._dataset.shards.name_of(row)):
            return row
        return row.without(self._left_out)

    def rows(self, indices: Sequence[int]) -> tuple[IndexRow, ...]:
        """Return the rows of the index for all that is read for a sample; raise OrderError outside
        the dataset.

        Of those behind its frames they are of the members of ``timed`` alone, where a part of a
        span can be read.
        """
        num_frames = len(indices) if self.num_frames is None else self.num_frames
        frames = dict.fromkeys(indices[:num_frames])
        rows_by_index = {index: self.row(index) for index in frames}
        fields = {channel.field for channel in self.timed}
        for index in indices[num_frames:]:
            if index in rows_by_index:
                continue
            row = self._dataset.index.row(index)
            is_whole = self.storage.needs_whole_spans or is_framed(
                self._dataset.shards.name_of(row)
            )
            if not is_whole:
                part = row.only(fields)
                row = row.only((META,)) if part is row else part
            rows_by_index[index] = row
        return tuple([rows_by_index[index] for index in indices])

    def values(self, fetched: FetchedSpan) -> dict[str, Value | None]:
        """Return the values of ``timed`` of a sample by name, None for one that it lacks; raises
        MemberError.
        """
        fields = {channel.field for channel in self.timed}
        if not fields:
            return {}
        members = self._members(fetched, fields)
        return decode_values(members, self.timed, fetched.row.key)

    def _members(self, fetched: FetchedSpan, fields: Collection[str]) -> dict[str, memoryview]:
        """Return raw members by field name, those of layers too."""
        row = fetched.row
        span, layers = fetched.span
        members = read_members(
            row,
            span,
            self._dataset.shards.name_of(row),
            fields,
            dictionary=self._dataset.dictionary,
        )
        for part, stored in zip(self.storage.parts, layers, strict=True):
            if stored is not None:
                members |= part.members(stored)
        return members

    def parse(self, fetched: FetchedSpan) -> Sample:
        """Decode all members but images; raises MemberError with key and member.

        A sample that breaks a rule on arrays (:mod:`fuelrail.pipeline.format.rules`) is a
        SchemaError: a blank image must never pass for a valid one, nor a label for one of the
        classes that it is not.
        """
        row = fetched.row
        members = self._members(fetched, self._wanted)
        sample = decode_sample(row.key, members, self._fields)
        if self.camera_rows != tuple(range(self._num_cameras)):
            sample = sample.of_cameras(self.camera_rows, self._num_cameras)
        check_arrays(sample, self._rig)
        if self.batch_names != self.cameras:
            pairs = zip(self.cameras, self.batch_names, strict=True)
            images = {
                name: sample.images[stored_name]
                for stored_name, name in pairs
                if stored_name in sample.images
            }
            sample = dataclasses.replace(sample, images=images)
        if self.needs_lidar and not np.isfinite(sample.geometry.lidar2keyego()).all():
            raise SchemaError(
                (
                    "the first lidar has no sweep, so boxes cannot be in its frame; use "
                    "box_frame='ego'"
                ),
                key=row.key,
                member=GEOMETRY,
            )
        return sample

    def sample(self, index: int) -> Sample:
        """Return one whole sample; images are views of its bytes."""
        return self.parse(self.fetch(index))

    def find(self, key: str) -> int:
        """Return the row of the sample with this key; raise OrderError where there is none."""
        index = self._dataset.find(key)
        if index is None:
            hint = (
                f"the first of its {len(self._dataset.index)} is '{self._dataset.index.row(0).key}'"
            )
            raise OrderError(f"dataset '{self._dataset.root}' has no sample '{key}'; {hint}")
        return index
