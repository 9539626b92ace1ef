"""A process group ends with its context, whenever that is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from fuelrail.bench.studies.compare.group import process_group, signal_group

pytestmark = pytest.mark.process

WITH_A_WORKER = """
import subprocess, sys
worker = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
print("both", flush=True)
worker.wait()
"""


def test_workers_are_gone_with_it(tmp_path):
    with process_group(
        [sys.executable, "-c", WITH_A_WORKER], os.environ, tmp_path / "log"
    ) as process:
        while (tmp_path / "log").read_text() != "both\n":
            assert process.poll() is None
            time.sleep(0.01)
        assert signal_group(process, 0)
    assert process.returncode == -signal.SIGKILL
    assert not signal_group(process, 0)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_while_it_is_started_leaves_nothing(sent, tmp_path, monkeypatch):
    started = []

    def start(*args, **options):
        started.append(start_process(*args, **options))
        os.kill(os.getpid(), sent)
        return started[0]

    start_process = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    before = signal.signal(sent, signal.default_int_handler)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            process_group([sys.executable, "-c", "input()"], os.environ, tmp_path / "log"),
        ):
            pytest.fail("it was interrupted before it began")
    finally:
        signal.signal(sent, before)
    assert started[0].returncode == -signal.SIGKILL
