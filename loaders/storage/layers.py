"""A dataset and its layers as one storage: a sample's span is whole when those of its layers are.

Requests, cache, retries and the replacement of bad samples see one storage, whose spans are `LayeredSpan`. Each layer
has a backend of its own, which fits the place of the layer. Requests to it are numbered by its own rows; the future
uses of the base, by which a cache evicts, are translated.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.storage.cache.future_uses import FutureUses, RequestNumbers
from fuelrail.loaders.storage.protocol import (
    LayeredSpan,
    PendingSample,
    PendingSpan,
    SampleStorage,
    Session,
    Span,
    Storage,
    StorageStats,
    StoredRow,
    add_stats,
)
from fuelrail.pipeline.errors import FuelrailError, IndexFileError, MemberError, OrderError, ShardError
from fuelrail.pipeline.format.dataset import Dataset, read_members
from fuelrail.pipeline.format.layers import NO_ROW, Layer

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.index.row import IndexRow


class LayerPart(NamedTuple):
    """A layer that is read: its storage, and the field names that are decoded, as the layer stores them."""

    layer: Layer
    storage: Storage
    fields: Collection[str]

    def row_of(self, position: int, key: str) -> tuple[int, IndexRow] | None:
        """The layer's row of a sample of the base, None where it has none.

        Raises OrderError where it must have one, IndexFileError where the row has another key.
        """
        number = self.layer.row(position)
        if number == NO_ROW:
            if self.layer.missing == "error":
                raise OrderError(
                    f"layer '{self.layer.name}' has no value for sample '{key}'; "
                    "LayerOptions(missing='mask') marks it in the batch"
                )
            return None
        row = self.layer.data.index.row(number)
        if row.key != key:
            raise IndexFileError(
                f"layer '{self.layer.name}' ('{self.layer.data.location}') has the key '{row.key}' for sample '{key}' "
                "of its base: verify the layer"
            )
        return number, row

    def members(self, stored: StoredRow) -> dict[str, memoryview]:
        """The raw members of a stored row, by the names that a loader has for them.

        Raises MemberError and IndexFileError, with the layer's name.
        """
        data = self.layer.data
        shard = data.shards.name_of(stored.row)
        try:
            found = read_members(stored.row, stored.span, shard, self.fields, dictionary=data.dictionary)
        except MemberError as error:
            message = f"layer '{self.layer.name}': {error.message}"
            raise type(error)(message, key=error.key, member=error.member) from error
        except IndexFileError as error:
            raise IndexFileError(f"layer '{self.layer.name}' ('{data.location}'): {error}") from error
        return {f"{self.layer.name}.{field}": content for field, content in found.items()}

    def named(self, read: PendingSpan) -> memoryview:
        """What ``read`` returns; an error of a shard says which layer's shard it is."""
        try:
            return read()
        except ShardError as error:
            message = f"layer '{self.layer.name}': {error.message}"
            raise type(error)(message, shard=error.shard, offset=error.offset, key=error.key) from error


def with_layers(
    base: Storage, layers: Sequence[Layer], channels: Sequence[Channel], open_storage: Callable[[Dataset], Storage]
) -> SampleStorage:
    """Return the storage of a dataset with those of its layers of which channels are selected; none: the base's own."""
    chosen = {channel.name for channel in channels}
    parts = []
    for layer in layers:
        both = zip(layer.manifest.channels, layer.channels, strict=True)
        fields = [own.field for own, joined in both if joined.name in chosen]
        if fields:
            parts.append(LayerPart(layer, open_storage(layer.data), frozenset(fields)))
    return LayeredStorage(base, parts) if parts else base


