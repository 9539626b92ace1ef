"""Commands that are ended in the middle: exit code, a report that says so, and no process left behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from getpass import getuser
from multiprocessing import forkserver
from pathlib import Path

import psutil
import pytest

from fuelrail.__main__ import main
from fuelrail.bench.measure.records import read_rank
from support.ranks import environment

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(1800),  # of commands that take half a minute on an idle machine
    pytest.mark.skipif(
        not sys.platform.startswith("linux"),
        reason="looks for processes in /proc",
    ),
]

QUICK = (
    "--workers",
    1,
    "--batch-size",
    1,
    "--accelerator",
    "emulated:resnet50-224-h100",
)
_PATIENCE_S = 600


def stepped(place, num_steps):
    """When a rank has made this number of steps of a run."""
    return lambda out: len(read_rank(out / place / "rank-00000.jsonl").steps) >= num_steps


def timed(out):
    """When a run of a loader is in the report."""
    path = out / "report.json"
    return path.exists() and any(
        entry["runs"] for entry in json.loads(path.read_text())["contestants"]
    )


CASES = {
    "train": (
        (*QUICK, "--ranks", 2, "--steps", 100_000, "--warmup", 2),
        stepped("records", 20),
        signal.SIGINT,
    ),
    "compare": (
        (
            "--only",
            "fuelrail:turbo",
            "--height",
            32,
            "--width",
            48,
            "--batch-size",
            2,
            "--psnr",
            15,
            "--seconds",
            0.3,
            "--rounds",
            1000,
        ),
        timed,
        signal.SIGTERM,
    ),
}


@contextmanager
def under_way(word, dataset, out, options, is_under_way):
    """The command, once it is as far as that, and the token that its processes hold in their environment."""
    token = uuid.uuid4().hex
    temporary = out.with_name("temporary")
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "fuelrail",
        "bench",
        word,
        dataset,
        "--out",
        out,
        "--no-html",
        *options,
    ]
    process = subprocess.Popen(
        [*map(str, command)],
        env={
            **environment(),
            "FUELRAIL_TEST_RUN": token,
            "TMPDIR": str(temporary),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: is_under_way(out) or process.poll() is not None)
        assert process.poll() is None, process.communicate()[1]
        yield process, token
    finally:
        process.kill()
        process.wait()  # its output may have been read already
        process.stderr.close()


def wait_until(condition):
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to pass"
        time.sleep(0.05)


@pytest.mark.parametrize("word", CASES)
def test_a_partial_report_says_so_and_nothing_keeps_running(word, dataset, tmp_path):
    options, is_under_way, sent = CASES[word]
    out = tmp_path / "out"
    with under_way(
        word,
        dataset=dataset,
        out=out,
        options=options,
        is_under_way=is_under_way,
    ) as (
        process,
        token,
    ):
        process.send_signal(sent)
        _, error = process.communicate(timeout=_PATIENCE_S)
    assert process.returncode == 130, error
    assert "the report is partial: " in error
    report = json.loads((out / "report.json").read_text())
    assert "interrupted" in report["cut_off"]
    assert "**Partial report: " in (out / "report.md").read_text()
    assert processes_of(token) == []
    assert {path.name for path in out.with_name("temporary").iterdir()} <= {
        f"torchinductor_{getuser()}"
    }  # a cache


STUDIES = {
    "diagnose": (
        (*QUICK, "--steps", 100, "--warmup", 2),
        stepped("without-storage/records", 1),
    ),
    "scale": (
        (*QUICK, "--ranks", 1, 2, "--steps", 100, "--warmup", 2),
        stepped("records/ranks-2-batch-1", 1),
    ),
}


def bench_until(is_under_way, act, word, dataset, out, *options):
    """Run the command here on warm ranks, and ``act()`` once it is as far as that; return its exit code."""

    def acting():
        wait_until(lambda: is_under_way(out))
        act()

    with ThreadPoolExecutor(1) as pool:
        acted = pool.submit(acting)
        code = main(
            [
                *map(
                    str,
                    (
                        "bench",
                        word,
                        dataset,
                        "--out",
                        out,
                        "--no-html",
                        *options,
                    ),
                )
            ]
        )
    acted.result()
    assert server().children() == []
    return code


def server():
    """The process that warm ranks are forks of."""
    return psutil.Process(forkserver._forkserver._forkserver_pid)


def rank_1():
    (launcher,) = server().children()
    return sorted(process.pid for process in launcher.children())[1]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("word", STUDIES)
def test_a_study_of_several_runs_keeps_those_that_were_whole(word, dataset, tmp_path, capsys):
    options, is_under_way = STUDIES[word]
    out = tmp_path / "out"
    code = bench_until(
        is_under_way,
        lambda: os.kill(os.getpid(), signal.SIGINT),
        word,
        dataset,
        out,
        *options,
    )
    assert code == 130
    assert "the report is partial: " in capsys.readouterr().err
    report = json.loads((out / "report.json").read_text())
    assert "interrupted" in report["cut_off"]
    assert "**Partial report: " in (out / "report.md").read_text()
    if word == "diagnose":
        assert report["diagnosis"] is None
        assert report["runs"] == ["as-it-is", "without-loading"]
    else:
        assert {run["num_ranks"] for run in report["measured"]} >= {1}


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_is_killed_is_named_in_a_partial_report(dataset, tmp_path, capsys):
    options, is_under_way, _ = CASES["train"]
    out = tmp_path / "out"
    assert (
        bench_until(
            is_under_way,
            lambda: os.kill(rank_1(), signal.SIGKILL),
            "train",
            dataset,
            out,
            *options,
        )
        == 1
    )
    report = json.loads((out / "report.json").read_text())
    assert report["cut_off"].startswith("rank 1 was ended by SIGKILL after ")
    assert f"the report is partial: {report['cut_off']}" in capsys.readouterr().err
    assert all(rank["num_steps"] >= 10 for rank in report["ranks"])


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_is_stuck_is_named_within_the_time_limit(dataset, tmp_path):
    """Once it is asked to end, it is continued: the launcher would wait half a minute before it kills it."""
    options, is_under_way, _ = CASES["train"]
    # A mesh of two axes has groups of its own, which must have the same limit.
    options = (
        *options,
        "--ranks",
        4,
        "--mesh",
        "dp_replicate=2,dp_shard=2",
        "--timeout-s",
        10,
    )

    def stop():
        rank = rank_1()
        os.kill(rank, signal.SIGSTOP)
        wait_until(lambda: is_asked_to_end(rank))
        os.kill(rank, signal.SIGCONT)

    assert bench_until(is_under_way, stop, "train", dataset, tmp_path / "out", *options) == 1
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["cut_off"].startswith(
        "rank 1 did not answer within the time limit (timeout_s), after "
    )


def is_asked_to_end(pid):
    """Whether SIGTERM waits for a process that is stopped."""
    (pending,) = re.findall(
        r"^ShdPnd:\s*(\w+)",
        Path(f"/proc/{pid}/status").read_text(),
        re.MULTILINE,
    )
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_nothing_outlives_a_command_that_is_killed(dataset, tmp_path):
    options, is_under_way, _ = CASES["train"]
    options = (*options, "--ranks", 1)  # a launcher and its rank
    with under_way(
        "train",
        dataset=dataset,
        out=tmp_path / "out",
        options=options,
        is_under_way=is_under_way,
    ) as (process, token):
        process.kill()
        process.wait()
    wait_until(lambda: processes_of(token) == [])


def processes_of(token):
    """Find the processes with the token in their environment, which children inherit."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [pid for pid in pids if pid != os.getpid() and token.encode() in environ_of(pid)]


def environ_of(pid):
    """A process's environment; empty if it is gone meanwhile, or somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""
