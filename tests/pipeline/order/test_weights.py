"""Weights and systematic sampling: exact expected counts, every epoch's counts next to them, and what is refused."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import csv
from pyarrow import parquet as pq

from fuelrail.pipeline.errors import OrderError
from fuelrail.pipeline.order.compile import compile_table
from fuelrail.pipeline.order.keys import read_columns
from fuelrail.pipeline.order.permutation import derive_key
from fuelrail.pipeline.order.spec import OrderSpec
from fuelrail.pipeline.order.table import Table
from fuelrail.pipeline.order.weights import (
    MAX_POSITIONS,
    AttributeWeights,
    ClassBalance,
    FileWeights,
    SystematicEpoch,
    SystematicSampling,
    TickSearch,
    columns_of,
    compute_weights,
)
from fuelrail.pipeline.settings import convert

WEIGHTS = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e3)), min_size=1, max_size=60).filter(
    any
)
LENGTHS = st.integers(1, 300)
KEYS = st.integers(0, 2**128 - 1)


@given(WEIGHTS, LENGTHS, KEYS)
def test_each_epoch_has_floor_or_ceil_of_the_expected_copies(weights, length, key):
    sampling = SystematicSampling(weights, length)
    samples = sampling.epoch(key)(np.arange(length))
    counts = np.bincount(samples, minlength=len(weights))
    expected = sampling.expected_counts()
    assert counts.sum() == length
    assert (np.diff(samples) >= 0).all()
    assert (np.abs(counts - expected) < 1).all()
    assert (counts[np.array(weights) == 0] == 0).all()
    assert expected == pytest.approx(
        length * np.array(weights) / np.sum(weights), abs=1e-6 * length
    )


@given(
    st.lists(st.sampled_from([0, 0, 1, 2, 1000, 2**40]), min_size=1, max_size=200).filter(any),
    st.data(),
)
def test_the_search_finds_what_bisection_finds(ticks, data):
    ends = np.cumsum(ticks)
    near = [end + step for end in ends.tolist() for step in (-1, 0, 1)]
    drawn = data.draw(st.lists(st.integers(0, int(ends[-1]) - 1), max_size=20))
    sought = np.array([tick for tick in near + drawn if 0 <= tick < ends[-1]])
    assert np.array_equal(TickSearch(ends)(sought), np.searchsorted(ends, sought, side="right"))


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any),
    st.integers(1, 40),
)
def test_over_all_phases_the_counts_are_exactly_the_expected_ones(weights, length):
    ends = np.cumsum(weights)
    total = int(ends[-1])
    counts = sum(
        np.bincount(
            SystematicEpoch(TickSearch(ends), length, phase)(np.arange(length)),
            minlength=len(weights),
        )
        for phase in range(total)
    )
    assert [Fraction(int(count), total) for count in counts] == [
        Fraction(length * w, total) for w in weights
    ]


@given(WEIGHTS, LENGTHS, KEYS, st.data())
def test_copies_begin_where_it_says(weights, length, key, data):
    epoch = SystematicSampling(weights, length).epoch(key)
    samples = epoch(np.arange(length))
    assert epoch.first_copies(range(len(weights) + 1)) == [
        int((samples < i).sum()) for i in range(len(weights) + 1)
    ]
    positions = data.draw(st.lists(st.integers(0, length - 1), max_size=9))
    assert epoch(np.array(positions, dtype=np.int64)).tolist() == samples[positions].tolist()


def test_equal_weights_of_equal_length_are_every_sample_once():
    for key in range(50):
        assert np.array_equal(
            SystematicSampling(np.full(1000, 0.3), 1000).epoch(key)(np.arange(1000)),
            np.arange(1000),
        )


def test_no_overflow_at_the_longest_epoch_of_uneven_weights():
    weights = np.ones(100_000)
    weights[::3] = 1e-5
    length = MAX_POSITIONS - 1
    sampling = SystematicSampling(weights, length)
    for key in (0, 1, 2**128 - 1):
        epoch = sampling.epoch(key)
        samples = epoch(np.array([0, 1, length // 2, length - 1]))
        assert samples[0] in (0, 1)
        assert samples[-1] in (99_998, 99_999)
        assert abs(samples[2] - 50_000) < 3
        starts = epoch.first_copies([0, 1, 2, 100_000])
        assert starts[0] == 0
        assert starts[3] == length
        assert epoch(np.array(starts[1:3])).tolist() == [1, 2]
        assert abs((starts[2] - starts[1]) - sampling.expected_counts()[1]) < 1


def test_samples_are_those_of_every_release():
    # Saved training states rely on these, as on the values in test_permutation.py.
    epoch = SystematicSampling([1.0, 0.0, 0.5, 3.25, 1e-12], 12).epoch(derive_key("golden"))
    assert epoch(np.arange(12)).tolist() == GOLDEN


GOLDEN = [0, 0, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3]


def test_texts_may_be_coded_and_columns_are_named_once():
    table = pa.table({"city": ["a", "b", None, "c"], "night": [True, False, None, True]})
    by_city = AttributeWeights(attribute="city", values={"a": 3, "c": 0})
    by_night = AttributeWeights(attribute="night", values={"true": 2}, default=0.5)
    coded = table.set_column(0, "city", table["city"].dictionary_encode())
    for columns in (table, coded):
        assert compute_weights([by_city], columns).tolist() == [3, 1, 1, 0]
        assert compute_weights([by_city, by_night], columns).tolist() == [
            6,
            0.5,
            0.5,
            0,
        ]
    assert columns_of([by_city, by_night, by_city]) == ("city", "night")


def test_file_weights_by_key(tmp_path):
    keys = pa.table({"key": ["k0", "k1", "k2"]})
    hard = pa.table({"key": ["k2", "gone"], "weight": [2.5, 9.0]})
    pq.write_table(hard, tmp_path / "hard.parquet")
    csv.write_csv(hard, tmp_path / "hard.csv")
    for name in ("hard.parquet", "hard.csv"):
        file = str(tmp_path / name)
        weighting = FileWeights(file=file, default=0.5)
        files = {file: read_columns(file, ("key", "weight"))}
        assert compute_weights([weighting], keys, files).tolist() == [
            0.5,
            0.5,
            2.5,
        ]
    assert columns_of([weighting]) == ("key",)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("w.json", "{}", "must be one of .parquet, .csv"),
        ("w.csv", "key,share\na,1\n", "no column 'weight'; it has: key, share"),
        ("w.csv", "key,weight\nk0,1\nk0,2\n", "names a key twice"),
        ("w.csv", "key,weight\nz,1\n", "names none of the 1 selected samples"),
        (
            "w.csv",
            "key,weight\nk0,-1\n",
            "weights must be finite numbers >= 0, got -1.0",
        ),
        ("w.csv", "key,weight\nk0,heavy\n", "attribute 'weight' is string"),
        ("w.parquet", "no parquet", "cannot be read"),
        (None, None, "cannot be read"),
    ],
)
def test_bad_weight_files_are_refused(tmp_path, name, content, text):
    path = tmp_path / (name or "gone.csv")
    if content is not None:
        path.write_text(content)
    spec = OrderSpec(weights=(FileWeights(file=str(path)),))
    with pytest.raises(OrderError, match=text):
        compile_table(spec, Table({"key": ["k0"]}, spec, None, None), [1])


def test_weightings_come_from_settings():
    spec = convert(
        {
            "weights": [
                {"by": "class_balance", "classes": ["num_car"]},
                {"by": "attribute", "attribute": "night"},
            ]
        },
        OrderSpec,
        "order.yaml",
    )
    assert spec.weights == (
        ClassBalance(classes=("num_car",)),
        AttributeWeights(attribute="night"),
    )
