"""What a log states and what is read of it: a killed recorder, cut and joined files, counts that differ."""

from __future__ import annotations

import contextlib
import os
import sqlite3
import struct

import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.logs.files import sqlite_wal
from fuelrail.sharding.sources.logs.files.mcap_records import MAGIC, RECORD
from fuelrail.sharding.sources.logs.files.sqlite_file import READ_WITH_WAL
from fuelrail.sharding.sources.registry import SourceSpec
from support.log_world import ros_messages, write_bag, write_mcap, write_rosbag2
from support.source_world import make_world

MESSAGE = 'INSERT INTO "messages"'
NO_END = "files without an end, as a killed recorder leaves them"


@pytest.fixture
def sent():
    world = make_world(1, 8)
    return ros_messages(world, world.clips[0])


def scan(kind, path, **options):
    return scan_source(SourceSpec(kind, str(path), options))


def write_killed_bag(folder, sent, num_in_file):
    """A folder as a recorder leaves it that was killed: all but the first messages are in the -wal."""
    write_rosbag2(folder / "bag", sent)
    closed = folder / "bag/bag.db3"
    with contextlib.closing(sqlite3.connect(closed)) as source:
        script = sorted(source.iterdump(), key=lambda line: line.startswith(MESSAGE))
    live = folder / "live.db3"
    with contextlib.closing(sqlite3.connect(live, isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA wal_autocheckpoint = 0")
        num_messages = 0
        for line in script:
            if line.startswith(MESSAGE):
                if num_messages == num_in_file:
                    database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                num_messages += 1
            if line not in ("BEGIN TRANSACTION;", "COMMIT;"):
                database.execute(line)
        closed.write_bytes(live.read_bytes())
        wal = folder / "bag/bag.db3-wal"
        wal.write_bytes((folder / "live.db3-wal").read_bytes())
    return folder / "bag", wal


def facts_of(folder):
    return {
        entry.name: (entry.stat().st_size, entry.stat().st_mtime_ns) for entry in os.scandir(folder)
    }


@pytest.mark.parametrize("num_in_file", [-1, 0, 25], ids=["tables too", "all", "half"])
def test_messages_in_the_write_ahead_log_are_read(tmp_path, sent, num_in_file):
    bag, wal = write_killed_bag(tmp_path, sent, num_in_file)
    before = facts_of(bag)
    info = scan("rosbag2", bag)
    assert info.num_samples == 8
    assert info.report.noted[READ_WITH_WAL] == 1
    assert facts_of(bag) == before
    assert wal.stat().st_size > 0


def test_a_cut_write_ahead_log_is_read_up_to_the_cut_and_the_rest_is_counted(tmp_path, sent):
    bag, wal = write_killed_bag(tmp_path, sent, 20)
    data = bytearray(wal.read_bytes())
    data[len(data) // 2] ^= 1
    wal.write_bytes(data)
    info = scan("rosbag2", bag)
    assert 0 < info.num_samples < 8
    assert info.report.noted["bytes of an unfinished write in a -wal"] > len(data) // 4
    # The metadata, where there is some, says how many messages there were.
    topic = "/cam_front/image_raw/compressed"
    assert info.report.noted[f"{topic}: messages that metadata.yaml counts and no file has"] > 0


def test_what_is_left_of_an_older_write_ahead_log_is_no_loss(tmp_path, sent):
    bag, wal = write_killed_bag(tmp_path, sent, 20)
    page_bytes = struct.unpack_from(">I", wal.read_bytes(), 8)[0]
    wal.write_bytes(wal.read_bytes() + bytes(3 * (24 + page_bytes)))
    noted = scan("rosbag2", bag).report.noted
    assert "bytes of an unfinished write in a -wal" not in noted


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"no log" * 100, "is not one of SQLite: it begins with 6e 6f"),
        (bytes(4096), "move it away to read the file without it"),
        (
            b"\x37\x7f\x06\x82\0\x2d\xe2\x18\0\0\x10\0" + bytes(9000),
            "none of its 8980 bytes",
        ),
    ],
)
def test_a_write_ahead_log_that_is_none_is_named(tmp_path, sent, data, says):
    bag, wal = write_killed_bag(tmp_path, sent, 20)
    wal.write_bytes(data)
    with pytest.raises(SourceError, match=rf"(?s)bag\.db3-wal.*{says}"):
        scan("rosbag2", bag)


