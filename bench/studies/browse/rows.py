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

    from fuelrail.bench.studies.runs.steps import RunSteps
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.order.epoch import EndlessOrder

    Rows = range | NDArray[np.int64]
    Tiles = list[dict[str, Any]]

_MOST: Final = 4096
"""Frames of a time line, and samples of a step, that are shown."""


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
        self.orders = {Path(file).stem: load_yaml(file, OrderSpec).resolved() for file in orders}
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
        names: list[str] = []
        for split, entry in self.dataset.splits.items():
            if entry.num_samples:
                names += self._joined(split).names
        return list(dict.fromkeys(names))

    def page(
        self, text: str, split: str, first: int, count: int, names: Sequence[str]
    ) -> dict[str, Any]:
        """Return rows ``first`` to ``first + count - 1`` of those that a filter selects, with
        attributes of these names; and how many there are.
        """
        rows = self.select(text, split)
        return {"total": len(rows), "rows": self._tiles(rows[first : first + count], names)}

    def clips(self, text: str, split: str, first: int, count: int) -> dict[str, Any]:
        """Do the same for clips, each by its first row."""
        rows, counts = self._clips(text, split)
        tiles = self._tiles(rows[first : first + count])
        for tile, num_frames in zip(tiles, counts[first:].tolist(), strict=False):
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
        is_of_clip = pc.equal(index.texts("clip_id", first, end), index.row(row).clip_id)
        rows = first + np.flatnonzero(is_of_clip)
        first = int(rows[0])
        end = int(rows[-1]) + 1
        rows = rows[np.argsort(index.column("frame", first, end)[rows - first], kind="stable")]
        place = int(np.flatnonzero(rows == row)[0])
        start = max(place - _MOST // 2, 0)
        shown = rows[start : start + _MOST]
        times_ns = index.column("timestamp_ns", first, end)[shown - first]
        return {
            "rows": shown,
            "seconds": (times_ns - times_ns[0]) / 1e9,
            "is_cut": len(shown) < len(rows) or not self._is_whole,
        }

    def step_of_order(
        self, name: str, split: str, epoch: int, step: int, global_batch: int
    ) -> dict[str, Any]:
        """Return the samples of a step of an epoch under an order file.

        Raises ConfigError, OrderError, and WorldError for a step that the epoch does not have.
        """
        if global_batch > _MOST:
            raise ConfigError(f"a batch of {global_batch}: at most {_MOST} samples are shown")
        order = self._order(name, split, global_batch)
        batching = order_batching(order, global_batch, World(), drop_last=False).of_epoch(epoch)
        positions = batching.positions(step)[batching.valid(step)]
        entries = order.epoch(epoch).entries(positions)
        samples = entries.samples[entries.valid] + self.dataset.split(split).first_sample
        return {
            "num_steps": batching.num_steps,
            "rows": self._tiles(samples),
            "text": f"epoch {epoch}, step {step:,} of {batching.num_steps:,}",
        }

    def step_of_run(self, step: int) -> dict[str, Any]:
        """Return the samples that a run saw at a step, over all of its segments; one that is not in
        the dataset has row -1.

        Raises ConfigError for a step that the run does not have, and what making its loader raises.
        """
        if self.run is None:
            raise ConfigError("no ledger was given: --ledger FILE")
        seen = self.run.step(step, most=_MOST)
        tiles: Tiles = []
        for key in seen.keys:
            row = self.dataset.find(key)
            if row is None:
                tiles.append({"row": -1, "key": key, "clip": "", "values": {}})
            else:
                tiles += self._tiles(range(row, row + 1))
        return {
            "num_steps": len(self.run),
            "rows": tiles,
            "text": f"step {step:,} of {len(self.run):,}: epoch {seen.epoch}",
        }

    def attributes(self, row: int) -> dict[str, Any]:
        """Return the attributes of a sample, those of a layer as ``layer.name``."""
        return read_attributes(self.dataset, [row], self.layers)[row]

    def _tiles(self, rows: Rows, names: Sequence[str] = ()) -> Tiles:
        """Return what stands below the thumbnails of these rows."""
        numbers = [int(row) for row in rows]
        values = read_attributes(self.dataset, numbers, self.layers, names) if names else {}
        tiles = []
        for row in numbers:
            entry = self.dataset.index.row(row)
            tiles.append(
                {
                    "row": row,
                    "key": entry.key,
                    "clip": entry.clip_id,
                    "values": {name: values[row].get(name) for name in names},
                }
            )
        return tiles

    def _select(self, text: str, split: str) -> Rows:
        """Return the rows of a split, or of all, that a filter selects; a range where there is
        none.
        """
        if not text.strip():
            if not split:
                return range(len(self.dataset))
            entry = self.dataset.splits.get(split)
            first = entry.first_sample if entry else 0
            return range(first, first + (entry.num_samples if entry else 0))
        parts = [np.empty(0, np.int64)]
        splits = self.dataset.splits.items()
        for name, entry in sorted(splits, key=lambda item: item[1].first_sample):
            if entry.num_samples and split in ("", name):
                attributes = self._joined(name)
                condition = Filter(text, attributes.names)
                table = attributes.read(condition.columns)
                samples = condition.select(table, entry.num_samples)
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
        return rows[places[in_order]], counts[in_order]

    def _compile(self, name: str, split: str, global_batch: int) -> EndlessOrder:
        if name not in self.orders:
            raise ConfigError(f"no order {name!r}; given with --order: {', '.join(self.orders)}")
        return compile_order(
            self.orders[name], self.dataset, split, global_batch=global_batch, layers=self.layers
        )
