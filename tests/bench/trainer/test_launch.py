"""How ranks end, with tiny programs; the first test starts interpreters. See also ``test_cut_off.py``."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from fuelrail.bench.ranks.launch import RankExit, run_ranks

pytestmark = pytest.mark.process

_PROGRAM = """
import os, pathlib, signal, sys, time
from fuelrail.bench.ranks.elastic import end_with

folder, what, launcher = sys.argv[1:]
rank = os.environ["RANK"]
end_with(int(launcher), signal.SIGKILL)
pathlib.Path(folder, f"pid-{rank}").write_text(str(os.getpid()))
if what == "end":
    pathlib.Path(folder, f"world-{rank}").write_text(os.environ["WORLD_SIZE"])
elif what == "kill" and rank == "1":
    os.kill(os.getpid(), signal.SIGKILL)
elif what == "fail" and rank == "0":
    sys.exit(7)
else:
    time.sleep(600)
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The tiny program, importable by name in the ranks, and the folder where they leave their process ids."""
    (tmp_path / "tiny_rank.py").write_text(_PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def run(folder, behaviour, on_wait=lambda: None):
    return run_ranks(["tiny_rank", str(folder), behaviour], 2, folder / "ranks.log", on_wait)


def pids(folder):
    return [int(path.read_text() or 0) for path in sorted(folder.glob("pid-*"))]


def alive(pid):
    try:
        # A zombie is gone as far as we care; the process that adopted it may take its time.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ranks_run_to_their_end(program):
    outcome = run(program, "end")
    assert outcome == (0, False, []), (program / "ranks.log").read_text()
    assert [(program / f"world-{rank}").read_text() for rank in (0, 1)] == [
        "2",
        "2",
    ]


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("behaviour", "first"),
    [
        ("kill", RankExit(rank=1, exit_code=-9)),
        ("fail", RankExit(rank=0, exit_code=7)),
    ],
)
def test_one_rank_that_fails_ends_the_others_and_is_named(program, behaviour, first):
    outcome = run(program, behaviour)
    assert (outcome.exit_code, outcome.interrupted) == (1, False)
    assert first in outcome.failed
    assert not any(map(alive, pids(program)))


def ctrl_c():
    raise KeyboardInterrupt


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("interrupt", [ctrl_c, sigterm])
def test_an_interrupt_ends_the_ranks_and_the_handler_before_comes_back(program, interrupt):
    before = signal.getsignal(signal.SIGTERM)

    def once_all_run():
        if len(pids(program)) == 2 and all(pids(program)):
            interrupt()

    assert run(program, "sleep", once_all_run).interrupted
    assert len(pids(program)) == 2
    assert not any(map(alive, pids(program)))
    assert signal.getsignal(signal.SIGTERM) == before