def test_a_write_ahead_log_that_is_a_fifo_or_leads_elsewhere_is_refused(tmp_path, sent):
    bag, wal = write_killed_bag(tmp_path, sent, 20)
    outside = tmp_path / "outside"
    wal.rename(outside)
    wal.symlink_to(outside)
    with pytest.raises(SourceError, match=r"bag\.db3-wal.*leads out"):
        scan("rosbag2", bag)
    wal.unlink()
    os.mkfifo(wal)
    with pytest.raises(SourceError, match=r"bag\.db3-wal.*not a regular file"):
        scan("rosbag2", bag)


def test_files_too_large_to_copy_are_named_with_the_remedy(tmp_path, sent, monkeypatch):
    bag, _ = write_killed_bag(tmp_path, sent, 20)
    monkeypatch.setattr(sqlite_wal, "MOST_COPIED", 1 << 10)
    with pytest.raises(SourceError, match=r"wal_checkpoint\(TRUNCATE\)"):
        scan("rosbag2", bag)


def test_a_journal_of_a_write_that_was_not_finished_is_refused(tmp_path, sent):
    write_rosbag2(tmp_path / "bag", sent)
    journal = tmp_path / "bag/bag.db3-journal"
    precious = tmp_path / "precious"
    precious.write_text("a file that a hostile journal would have SQLite delete")
    journal.write_bytes(bytes(512))
    assert scan("rosbag2", tmp_path / "bag").num_samples == 8
    journal.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(504))
    with pytest.raises(SourceError, match=r"bag\.db3-journal' beside it.*quick_check"):
        scan("rosbag2", tmp_path / "bag")
    assert precious.exists()


def test_an_mcap_without_an_end_is_noted(tmp_path, sent):
    path = tmp_path / "log.mcap"
    write_mcap(path, sent, chunk_size=4000)
    data = path.read_bytes()
    assert NO_END not in scan("mcap", path).report.noted
    data_end = data.rindex(RECORD.pack(0x0F, 4))
    path.write_bytes(data[:data_end])
    noted = scan("mcap", path).report.noted
    assert noted[NO_END] == 1
    assert "bytes after a cut" not in noted
    path.write_bytes(data[:data_end] + bytes(5000))
    noted = scan("mcap", path).report.noted
    assert noted[NO_END] == 1
    assert noted["bytes after a cut"] == 5000


def test_two_mcap_files_in_one_are_refused(tmp_path, sent):
    path = tmp_path / "log.mcap"
    write_mcap(path, sent)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(SourceError, match=r"bytes behind its end: two files were joined"):
        scan("mcap", path)


@pytest.mark.parametrize("kind", ["rosbag1", "rosbag2"])
def test_bytes_behind_the_end_of_a_bag_are_refused(tmp_path, sent, kind):
    path = tmp_path / "log.bag"
    if kind == "rosbag1":
        write_bag(path, sent)
    else:
        write_rosbag2(tmp_path / "bag", sent)
        path = tmp_path / "bag/bag.db3"
    data = path.read_bytes()
    path.write_bytes(data * 2)
    with pytest.raises(SourceError, match=rf"has {len(data)} bytes behind its end: two files"):
        scan(kind, path)
    path.write_bytes(data + bytes(4096))
    if kind == "rosbag1":
        with pytest.raises(SourceError, match="has 4096 bytes behind its end"):
            scan(kind, path)
    else:
        assert scan(kind, path).report.noted["bytes of 0 behind the end of a database"] == 4096


