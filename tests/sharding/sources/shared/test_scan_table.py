"""The scan table: what is written is read back; keys cannot collide."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import (
    SCHEMA,
    Meta,
    decode_meta,
    encode_meta,
)
from fuelrail.sharding.sources.shared.scan_table import (
    CLIP_NUMBER,
    ROWS_PER_BATCH,
    Reference,
    ScanTable,
    ScanWriter,
    decode_row,
    frame_key,
    frame_keys,
    tar_bytes,
)

ATTRIBUTES = {"location": str, "night": bool, "num_boxes": int, "speed": float}


def meta(clip: str, frame: int) -> Meta:
    return Meta(
        schema=SCHEMA,
        dataset="",
        key=frame_key(clip, frame),
        sample_token="t",
        clip_id=clip,
        clip_token="",
        clip_name=clip,
        log_id="",
        vehicle="",
        frame_idx=frame,
        num_frames=9,
        prev_key=None,
        next_key=None,
        timestamp_ns=frame * 10,
        is_key_frame=True,
        split="",
        cameras={},
    )


def fill(path, lengths):
    with ScanWriter(path, ATTRIBUTES) as out:
        for clip, length in lengths.items():
            out.begin_clip(clip, clip.upper(), "")
            for frame in range(length):
                out.append(
                    meta(clip, frame),
                    b"g" * frame,
                    None if clip == "b" else b"boxes",
                    [
                        Reference(
                            name="cam_front.jpg",
                            ref=f"{clip}/{frame}",
                            bytes=1000 + frame,
                            width=640,
                            height=480,
                        ),
                        Reference("l.npy", "x", 100),
                    ],
                    {
                        "location": clip,
                        "night": None,
                        "num_boxes": frame,
                        "speed": 0.5,
                    },
                )
        return out


def test_rows_come_back(tmp_path):
    out = fill(tmp_path / "scan.arrow", {"a": 3, "b": ROWS_PER_BATCH, "c": 2})
    table = ScanTable(tmp_path / "scan.arrow")
    assert len(table) == ROWS_PER_BATCH + 5
    assert [(clip.clip_id, clip.first_row, clip.num_samples) for clip in out.clips] == [
        ("a", 0, 3),
        ("b", 3, ROWS_PER_BATCH),
        ("c", ROWS_PER_BATCH + 3, 2),
    ]
    assert out.clips[0].clip_name == "A"
    expected = [
        (0, 0, 0),
        (2, 0, 2),
        (3, 1, 0),
        (ROWS_PER_BATCH, 1, ROWS_PER_BATCH - 3),
        (ROWS_PER_BATCH + 4, 2, 1),
    ]
    for number, clip, frame in expected:
        row = table.row(number)
        assert (row.clip, row.frame, row.timestamp_ns) == (
            clip,
            frame,
            frame * 10,
        )
        assert decode_meta(row.meta).key == row.key == f"{'abc'[clip]}-{frame:06d}"
        assert row.geometry == b"g" * frame
        assert row.boxes == (None if clip == 1 else b"boxes")
        assert row.members == (
            Reference(
                name="cam_front.jpg",
                ref=f"{'abc'[clip]}/{frame}",
                bytes=1000 + frame,
                width=640,
                height=480,
            ),
            Reference(name="l.npy", ref="x", bytes=100, width=0, height=0),
        )
    assert np.array_equal(np.bincount(table.numbers("clip")), [3, ROWS_PER_BATCH, 2])
    attributes = pa.concat_tables(table.attribute_parts())
    assert attributes.column_names == [
        "key",
        CLIP_NUMBER,
        "frame",
        "timestamp_ns",
        *ATTRIBUTES,
    ]
    ids = pa.array(["a", "b", "c"]).take(attributes[CLIP_NUMBER].combine_chunks())
    assert (
        frame_keys(ids, attributes["frame"].combine_chunks()).to_pylist()
        == attributes["key"].to_pylist()
    )
    assert attributes["location"].to_pylist()[2:4] == ["a", "b"]
    assert attributes["night"].null_count == len(table)


small = st.binary(max_size=300)
references = st.builds(
    Reference,
    st.text("abc._", max_size=9),
    st.text(max_size=9),
    *3 * [st.integers(0, 2**27)],
)


@given(
    st.lists(
        st.tuples(small, st.none() | small, st.lists(references, max_size=4)),
        min_size=1,
        max_size=9,
    )
)
def test_any_row_comes_back_whatever_was_looked_at_before(rows):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan.arrow"
        with ScanWriter(path, {}) as out:
            out.begin_clip("a", "A", "")
            for frame, (geometry, boxes, members) in enumerate(rows):
                out.append(meta("a", frame), geometry, boxes, members, {})
        table = ScanTable(path)
        encoded = [table.encoded_row(number) for number in range(len(rows))]
        for number in reversed(range(len(rows))):
            geometry, boxes, members = rows[number]
            row = table.row(number)
            assert (row.geometry, row.boxes, row.members) == (
                geometry,
                boxes,
                tuple(members),
            )
            assert row == decode_row(encoded[number])
            assert (row.key, row.frame) == (frame_key("a", number), number)


def test_size_is_what_the_sample_takes_in_a_tar(tmp_path):
    fill(tmp_path / "scan.arrow", {"a": 1})
    table = ScanTable(tmp_path / "scan.arrow")
    small = (
        tar_bytes(len(encode_meta(meta("a", 0))) // 2)
        + tar_bytes(0)
        + tar_bytes(len(b"boxes") // 2)
    )
    assert table.numbers("size_bytes").tolist() == [small + tar_bytes(1000) + tar_bytes(50)]
    assert (tar_bytes(0), tar_bytes(1), tar_bytes(512), tar_bytes(513)) == (
        512,
        1024,
        1024,
        1536,
    )


def test_clip_ids_are_unique_and_legal(tmp_path):
    with ScanWriter(tmp_path / "scan.arrow", {}) as out:
        out.begin_clip("a", "A", "")
        with pytest.raises(SourceError, match="duplicate clip id 'a'"):
            out.begin_clip("a", "other", "")
        with pytest.raises(ConfigError, match="not allowed"):
            out.begin_clip("a.b", "other", "")
