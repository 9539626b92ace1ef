from __future__ import annotations

from fuelrail.bench.measure.records import (
    PHASES,
    InputFacts,
    RankEnd,
    RankFailure,
    RankHeader,
    RankLog,
    RankWriter,
    StageSnapshot,
    rank_path,
    read_rank,
)
from fuelrail.pipeline.runtime.stages import StageClock
from support.bench_runs import steps

HEADER = RankHeader(device="d", backend=None, num_parameters=1)
INPUT = InputFacts(num_cameras=2, height=3, width=4)
END = RankEnd(parameters_xxh3="00", peak_rss_bytes=5, peak_device_bytes=None)


def test_what_is_written_comes_back(tmp_path):
    records = steps(2, wait_ms=3)
    stages = StageSnapshot(
        stages=[
            StageClock(
                name="decode",
                num_threads=2,
                items=10,
                busy_s=1.0,
                starved_s=2.0,
                blocked_s=3.0,
                waiting=4,
                capacity=5,
            )
        ]
    )
    failure = RankFailure(kind="refused", message="no", at_ns=9)
    with RankWriter(rank_path(tmp_path, 0)) as writer:
        for record in (
            HEADER,
            INPUT,
            records[0],
            stages,
            records[1],
            END,
            failure,
        ):
            writer.write(record)
    log = read_rank(rank_path(tmp_path, 0))
    assert (log.header, log.input, log.end, log.failure) == (
        HEADER,
        INPUT,
        END,
        failure,
    )
    assert log.steps == records
    assert log.snapshots == [stages]


def test_a_file_is_readable_while_it_is_written_and_when_its_last_line_is_cut_off(
    tmp_path,
):
    path = rank_path(tmp_path, 3)
    with RankWriter(path) as writer:
        writer.write(HEADER)
        assert read_rank(path).header == HEADER
        writer.write(steps(1)[0])
    path.write_bytes(path.read_bytes()[:-20])
    log = read_rank(path)
    assert log.header == HEADER
    assert log.steps == []


def test_a_rank_that_wrote_nothing_is_an_empty_log(tmp_path):
    assert read_rank(rank_path(tmp_path, 1)) == RankLog()


def test_phases_add_up_to_the_step():
    record = steps(1, wait_ms=3, reduce_ms=2, other_ms=0.5)[0]
    assert sum(record.phase_ns(phase) for phase in PHASES) == record.wall_ns
