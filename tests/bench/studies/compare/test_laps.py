"""Processes that run in laps: what runs when, and what is left of them."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time

import pytest

from fuelrail.bench.studies.compare.group import process_group
from fuelrail.bench.studies.compare.laps import LapProcess

pytestmark = pytest.mark.process

# Two "workers" count beside it, so that what is stopped with it can be seen.
TICKER = textwrap.dedent("""
    import array, subprocess, sys, time
    out = open(sys.argv[1], "wb", buffering=0)
    out.write(array.array("d", [time.monotonic()]))
    worker = "import sys, time; out = open(sys.argv[1], 'wb', buffering=0)\\nwhile 1: out.write(b'x'); time.sleep(.01)"
    subprocess.Popen([sys.executable, "-c", worker, sys.argv[2]])
    while True:
        time.sleep(0.01)
        out.write(array.array("d", [time.monotonic()]))
""")


@pytest.fixture
def ticker(tmp_path):
    command = [
        sys.executable,
        "-c",
        TICKER,
        str(tmp_path / "arrivals"),
        str(tmp_path / "worker"),
    ]
    with process_group(command, os.environ, tmp_path / "log") as process:
        yield LapProcess(process, tmp_path / "arrivals")


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it did not come in a minute")


def test_a_process_and_its_workers_run_in_their_laps_only(ticker, tmp_path):
    files = tmp_path / "arrivals", tmp_path / "worker"
    assert ticker.begin(0.0, 60.0)
    wait_for(lambda: ticker.lap(0.02) or (files[1].exists() and files[1].stat().st_size > 2))
    before = [path.stat().st_size for path in files]
    time.sleep(0.1)
    assert [path.stat().st_size for path in files] == before
    first = ticker.num_laps
    ticker.lap(0.2)
    ticker.lap(0.2)
    timed = ticker.timed(first)
    assert all(path.stat().st_size > size for path, size in zip(files, before, strict=True))
    # What came before the laps, or while it was stopped, is not theirs.
    assert min(timed.arrival_s) >= 0
    assert timed.arrival_s == sorted(timed.arrival_s)
    assert len(timed.arrival_s) <= (files[0].stat().st_size - before[0]) / 8
    assert timed.first_batch_s > 0
    assert timed.peak_memory_bytes > 1 << 20


def test_what_ends_or_never_begins_is_noticed(tmp_path):
    log = tmp_path / "log"
    with process_group([sys.executable, "-c", "print('no')"], os.environ, log) as started:
        assert not LapProcess(started, tmp_path / "arrivals").begin(0.0, 60.0)
    assert log.read_text() == "no\n"
    with process_group(
        [sys.executable, "-c", "import time; time.sleep(600)"], os.environ, log
    ) as started:
        process = LapProcess(started, tmp_path / "arrivals")
        assert not process.begin(0.0, 0.1)
        assert process.is_alive()
    assert not process.is_alive()


@pytest.mark.skipif(
    sys.platform != "linux",
    reason="elsewhere a stopped group may outlive who stopped it",
)
def test_nothing_stays_stopped_for_ever_when_its_parent_is_killed(tmp_path):
    arrivals, worker, log = (str(tmp_path / name) for name in ("arrivals", "worker", "log"))
    script = textwrap.dedent(f"""
        import os, pathlib, signal, sys, time
        from fuelrail.bench.studies.compare.laps import LapProcess
        from fuelrail.bench.studies.compare.group import process_group
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it, and children inherit that
        command = [sys.executable, "-c", {TICKER!r}, {arrivals!r}, {worker!r}]
        with process_group(command, os.environ, pathlib.Path({log!r})) as process:
            LapProcess(process, pathlib.Path({arrivals!r})).begin(0.5, 60.0)
            while pathlib.Path(f"/proc/{{process.pid}}/stat").read_text().rpartition(") ")[2][0] != "T":
                time.sleep(0.01)  # a signal is sent; on a busy machine the process stops later
            print(process.pid, flush=True)
            time.sleep(600)
    """)
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    ) as parent:
        group = int(parent.stdout.readline())
        parent.kill()

    def is_gone():
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        return False

    wait_for(is_gone)
