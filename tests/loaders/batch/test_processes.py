"""The user's transform in worker processes: what it gives is what threads give, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import re
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch

from fuelrail.loaders.batch.processes import _dump
from fuelrail.pipeline.errors import ConfigError, SchemaError, StageError
from support.batches import GROUPS, TRAIN, load, unlike
from support.forked import fork, join
from support.ranks import warm
from support.transforms import (
    KilledOnce,
    everything,
    failing,
    replaced,
    waiting,
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module", autouse=True)
def _server():
    """One fork server for all tests of a process, which has torch loaded."""
    warm()


def wait_for_end(pids: set[int]) -> None:
    deadline_s = time.monotonic() + 200
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < deadline_s, f"worker processes are left: {pids}"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "options",
    [
        {"image": TRAIN, "points": True, "two_views": True, "num_workers": 1},
        {
            "camera_groups": GROUPS,
            "frames": [-1, 0],
            "static": True,
            "num_workers": 3,
        },
        {"collate_fn": lambda samples: samples},
    ],
    ids=["two views", "groups, windows, static", "collate_fn"],
)
def test_batches_are_those_of_threads_and_so_is_the_rest_after_a_resume(tiny, options):
    with load(tiny, transform=everything, **options) as loader:
        expected = [pickle.loads(pickle.dumps(batch)) for batch in loader]
    with load(tiny, transform=everything, transform_in="process", **options) as loader:
        received = [pickle.loads(pickle.dumps(batch)) for batch in islice(loader, 2)]
        state = loader.state_dict()
    with load(tiny, transform=everything, transform_in="process", **options) as loader:
        loader.load_state_dict(state)
        received += [pickle.loads(pickle.dumps(batch)) for batch in loader]
    assert unlike(expected, received) == []


def named_memory(pids):
    """The files in /dev/shm that processes have mapped, and that have a name there."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return set(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE))  # others are "(deleted)"


def test_processes_are_others_work_on_and_are_gone_at_the_end(tiny):
    before = named_memory([os.getpid()])
    loader = load(tiny, transform=replaced, transform_in="process", num_workers=2)
    pids = set()
    for _ in range(2):
        for batch in loader:
            pids.update(batch["process"].tolist())
    assert 1 <= len(pids) <= 2, "workers are kept from epoch to epoch"
    assert os.getpid() not in pids
    assert named_memory([os.getpid(), *pids]) <= before, "a killed process would leave it there"
    loader.close()
    wait_for_end(pids)
    new_pids = {pid for batch in loader for pid in batch["process"].tolist()}
    assert not new_pids & pids
    del loader  # without a close
    wait_for_end(new_pids)


def test_an_error_is_that_of_a_thread_with_the_traceback_of_the_worker(tiny):
    def error_of(frame: int, transform_in: str) -> Exception:
        options = {
            "shuffle": False,
            "order": {"kind": "sequential", "filter": f"frame == {frame}"},
            "num_workers": 1,
        }
        with load(tiny, 1, transform=failing, transform_in=transform_in, **options) as loader:
            with pytest.raises((StageError, ConfigError, SchemaError)) as caught:
                next(iter(loader))
            return caught.value

    process_error = error_of(1, "process")
    thread_error = error_of(1, "thread")
    assert str(process_error) == str(thread_error)
    assert "ValueError: no clip-0000-000001" in str(process_error)
    assert "support/transforms.py" in str(process_error)
    assert type(process_error.__cause__) is ValueError
    assert 'raise ValueError(f"no {sample' in str(process_error.__cause__.__cause__)
    ours = error_of(2, "process")
    assert (type(ours), str(ours)) == (SchemaError, str(error_of(2, "thread")))
    assert "RuntimeError: OddError: 1 and 2" in str(error_of(3, "process"))
    assert "what cannot be pickled" in str(error_of(0, "process"))


def test_a_killed_worker_is_named_and_the_next_iteration_has_another(tiny, tmp_path):
    with load(
        tiny,
        transform=KilledOnce(str(tmp_path / "flag")),
        transform_in="process",
        num_workers=1,
    ) as loader:
        with pytest.raises(StageError, match=r"on sample 'clip.*exit code -9"):
            list(loader)
        loader.set_epoch(0)
        assert len(list(loader)) == len(loader)


def test_a_worker_that_hangs_ends_with_the_loader(tiny, monkeypatch):
    monkeypatch.setattr("fuelrail.pipeline.runtime.stages._JOIN_TIMEOUT_S", 0.1)
    loader = load(tiny, transform=waiting, transform_in="process", num_workers=1)
    iterator = iter(loader)
    (pool,) = _pools(loader)
    (worker,) = pool._all
    loader.close()
    wait_for_end({worker.process.pid})
    del iterator


def _pools(loader):
    transform = loader._make.transform
    deadline_s = time.monotonic() + 200
    while not (transform._pools and next(iter(transform._pools.values()))._all):
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    return transform._pools.values()


def test_what_cannot_work_is_refused(tiny):
    for transform, said in (
        (
            lambda sample: sample,
            "cannot be pickled, which transform_in='process' needs",
        ),
        (None, "there is none: give transform="),
    ):
        with pytest.raises(ConfigError, match=said):
            load(tiny, transform=transform, transform_in="process")
    with pytest.raises(ConfigError, match="transform_in='fork' must be 'thread' or 'process'"):
        load(tiny, transform=replaced, transform_in="fork")


def test_a_function_that_workers_do_not_find_is_named(tiny, monkeypatch):
    monkeypatch.setattr("support.transforms.only_here", _only_here, raising=False)
    monkeypatch.setattr(_only_here, "__module__", "support.transforms")
    monkeypatch.setattr(_only_here, "__qualname__", "only_here")
    loader = load(tiny, transform=_only_here, transform_in="process", num_workers=1)
    with (
        pytest.raises(
            ConfigError,
            match=r"cannot be loaded in a worker process .*only_here",
        ),
        loader,
    ):
        next(iter(loader))


def _only_here(sample):
    return sample


def test_a_process_that_may_have_no_children_runs_it_itself(tiny, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with load(tiny, transform=replaced, transform_in="process") as loader:
        assert {pid for batch in loader for pid in batch["process"].tolist()} == {os.getpid()}


@pytest.mark.slow
def test_a_fork_has_workers_of_its_own(tiny, tmp_path):
    loader = load(tiny, transform=replaced, transform_in="process", num_workers=1)
    iterator = iter(loader)
    ours = set(next(iterator)["process"].tolist())

    def child():
        child_pids = {pid for batch in loader for pid in batch["process"].tolist()}
        Path(tmp_path, "pids").write_text(" ".join(map(str, child_pids)))
        loader.close()

    assert join(fork(child)) == 0
    theirs = {int(pid) for pid in Path(tmp_path, "pids").read_text().split()}
    assert len(theirs) == 1
    assert not theirs & ours
    wait_for_end(theirs)
    assert {pid for batch in iterator for pid in batch["process"].tolist()} == ours
    loader.close()


def test_a_view_travels_without_the_memory_that_it_is_of():
    matrix = torch.zeros(1000, 1000)
    assert len(_dump({"one": matrix[3], "scalar": torch.tensor(1.5)})) < 10_000
    back = pickle.loads(_dump((matrix[:2, :3].t(), torch.tensor(True), torch.empty(0, 4))))
    assert unlike(back, (torch.zeros(3, 2), torch.tensor(True), torch.empty(0, 4))) == []
    back[0].add_(1)  # its memory may be written
