"""A dataset and its layers as one storage: a sample's span is whole when those of its layers are.

Requests, cache, retries and the replacement of bad samples see one storage, whose spans are
`LayeredSpan`. Each layer has a backend of its own, which fits the place of the layer. Requests to
it are numbered by its own rows; the future uses of the base, by which a cache evicts, are
translated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from fuelrail.loaders.storage.cache.future_uses import (
    FutureUses,
    RequestNumbers,
)
from fuelrail.loaders.storage.protocol import (
    LayeredSpan,
    PendingSample,
    PendingSpan,
    Session,
    Storage,
    StorageStats,
    StoredRow,
    add_stats,
    raise_at_its_turn,
)
from fuelrail.pipeline.errors import (
    FuelrailError,
    IndexFileError,
    MemberError,
    OrderError,
    ShardError,
)
from fuelrail.pipeline.format.dataset import Dataset, read_members

if TYPE_CHECKING:
    from fuelrail.pipeline.channels.table import Channel
    from fuelrail.pipeline.format.index.row import IndexRow
    from fuelrail.pipeline.format.layers import Layer

_RowResult = tuple[int, "IndexRow"] | FuelrailError | None
"""A layer's row of a sample; None where it has none; or the error to raise when it is the
sample's turn.
"""


class LayerPart(NamedTuple):
    """A layer that is read: its storage, and the decoded fields by the names that it stores,
    with those of a loader.
    """

    layer: Layer
    storage: Storage
    fields: Mapping[str, str]

    def find(self, position: int, key: str) -> _RowResult:
        """Return the layer's row of a sample of the base, None where it has none.

        Where it must have one it is an OrderError, where the row has another key an IndexFileError:
        returned, so that it is raised at the sample's turn, however far ahead this is called.
        """
        layer = self.layer
        try:
            result = layer.find(position, key)
        except FuelrailError as error:
            return error
        if result is not None or layer.missing != "error":
            return result
        return OrderError(
            f"layer '{layer.name}' has no value for sample '{key}'; "
            "LayerOptions(missing='mask') marks it in the batch"
        )

    def members(self, stored: StoredRow) -> dict[str, memoryview]:
        """Return the raw members of a stored row, by the names that a loader has for them.

        Raises MemberError and IndexFileError, with the layer's name.
        """
        data = self.layer.data
        row = stored.row
        shard = data.shards.name_of(row)
        try:
            contents = read_members(
                row,
                stored.span,
                shard,
                self.fields,
                dictionary=data.dictionary,
            )
        except MemberError as error:
            message = f"layer '{self.layer.name}': {error.message}"
            raise type(error)(message, key=error.key, member=error.member) from error
        except IndexFileError as error:
            raise IndexFileError(
                f"layer '{self.layer.name}' ('{data.location}'): {error}"
            ) from error
        return {self.fields[field]: content for field, content in contents.items()}

    def stored(self, row: IndexRow, read: PendingSpan) -> StoredRow:
        """Add to a row what ``read`` returns; an error of a shard says which layer's shard it
        is.
        """
        try:
            return StoredRow(row, read())
        except ShardError as error:
            message = f"layer '{self.layer.name}': {error.message}"
            raise type(error)(
                message,
                shard=error.shard,
                offset=error.offset,
                key=error.key,
            ) from error


def with_layers(
    base: Storage,
    layers: Sequence[Layer],
    channels: Sequence[Channel],
    open_storage: Callable[[Dataset], Storage],
) -> LayeredStorage:
    """Return the storage of a dataset with those of its layers of which channels are selected."""
    chosen = {channel.name for channel in channels}
    parts = []
    for layer in layers:
        pairs = zip(layer.manifest.channels, layer.channels, strict=True)
        fields = {stored.field: joined.field for stored, joined in pairs if joined.name in chosen}
        if fields:
            parts.append(LayerPart(layer, open_storage(layer.data), fields))
    return LayeredStorage(base, parts)


class LayeredStorage:
    """The storage of a dataset with its layers, if any. Safe to use from many threads."""

    def __init__(self, base: Storage, parts: Sequence[LayerPart] = ()) -> None:
        self._base = base
        self.parts = tuple(parts)
        self.look_ahead_bytes = base.look_ahead_bytes
        self.needs_whole_spans = base.needs_whole_spans

    def span(self, index: int, row: IndexRow) -> LayeredSpan:
        """Return one sample's bytes and those of its layers, now.

        Raise ShardError with shard, offset and key.
        """
        base = self._base.span(index, row)
        layers = []
        for part in self.parts:
            result = part.find(index, row.key)
            if isinstance(result, FuelrailError):
                raise result
            stored = None
            if result is not None:
                read = partial(part.storage.span, *result)
                stored = part.stored(result[1], read)
            layers.append(stored)
        return LayeredSpan(base, tuple(layers))

    def session(
        self, future_uses: FutureUses | None = None, uses_per_step: int = 0
    ) -> LayeredSession:
        """Start a stream of requests to the base and to all layers."""
        parts = [_PartSession(part, future_uses, uses_per_step) for part in self.parts]
        return LayeredSession(self._base.session(future_uses, uses_per_step), parts)

    def stats(self) -> StorageStats:
        """Return the counters of the base and of all layers together."""
        stats = [self._base.stats()]
        stats += [part.storage.stats() for part in self.parts]
        return add_stats(stats)

    def close(self) -> None:
        """Let go of files, connections and threads of the base and of all layers."""
        self._base.close()
        for part in self.parts:
            part.storage.close()


class LayeredSession:
    """One iteration's requests to a base and its layers."""

    def __init__(self, base: Session, parts: Sequence[_PartSession] = ()) -> None:
        self._base = base
        self._parts = parts
        self._results: dict[int, list[_RowResult]] = {}
        self._num_requested = 0

    def look_up(self, index: int, row: IndexRow) -> int:
        """Find the layers' rows for a sample that will be requested; return the number of their
        bytes.
        """
        results = [item.part.find(index, row.key) for item in self._parts]
        self._results[index] = results
        return sum([result[1].length for result in results if isinstance(result, tuple)])

    def request(self, rows: Sequence[tuple[int, IndexRow]]) -> list[PendingSample]:
        """Ask for the spans of the base and of the layers' rows for these samples."""
        base = self._base.request(rows)
        results_of_rows = []
        for index, row in rows:
            results = self._results.pop(index, [])
            if not results:
                results = [item.part.find(index, row.key) for item in self._parts]
            results_of_rows.append(results)
        layers = []
        if rows:
            results_of_parts = zip(*results_of_rows, strict=True)
            for item, layer_results in zip(self._parts, results_of_parts, strict=True):
                layers.append(item.request(layer_results, self._num_requested))
        self._num_requested += len(rows)

        def take(sample: PendingSpan, *rows: Callable[[], StoredRow | None]) -> LayeredSpan:
            return LayeredSpan(sample(), tuple([stored() for stored in rows]))

        return [partial(take, *item) for item in zip(base, *layers, strict=True)]

    def close(self) -> None:
        """Cancel what was requested of the base and of the layers."""
        self._base.close()
        for part in self._parts:
            part.session.close()


