"""Ledgers: a chain that no edit survives, appending after kills, and what the weights have seen."""

from __future__ import annotations

import random
import time

import pytest

from fuelrail.pipeline.errors import LedgerError
from fuelrail.pipeline.format import ledger
from fuelrail.pipeline.format.ledger import (
    BatchDigest,
    LedgerFile,
    PlaceReached,
    RunSetup,
    SampleReplaced,
    SegmentStart,
    read_ledger,
    seen_by_weights,
)
from fuelrail.pipeline.limits import UNTYPED

SETUP = RunSetup(
    version=1,
    identity={"dataset": "f", "split": "train"},
    epoch_length=100,
    loader=None,
    decoder="turbo",
    versions={"python": "3"},
)


def start(epoch, samples, *, restored=True, place=None):
    state = (epoch, samples) if restored else None
    return SegmentStart(
        place=place or (epoch, samples),
        global_batch=4,
        ranks=1,
        restored=state,
        time="2026-01-01T00:00:00+00:00",
    )


def reach_record(epoch, samples, why="state"):
    return PlaceReached((epoch, samples), why)


@pytest.fixture
def path(tmp_path):
    """A ledger of three segments."""
    file = LedgerFile(tmp_path / "a.ledger")
    file.append(SETUP, start(0, 0, restored=False))
    for place in range(4, 100, 16):
        file.append(reach_record(0, place))
    file.append(start(0, 52))
    file.append(
        SampleReplaced(
            since=(0, 52),
            rank=0,
            epoch=0,
            position=57,
            key="bad",
            replaced_by="good",
        )
    )
    file.append(reach_record(1, 0, "epoch"))
    file.append(start(1, 0))
    return file.path


def wrong_record(path, data, valid):
    """The number of the record that is refused; None where nothing is, or only whole records are missing at the end."""
    path.write_bytes(data)
    try:
        read_ledger(path)
    except LedgerError as error:
        return error.record
    assert valid.startswith(data), "an edit that is not seen"
    return None


