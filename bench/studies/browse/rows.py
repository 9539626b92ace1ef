"""Which samples a page lists: those that a filter selects, clips, the frames of a clip, and those
of a step of an order or of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fuelrail.pipeline.errors import ConfigError, needs
from fuelrail.pipeline.format.index.samples import ROWS_PER_BATCH
from fuelrail.pipeline.format.layers import INDEXED, JoinedAttributes
from fuelrail.pipeline.order.balance import order_batching
from fuelrail.pipeline.order.batching import World
from fuelrail.pipeline.order.compile import compile_order
from fuelrail.pipeline.order.select import Filter
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.settings import load_yaml

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.bench.studies.runs.history import RunHistory
    from fuelrail.loaders.loader import DataLoader
    from fuelrail.pipeline.format.dataset import Dataset
    from fuelrail.pipeline.format.layers import Layer
    from fuelrail.pipeline.order.epoch import EndlessOrder

    Rows = NDArray[np.int64]
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
        self.history: RunHistory | None = None
        if ledger is not None:
            from fuelrail.bench.studies.runs.history import RunHistory

            self.history = RunHistory(ledger)
            self._replaced = self.history.replaced()
        index = dataset.index
        self._is_whole = all(index.has_row(row) for row in range(0, len(index), ROWS_PER_BATCH))
        """Whether no part of the index has to be fetched."""
        self._clip_numbers = lru_cache(1)(index.clip_numbers)
        self._attributes = lru_cache(64)(lambda split: JoinedAttributes(dataset, split, layers))
        self._columns = lru_cache(16)(
            lambda split, name: self._attributes(split).read([name])[name]
        )
        self.select = lru_cache(4)(self._select)
        self._clips = lru_cache(4)(self._group_clips)
        self._order = lru_cache(4)(self._compile)
        self._loader = lru_cache(4)(self._make_loader)

    def names(self) -> list[str]:
        """Return the names that filters and captions may use."""
        splits = [name for name, entry in self.dataset.splits.items() if entry.num_samples]
        return list(dict.fromkeys(name for each in splits for name in self._attributes(each).names))

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
        first = 0 if self._is_whole else row - row % ROWS_PER_BATCH
        end = len(index) if self._is_whole else min(first + ROWS_PER_BATCH, len(index))
        numbers = self._clip_numbers(first, end)
        rows = np.flatnonzero(numbers == numbers[row - first])
        rows = rows[np.argsort(index.column("frame", first, end)[rows], kind="stable")]
        start = max(int(np.flatnonzero(rows == row - first)[0]) - _MOST // 2, 0)
        frames = rows[start : start + _MOST]
        times_ns = index.column("timestamp_ns", first, end)[frames]
        is_cut = len(frames) < len(rows) or not self._is_whole
        return {"rows": first + frames, "seconds": (times_ns - times_ns[0]) / 1e9, "is_cut": is_cut}

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
        text = f"epoch {epoch}, step {step:,} of {batching.num_steps:,}"
        return {"num_steps": batching.num_steps, "rows": self._tiles(samples), "text": text}

    def step_of_run(self, step: int) -> dict[str, Any]:
        """Return the samples that a run saw at a step, over all of its segments; one that is not in
        the dataset has row -1.

        Raises ConfigError for a step that the run does not have, and what making its loader raises.
        """
        if self.history is None:
            raise ConfigError("no ledger was given: --ledger FILE")
        part, place = self.history.step(step)
        loader = self._loader(next(n for n, p in enumerate(self.history.parts) if p is part))
        count = min(part.stretch.start.global_batch, _MOST)
        positions = (place.samples_consumed + np.arange(count)) % loader.where.epoch_length
        entries = loader.where.order.epoch(place.epoch).entries(positions)
        datasets = list(loader.datasets.values())
        tiles: Tiles = []
        for number in np.flatnonzero(entries.valid).tolist():
            data = datasets[int(entries.parts[number])]
            first = data.split(part.identity.split).first_sample
            key = data.index.row(first + int(entries.samples[number])).key
            if "pack" not in entries.flags:
                stand_in = self._replaced.get((place.epoch, int(positions[number])))
                key = key if stand_in is None else stand_in.replaced_by
            row = self.dataset.find(key)
            tile = {"row": -1, "key": key, "clip": "", "values": {}}
            tiles += [tile] if row is None else self._tiles(np.array([row]))
        text = f"step {step:,} of {self.history.num_steps:,}: epoch {place.epoch}"
        return {"num_steps": self.history.num_steps, "rows": tiles, "text": text}

    def attributes(self, row: int) -> dict[str, Any]:
        """Return the attributes of a sample, those of a layer as ``layer.name``."""
        values: dict[str, Any] = {}
        key = self.dataset.index.row(row).key
        places = [("", self.dataset, row)]
        for layer in self.layers:
            place = layer.find(row, key)
            if place is not None:
                places.append((f"{layer.name}.", layer.data, place[0]))
        for prefix, data, number in places:
            file = data.attributes_file()
            columns = file.schema(len(data)).names if file.exists else []
            names = [name for name in columns if name not in INDEXED]
            for batch in file.batches(names, range(number, number + 1)) if names else ():
                values |= {prefix + name: batch[name][0].as_py() for name in names}
        return values

    def _tiles(self, rows: Rows, names: Sequence[str] = ()) -> Tiles:
        """Return what stands below the thumbnails of these rows."""
        tiles = []
        for row in rows.tolist():
            entry = self.dataset.index.row(row)
            values = {name: self._value(row, name) for name in names}
            tiles.append({"row": row, "key": entry.key, "clip": entry.clip_id, "values": values})
        return tiles

    def _value(self, row: int, name: str) -> Any:
        for split, entry in self.dataset.splits.items():
            place = row - entry.first_sample
            if 0 <= place < entry.num_samples and name in self._attributes(split).names:
                return self._columns(split, name)[place].as_py()
        return None

    def _select(self, text: str, split: str) -> Rows:
        parts = [np.empty(0, np.int64)]
        splits = self.dataset.splits.items()
        for name, entry in sorted(splits, key=lambda item: item[1].first_sample):
            if not entry.num_samples or split not in ("", name):
                continue
            samples = np.arange(entry.num_samples)
            if text.strip():
                attributes = self._attributes(name)
                condition = Filter(text, attributes.names)
                samples = condition.select(attributes.read(condition.columns), len(samples))
            parts.append(entry.first_sample + samples)
        return np.concatenate(parts)

    def _group_clips(self, text: str, split: str) -> tuple[Rows, Rows]:
        if not self._is_whole:
            raise ConfigError("there is no list of clips of an index that is fetched by parts")
        rows = self.select(text, split)
        numbers = self._clip_numbers(0, len(self.dataset))[rows]
        _, places, counts = np.unique(numbers, return_index=True, return_counts=True)
        in_order = np.argsort(places)
        return rows[places[in_order]], counts[in_order]

    def _compile(self, name: str, split: str, global_batch: int) -> EndlessOrder:
        if name not in self.orders:
            raise ConfigError(f"no order {name!r}; given with --order: {', '.join(self.orders)}")
        return compile_order(
            self.orders[name], self.dataset, split, global_batch=global_batch, layers=self.layers
        )

    def _make_loader(self, number: int) -> DataLoader:
        """Make a loader with the order of a part of the run; it loads nothing."""
        with needs("the step of a run"):
            from fuelrail.bench.studies.runs.replay import make_loader

        assert self.history is not None
        part = self.history.parts[number]
        settings = part.stretch.setup.loader or {}
        functions = settings.get("functions")
        is_mix = settings.get("mix") is not None
        with make_loader(
            part,
            ledger=self.history.path,
            rank=None,
            dataset=None if is_mix else self.dataset.url or self.dataset.root,
            functions=dict.fromkeys(functions if isinstance(functions, dict) else (), _same),
            files=Path(self.history.path).parent,
        ) as loader:
            return loader


def _same(value: Any) -> Any:
    return value
