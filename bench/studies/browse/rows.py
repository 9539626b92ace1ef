"""Which samples a page lists: those that a filter selects, clips, the frames of a clip, and those
of a step of an order or of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow.compute as pc

from fuelrail.pipeline.errors import ConfigError
from fuelrail.pipeline.format.attributes import clip_numbers, has_whole_index
from fuelrail.pipeline.format.index.samples import ROWS_PER_BATCH
from fuelrail.pipeline.format.layers import JoinedAttributes, read_attributes
from fuelrail.pipeline.order.balance import order_batching
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.compile import compile_order
from fuelrail.pipeline.order.select import Filter
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import load_yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.bench.studies.browse.query import Query
    from fuelrail.bench.studies.runs.steps import RunSteps
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.order.epoch import EndlessOrder

    Rows = range | NDArray[np.int64]
    Tiles = list[dict[str, Any]]

_MAX_SAMPLES: Final = 4096
"""Samples of a time line, and of a step, that are shown."""


class DatasetRows:
    """The rows of a dataset with its layers. Thread-safe; what was asked for last is kept."""

    def __init__(
        self,
        dataset: Dataset,
        layers: Sequence[Layer] = (),
        orders: Sequence[str] = (),
        ledger: str | None = None,
    ) -> None:
        """Read the files of orders, and the ledger; raises ConfigError and LedgerError."""
        self.dataset = dataset
        self.layers = tuple(layers)
        self.orders: dict[str, OrderSpec] = {}
        for file in orders:
            order = load_yaml(file, OrderSpec)
            self.orders[Path(file).stem] = order.resolved()
        self.run: RunSteps | None = None
        if ledger is not None:
            from fuelrail.bench.studies.runs.steps import RunSteps

            self.run = RunSteps(ledger, dataset)
        self._is_whole = has_whole_index(dataset)
        self.select = lru_cache(4)(self._select)
        self._joined = lru_cache(64)(lambda split: JoinedAttributes(dataset, split, layers))
        self._clips = lru_cache(4)(self._group_clips)
        self._clip_numbers = lru_cache(1)(lambda: clip_numbers(dataset))
        self._order = lru_cache(4)(self._compile)

    def names(self) -> list[str]:
        """Return the names that filters and captions may use."""
        names: dict[str, None] = {}
        for split, entry in self.dataset.splits.items():
            if entry.num_samples:
                names |= dict.fromkeys(self._joined(split).names)
        return list(names)

    def page(self, query: Query) -> dict[str, Any]:
        """Return the part that is asked for of the rows that a filter selects, with attributes; and
        how many there are.
        """
        rows = self.select(query.filter, query.split)
        names = query.columns.split("\n") if query.columns else ()
        tiles = self._tiles(rows[query.place], names)
        return {"total": len(rows), "rows": tiles}

    def clips(self, query: Query) -> dict[str, Any]:
        """Do the same for clips, each by its first row."""
        rows, counts = self._clips(query.filter, query.split)
        tiles = self._tiles(rows[query.place])
        nums_frames = counts[query.place].tolist()
        for tile, num_frames in zip(tiles, nums_frames, strict=True):
            tile["num_frames"] = num_frames
        return {"total": len(rows), "rows": tiles}

    def clip(self, row: int) -> dict[str, Any]:
        """Return the rows of a sample's clip by frame, and their times [s]; of an index that is
        fetched by parts, what the sample's part has of them.
        """
        index = self.dataset.index
        first = 0
        end = len(index)
        if not self._is_whole:
            first = row - row % ROWS_PER_BATCH
            end = min(first + ROWS_PER_BATCH, end)
        clip_ids = index.texts("clip_id", first, end)
        is_of_clip = pc.equal(clip_ids, index.row(row).clip_id)
        rows = first + np.flatnonzero(is_of_clip)
        first = int(rows[0])
        end = int(rows[-1]) + 1
        frames = index.column("frame", first, end)[rows - first]
        rows = rows[np.argsort(frames, kind="stable")]
        place = int(np.flatnonzero(rows == row)[0])
        start = max(place - _MAX_SAMPLES // 2, 0)
        window = rows[start : start + _MAX_SAMPLES]
        times_ns = index.column("timestamp_ns", first, end)[window - first]
        seconds = (times_ns - times_ns[0]) / 1e9
        is_cut = len(window) < len(rows) or not self._is_whole
        return {"rows": window, "seconds": seconds, "is_cut": is_cut}

    def step_of_order(self, query: Query) -> dict[str, Any]:
        """Return the samples of a step of an epoch under an order file.

        Raises ConfigError, OrderError, and WorldError for a step that the epoch does not have.
        """
        if query.batch > _MAX_SAMPLES:
            raise ConfigError(f"a batch of {query.batch}: at most {_MAX_SAMPLES} samples are shown")
        order = self._order(query.name, query.split, query.batch)
        endless = order_batching(order, query.batch, World(), drop_last=False)
        batching = endless.of_epoch(query.epoch)
        is_real = batching.valid(query.step)
        positions = batching.positions(query.step)[is_real]
        entries = order.epoch(query.epoch).entries(positions)
        samples = entries.samples[entries.valid]
        first = self.dataset.split(query.split).first_sample
        return {
            "num_steps": batching.num_steps,
            "rows": self._tiles(first + samples),
            "text": f"epoch {query.epoch}, step {query.step:,} of {batching.num_steps:,}",
        }

    def step_of_run(self, step: int) -> dict[str, Any]:
        """Return the samples that a run saw at a step, over all of its segments; one that is not in
        the dataset has row -1.

        Raises ConfigError for a step that the run does not have, and what making its loader raises.
        """
        if self.run is None:
            raise ConfigError("no ledger was given: --ledger FILE")
        samples = self.run.step(step, limit=_MAX_SAMPLES)
        tiles: Tiles = []
        for key in samples.keys:
            row = self.dataset.find(key)
            if row is None:
                tile = {"row": -1, "key": key, "clip": "", "values": {}}
                tiles.append(tile)
            else:
                tiles += self._tiles(range(row, row + 1))
        return {
            "num_steps": len(self.run),
            "rows": tiles,
            "text": f"step {step:,} of {len(self.run):,}: epoch {samples.epoch}",
        }

    def attributes(self, row: int) -> dict[str, Any]:
        """Return the attributes of a sample, those of a layer as ``layer.name``."""
        return read_attributes(self.dataset, [row], self.layers)[row]

    def _tiles(self, rows: Rows, names: Sequence[str] = ()) -> Tiles:
        """Return what stands below the thumbnails of these rows."""
        numbers = [int(row) for row in rows]
        values = {}
        if names:
            values = read_attributes(self.dataset, numbers, self.layers, names)
        tiles = []
        for row in numbers:
            entry = self.dataset.index.row(row)
            tile = {
                "row": row,
                "key": entry.key,
                "clip": entry.clip_id,
                "values": {name: values[row].get(name) for name in names},
            }
            tiles.append(tile)
        return tiles

    def _select(self, text: str, split: str) -> Rows:
        """Return the rows of a split, or of all, that a filter selects; a range where there is
        none.
        """
        has_filter = bool(text.strip())
        if not has_filter and not split:
            return range(len(self.dataset))
        splits = list(self.dataset.splits.items())
        splits.sort(key=lambda item: item[1].first_sample)
        parts = [np.empty(0, np.int64)]
        for name, entry in splits:
            if not entry.num_samples or split not in ("", name):
                continue
            samples = np.arange(entry.num_samples)
            if has_filter:
                attributes = self._joined(name)
                condition = Filter(text, attributes.names)
                columns = attributes.read(condition.columns)
                samples = condition.select(columns, len(samples))
            parts.append(entry.first_sample + samples)
        return np.concatenate(parts)

    def _group_clips(self, text: str, split: str) -> tuple[Rows, NDArray[np.int64]]:
        """Return the first row and the number of selected frames of each clip, by first row."""
        rows = self.select(text, split)
        if isinstance(rows, range):
            rows = np.arange(rows.start, rows.stop)
        numbers = self._clip_numbers()[rows]
        _, places, counts = np.unique(numbers, return_index=True, return_counts=True)
        in_order = np.argsort(places)
        first_rows = rows[places[in_order]]
        return first_rows, counts[in_order]

    def _compile(self, name: str, split: str, global_batch: int) -> EndlessOrder:
        if name not in self.orders:
            names = ", ".join(self.orders)
            raise ConfigError(f"no order {name!r}; given with --order: {names}")
        return compile_order(
            self.orders[name],
            self.dataset,
            split,
            global_batch=global_batch,
            layers=self.layers,
        )