class _PartSession:
    """The requests to one layer."""

    def __init__(
        self,
        part: LayerPart,
        future_uses: FutureUses | None,
        uses_per_step: int,
    ) -> None:
        self.part = part
        self._numbers: RequestNumbers | None = None
        uses = None
        if future_uses is not None:
            # A complete layer is asked whenever the base is.
            if not part.layer.is_complete:
                self._numbers = RequestNumbers()
            uses = future_uses.of_other_rows(part.layer.rows_at, self._numbers)
        self.session = part.storage.session(uses, uses_per_step)

    def request(
        self, results: Sequence[_RowResult], first: int
    ) -> list[Callable[[], StoredRow | None]]:
        """Ask for these rows; ``first`` is the number of the first among the base's requests."""
        if self._numbers is not None:
            for number, result in enumerate(results, first):
                if isinstance(result, tuple):
                    self._numbers.note(number)
        stored_rows = [result for result in results if isinstance(result, tuple)]
        pending = iter(self.session.request(stored_rows))
        rows: list[Callable[[], StoredRow | None]] = []
        for result in results:
            if isinstance(result, tuple):
                _, row = result
                rows.append(partial(self.part.stored, row, next(pending)))
            elif result is None:
                rows.append(lambda: None)
            else:
                rows.append(partial(raise_at_its_turn, result))
        return rows