@pytest.mark.parametrize("num", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_every_edit_is_refused_with_the_record_that_is_wrong(path, num):
    valid = path.read_bytes()
    draw = random.Random(0)
    lines = valid.splitlines(keepends=True)
    ends = [sum(map(len, lines[: number + 1])) for number in range(len(lines))]
    refused = 0
    for _ in range(num):
        kind = draw.randrange(5)
        position = draw.randrange(len(valid))
        number = next(number for number, end in enumerate(ends) if position < end)
        if kind == 0:  # another byte
            data = (
                valid[:position]
                + bytes([valid[position] ^ draw.randrange(1, 256)])
                + valid[position + 1 :]
            )
        elif kind == 1:  # a byte more
            data = valid[:position] + bytes([draw.randrange(256)]) + valid[position:]
        elif kind == 2:  # some bytes less
            data = valid[:position] + valid[position + draw.randrange(1, 9) :]
        elif kind == 3:  # a record less, with others behind it
            number = draw.randrange(len(lines) - 1)
            data = b"".join(lines[:number] + lines[number + 1 :])
        else:  # two records that change places
            number = draw.randrange(len(lines) - 1)
            data = b"".join(
                [
                    *lines[:number],
                    lines[number + 1],
                    lines[number],
                    *lines[number + 2 :],
                ]
            )
        if (
            data == valid
        ):  # a byte more that is equal to its neighbour is the same text; so is a cut of nothing
            continue
        wrong = wrong_record(path, data, valid)
        if wrong is None:
            assert kind in (2, 3), (
                "only a cut at the end of a record is a ledger of an earlier time"
            )
            continue
        refused += 1
        assert number - 1 <= wrong <= number + 1 if kind in (1, 2) else wrong == number
    assert refused > 0.98 * num


def test_a_record_that_a_kill_has_cut_is_removed_by_the_next_run(path):
    data = path.read_bytes()
    path.write_bytes(data + b'0123 {"record":"rea')
    with pytest.raises(LedgerError, match=r"record 12 has no end: a run was killed"):
        read_ledger(path)
    assert len(read_ledger(path, open_end=True).records) == 12
    LedgerFile(path).append(reach_record(1, 8))
    assert read_ledger(path).records[-1] == reach_record(1, 8)
    assert path.read_bytes().startswith(data)


@pytest.mark.parametrize("text", ["these are notes\nof mine\n", "hello", "[]", '{"a": 1}\n'])
@pytest.mark.parametrize("open_end", [False, True])
def test_another_file_is_not_called_a_damaged_ledger(tmp_path, text, open_end):
    (tmp_path / "notes.txt").write_text(text)
    with pytest.raises(LedgerError, match=r"notes\.txt' is no ledger: ") as error:
        read_ledger(tmp_path / "notes.txt", open_end=open_end)
    assert "backup" not in str(error.value)


def test_two_writers_are_noticed(path):
    first_writer = LedgerFile(path)
    second_writer = LedgerFile(path)
    first_writer.append(reach_record(1, 8))
    assert not second_writer.is_newest()
    with pytest.raises(LedgerError, match="was written to by another loader"):
        second_writer.append(reach_record(1, 4))
    first_writer.append(reach_record(1, 12), in_place_of_last=True)
    assert [first_writer.place for first_writer in read_ledger(path).records[-2:]] == [
        (1, 0),
        (1, 12),
    ]


def test_another_writer_is_noticed_by_the_last_record_and_not_by_the_size(path):
    """A state that replaces the last one is often as long."""
    first_writer = LedgerFile(path)
    first_writer.append(reach_record(1, 8))
    second_writer = LedgerFile(path)
    num_bytes = path.stat().st_size
    first_writer.append(reach_record(1, 9), in_place_of_last=True)
    assert path.stat().st_size == num_bytes
    assert not second_writer.is_newest()
    for is_in_place in (False, True):
        with pytest.raises(LedgerError, match="was written to by another loader"):
            second_writer.append(reach_record(1, 12), in_place_of_last=is_in_place)
    first_writer.append(reach_record(1, 12))
    assert [first_writer.place[1] for first_writer in read_ledger(path).records[-2:]] == [9, 12]


def test_a_whole_record_in_the_place_of_a_cut_one_is_another_writers(path):
    data = path.read_bytes()
    first_writer = LedgerFile(path)
    first_writer.append(reach_record(1, 8))
    size_of_record = path.stat().st_size - len(data)
    path.write_bytes(data + b"x" * size_of_record)
    first_writer = LedgerFile(path)
    second_writer = LedgerFile(path)
    first_writer.append(reach_record(1, 8))
    assert path.stat().st_size == len(data) + size_of_record
    with pytest.raises(LedgerError, match="was written to by another loader"):
        second_writer.append(reach_record(1, 8))
    assert read_ledger(path).records[-1] == reach_record(1, 8)


def test_a_link_is_followed_within_the_folder_and_no_file_is_made_outside(path, tmp_path):
    link = tmp_path / "link.ledger"
    link.symlink_to(path.name)
    LedgerFile(link).append(reach_record(1, 8))
    assert link.is_symlink() and read_ledger(path).records[-1] == reach_record(1, 8)
    outside = tmp_path / "outside" / "new.ledger"
    outside.parent.mkdir()
    runs = tmp_path / "runs"
    runs.mkdir()
    broken = runs / "broken.ledger"
    broken.symlink_to(outside)
    with pytest.raises(LedgerError, match="it is a link that leads out of"):
        LedgerFile(broken)
    late = LedgerFile(runs / "late.ledger")
    late.path.symlink_to(outside)
    with pytest.raises(LedgerError, match="cannot be written"):
        late.append(SETUP, start(0, 0))
    assert not outside.exists()


def test_setups_are_limited_by_what_they_decode_to(tmp_path, monkeypatch):
    """Two bytes of JSON become a list of 64."""
    monkeypatch.setattr(ledger, "UNTYPED", UNTYPED._replace(maximum=5000))
    large = RunSetup(
        version=1,
        identity={"lists": [[]] * 700},
        epoch_length=100,
        loader=None,
        decoder=None,
        versions={},
    )
    file = LedgerFile(tmp_path / "a.ledger")
    for _ in range(3):
        file.append(large, start(0, 0))
    with pytest.raises(
        LedgerError,
        match=r"record 4, with the setups before it, takes \d+ bytes",
    ):
        read_ledger(file.path)


def test_a_ledger_of_many_digests_is_read_in_linear_time_and_little_memory(
    tmp_path,
):
    """A search for the place before, back over all digests, took minutes."""
    file = LedgerFile(tmp_path / "a.ledger")
    digests = [BatchDigest((0, number), 0, 1, f"{number:016x}") for number in range(60_000)]
    file.append(SETUP, start(0, 0), *digests, sync=False)
    file.append(*(reach_record(0, number) for number in range(3000)), sync=False)
    before_s = time.process_time()
    assert len(read_ledger(file.path).records) == 63_002
    assert time.process_time() - before_s < 5


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [reach_record(0, 4)],
            "record 0 is the first one, and must be a setup",
        ),
        (
            [SETUP, reach_record(0, 4)],
            "record 1 follows a setup, and must be a start",
        ),
        (
            [
                RunSetup(
                    version=2,
                    identity={},
                    epoch_length=1,
                    loader=None,
                    decoder=None,
                    versions={},
                ),
                start(0, 0),
            ],
            "record 0 has version 2; this Fuelrail reads 1",
        ),
        (
            [SETUP, start(0, 8), reach_record(0, 4)],
            r"record 2 reaches \(0, 4\), which is before the place reached last",
        ),
        (
            [SETUP, start(0, 8), reach_record(0, 12), reach_record(2, 0)],
            "record 3 reaches .* more than an epoch behind",
        ),
        (
            [SETUP, start(0, 8), reach_record(0, 2**62)],
            r"record 2 is of no known form: at 'place\[1\]': must be a whole number from 0 to ",
        ),
    ],
)
def test_records_in_another_order_are_refused(tmp_path, records, message):
    LedgerFile(tmp_path / "a.ledger").append(*records)
    with pytest.raises(LedgerError, match=message):
        read_ledger(tmp_path / "a.ledger")


