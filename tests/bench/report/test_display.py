"""Tables and tiles of records, from how their fields show."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from fuelrail.bench.measure.clock import Summary
from fuelrail.bench.measure.display import display, displayed_fields
from fuelrail.bench.measure.rates import Interval
from fuelrail.bench.report.page import table_of, tiles_of


class Record(msgspec.Struct):
    """A record with a field of each kind."""

    name: Annotated[str, display("stage")]
    num_bytes: Annotated[int, display("memory", unit="MiB", digits=".1f", scale=2**-20)]
    rate: Annotated[float | None, display("items/s", missing="unknown", better="more")]
    hidden: int = 0


class Figures(msgspec.Struct):
    """Figures with a spread."""

    first_batch_s: Annotated[
        Interval, display("first batch", unit="s", digits=".2f", better="less")
    ]
    step_time: Annotated[Summary, display("step time", unit="ms")]
    mfu: Annotated[float | None, display("MFU", digits=".1%")] = None


STEP_TIME = Summary(mean_ms=130.0, p50_ms=129.9, p99_ms=150.2, max_ms=160.0, count=50)


def test_a_table_has_a_column_for_each_field_that_shows():
    table = table_of([Record("fetch", 3 << 20, 1234.5), Record("decode", 1 << 19, None)])
    assert table.header == ["stage", "memory [MiB]", "items/s"]
    assert table.rows == [
        ["fetch", "3.0", "1,234"],
        ["decode", "0.5", "unknown"],
    ]


@pytest.mark.parametrize(
    ("num_repeats", "label"),
    [(2, "first batch"), (3, "first batch (0.09 to 0.11)")],
)
def test_a_tile_says_its_unit_and_its_spread(num_repeats, label):
    interval = Interval(
        median=0.1,
        low=0.09,
        high=0.11,
        confidence=0.75,
        num_repeats=num_repeats,
    )
    tiles = tiles_of(Figures(interval, STEP_TIME), names={"step_time": "step"})
    assert tiles.entries == [
        ("0.10 s", label),
        ("130 ms", "step p50; p99 150 ms"),
    ]


def test_a_field_says_whether_more_is_better():
    assert {name: entry.better for name, entry in displayed_fields(Record).items()} == {
        "name": None,
        "num_bytes": None,
        "rate": "more",
    }
