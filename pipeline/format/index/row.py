"""A row of the index: one sample, the place of its span, and its members. Read in columns, which cost least."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, overload

from fuelrail.pipeline.format.codecs import suffix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class MemberEntry(NamedTuple):
    """One member of a sample: field name without codec suffix, its data's offset in the span, sizes [bytes], codec."""

    name: str
    offset: int
    stored_bytes: int
    raw_bytes: int
    codec: str


class MemberKinds(NamedTuple):
    """Names and codecs of a sample's members, and both as one: the fields by which they are stored in the shard."""

    names: tuple[str, ...]
    codecs: tuple[str, ...]
    fields: tuple[str, ...]


class MemberColumns(NamedTuple):
    """A sample's members column by column, all of one length."""

    kinds: MemberKinds
    offsets: Sequence[int]
    stored_bytes: Sequence[int]
    raw_bytes: Sequence[int]


class Members(Sequence[MemberEntry]):
    """A sample's members, read from the mapped index each time they are asked for. Equal to a tuple of them.

    A mapped file must not be cut: a new index is published by a rename.
    """

    __slots__ = ("_end", "_first", "_read")

    def __init__(self, read: Callable[[int, int], MemberColumns], first: int, end: int) -> None:
        """``read`` gives the columns of the entries ``first`` to ``end - 1``."""
        self._read, self._first, self._end = read, first, end

    def columns(self) -> MemberColumns:
        """All entries, as columns."""
        return self._read(self._first, self._end)

    def _entries(self) -> tuple[MemberEntry, ...]:
        (names, codecs, _), offsets, stored_bytes, raw_bytes = self.columns()
        return tuple(map(MemberEntry, names, offsets, stored_bytes, raw_bytes, codecs))

    def __len__(self) -> int:
        return self._end - self._first

    @overload
    def __getitem__(self, at: int) -> MemberEntry: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[MemberEntry, ...]: ...
    def __getitem__(self, at: int | slice) -> MemberEntry | tuple[MemberEntry, ...]:
        return self._entries()[at]

    def __iter__(self) -> Iterator[MemberEntry]:
        return iter(self._entries())

    def __eq__(self, other: object) -> bool:
        return self._entries() == tuple(other) if isinstance(other, (Members, tuple)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._entries())

    def __repr__(self) -> str:
        return repr(self._entries())

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return tuple, (self._entries(),)  # what it reads from stays where it is


class IndexRow(NamedTuple):
    """One sample: identity, and its span in shard number ``shard`` (manifest order), with the span's xxh3-64."""

    key: str
    clip_id: str
    frame: int
    timestamp_ns: int
    shard: int
    offset: int
    length: int
    xxh3: int
    members: Sequence[MemberEntry]

    def columns(self) -> MemberColumns:
        """The members, column by column."""
        if isinstance(self.members, Members):
            return self.members.columns()
        names, offsets, stored_bytes, raw_bytes, codecs = zip(*self.members, strict=True) if self.members else ((),) * 5
        return MemberColumns(member_kinds(names, codecs), offsets, stored_bytes, raw_bytes)


@lru_cache(maxsize=1024)
def member_kinds(names: tuple[str, ...], codecs: tuple[str, ...]) -> MemberKinds:
    """Of a list of members, with their fields; hardly any two samples of a dataset have different ones."""
    return MemberKinds(names, codecs, tuple([name + suffix(codec) for name, codec in zip(names, codecs, strict=True)]))