def summarize_segments(*records):
    segments, lost = seen_by_weights([SETUP, *records])
    return [(part.start.place, part.end, part.skipped) for part in segments], [
        part.record for part in lost
    ]


def test_what_the_weights_have_seen():
    first = start(0, 0, restored=False)
    assert summarize_segments(first) == ([((0, 0), (0, 0), False)], [])
    # Killed after the state at 40: what came behind it is thrown away, whether it is known or not.
    run = (first, reach_record(0, 40), reach_record(0, 80))
    assert summarize_segments(*run, start(0, 40)) == (
        [((0, 0), (0, 40), False), ((0, 40), (0, 40), False)],
        [],
    )
    segments, _ = seen_by_weights([SETUP, *run, start(0, 40)])
    assert segments[0].trained == (0, 80)
    # The mark is lost, the state is not.
    assert summarize_segments(first, start(0, 40), reach_record(0, 60))[0] == [
        ((0, 0), (0, 40), False),
        ((0, 40), (0, 60), False),
    ]
    # The end of an epoch would have been noted: what was trained without this ledger is not known.
    assert summarize_segments(first, start(5, 0))[0] == [
        ((0, 0), (0, 0), False),
        ((5, 0), (5, 0), True),
    ]
    # Without a state nobody knows that a run has come there.
    assert summarize_segments(first, reach_record(0, 8), start(1, 0, restored=False))[0][1] == (
        (1, 0),
        (1, 0),
        True,
    )
    # Back behind the start of a segment: nothing of it is left.
    assert summarize_segments(
        *run,
        start(0, 40),
        reach_record(0, 96),
        start(0, 20),
        reach_record(1, 4),
    ) == (
        [((0, 0), (0, 20), False), ((0, 20), (1, 4), False)],
        [4],
    )
    # Fewer positions are left than a step takes: the next epoch comes, and nothing was skipped.
    assert summarize_segments(
        first,
        reach_record(0, 98),
        start(0, 98, place=(1, 0)),
        reach_record(1, 8),
    )[0] == [
        ((0, 0), (0, 98), False),
        ((1, 0), (1, 8), False),
    ]
    assert summarize_segments(*run, start(0, 80, place=(1, 0)))[0][1] == (
        (1, 0),
        (1, 0),
        True,
    )
    assert summarize_segments(*run, first, reach_record(0, 4)) == (
        [((0, 0), (0, 4), False)],
        [1],
    )
