"""The keys of the samples that a run saw at a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from fuelrail.bench.studies.runs.history import RunHistory
from fuelrail.pipeline.errors import needs

if TYPE_CHECKING:
    from fuelrail.loaders.loader import DataLoader
    from fuelrail.pipeline.format.dataset import Dataset

_LOADERS_KEPT: Final = 4


class SeenStep(NamedTuple):
    """A step of an epoch, and the keys of its samples over all ranks."""

    epoch: int
    keys: list[str]


class RunSteps:
    """The steps of a run whose ledger is given, over all of its segments.

    ``dataset`` is where the samples are now; a mix of datasets is read where the ledger says.
    Raises LedgerError, and ConfigError for a ledger without a start.
    """

    def __init__(self, ledger: str | os.PathLike[str], dataset: Dataset) -> None:
        self._history = RunHistory(ledger)
        self._dataset = dataset
        self._replaced = self._history.replaced()
        self._loaders: dict[int, DataLoader] = {}

    def __len__(self) -> int:
        return self._history.num_steps

    def step(self, number: int, limit: int) -> SeenStep:
        """Return a step, of its samples at most ``limit``.

        Raises ConfigError for a step that the run does not have, and what making its loader raises.
        """
        part, place = self._history.step(number)
        if part.first not in self._loaders:
            with needs("the step of a run"):
                from fuelrail.bench.studies.runs.replay import make_loader

            settings = part.stretch.setup.loader or {}
            functions = settings.get("functions")
            names = functions if isinstance(functions, dict) else ()
            dataset = None
            if settings.get("mix") is None:
                dataset = self._dataset.url or self._dataset.root
            with make_loader(  # which has the order, and loads nothing
                part,
                ledger=self._history.path,
                rank=None,
                dataset=dataset,
                functions=dict.fromkeys(names, lambda value: value),
                files=Path(self._history.path).parent,
            ) as loader:
                while len(self._loaders) >= _LOADERS_KEPT:
                    self._loaders.popitem()
                self._loaders[part.first] = loader
        loader = self._loaders[part.first]
        count = min(part.stretch.start.global_batch, limit)
        positions = place.samples_consumed + np.arange(count)
        positions %= loader.where.epoch_length
        entries = loader.where.order.epoch(place.epoch).entries(positions)
        has_packs = "pack" in entries.flags
        datasets = list(loader.datasets.values())
        keys = []
        for entry in np.flatnonzero(entries.valid).tolist():
            data = datasets[int(entries.parts[entry])]
            first = data.split(part.identity.split).first_sample
            row = first + int(entries.samples[entry])
            key = data.index.row(row).key
            position = int(positions[entry])
            stand_in = self._replaced.get((place.epoch, position))
            if stand_in is not None and not has_packs:
                key = stand_in.replaced_by
            keys.append(key)
        return SeenStep(place.epoch, keys)
