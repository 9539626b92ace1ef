"""One process makes the batches of all ranks of a host: each once for the ranks that share it, also through kills."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from fuelrail.loaders.serving import node
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
        target=run,
        args=(tiny, parallel, folder, folder / f"{job}-{rank}", environment),
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
    processes = []
    for process in psutil.process_iter(["cmdline"]):
        if "fuelrail.loaders.serving.node" in (process.info["cmdline"] or []):
            try:
                is_ours = process.environ().get("MASTER_PORT") == job
            except psutil.Error:
                continue
            processes += [process] if is_ours else []
    return processes


def wait_for(condition):
    deadline_s = time.monotonic() + 180
    while not (result := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return result


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
        [start(tiny, folder, rank, "0", where="") for rank in numbers],
        folder,
        "0",
        numbers,
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


def listening(job):
    """The abstract sockets of this user's processes of a job, of all jobs that run now."""
    addresses = []
    for process in servers(job):
        with contextlib.suppress(psutil.Error):
            addresses += [
                connection.laddr
                for connection in process.net_connections("unix")
                if connection.laddr.startswith("@")
            ]
    return addresses


@pytest.mark.parametrize("early", [(0,), (0, 3), (0, 1, 2)])
def test_a_job_that_was_killed_as_it_began_starts_again_at_once(
    tiny, tmp_path, job, expected, early
):
    """The process of the killed ranks still waits for the others: their connections are no ranks."""
    killed = [start(tiny, tmp_path, rank, job) for rank in early]
    files = [tmp_path / f"{job}-{rank}" for rank in early]
    wait_for(lambda: all(file.exists() for file in files) and listening(job))
    time.sleep(1)
    for rank in killed:
        rank.kill()
        rank.join()
    begin_s = time.monotonic()
    ranks = [start(tiny, tmp_path, rank, job) for rank in range(NUM_RANKS)]
    lines = finished(ranks, tmp_path, job)
    assert lines == [expected[rank // 2] for rank in range(NUM_RANKS)]
    assert time.monotonic() - begin_s < 110  # it waits for ranks for two minutes
    wait_for(lambda: not servers(job))


def test_a_job_killed_before_its_process_listens_starts_again(tiny, tmp_path, job, expected):
    first = start(tiny, tmp_path, 0, job)
    wait_for(lambda: servers(job))
    first.kill()
    first.join()
    ranks = [start(tiny, tmp_path, rank, job) for rank in range(NUM_RANKS)]
    # On a busy host the first one's process may begin to listen after all: it waits two minutes for ranks.
    assert finished(ranks, tmp_path, job) == [expected[rank // 2] for rank in range(NUM_RANKS)]


def test_strangers_connections_are_no_ranks(tiny, tmp_path, job, expected):
    """Of the same user: silent ones, some that send what is no rank, and one that is gone."""
    first = start(tiny, tmp_path, 0, job)
    (name,) = wait_for(lambda: listening(job))
    strangers = []
    for data in (
        b"",
        b"",
        b"x",
        struct.pack("!i", 3) + b"abc",
        struct.pack("!i", 1 << 30),
    ):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(name.replace("@", "\0", 1))
        stranger.sendall(data)
        strangers.append(stranger)
    strangers.pop().close()
    ranks = [
        first,
        *(start(tiny, tmp_path, rank, job) for rank in range(1, NUM_RANKS)),
    ]
    assert finished(ranks, tmp_path, job) == [expected[rank // 2] for rank in range(NUM_RANKS)]
    for stranger in strangers:
        stranger.close()
    wait_for(lambda: not servers(job))


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
@pytest.mark.parametrize("num_taken", [1, 8])
def test_names_that_another_user_has_taken_are_passed_by(
    tiny, tmp_path, job, expected, num_taken, monkeypatch
):
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    names = []
    monkeypatch.setenv("MASTER_PORT", job)
    monkeypatch.setattr(node, "_numbers", itertools.count())
    monkeypatch.setattr(node, "_connect", names.append)
    monkeypatch.setattr(node, "_START_S", 0.0)
    monkeypatch.setattr(node, "_start_process", names.append)
    with pytest.raises(ChildProcessError):
        node.connect_node()()
    squatter = subprocess.Popen(
        [sys.executable, "-c", SQUAT, *names[0][:num_taken]],
        stdout=subprocess.PIPE,
    )
    assert squatter.stdout is not None and squatter.stdout.readline() == b"taken\n"
    try:
        ranks = [start(tiny, tmp_path, rank, job) for rank in range(NUM_RANKS)]
        if num_taken == 1:
            lines = finished(ranks, tmp_path, job)
            assert lines == [expected[rank // 2] for rank in range(NUM_RANKS)]
        else:
            ranks[0].join(60)
            assert ranks[0].exitcode == 1
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
        squatter.kill()
        squatter.communicate()


SQUAT = """
import os, socket, sys, time
os.setuid(65534)
held = []
for name in sys.argv[1:]:
    held.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    held[-1].bind("\\0" + name)
    held[-1].listen(100)
print("taken", flush=True)
time.sleep(600)
"""
