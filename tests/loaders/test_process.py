"""What a process does to a loader: fork, exit, Ctrl-C, ranks that come up late, batches that no epoch fills."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest

from fuelrail import DataLoader, World
from fuelrail.pipeline.errors import WorldError
from support.loaders import make_loader
from support.ranks import environment

pytestmark = pytest.mark.process

SETUP = """
import os, pickle, sys
from fuelrail import DataLoader
from fuelrail.pipeline.errors import StageError
image = {"height": 64, "width": 96, "resize": 1.0}
loader = DataLoader(sys.argv[1], 2, shuffle=True, drop_last=True, transforms={"image": image}, num_workers=2)
iterator = iter(loader)
first = next(iterator)
"""


@pytest.fixture(scope="module")
def tiny(build_once):
    return build_once({"train": (5, 7, 9)})[0]


def python(root, code):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SETUP + code, root],
        capture_output=True,
        text=True,
        timeout=280,
        env=environment(),
    )


def test_a_fork_while_it_runs(tiny):
    """Continuing in the child is an error that says so, and it continues as a pickled copy; so does the parent."""
    done = python(
        tiny,
        """
pickled = pickle.dumps(loader)
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except StageError as error:
        print(error)
    del iterator
    print(*[len({(b["epoch"], *b["sample_key"]) for b in one}) for one in (loader, pickle.loads(pickled))])
    print(*sorted({b["epoch"] for one in (loader, pickle.loads(pickled)) for b in one}), flush=True)
    sys.exit(5)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(iterator)))
kept = next(iter(loader))["img"]  # the interpreter ends in the middle of an epoch, with a batch's buffer in use
""",
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert "was forked from it without its threads: start iterating in the child" in lines[0]
    assert lines[1:] == ["10 10", "1 2", "5 9"]


def test_an_exception_in_the_training_loop_ends_the_process(tiny):
    done = python(tiny, "for batch in loader:\n    raise RuntimeError('the model')\n")
    assert done.returncode == 1
    assert done.stderr.endswith("RuntimeError: the model\n")


def test_ctrl_c_in_the_training_loop(tiny):
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SETUP + "print('go', flush=True)\nwhile True:\n    list(loader)\n",
            tiny,
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=280)
    assert errors.splitlines()[-1].startswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


class TestRanks:
    def test_a_loader_that_was_made_before_its_rank_was_known_says_so(self, tiny, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        loader = DataLoader(tiny, 2)
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(
            WorldError,
            match=r"made as World\(rank=0, size=1\), but the process is World\(rank=1, size=2\)",
        ):
            iter(loader)
        with_world = DataLoader(tiny, 2, world=World(0, 1))
        assert len(next(iter(with_world))["sample_key"]) == 2
        with_world.close()

    def test_a_batch_larger_than_the_dataset(self, tiny):
        with pytest.raises(
            WorldError,
            match=r"an epoch of 21 samples has no full global batch of 64.*drop_last=False",
        ):
            DataLoader(tiny, 32, drop_last=True, world=World(0, 2))
        with DataLoader(tiny, 32, world=World(1, 2)) as loader:
            (batch,) = list(loader)
        assert not batch["valid"].any(), "all of this rank's samples are padding"
        assert len(batch["sample_key"]) == 32


def test_it_starts_no_process(tiny):
    before = (
        psutil.Process().children()
    )  # other tests' spawned workers leave Python's resource tracker behind
    with DataLoader(tiny, 2) as loader:
        next(iter(loader))
        assert psutil.Process().children() == before


def test_a_dropped_loader_gives_its_files_back_at_once(tiny):
    """Not when the garbage collector comes: a loop that opens loaders must not run out of files, nor map them all."""

    def counts():
        process = psutil.Process()
        return np.array(
            (
                process.num_fds(),
                sum(thread.name.startswith("fuelrail") for thread in threading.enumerate()),
                sum(str(tiny) in mapped.path for mapped in process.memory_maps()),
            )
        )

    list(make_loader(tiny, 2, num_workers=1))  # what libraries open on first use stays open
    gc.collect()
    gc.disable()
    try:
        before = counts()
        for number in range(20):
            loader = make_loader(tiny, 2, num_workers=1)
            next(iter(loader))
            if number % 2:
                loader.close()
            del loader
        deadline = (
            time.monotonic() + 200
        )  # the last thread's own ending, after it was let go, takes a moment
        while (counts() > before).any() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert (
            counts() <= before
        ).all()  # fewer where an earlier test's last thread was still ending
    finally:
        gc.enable()
