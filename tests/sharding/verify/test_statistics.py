"""Statistics of a dataset's numbers against numpy over all of them at once."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.channels.series import parts_of_series, series_channel
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.errors import ConfigError
from fuelrail.sharding.verify.statistics import _Numbers
from support.datasets import build_dataset

STATE = Channel(
    name="state",
    kind="array",
    field="state.npy",
    dtype="float32",
    axes=("row", "column"),
    shape=(2, 3),
    law=Law("fixed"),
    optional=True,
    allows_nan=True,
)
CAN = series_channel("can", "float64")
RATE_NS = 500_000_000
ROWS = 20


def state(row):
    values = np.random.default_rng(row).normal(row, 2, (2, 3)).astype(np.float32)
    values[0, 0] = np.nan
    values[1, 1] = np.nan if row % 2 else values[1, 1]
    return None if row == 3 else values


def can_times(clip):
    return np.arange(-3, 25) * 90_000_000 + clip * 4 * RATE_NS


def can(row):
    clip = row // 4
    times = can_times(row // 4)
    parts = list(parts_of_series(times, times * 1e-9, (np.arange(4) + clip * 4) * RATE_NS))
    return parts[row % 4]


@pytest.fixture
def root(tmp_path):
    build_dataset(
        tmp_path / "d",
        {"train": (8, 8), "val": (4,)},
        extra=[(STATE, state), (CAN, can)],
    )
    return tmp_path / "d"


def expected(values):
    statistics = {
        "count": np.isfinite(values).sum(0),
        "mean": np.nanmean(values, 0),
        "std": np.nanstd(values, 0),
    }
    quantiles = {
        f"q{round(100 * quantile):02}": np.nanquantile(values, quantile, axis=0)
        for quantile in (0.01, 0.1, 0.5, 0.9, 0.99)
    }
    return {
        **statistics,
        "min": np.nanmin(values, 0),
        "max": np.nanmax(values, 0),
        **quantiles,
    }


@pytest.mark.filterwarnings(
    "ignore:Mean of empty slice", "ignore:Degrees of freedom", "ignore:All-NaN"
)
def test_statistics_are_those_of_all_numbers_and_lie_beside_the_manifest(root, capsys):
    before = fr.open(root).manifest.digest
    assert main(["inspect", str(root), "--statistics"]) == 0
    assert "mean; std; q01; q50; q99" in capsys.readouterr().out
    stored = json.loads((root / "statistics.json").read_text())
    assert stored["fingerprint"] == fr.open(root).manifest.fingerprint
    assert fr.open(root).manifest.digest == before
    assert not fr.verify(root).faults
    for split, rows in (("train", range(16)), ("val", range(16, ROWS))):
        statistics = stored["splits"][split]
        states = np.stack([state(row) for row in rows if row != 3]).astype(np.float64)
        for name, numbers in expected(states).items():
            np.testing.assert_allclose(
                np.array(statistics["state"][name], float),
                numbers,
                rtol=1e-9,
                err_msg=name,
            )
        # Each measurement counts once, though neighbouring samples have it too.
        times = np.concatenate([can_times(clip) for clip in {row // 4 for row in rows}]) * 1e-9
        for name, numbers in expected(times).items():
            np.testing.assert_allclose(
                statistics["can"][name],
                numbers,
                rtol=1e-9,
                atol=1e-9,
                err_msg=name,
            )
    assert fr.inspect(root, statistics=True).facts["statistics"] == stored["splits"]
    with pytest.raises(ConfigError, match="is one sample"):
        fr.inspect(root, "clip-0000-000001", statistics=True)


@given(
    st.lists(
        st.lists(st.floats(-1e6, 1e6) | st.just(np.nan), max_size=40),
        max_size=6,
    )
)
@pytest.mark.filterwarnings("ignore:All-NaN")
def test_batches_do_not_matter(batches):
    numbers = _Numbers(())
    for batch in batches:
        numbers.add(np.array(batch, np.float64))
    statistics = numbers.result()
    all_numbers = np.array([number for batch in batches for number in batch], np.float64)
    assert statistics["count"] == np.isfinite(all_numbers).sum()
    if statistics["count"]:
        for name, value in expected(all_numbers).items():
            assert statistics[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name
    else:
        assert statistics["mean"] is statistics["q50"] is statistics["min"] is None


def test_quantiles_of_many_are_those_of_evenly_spaced_ones(monkeypatch):
    monkeypatch.setattr("fuelrail.sharding.verify.statistics._MOST_KEPT", 1000)
    numbers = _Numbers((1,))
    values = np.random.default_rng(0).normal(size=(20_000, 1))
    for first in range(0, len(values), 777):
        numbers.add(values[first : first + 777])
    assert len(numbers._kept) <= 1000
    assert np.array_equal(numbers._kept, values[:: numbers._stride])
    statistics = numbers.result()
    assert statistics["mean"] == pytest.approx([values.mean()])
    assert abs(statistics["q50"][0] - np.median(values)) < 0.15