def without_a_chunk(data):
    """An MCAP whose summary lacks the index of its last chunk, and has no checksum."""
    end = len(data) - len(MAGIC)
    start, _, _ = struct.unpack_from("<QQI", data, end - 20)
    records = []
    position = start
    while position < end:
        op, length = RECORD.unpack_from(data, position)
        records.append((op, data[position : position + RECORD.size + length]))
        position += RECORD.size + length
    last = [number for number, (op, _) in enumerate(records) if op == 0x08][-1]
    del records[last]
    records[-1] = (
        0x02,
        RECORD.pack(0x02, 20) + struct.pack("<QQI", start, 0, 0),
    )
    return data[:start] + b"".join(record for _, record in records) + MAGIC


def test_messages_that_statistics_count_and_no_index_has_are_noted(tmp_path, sent):
    path = tmp_path / "log.mcap"
    write_mcap(path, sent, chunk_size=4000)
    path.write_bytes(without_a_chunk(path.read_bytes()))
    info = scan("mcap", path, missing_camera="mask", poses="none")
    lacking = [name for name in info.report.noted if "file counts and does not have" in name]
    assert lacking


def test_messages_that_a_bag_counts_and_its_index_lacks_are_noted(tmp_path, sent):
    path = tmp_path / "log.bag"
    write_bag(path, sent)
    assert not [name for name in scan("rosbag1", path).report.noted if "counts" in name]
    data = bytearray(path.read_bytes())
    topic = data.rindex(b"topic=/lidar_top/points")
    number = data.rindex(b"conn=", 0, topic) + 5
    connection = bytes(data[number : number + 4])
    summary = data.rindex(connection + struct.pack("<I", 8))
    data[summary + 4 : summary + 8] = struct.pack("<I", 11)
    path.write_bytes(data)
    noted = scan("rosbag1", path).report.noted
    assert noted["/lidar_top/points: messages that the file counts and does not have"] == 3


def test_rows_of_a_database_are_read_whatever_their_numbers(tmp_path, sent):
    write_rosbag2(tmp_path / "bag", sent)
    with contextlib.closing(sqlite3.connect(tmp_path / "bag/bag.db3")) as database:
        database.execute("UPDATE messages SET id = id - 50")
        database.execute("INSERT INTO messages VALUES (900, 77, 1, x'00')")
        database.commit()
    info = scan("rosbag2", tmp_path / "bag")
    assert info.num_samples == 8
    assert info.report.noted["(a topic that the file does not describe): messages"] == 1


def test_files_and_folders_that_are_not_read_are_noted(tmp_path, sent):
    write_rosbag2(tmp_path / "bags/a", sent)
    write_rosbag2(tmp_path / "bags/b", sent)
    (tmp_path / "bags/a/a_1.db3").write_bytes((tmp_path / "bags/b/b.db3").read_bytes())
    (tmp_path / "bags/b/metadata.yaml").unlink()
    noted = scan("rosbag2", tmp_path / "bags").report.noted
    assert noted["files of logs that the metadata.yaml beside them does not name"] == 1
    assert [number for name, number in noted.items() if "folders of logs without" in name] == [1]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (
            RECORD.pack(0x80, 0) * 3_000_000,
            "over 65536 records without content",
        ),
        (
            RECORD.pack(0x06, 40) + bytes(40),
            "over 65536 records without content",
        ),
        (RECORD.pack(0x05, 0), "byte 8 has 0 bytes, and its head alone has 22"),
    ],
    ids=["unknown", "chunks", "messages"],
)
def test_records_without_content_end_soon(tmp_path, body, says):
    path = tmp_path / "log.mcap"
    number = 1 if len(body) > 1 << 20 else 300_000
    path.write_bytes(MAGIC + body * number)
    with pytest.raises(SourceError, match=says):
        scan("mcap", path)
