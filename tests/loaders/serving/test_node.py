"""One process makes the batches of all ranks of a host: each once for the ranks that share it, also through kills."""

from __future__ import annotations

import signal
import time
import uuid

import psutil
import pytest

from support.node_rank import run
from support.ranks import warm

pytestmark = [pytest.mark.process, pytest.mark.slow]
NUM_RANKS = 4


def start(tiny, folder, rank, job, where="node", parallel=2):
    environment = {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "WHERE": where,
        "LOCAL_WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": job,
    }
    process = warm().Process(
        target=run, args=(tiny, parallel, folder, folder / f"{job}-{rank}", environment)
    )
    process.start()
    return process


def lines_of(folder, job, rank):
    return (folder / f"{job}-{rank}").read_text().splitlines()


def finished(ranks, folder, job, numbers=range(NUM_RANKS)):
    for rank in ranks:
        rank.join(100)
    return [lines_of(folder, job, rank) for rank in numbers]


def servers(job):
    """The processes that were started for ranks of a job."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "fuelrail.loaders.serving.node" in (process.info["cmdline"] or []):
            try:
                is_ours = process.environ().get("MASTER_PORT") == job
            except psutil.Error:
                continue
            found += [process] if is_ours else []
    return found


def wait_for(condition):
    deadline_s = time.monotonic() + 60
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return found


@pytest.fixture
def job():
    name = uuid.uuid4().hex
    yield name
    for process in servers(name):
        process.kill()


@pytest.fixture(scope="module")
def expected(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("none")
    numbers = range(0, NUM_RANKS, 2)
    return finished(
        [start(tiny, folder, rank, "0", where="") for rank in numbers], folder, "0", numbers
    )


def test_ranks_that_share_a_sample_share_its_decoding_and_two_jobs_are_kept_apart(
    tiny, tmp_path, job, expected
):
    ranks = [
        start(tiny, tmp_path, rank, name) for name in (job, job + "b") for rank in range(NUM_RANKS)
    ]
    for name in (job, job + "b"):
        assert finished(ranks, tmp_path, name) == [expected[rank // 2] for rank in range(NUM_RANKS)]
    wait_for(lambda: not servers(job) and not servers(job + "b"))


def test_a_killed_process_is_started_again_and_every_rank_gets_every_batch_once(
    tiny, tmp_path, job, expected
):
    (hold := tmp_path / "wait-1-1").touch()
    ranks = [start(tiny, tmp_path, rank, job) for rank in range(NUM_RANKS)]
    before = wait_for(lambda: servers(job))
    files = [tmp_path / f"{job}-{rank}" for rank in range(NUM_RANKS)]
    wait_for(lambda: all(file.exists() and file.read_text() for file in files))
    before[0].send_signal(signal.SIGKILL)
    hold.unlink()
    lines = finished(ranks, tmp_path, job)
    assert lines == [expected[rank // 2] for rank in range(NUM_RANKS)]
    wait_for(lambda: not servers(job))


@pytest.mark.parametrize("victim", [0, 3])
def test_the_death_of_a_rank_does_not_end_the_others(tiny, tmp_path, job, expected, victim):
    (tmp_path / f"kill-{victim}-1-1").touch()
    ranks = [start(tiny, tmp_path, rank, job) for rank in range(NUM_RANKS)]
    lines = finished(ranks, tmp_path, job)
    assert ranks[victim].exitcode == -signal.SIGKILL
    for rank in {*range(NUM_RANKS)} - {victim}:
        assert lines[rank] == expected[rank // 2]
    wait_for(lambda: not servers(job))
