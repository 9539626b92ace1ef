"""``fuelrail inspect --statistics``: mean, deviation and quantiles of the numbers of a dataset,
for normalisation.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from fuelrail.pipeline.channels.series import TIMES, VALUES, one_of_series
from fuelrail.pipeline.errors import ConfigError, DatasetError
from fuelrail.pipeline.format.attributes import TEXTS, ClipTable
from fuelrail.pipeline.storage.files import published

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fuelrail.pipeline.format.dataset import Dataset

STATISTICS_FILE: Final = "statistics.json"
"""Beside the manifest. It is not part of the dataset: no digest covers it."""
_QUANTILES: Final = {
    "q01": 0.01,
    "q10": 0.1,
    "q50": 0.5,
    "q90": 0.9,
    "q99": 0.99,
}
_MOST_NUMBERS: Final = 4096  # of a value
_MOST_KEPT: Final = 1 << 22  # of a channel, for quantiles
_AT_ONCE: Final = 4096


def dataset_statistics(
    dataset: Dataset,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Compute statistics by split and channel, and store them beside the manifest.

    Those of kind ``array`` and series, number by number of a value's shape, and of attributes:
    ``count`` of finite numbers, ``mean``, ``std`` (population), ``min``, ``max`` and quantiles
    ``q01`` to ``q99``, which are interpolated, and of evenly spaced values where there are many.
    Raises ConfigError for a URL, and DatasetError where the folder cannot be written.
    """
    if dataset.url is not None:
        raise ConfigError(
            f"statistics are stored beside the manifest, in folders only, got '{dataset.location}'"
        )
    numbers = {split: _compute_split_statistics(dataset, split) for split in dataset.splits}
    document = {"fingerprint": dataset.manifest.fingerprint, "splits": numbers}
    encoded = msgspec.json.encode(document)
    try:
        with published(Path(dataset.root) / STATISTICS_FILE) as file:
            file.write(msgspec.json.format(encoded, indent=1) + b"\n")
    except OSError as error:
        raise DatasetError(
            f"'{dataset.root}/{STATISTICS_FILE}' cannot be written: {error.strerror}"
        ) from error
    return numbers


def _compute_split_statistics(dataset: Dataset, split: str) -> dict[str, dict[str, Any]]:
    entry = dataset.split(split)
    rows = range(entry.first_sample, entry.first_sample + entry.num_samples)
    channels = [
        item for item in dataset.manifest.extra_channels if item.field in dataset.index.names
    ]
    forms = {}  # of one value of each channel of few numbers
    series = set()
    for channel in channels:
        form = one_of_series(channel) or channel
        if form is not channel:
            series.add(channel.name)
        num_values = math.prod(side or 0 for side in form.shape)
        if form.kind == "array" and form.dtype != "bool" and num_values <= _MOST_NUMBERS:
            forms[channel.name] = form
    numbers = {name: _Numbers(form.shape) for name, form in forms.items()}
    clips = ClipTable.of_split(dataset, split, times=True) if series else None
    pending: dict[str, list[NDArray[Any]]] = {name: [] for name in forms}
    if forms:
        for row in rows:
            for name, value in dataset.read(row, list(forms)).items():
                if name in series and clips is not None and clips.times_ns is not None:
                    # No other sample counts the measurements since the sample before.
                    times = value[TIMES]
                    rank = int(clips.ranks[row - rows.start])
                    first, end = clips.bounds(np.array(rank))
                    is_new = np.ones(len(times), bool)
                    if rank > first:
                        is_new &= times > clips.times_ns[rank - 1]
                    if rank < end - 1:
                        is_new &= times <= clips.times_ns[rank]
                    pending[name].append(value[VALUES][is_new])
                else:
                    pending[name].append(value[None])
            if row % _AT_ONCE == _AT_ONCE - 1 or row == rows[-1]:
                for name, values in pending.items():
                    if values:
                        numbers[name].add(np.concatenate(values))
                        values.clear()
    file = dataset.attributes_file()
    schema = file.schema(len(dataset.index)) if file.exists else pa.schema([])
    names = []
    for field in schema:
        if field.name in (*TEXTS, "frame", "timestamp_ns"):
            continue
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type):
            names.append(field.name)
    if names:
        for batch in file.batches(names, rows):
            for name, column in zip(names, batch.columns, strict=True):
                numbers_of_batch = column.cast(pa.float64())
                values = numbers_of_batch.to_numpy(zero_copy_only=False)
                numbers.setdefault(name, _Numbers(())).add(values)
    return {name: accumulator.result() for name, accumulator in numbers.items()}


class _Numbers:
    """Statistics of values of one shape, batch by batch: Chan, Golub and LeVeque, 1983."""

    def __init__(self, shape: tuple[int | None, ...]) -> None:
        self._shape = tuple(side or 0 for side in shape)
        width = math.prod(self._shape)
        self._count = np.zeros(width)
        self._mean = np.zeros(width)
        self._squares = np.zeros(width)
        self._min = np.full(width, np.inf)
        self._max = np.full(width, -np.inf)
        self._kept = np.empty((0, width))
        self._num_seen = 0
        self._stride = 1

    def add(self, values: NDArray[Any]) -> None:
        """Add values (M, *shape); what is not finite does not count."""
        rows = values.reshape(len(values), len(self._mean))
        rows = rows.astype(np.float64)
        rows[~np.isfinite(rows)] = np.nan
        is_there = ~np.isnan(rows)
        count = is_there.sum(0)
        sums = np.where(is_there, rows, 0).sum(0)
        mean = sums / np.maximum(count, 1)
        difference = mean - self._mean
        total = np.maximum(self._count + count, 1)
        deviations = np.where(is_there, rows - mean, 0)
        squares = (deviations**2).sum(0)
        self._squares += squares + difference**2 * self._count * count / total
        self._mean += difference * count / total
        self._count += count
        lowest = np.where(is_there, rows, np.inf).min(0, initial=np.inf)
        highest = np.where(is_there, rows, -np.inf).max(0, initial=-np.inf)
        self._min = np.fmin(self._min, lowest)
        self._max = np.fmax(self._max, highest)
        first = -self._num_seen % self._stride
        sampled_rows = rows[first :: self._stride]
        self._kept = np.concatenate([self._kept, sampled_rows])
        self._num_seen += len(rows)
        while self._kept.size > _MOST_KEPT:
            self._kept = self._kept[::2]
            self._stride = 2 * self._stride

    def result(self) -> dict[str, Any]:
        """Return the statistics, as numbers or nested lists of the shape; null where there is no
        number.
        """
        is_there = self._count > 0
        values = np.zeros((1, len(is_there)))
        if len(self._kept):
            values = np.where(is_there, self._kept, 0)
        quantiles = np.nanquantile(values, [*_QUANTILES.values()], axis=0)
        variance = self._squares / np.maximum(self._count, 1)
        statistics = {
            "count": self._count,
            "mean": self._mean,
            "std": np.sqrt(variance),
            "min": self._min,
            "max": self._max,
            **dict(zip(_QUANTILES, quantiles, strict=True)),
        }
        lists = {}
        for name, array in statistics.items():
            is_absent = np.isnan(array)
            if name != "count":
                is_absent |= ~is_there
            numbers = array.astype(object)
            numbers[is_absent] = None
            lists[name] = numbers.reshape(self._shape).tolist()
        return lists
