"""Verification of frame shards: every flipped byte and every cut is found, with shard, offset and key."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.format.codecs import DICTIONARY_FILE, train_dictionary
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.format.index.samples import INDEX_FILE
from fuelrail.pipeline.format.tar import END_OF_ARCHIVE
from fuelrail.pipeline.format.zstd_frames import (
    encode_frame,
    encode_seek_table,
    read_seek_table,
)
from fuelrail.sharding.verify.dataset import verify
from support import edits
from support.datasets import build_dataset

SHARD = "train-000000.tar.zst"


def faults(root, *, deep=False):
    return verify(root, deep=deep, num_threads=2).faults


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """One dataset for all examples, its first shard's bytes, which are put back after each, and rows."""
    root = tmp_path_factory.mktemp("frames") / "tiny"
    build_dataset(root, {"train": (4, 4)}, layout="frame", size=(48, 32))
    return (
        root,
        (root / SHARD).read_bytes(),
        [open_dataset(root).index.row(number) for number in range(4)],
    )


def reseal(root, data):
    """Other bytes of the first shard, with a manifest that agrees: what only an insider's mistake leaves."""
    (root / SHARD).write_bytes(data)
    edits.reseal(root)


@given(data=st.data())
@settings(max_examples=30)
def test_every_flipped_bit_is_found_and_named(pristine, data):
    root, content, rows = pristine
    position = data.draw(st.integers(0, len(content) - 1))
    bad = bytearray(content)
    bad[position] ^= 1 << data.draw(st.integers(0, 7))
    (root / SHARD).write_bytes(bad)
    try:
        reported = faults(root, deep=data.draw(st.booleans()))
    finally:
        (root / SHARD).write_bytes(content)
    assert {fault.file for fault in reported} == {SHARD}
    assert reported[0].text == "SHA-256 does not match the manifest"
    owner = next(
        (row for row in rows if row.offset <= position < row.offset + row.length),
        None,
    )
    named = {(fault.offset, fault.key) for fault in reported[1:]}
    if owner is not None:
        assert named == {(owner.offset, owner.key)}
    else:
        assert named
        assert all(
            (offset is not None and offset >= rows[-1].offset + rows[-1].length) or key
            for offset, key in named
        )


@given(data=st.data())
@settings(max_examples=30)
def test_every_cut_is_found_and_every_sample_it_hits_is_named(pristine, data):
    root, content, rows = pristine
    length = data.draw(st.integers(1, len(content) - 1))
    (root / SHARD).write_bytes(content[:length])
    try:
        reported = faults(root)
    finally:
        (root / SHARD).write_bytes(content)
    assert reported[0].text == f"has {length} bytes, the manifest says {len(content)}"
    named = {fault.key for fault in reported if fault.key}
    assert named == {row.key for row in rows if row.offset + row.length > length}
    assert {fault.file for fault in reported} == {SHARD}


class TestInsiderMistakes:
    """All digests right, and yet not what it should be."""

    @pytest.fixture
    def root(self, tmp_path):
        build_dataset(tmp_path / "tiny", {"train": (4,)}, layout="frame", size=(48, 32))
        return tmp_path / "tiny"

    def frames(self, root):
        content = (root / SHARD).read_bytes()
        return content, read_seek_table(content, shard=SHARD)

    def test_a_table_with_another_decoded_size(self, root):
        content, table = self.frames(root)
        sizes = [(frame.stored_bytes, frame.raw_bytes) for frame in table]
        body = content[: table[-1].offset + table[-1].stored_bytes]
        sizes[1] = (sizes[1][0], sizes[1][1] + 512)
        reseal(root, body + encode_seek_table(sizes))
        (fault,) = faults(root)
        row = open_dataset(root).index.row(1)
        assert (fault.offset, fault.key) == (row.offset, row.key)
        assert "the seek table" in fault.text

    def test_no_table(self, root):
        content, table = self.frames(root)
        reseal(root, content[: table[-1].offset + table[-1].stored_bytes])
        (fault,) = faults(root)
        assert fault.text == "no seek table at the end"

    def test_an_archive_that_does_not_end(self, root):
        content, table = self.frames(root)
        end = encode_frame(b"\1" + END_OF_ARCHIVE[1:], 3)
        sizes = [(frame.stored_bytes, frame.raw_bytes) for frame in table[:-1]]
        reseal(
            root,
            content[: table[-1].offset]
            + end
            + encode_seek_table([*sizes, (len(end), len(END_OF_ARCHIVE))]),
        )
        (fault,) = faults(root)
        assert (fault.text, fault.offset) == (
            "the last frame is not the end of the archive",
            table[-1].offset,
        )

    def test_frames_that_the_index_does_not_know(self, root):
        content, table = self.frames(root)
        extra = encode_frame(bytes(512), 3)
        end = content[table[-1].offset :][: table[-1].stored_bytes]
        sizes = [(frame.stored_bytes, frame.raw_bytes) for frame in table[:-1]]
        table_bytes = encode_seek_table([*sizes, (len(extra), 512), (len(end), 1024)])
        reseal(root, content[: table[-1].offset] + extra + end + table_bytes)
        (fault,) = faults(root)
        assert fault.text.startswith(
            f"the index covers {table[-1].offset} bytes of frames, the archive's end is at"
        )

    def test_without_an_index_the_frames_are_checked_all_the_same(self, root):
        content, table = self.frames(root)
        bad = bytearray(content)
        bad[table[2].offset + 40] ^= 1
        reseal(root, bytes(bad))
        (root / INDEX_FILE).unlink()
        reported = [fault for fault in faults(root) if fault.file == SHARD]
        assert [fault.offset for fault in reported] == [table[2].offset]


def test_a_damaged_dictionary_is_one_fault_and_not_one_for_each_sample(
    tmp_path,
):
    small = [b'{"key": "%06d", "schema": "fuelrail/1"}' % number for number in range(500)]
    build_dataset(
        tmp_path / "tiny",
        {"train": (3,)},
        dictionary=train_dictionary(small, 1024, 3),
    )
    assert faults(tmp_path / "tiny", deep=True) == []
    file = tmp_path / "tiny" / DICTIONARY_FILE
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    reported = faults(tmp_path / "tiny", deep=True)
    assert {fault.file for fault in reported} == {DICTIONARY_FILE}
