"""Blocks of shards and files in memory that is used again: the same bytes in fewer pieces and aligned writes."""

from __future__ import annotations

import io
import os
import random

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.tar import StoredMember, pack_sample
from fuelrail.sharding.write import blocks
from fuelrail.sharding.write.blocks import BlockWriter
from fuelrail.sharding.write.read_buffer import ReadBuffer

SMALL_BLOCK = 64


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "IO_BLOCK_BYTES", SMALL_BLOCK)


def write_bundles(path, bundles) -> list[tuple[int, int]]:
    """Write all bundles of pieces to a file; where each system call began, and how long it was."""
    calls: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patched, path.open("wb") as file:
        writev = os.writev

        def noted(fd, views):
            offset = os.lseek(fd, 0, os.SEEK_CUR)
            calls.append((offset, writev(fd, views)))
            return calls[-1][1]

        patched.setattr(os, "writev", noted)
        writer = BlockWriter(file)
        for pieces in bundles:
            writer.write(pieces)
        writer.flush()
        writer.flush()
    return calls


@given(st.lists(st.lists(st.binary(max_size=300), max_size=6), max_size=8))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_bytes_are_the_same_and_the_writes_aligned(small_blocks, tmp_path_factory, bundles):
    path = tmp_path_factory.mktemp("blocks") / "file"
    calls = write_bundles(path, bundles)
    assert path.read_bytes() == b"".join(b"".join(pieces) for pieces in bundles)
    assert all(offset % SMALL_BLOCK == 0 for offset, _ in calls)
    assert all(length % SMALL_BLOCK == 0 for _, length in calls[:-1])


def test_what_was_handed_over_may_be_overwritten_at_once(small_blocks, tmp_path):
    memory = bytearray(b"a" * 100)
    with (tmp_path / "file").open("wb") as file:
        writer = BlockWriter(file)
        for letter in b"abc":
            memory[:] = bytes([letter]) * 100
            writer.write([memory])
        writer.flush()
    assert (tmp_path / "file").read_bytes() == b"a" * 100 + b"b" * 100 + b"c" * 100


def test_any_array_and_more_pieces_than_one_call_takes(small_blocks, tmp_path):
    pieces = [memoryview(bytes(range(8))).cast("I")] * (blocks._MOST_PIECES + 5)
    write_bundles(tmp_path / "file", [pieces])
    assert (tmp_path / "file").read_bytes() == bytes(range(8)) * len(pieces)


def test_a_call_that_writes_less_is_followed_by_others(small_blocks, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, views: os.write(fd, b"".join(views)[:10]))
    with (tmp_path / "file").open("wb") as file:
        writer = BlockWriter(file)
        writer.write([bytes(range(200))])
        writer.flush()
    assert (tmp_path / "file").read_bytes() == bytes(range(200))


def test_what_is_not_a_file_of_this_machine_gets_the_pieces_as_they_come():
    file = io.BytesIO()
    writer = BlockWriter(file)
    writer.write([b"ab", b"c"])
    assert file.getvalue() == b"abc"
    writer.flush()
    assert file.getvalue() == b"abc"


SIZES = st.one_of(
    st.integers(1, 2000),
    st.sampled_from([511, 512, 513, 16_383, 16_384, 70_000, 2_500_000]),
)
MEMBERS = st.lists(st.tuples(st.booleans(), SIZES), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("files")


def members_in(buffer, folder, sizes, draw):
    """Members of files that were read and of bytes from elsewhere, and what their data are."""
    stored = []
    contents = []
    for number, (is_file, size) in enumerate(sizes):
        content = draw.randbytes(size)
        path = folder / str(number)
        path.write_bytes(content)
        stored.append(
            StoredMember(
                f"m{number}.bin",
                buffer.read(str(path), size) if is_file else content,
            )
        )
        contents.append(StoredMember(f"m{number}.bin", content))
    return stored, contents


@given(
    samples=st.lists(MEMBERS, min_size=1, max_size=3),
    shuffled=st.booleans(),
    seed=st.integers(0, 99),
)
@example(
    samples=[
        [(False, 241)],
        [
            (True, 517),
            (True, 1),
            (True, 81),
            (False, 1),
            (False, 1),
            (False, 509),
        ],
    ],
    shuffled=True,
    seed=0,
)
@settings(max_examples=25)
def test_joined_pieces_are_the_same_bytes(folder, samples, shuffled, seed):
    draw = random.Random(seed)
    buffer = ReadBuffer()
    for sizes in samples:
        buffer.clear()
        stored, contents = members_in(buffer, folder, sizes, draw)
        order = draw.sample(range(len(sizes)), len(sizes)) if shuffled else range(len(sizes))
        packed = pack_sample("key", [stored[number] for number in order])
        pieces = buffer.joined(packed.pieces)
        assert len(pieces) <= len(packed.pieces)
        assert b"".join(pieces) == b"".join(
            pack_sample("key", [contents[number] for number in order]).pieces
        )


def test_a_sample_that_is_kept_stays_while_the_next_one_is_read(folder):
    buffer = ReadBuffer()
    kept = b""
    data = memoryview(b"")
    for number in range(4):
        content = bytes([number]) * 5000
        (folder / "kept").write_bytes(content)
        buffer.clear(keep=True)
        before = data
        data = buffer.read(str(folder / "kept"), len(content))
        assert (before, data) == (kept, content)
        kept = content


def test_a_sample_of_files_is_one_piece(folder):
    buffer = ReadBuffer()
    sizes = [
        (False, 1500),
        (False, 900),
        *[(True, 200_000 + number) for number in range(6)],
    ]
    stored, _ = members_in(buffer, folder, sizes, random.Random(0))
    assert len(buffer.joined(pack_sample("key", stored).pieces)) == 1


def test_a_file_that_is_not_stored_as_it_is_leaves_the_others_together(folder):
    buffer = ReadBuffer()
    stored, _ = members_in(
        buffer,
        folder,
        [(True, 100_000), (True, 30_000), (True, 300_000)],
        random.Random(0),
    )
    stored[2] = stored[2]._replace(data=bytes(stored[2].data[::2]))
    assert [len(piece) for piece in buffer.joined(pack_sample("key", stored).pieces)] == [
        512 + 100_352 + 512 + 30_208 + 512,
        150_000,
        16,
    ]


@pytest.mark.parametrize("size", [99, 101])
def test_a_file_of_another_size_is_named(folder, size):
    (folder / "changed").write_bytes(bytes(100))
    with pytest.raises(
        SourceError,
        match=rf"changed' had {size} bytes when the run started and has 100 now",
    ):
        ReadBuffer().read(str(folder / "changed"), size)
