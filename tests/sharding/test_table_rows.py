"""Rows read from a batch's buffers are those that Arrow reads."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.table_rows import row_reader

INTS = st.integers(-(1 << 31), (1 << 31) - 1)
PAIRS = pa.list_(pa.struct([("name", pa.string()), ("bytes", pa.int64())]))
COLUMNS = st.one_of(
    st.tuples(st.just(pa.int32()), st.lists(INTS, min_size=1)),
    st.tuples(st.just(pa.int64()), st.lists(INTS.map(lambda value: value << 20), min_size=1)),
    st.tuples(st.just(pa.string()), st.lists(st.none() | st.text(), min_size=1)),
    st.tuples(st.just(pa.binary()), st.lists(st.none() | st.binary(max_size=20), min_size=1)),
    st.tuples(st.just(PAIRS), st.lists(st.lists(st.tuples(st.text(), INTS), max_size=3), min_size=1)),
)


@given(COLUMNS)
def test_rows_are_what_arrow_reads(column):
    kind, values = column
    given_values = [[dict(zip(("name", "bytes"), pair, strict=True)) for pair in row] for row in values] \
        if kind == PAIRS else values  # fmt: skip
    batch = pa.record_batch([pa.array(given_values, kind)], names=["column"])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    read = row_reader(pa.ipc.open_file(sink.getvalue()).get_batch(0).column(0))
    assert [read(row) for row in range(len(values))] == values
