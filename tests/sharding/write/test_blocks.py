"""Blocks: the same bytes whatever the pieces, in writes that begin and end at multiples of a block."""

from __future__ import annotations

import io
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuelrail.sharding.write import blocks
from fuelrail.sharding.write.blocks import BlockWriter

SMALL_BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCK_BYTES", SMALL_BLOCK)


def written(path, bundles) -> list[tuple[int, int]]:
    """Write all bundles of pieces to a file; where each system call began, and how long it was."""
    calls: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patched, path.open("wb") as file:
        writev = os.writev

        def noted(fd, views):
            at = os.lseek(fd, 0, os.SEEK_CUR)
            calls.append((at, writev(fd, views)))
            return calls[-1][1]

        patched.setattr(os, "writev", noted)
        writer = BlockWriter(file)
        for pieces in bundles:
            writer.write(pieces)
        writer.flush()
        writer.flush()
    return calls


@given(st.lists(st.lists(st.binary(max_size=300), max_size=6), max_size=8))
def test_the_bytes_are_the_same_and_the_writes_aligned(tmp_path_factory, bundles):
    path = tmp_path_factory.mktemp("blocks") / "file"
    calls = written(path, bundles)
    assert path.read_bytes() == b"".join(b"".join(pieces) for pieces in bundles)
    assert all(at % SMALL_BLOCK == 0 for at, _ in calls)
    assert all(length % SMALL_BLOCK == 0 for _, length in calls[:-1])


def test_what_was_handed_over_may_be_overwritten_at_once(tmp_path):
    memory = bytearray(b"a" * 100)
    with (tmp_path / "file").open("wb") as file:
        writer = BlockWriter(file)
        for letter in b"abc":
            memory[:] = bytes([letter]) * 100
            writer.write([memory])
        writer.flush()
    assert (tmp_path / "file").read_bytes() == b"a" * 100 + b"b" * 100 + b"c" * 100


def test_any_array_and_more_pieces_than_one_call_takes(tmp_path):
    pieces = [memoryview(bytes(range(8))).cast("I")] * (blocks._MOST_PIECES + 5)
    written(tmp_path / "file", [pieces])
    assert (tmp_path / "file").read_bytes() == bytes(range(8)) * len(pieces)


def test_a_call_that_writes_less_is_followed_by_others(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "writev", lambda fd, views: os.write(fd, b"".join(views)[:10]))
    with (tmp_path / "file").open("wb") as file:
        writer = BlockWriter(file)
        writer.write([bytes(range(200))])
        writer.flush()
    assert (tmp_path / "file").read_bytes() == bytes(range(200))


def test_what_is_no_file_of_this_machine_gets_the_pieces_as_they_come():
    file = io.BytesIO()
    writer = BlockWriter(file)
    writer.write([b"ab", b"c"])
    assert file.getvalue() == b"abc"
    writer.flush()
    assert file.getvalue() == b"abc"
