"""A row of the index: one sample, the place of its span, and its members.

Read in columns, which cost least.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, overload

from fuelrail.pipeline.format.codecs import suffix
from fuelrail.pipeline.format.tar import BLOCK_BYTES


class MemberEntry(NamedTuple):
    """One member of a sample: field name without codec suffix, its data's offset in the span, sizes
    [bytes], codec.

    ``xxh3`` is the xxh3-64 of its stored bytes: a part of a span is checked by it.
    """

    name: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str
    xxh3: int


class MemberKinds(NamedTuple):
    """Names and codecs of a sample's members, and both as one: the fields by which they are
    stored in the shard.
    """

    names: tuple[str, ...]
    codecs: tuple[str, ...]
    fields: tuple[str, ...]


class MemberColumns(NamedTuple):
    """A sample's members column by column, all of one length."""

    kinds: MemberKinds
    offsets: Sequence[int]
    stored_bytes: Sequence[int]
    raw_bytes: Sequence[int]


class MemberParts:
    """The members of all samples of a part of the index, one after the other, in columns as they
    are stored.
    """

    def __init__(
        self,
        columns: tuple[memoryview, ...],
        kinds: Callable[[bytes, bytes], MemberKinds],
    ) -> None:
        """Take numbers of names and codecs, which ``kinds`` knows, offsets, stored and raw
        bytes, and digests.
        """
        self.columns = columns
        self._kinds = kinds

    def __call__(self, first: int, end: int) -> MemberColumns:
        """Return the entries ``first`` to ``end - 1``, column by column."""
        name, codec, offset, stored, raw, _ = self.columns
        names = name[first:end].tobytes()
        codecs = codec[first:end].tobytes()
        return MemberColumns(
            self._kinds(names, codecs),
            offset[first:end].tolist(),
            stored[first:end].tolist(),
            raw[first:end].tolist(),
        )


class Members(Sequence[MemberEntry]):
    """A sample's members, read from the mapped index each time they are asked for.

    Equal to a tuple of them.

    A mapped file must not be cut: a new index is published by a rename.
    """

    __slots__ = ("_end", "_first", "_read")

    def __init__(self, read: MemberParts, first: int, end: int) -> None:
        """Take entries ``first`` to ``end - 1`` of ``read``."""
        self._read = read
        self._first = first
        self._end = end

    def columns(self) -> MemberColumns:
        """Return all entries, as columns."""
        return self._read(self._first, self._end)

    def _entries(self) -> tuple[MemberEntry, ...]:
        kinds, offsets, stored_bytes, raw_bytes = self.columns()
        digests = self._read.columns[-1][self._first : self._end]
        columns = (
            kinds.names,
            offsets,
            stored_bytes,
            raw_bytes,
            kinds.codecs,
            digests,
        )
        return tuple(map(MemberEntry, *columns))

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, index: int) -> MemberEntry: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[MemberEntry, ...]: ...
    def __getitem__(self, index: int | slice) -> MemberEntry | tuple[MemberEntry, ...]:
        return self._entries()[index]

    def __iter__(self) -> Iterator[MemberEntry]:
        return iter(self._entries())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Members, tuple)):
            return self._entries() == tuple(other)
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._entries())

    def __repr__(self) -> str:
        return repr(self._entries())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return tuple, (self._entries(),)  # what it reads from stays where it is


class IndexRow(NamedTuple):
    """One sample: identity, and its span in shard number ``shard`` (manifest order), with the
    span's xxh3-64.
    """

    key: str
    clip_id: str
    frame: int
    timestamp_ns: int
    shard: int
    offset: int
    length: int
    xxh3: int
    members: Sequence[MemberEntry]
    is_part: bool = False
    """Whether ``length`` and ``members`` are those of a part of the span, whose members are
    checked one by one.
    """

    def columns(self) -> MemberColumns:
        """Return the members, column by column."""
        if isinstance(self.members, Members):
            return self.members.columns()
        columns = zip(*self.members, strict=True) if self.members else ((),) * 6
        names, offsets, stored_bytes, raw_bytes, codecs, _ = columns
        return MemberColumns(
            member_kinds(names, codecs),
            offsets,
            stored_bytes,
            raw_bytes,
        )

    def without(self, names: Collection[str]) -> IndexRow:
        """Return the row of the beginning of the span, up to the last member that is not one of
        ``names``.

        Members of these names are not in it. Without any of them it is the row itself.
        """
        entries = tuple([entry for entry in self.members if entry.name not in names])
        if not entries or len(entries) == len(self.members):
            return self
        end = max([entry.offset + entry.stored_bytes for entry in entries])
        length = end + -end % BLOCK_BYTES
        if not 0 < length <= self.length:
            return self  # a damaged entry, which is reported when the whole span is read
        return self._replace(length=length, members=entries, is_part=True)

    def only(self, names: Collection[str]) -> IndexRow:
        """Return the row of the part of the span from the first to the last member of these names,
        with these alone.

        It is the row itself where none is there, or an entry is damaged.
        """
        entries = [entry for entry in self.members if entry.name in names]
        if not entries:
            return self
        start = min([entry.offset for entry in entries]) - BLOCK_BYTES
        end = max([entry.offset + entry.stored_bytes for entry in entries])
        if not 0 <= start < end <= self.length:
            return self
        members = [entry._replace(offset=entry.offset - start) for entry in entries]
        return self._replace(
            offset=self.offset + start,
            length=end - start,
            members=tuple(members),
            is_part=True,
        )


@lru_cache(maxsize=1024)
def member_kinds(names: tuple[str, ...], codecs: tuple[str, ...]) -> MemberKinds:
    """Return kinds of a list of members, with their fields; rarely do two samples of a dataset
    have different ones.
    """
    fields = [name + suffix(codec) for name, codec in zip(names, codecs, strict=True)]
    return MemberKinds(names, codecs, tuple(fields))
