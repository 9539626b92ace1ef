"""Any table as a dataset of an order: a number of rows, or columns in memory; and its rows in
that order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.balance import rank_positions
from fuelrail.pipeline.order.compile import (
    compile_table,
    mix_orders,
    needs_clips,
)
from fuelrail.pipeline.order.epoch import digest
from fuelrail.pipeline.order.permutation import CHUNK
from fuelrail.pipeline.order.windows import window_lookup
from fuelrail.pipeline.order.without import check_unseen, windows_without

if TYPE_CHECKING:
    import pyarrow as pa
    from numpy.typing import ArrayLike

    from fuelrail.pipeline.dtypes import I64, Mask
    from fuelrail.pipeline.format.attributes import ClipTable
    from fuelrail.pipeline.order.batching import Batching, Cursor, Walk
    from fuelrail.pipeline.order.epoch import EndlessOrder, Epoch
    from fuelrail.pipeline.order.mix import MixStage
    from fuelrail.pipeline.order.spec import OrderSpec
    from fuelrail.pipeline.order.windows import FrameWindow, WindowLookup

    Columns: TypeAlias = Mapping[str, ArrayLike]
    Data: TypeAlias = int | Columns | Mapping[str, int | Columns]


class Entry(NamedTuple):
    """A row with all that the order knows of it; what the dataset gets with ``entries=True`` in
    place of a number.
    """

    row: int
    valid: bool
    """False: padding, at the end of an epoch without ``drop_last``, of a lane or of a bucket."""
    lane: int
    """The lane of kind ``lanes``; else 0."""
    prev_exists: bool
    """The lane showed the frame before this one in its previous step; else False."""
    frames: tuple[int, ...]
    """The rows of the window, in its order; empty without a window."""
    present: tuple[bool, ...]
    """Which of ``frames`` are the frames asked for; False: a stand-in."""
    pack: int = 0
    """The pack of the rank's batch that it is in; 0 without packs."""
    bucket: int = 0
    """The bucket of its batch, counted in the order of the bounds, or of the values; 0 without
    buckets.
    """