class LayeredStorage:
    """The storage of a dataset with layers. Safe to use from many threads."""

    def __init__(self, base: Storage, parts: Sequence[LayerPart]) -> None:
        self._base, self.parts = base, tuple(parts)
        self.look_ahead_bytes, self.needs_whole_spans = base.look_ahead_bytes, base.needs_whole_spans

    def span(self, index: int, row: IndexRow) -> Span:
        """One sample's bytes and those of its layers, now. Raises ShardError with shard, offset and key."""
        base = self._base.span(index, row)
        layers = []
        for part in self.parts:
            found = part.row_of(index, row.key)
            read = None if found is None else partial(part.storage.span, *found)
            layers.append(None if found is None or read is None else StoredRow(found[1], part.named(read)))
        return LayeredSpan(base, tuple(layers))

    def num_bytes(self, index: int) -> int:
        """The bytes that layers add to the span of a sample."""
        numbers = [(part, part.layer.row(index)) for part in self.parts]
        return sum([part.layer.data.index.place(number)[2] for part, number in numbers if number != NO_ROW])

    def recheck(self, indices: Sequence[int]) -> None:
        """Raise ShardError where what was made of spans may not have been made of the bytes that were checked."""
        self._base.recheck(indices)
        for part in self.parts:
            part.storage.recheck([number for number in map(part.layer.row, indices) if number != NO_ROW])

    def session(self, future_uses: FutureUses | None = None, uses_per_step: int = 0) -> _LayeredSession:
        """Start a stream of requests to the base and to all layers."""
        base = self._base.session(future_uses, uses_per_step)
        return _LayeredSession(base, [_PartSession(part, future_uses, uses_per_step) for part in self.parts])

    def stats(self) -> StorageStats:
        """Return the counters of the base and of all layers together."""
        return add_stats([self._base.stats(), *(part.storage.stats() for part in self.parts)])

    def close(self) -> None:
        """Let go of files, connections and threads of the base and of all layers."""
        self._base.close()
        for part in self.parts:
            part.storage.close()


class _PartSession:
    """The requests to one layer."""

    def __init__(self, part: LayerPart, future_uses: FutureUses | None, uses_per_step: int) -> None:
        self.part = part
        # A complete layer is asked whenever the base is.
        self._numbers = None if future_uses is None or part.layer.is_complete else RequestNumbers()
        uses = None if future_uses is None else future_uses.of_other_rows(part.layer.rows_at, self._numbers)
        self.session = part.storage.session(uses, uses_per_step)

    def request(self, rows: Sequence[tuple[int, IndexRow]], first: int) -> list[_Asked]:
        """Ask for the rows of these samples; ``first`` is the number of the first among the base's requests."""
        found: list[tuple[int, IndexRow] | FuelrailError | None] = []
        for number, (index, row) in enumerate(rows):
            try:
                found.append(own := self.part.row_of(index, row.key))
            except FuelrailError as error:  # raised at its turn, so that the outcome does not depend on the look-ahead
                found.append(error)
                continue
            if own is not None and self._numbers is not None:
                self._numbers.note(first + number)
        pending = iter(self.session.request([own for own in found if isinstance(own, tuple)]))
        return [
            _Asked(self.part, own[1], next(pending)) if isinstance(own, tuple) else _Asked(self.part, None, None, own)
            for own in found
        ]


class _Asked(NamedTuple):
    """What was asked of a layer for one sample: a row and what waits for it; nothing; or an error to raise."""

    part: LayerPart
    row: IndexRow | None
    pending: PendingSpan | None
    error: FuelrailError | None = None

    def take(self) -> StoredRow | None:
        if self.error is not None:
            raise self.error
        if self.row is None or self.pending is None:
            return None
        return StoredRow(self.row, self.part.named(self.pending))


class _LayeredSession:
    """One iteration's requests to a base and its layers."""

    def __init__(self, base: Session, parts: Sequence[_PartSession]) -> None:
        self._base, self._parts = base, parts
        self._num_requested = 0

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSample]:
        """Ask for the spans of the base and of the layers' rows for these samples."""
        base = self._base.request(rows)
        asked = [part.request(rows, self._num_requested) for part in self._parts]
        self._num_requested += len(rows)
        return [partial(_take, *one) for one in zip(base, *asked, strict=True)]

    def close(self) -> None:
        """Cancel what was requested of the base and of the layers."""
        self._base.close()
        for part in self._parts:
            part.session.close()


def _take(base: PendingSpan, *layers: _Asked) -> LayeredSpan:
    return LayeredSpan(base(), tuple([asked.take() for asked in layers]))
