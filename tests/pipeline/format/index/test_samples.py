"""The index: what is written is read, by pyarrow too; damage is an IndexFileError, never a crash of the process."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import IndexFileError, OrderError
from fuelrail.pipeline.format.index import samples as index_module
from fuelrail.pipeline.format.index.row import IndexRow, MemberEntry
from fuelrail.pipeline.format.index.samples import (
    INDEX_FILE,
    IndexWriter,
    SampleIndex,
    write_index,
)

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ["meta.json", "cam_front.jpg", "lidar_top.npy"]
CODECS = ["raw", "zstd", "zstd-p20"]
SCALARS = ("frame", "timestamp_ns", "shard", "offset", "length", "xxh3")

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
WORDS = st.text(st.characters(codec="utf-8"), max_size=6)
OFFSETS = st.integers(0, 2**63 - 1)
SIZES = st.integers(0, 1 << 20)
DIGESTS = st.integers(0, 2**64 - 1)
MEMBERS = st.builds(
    MemberEntry,
    st.sampled_from(NAMES),
    INT64,
    SIZES,
    SIZES,
    st.sampled_from(CODECS),
    DIGESTS,
)
ROWS = st.builds(
    IndexRow,
    WORDS,
    WORDS,
    INT32,
    INT64,
    INT32,
    OFFSETS,
    SIZES,
    DIGESTS,
    st.lists(MEMBERS, max_size=3).map(tuple),
    st.just(False),
)


def make_rows(count: int) -> list[IndexRow]:
    return [
        IndexRow(
            key=f"clip-{i // 4:04d}-{i % 4:06d}",
            clip_id=f"clip-{i // 4:04d}",
            frame=i % 4,
            timestamp_ns=i * 10**8,
            shard=i % 3,
            offset=i * 4096,
            length=4096,
            xxh3=i * 7919,
            members=tuple(
                MemberEntry(
                    name=n,
                    offset=512 + 1024 * k,
                    stored_bytes=10 + k,
                    raw_bytes=20 + k,
                    codec=CODECS[k],
                    xxh3=2**63 + k,
                )
                for k, n in enumerate(NAMES[: i % 4])
            ),
        )
        for i in range(count)
    ]


def read_all(index: SampleIndex) -> list[IndexRow]:
    return [index.row(i) for i in range(len(index))]


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> int:
    """Seven rows a batch, so that few rows fill several batches."""
    monkeypatch.setattr(index_module, "ROWS_PER_BATCH", 7)
    return 7


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(ROWS, max_size=20))
def test_what_is_written_is_read(tmp_path_factory, rows) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.arrow"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_module, "ROWS_PER_BATCH", 7)
        assert write_index(path, rows, NAMES, CODECS) == len(rows)
        index = SampleIndex(path)
        assert (index.names, index.codecs) == (tuple(NAMES), tuple(CODECS))
        assert read_all(index) == rows
        for name in SCALARS:
            assert index.column(name).tolist() == [getattr(row, name) for row in rows]
        assert index.strings("key") == [row.key for row in rows]
        assert index.strings("clip_id") == [row.clip_id for row in rows]


@pytest.mark.parametrize("count", [0, 1, 6, 7, 8, 14, 20])
def test_ranges_of_columns_cross_batches(tmp_path: Path, small_batches: int, count: int) -> None:
    rows = make_rows(count)
    write_index(tmp_path / INDEX_FILE, rows, NAMES, CODECS)
    index = SampleIndex(tmp_path / INDEX_FILE)
    for first in range(count + 1):
        for end in range(first, count + 1):
            assert index.column("offset", first, end).tolist() == [
                row.offset for row in rows[first:end]
            ]
            assert index.strings("key", first, end) == [row.key for row in rows[first:end]]


@pytest.mark.parametrize("name", SCALARS)
def test_columns_have_the_stated_dtype_empty_or_not(tmp_path: Path, name: str) -> None:
    write_index(tmp_path / INDEX_FILE, make_rows(3), NAMES, CODECS)
    index = SampleIndex(tmp_path / INDEX_FILE)
    assert index.column(name).dtype == index.column(name, 1, 1).dtype
    assert index.column(name).dtype == np.dtype(
        {"frame": "i4", "shard": "i4", "xxh3": "u8"}.get(name, "i8")
    )


def test_pyarrow_reads_the_same_table(tmp_path: Path, small_batches: int) -> None:
    rows = make_rows(20)
    write_index(tmp_path / INDEX_FILE, rows, NAMES, CODECS)
    with (
        pa.memory_map(str(tmp_path / INDEX_FILE)) as source,
        pa.ipc.open_file(source) as file,
    ):
        assert [file.get_batch(i).num_rows for i in range(file.num_record_batches)] == [7, 7, 6]
        table = file.read_all()
        table.validate(full=True)
        names, codecs = (
            json.loads(table.schema.metadata[k]) for k in (b"fuelrail.members", b"fuelrail.codecs")
        )
        read_rows = [
            IndexRow(
                **{
                    **row,
                    "members": tuple(
                        MemberEntry(
                            **{
                                **m,
                                "name": names[m["name"]],
                                "codec": codecs[m["codec"]],
                            }
                        )
                        for m in row["members"]
                    ),
                }
            )
            for row in table.to_pylist()
        ]
    assert read_rows == rows


def test_equal_rows_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_index(tmp_path / name, make_rows(50), NAMES, CODECS)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


@pytest.mark.parametrize("start", [b"ARROW2", b"arrow1", bytes(6)])
def test_a_table_begins_and_ends_as_an_arrow_file_does(tmp_path: Path, start: bytes) -> None:
    """Arrow itself looks at the end alone."""
    write_index(tmp_path / INDEX_FILE, make_rows(3), NAMES, CODECS)
    data = (tmp_path / INDEX_FILE).read_bytes()
    (tmp_path / INDEX_FILE).write_bytes(start + data[6:])
    with pytest.raises(IndexFileError, match="it does not begin as an Arrow file does"):
        SampleIndex(tmp_path / INDEX_FILE)
    (tmp_path / INDEX_FILE).write_bytes(data[:-6] + start)
    with pytest.raises(IndexFileError, match="it does not end as an Arrow file does"):
        SampleIndex(tmp_path / INDEX_FILE)


@pytest.mark.parametrize("index", [-1, 3, 10**12])
def test_rows_outside_are_refused(tmp_path: Path, index: int) -> None:
    write_index(tmp_path / INDEX_FILE, make_rows(3), NAMES, CODECS)
    with pytest.raises(OrderError, match=f"sample {index} is outside the index of 3 samples"):
        SampleIndex(tmp_path / INDEX_FILE).row(index)


def test_a_full_batch_is_followed_by_a_short_one(tmp_path: Path) -> None:
    """The batch has its real length: one row more than a batch holds."""
    count = index_module.ROWS_PER_BATCH + 1
    rows = make_rows(4)
    write_index(
        tmp_path / INDEX_FILE,
        (rows[i % 4] for i in range(count)),
        NAMES,
        CODECS,
    )
    index = SampleIndex(tmp_path / INDEX_FILE)
    assert len(index) == count
    assert index.row(count - 2) == rows[(count - 2) % 4]
    assert index.row(count - 1) == rows[(count - 1) % 4]


def test_many_threads_read_one_index(tmp_path: Path, small_batches: int) -> None:
    rows = make_rows(200)
    write_index(tmp_path / INDEX_FILE, rows, NAMES, CODECS)
    for _ in range(5):
        index = SampleIndex(tmp_path / INDEX_FILE)
        order = list(range(200)) * 2
        random.Random(1).shuffle(order)
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(index.row, order)) == [rows[i] for i in order]


class TestDamage:
    """Arrow itself trusts what it maps: without checks of ours many of these end the process with a signal."""

    def test_missing_file(self, tmp_path: Path) -> None:
        with pytest.raises(IndexFileError, match="cannot be opened"):
            SampleIndex(tmp_path / "missing")
        with pytest.raises(IndexFileError, match="cannot be opened"):
            SampleIndex(tmp_path)

    def write(
        self,
        path: Path,
        *,
        metadata: dict | None = None,
        batches: list | None = None,
        schema=None,
    ) -> Path:
        """An index with chosen parts, through pyarrow alone."""
        write_index(path, make_rows(5), NAMES, CODECS)
        with pa.ipc.open_file(path.read_bytes()) as file:
            table = file.read_all()
        right = schema or table.schema
        right = right.with_metadata({**table.schema.metadata, **(metadata or {})})
        with (
            pa.OSFile(str(path), "wb") as sink,
            pa.ipc.new_file(sink, right) as writer,
        ):
            for batch in table.to_batches() if batches is None else batches:
                writer.write_batch(pa.RecordBatch.from_arrays(batch.columns, schema=right))
        return path

    def test_wrong_batch_lengths(self, tmp_path: Path, small_batches: int) -> None:
        write_index(tmp_path / "good", make_rows(9), NAMES, CODECS)
        with pa.ipc.open_file((tmp_path / "good").read_bytes()) as file:
            full = file.get_batch(0)
            short = file.get_batch(1)
        path = self.write(tmp_path / "short first", batches=[short, short])
        with pytest.raises(IndexFileError, match="record batch 0 has 2 rows"):
            SampleIndex(path).row(0)
        long = pa.Table.from_batches([full, short]).combine_chunks().to_batches()
        path = self.write(tmp_path / "long last", batches=long)
        with pytest.raises(IndexFileError, match="record batch 0 has 9 rows"):
            SampleIndex(path)


def test_unknown_names_and_codecs_are_the_writers_mistake(
    tmp_path: Path,
) -> None:
    row = make_rows(1)[0]._replace(
        members=(
            MemberEntry(
                name="other.bin",
                offset=0,
                stored_bytes=1,
                raw_bytes=1,
                codec="raw",
                xxh3=0,
            ),
        )
    )
    with (
        pytest.raises(KeyError, match=r"other\.bin"),
        IndexWriter(tmp_path / INDEX_FILE, NAMES, CODECS) as writer,
    ):
        writer.append(row)


def test_an_interrupted_writer_leaves_no_index(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError),
        IndexWriter(tmp_path / INDEX_FILE, NAMES, CODECS) as writer,
    ):
        for row in make_rows(3):
            writer.append(row)
        raise RuntimeError("interrupted")
    with pytest.raises(IndexFileError, match="cannot be opened"):
        SampleIndex(tmp_path / INDEX_FILE)