class OrderedRows:
    """The rows of the data in their order: pure arithmetic, without a position."""

    def __init__(
        self,
        data: Data,
        spec: OrderSpec,
        blocks: int | Sequence[int] | None,
        mix: Mapping[str, int] | Sequence[MixStage] | None,
        window: FrameWindow | None,
        global_batch: int,
        *,
        entries: bool,
    ) -> None:
        spec = spec.resolved()
        tables: dict[str, Table] = {}

        def compile_one(
            name: str,
            part_spec: OrderSpec,
            unknown: set[str] | None = None,
        ) -> EndlessOrder:
            part_data = data if mix is None else data[name]  # type: ignore[index]
            table = Table(part_data, part_spec, blocks, window)
            tables[name] = table
            return compile_table(
                part_spec,
                table,
                table.lengths,
                global_batch=global_batch,
                window=window,
                clips=table.clips,
                unknown=unknown,
            )

        if mix is None:
            self.order: EndlessOrder = compile_one("", spec)
        else:
            if not isinstance(data, Mapping):
                raise OrderError(
                    f"with mix={mix} data is a mapping of names to data, got {type(data).__name__}"
                )
            self.order = mix_orders(
                mix,
                spec=spec,
                datasets=data,
                compile_one=lambda _, *keywords: compile_one(*keywords),
                global_batch=global_batch,
            )
        identities = {name: table.identity for name, table in tables.items()}
        self.described = identities[""] if mix is None else identities
        """What a position depends on besides the order, in words; of a mix by name."""
        lengths = [len(table) for table in tables.values()]
        self._bases = np.cumsum([0, *lengths])
        self._windows: list[WindowLookup | None] = []
        for table in tables.values():
            lookup = None
            if window is not None and table.clips is not None:
                lookup = window_lookup(table.clips, window)
            self._windows.append(lookup)
        self._lookups = windows_without(self._windows, self.order)
        self._entries = entries
        self._is_cut_evenly = not (spec.pack or spec.balance)
        self._newest: tuple[int, Epoch] | None = None

    def batches(
        self,
        epoch: int,
        batching: Batching,
        steps: range,
    ) -> list[list[Any]]:
        """Return this rank's batches of some consecutive steps."""
        if self._newest is None or self._newest[0] != epoch:
            self._newest = epoch, self.order.epoch(epoch)
        _, in_order = self._newest
        if self._is_cut_evenly:
            step_numbers = np.array(steps, np.int64)
            starts = batching.start + step_numbers * batching.global_batch
            running = starts[:, None] + np.array(batching.rows)
            return self._rows(
                in_order,
                positions=running % batching.epoch_length,
                is_first=running < batching.epoch_length,
            )
        batches = []
        for step in steps:
            positions, valid = rank_positions(
                self.order,
                in_order,
                batching,
                step,
            )
            batches += self._rows(in_order, positions[None], valid[None])
        return batches

    def _rows(
        self,
        in_order: Epoch,
        positions: I64,
        is_first: Mask,
    ) -> list[list[Any]]:
        """Return the batches of the rank at ``positions`` (batches, rank_batch); one batch only
        where they are packs.

        ``is_first`` is False for positions that fill up the epoch's last batch.
        """
        if not self._entries and len(self._lookups) == 1:
            samples = in_order(positions)
            plain: list[list[Any]] = samples.reshape(len(positions), -1).tolist()
            return plain
        parts, samples, valid, flags = in_order.entries(positions)
        rows = (samples + self._bases[parts]).reshape(len(positions), -1)
        if not self._entries:
            return rows.tolist()  # type: ignore[no-any-return]
        if "pack" in flags:
            is_first = is_first[0, flags["pack"]]
        num_frames = 0
        if self._lookups[0] is not None:
            num_frames = len(self._lookups[0].window.frames)
        frames = np.zeros((samples.size, num_frames), np.int64)
        present = np.zeros((samples.size, num_frames), bool)
        flat_parts = parts.reshape(-1)
        flat_samples = samples.reshape(-1)
        for part, lookup in enumerate(self._lookups):
            mask = flat_parts == part
            if lookup is not None and mask.any():
                windows = lookup(flat_samples[mask])
                frames[mask] = windows.samples + self._bases[part]
                present[mask] = windows.present
        zeros = np.zeros_like(rows)
        falses = np.zeros(rows.shape, bool)
        columns = {
            "row": rows,
            "valid": valid & is_first,
            "lane": flags.get("lane", zeros),
            "prev_exists": flags.get("prev_exists", falses),
            "pack": flags.get("pack", zeros),
            "bucket": flags.get("bucket", zeros),
        }
        values: dict[str, Iterable[Any]] = {}
        for name, column in columns.items():
            values[name] = column.reshape(-1).tolist()
        values["frames"] = map(tuple, frames.tolist())
        values["present"] = map(tuple, present.tolist())
        entries = list(map(Entry, *(values[name] for name in Entry._fields)))
        batch_rows = rows.shape[1]
        starts = range(0, len(entries), batch_rows)
        return [entries[start : start + batch_rows] for start in starts]

    def check_unseen(
        self,
        identity: dict[str, Any],
        place: Cursor,
        full_batch: int,
    ) -> None:
        """Raise StateMismatchError where a run of this order's identity has shown what this one
        leaves out.
        """
        check_unseen(
            self.order,
            state=identity,
            place=place,
            full_batch=full_batch,
            windows=self._windows,
        )

    def rest(self, walk: Walk) -> Iterator[list[Any]]:
        """Yield this rank's batches of the first epoch of a walk."""
        steps_per_chunk = max(1, CHUNK // walk.batching.rank_batch)
        for start in range(0, walk.num_steps, steps_per_chunk):
            end = min(start + steps_per_chunk, walk.num_steps)
            yield from self.batches(walk.start.epoch, walk.rest, range(start, end))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_newest": None}


class Table:
    """Data in memory as orders read it: `Attributes` of a dataset are the same of stored ones."""

    def __init__(
        self,
        data: object,
        spec: OrderSpec,
        blocks: int | Sequence[int] | None,
        window: FrameWindow | None,
    ) -> None:
        self._columns: Columns = {}
        if isinstance(data, Mapping):
            self._columns = data
            lengths = {name: len(column) for name, column in data.items()}
            if len(set(lengths.values())) != 1:
                raise OrderError(f"columns of one length are needed, at least one, got {lengths}")
            (num_rows,) = set(lengths.values())
        elif isinstance(data, int | np.integer):
            num_rows = int(data)
        else:
            raise OrderError(
                f"data is a number of rows, or columns by name, got {type(data).__name__}"
            )
        self.lengths: tuple[int, ...] = (num_rows,)
        self.identity = f"{num_rows} rows"
        if (blocks is not None) != (spec.kind == "windowed"):
            raise OrderError(
                f"blocks={blocks} with order kind {spec.kind!r}: 'windowed' needs them, "
                "others take none"
            )
        if blocks is not None:
            if isinstance(blocks, int) and blocks >= 1:
                num_full, rest = divmod(num_rows, blocks)
                self.lengths = (blocks,) * num_full
                if rest:
                    self.lengths += (rest,)
            elif (
                not isinstance(blocks, int)
                and sum(blocks) == num_rows
                and min(blocks, default=0) >= 0
            ):
                self.lengths = tuple(blocks)
            else:
                blocks_text = f"{blocks}"
                if not isinstance(blocks, int):
                    blocks_text = f"{len(blocks)} lengths with the sum {sum(blocks)}"
                raise OrderError(
                    f"blocks is a number of rows >= 1, or lengths whose sum is {num_rows}, got "
                    f"{blocks_text}"
                )
            self.identity += f", blocks {digest(np.array(self.lengths))}"
        self._num_rows = num_rows
        self.clips: ClipTable | None = None
        if window is None and not needs_clips(spec, window):
            return
        from fuelrail.pipeline.format.attributes import ClipTable

        if "clip_id" not in self._columns:
            raise OrderError(
                "lanes and windows need a column 'clip_id': which clip, or episode, each row is of"
            )
        clip_ids = np.asarray(self._columns["clip_id"])
        _, first_rows, id_index = np.unique(
            clip_ids,
            return_index=True,
            return_inverse=True,
        )
        clip_of_id = np.argsort(np.argsort(first_rows))  # in the order of their first row
        clips = clip_of_id[id_index]
        if "frame" in self._columns:
            frames = self._columns["frame"]
        else:
            by_clip = np.argsort(clips, kind="stable")
            sorted_clips = clips[by_clip]
            starts = np.searchsorted(sorted_clips, sorted_clips)
            frames = np.empty_like(by_clip)
            frames[by_clip] = np.arange(num_rows) - starts
        self.clips = ClipTable.build(clips, frames)
        self.identity += f", clips {digest(self.clips.keys, self.clips.samples)}"

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._columns)

    def __len__(self) -> int:
        return self._num_rows

    def read(self, names: Sequence[str]) -> pa.Table:
        """Return some columns; raise OrderError for others than there are."""
        import pyarrow as pa

        missing = [name for name in names if name not in self._columns]
        if missing:
            raise OrderError(
                f"data has no column {missing[0]!r}; it has: "
                f"{', '.join(self._columns) or 'rows only'}"
            )
        return pa.table({name: self._columns[name] for name in names})
