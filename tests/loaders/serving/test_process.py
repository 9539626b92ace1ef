"""Batches made in a process of their own: the same ones, whatever happens to the process, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import psutil
import pytest
import torch

from fuelrail import Normalize, OrderSpec
from fuelrail.loaders.serving.memory import MappedMemory, SharedMemory
from fuelrail.pipeline.errors import (
    ConfigError,
    FuelrailError,
    SchemaError,
    StageError,
)
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.order.mix import MixStage
from fuelrail.pipeline.order.windows import FrameWindow
from support.batches import (
    GROUPS,
    TINY,
    TRAIN,
    check_equal_elsewhere,
    copied,
    load,
    unlike,
)
from support.ranks import warm
from support.storage_suite import spoil
from support.transforms import everything, failing

pytestmark = pytest.mark.process
NORMALIZE = Normalize(mean=(120.0, 115.0, 100.0), std=(60.0, 55.0, 50.0))


@pytest.fixture(scope="module", autouse=True)
def _server():
    """One fork server for all tests of a process, which has torch loaded."""
    warm()


def load_in_process(*args, **options):
    return load(*args, where="process", **options)


def child(loader) -> int:
    """The process behind a loader; between two, the next one."""
    while (link := loader._client.transport.link) is None:
        time.sleep(0.01)
    return link.process.pid


def shared_memory():
    """Named blocks of this machine's shared memory, semaphores apart."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("sem.")}


def wait_for_end(pid: int) -> None:
    deadline_s = time.monotonic() + 200
    while is_running(pid):
        assert time.monotonic() < deadline_s, f"process {pid} is left"
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    """Whether a process is there and not a zombie; it may end between two questions."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def noisy(batch, generator):
    return {**batch, "noise": torch.rand(3, generator=generator)}


def listed(samples):
    return samples


CASES = {
    "shuffled": {"image": TRAIN, "points": True},
    "two views": {"image": TRAIN, "two_views": True, "normalize": NORMALIZE},
    "groups, windows": {
        "camera_groups": GROUPS,
        "window": FrameWindow(frames=(-1, 0)),
    },
    "static": {"image": TRAIN, "static": True},
    "lanes": {"order": OrderSpec(kind="lanes"), "drop_last": True},
    "windows of shards": {
        "order": OrderSpec(kind="windowed", window=2, seed=2),
        "drop_last": False,
    },
    "transform": {"transform": everything},
    "collate_fn": {"collate_fn": listed},
    "batch_transform": {"batch_transform": noisy},
    "one camera": {"cameras": ["cam_front"], "num_workers": 1},
}


@pytest.mark.parametrize("name", CASES)
def test_batches_are_those_of_threads_for_three_epochs_and_after_a_resume(tiny, name):
    check_equal_elsewhere(tiny, load_in_process, CASES[name])


def test_a_mix_and_a_ramp_are_the_same(tiny, build_once):
    second_root = build_once({"train": (4, 6)}, seed=5)[0]
    stages = [
        MixStage({"a": 3, "b": 1}, until=8, ramp=True),
        MixStage({"a": 1, "b": 1}),
    ]
    with load({"a": tiny, "b": second_root}, 4, mix=stages, image=TINY) as loader:
        expected = [copied(batch) for _ in range(2) for batch in loader]
    with load_in_process({"a": tiny, "b": second_root}, 4, mix=stages, image=TINY) as loader:
        received = [copied(batch) for _ in range(2) for batch in loader]
    assert unlike(expected, received) == []


def test_a_killed_process_is_replaced_and_no_batch_is_lost_or_changed(tiny):
    with load(tiny, 1, image=TINY) as loader:
        expected = [copied(batch) for _ in range(3) for batch in loader]
    received = []
    pids = set()
    with load_in_process(tiny, 1, image=TINY) as loader:
        for _ in range(3):
            for step, batch in enumerate(loader):
                received.append(copied(batch))
                pids.add(child(loader))
                if step % 5 == 2:
                    os.kill(child(loader), signal.SIGKILL)
                    wait_for_end(child(loader))
        counted = loader.stats()
    assert unlike(expected, received) == []
    assert len(pids) > 6
    assert counted.stages[-1].items >= len(expected)
    assert counted.storage.spans >= len(expected)


def ends(sample):
    os.abort()


def test_a_process_that_always_ends_is_an_error_that_says_how(tiny):
    text = r"before batch 0 .*exit code -6.* 3 times in a row"
    with (
        load_in_process(tiny, transform=ends, image=TINY) as loader,
        pytest.raises(ChildProcessError, match=text),
    ):
        next(iter(loader))


def test_an_error_is_that_of_a_thread_with_the_traceback_of_the_process(tiny):
    def error_of(frame, where):
        options = {
            "order": {"kind": "sequential", "filter": f"frame == {frame}"},
            "num_workers": 1,
            "image": TINY,
        }
        with load(
            tiny,
            1,
            transform=failing,
            collate_fn=listed,
            where=where,
            **options,
        ) as loader:
            with pytest.raises((StageError, ConfigError, SchemaError)) as caught:
                next(iter(loader))
            return caught.value

    process_error = error_of(1, "process")
    thread_error = error_of(1, None)
    assert (type(process_error), str(process_error)) == (
        type(thread_error),
        str(thread_error),
    )
    assert 'raise ValueError(f"no {sample' in str(process_error.__cause__)
    assert (type(error_of(2, "process")), str(error_of(2, "process"))) == (
        SchemaError,
        str(error_of(2, None)),
    )
    assert "what cannot be pickled" in str(error_of(0, "process"))


def test_bad_samples_are_replaced_counted_and_noted(tiny_copy, tmp_path):
    spoil(tiny_copy, open_dataset(tiny_copy).index.row(3))
    policy = {"on_error": "substitute", "file": str(tmp_path / "bad.jsonl")}
    with load(tiny_copy, image=TINY, bad_samples=policy) as loader:
        expected = [copied(batch) for batch in loader]
        bad = loader.stats().bad_samples
    lines = (tmp_path / "bad.jsonl").read_text().splitlines()
    with load_in_process(tiny_copy, image=TINY, bad_samples=policy) as loader:
        assert unlike(expected, [copied(batch) for batch in loader]) == []
        assert loader.stats().bad_samples == bad > 0
    assert len((tmp_path / "bad.jsonl").read_text().splitlines()) == 2 * len(lines)


def test_images_are_views_of_shared_memory_and_a_kept_batch_is_not_overwritten(
    tiny,
):
    with load_in_process(tiny, 1, image=TINY) as loader:
        batches = list(loader)
        before = [copied(batch) for batch in batches]
        for _ in loader:
            pass
        assert unlike(before, batches) == []
        addresses = {batch["img"].data_ptr() for batch in batches}
        assert len(addresses) == len(batches)
        maps = Path("/proc/self/maps").read_text()
        spans = [
            line.split()[0].split("-") for line in maps.splitlines() if "fuelrail-batches" in line
        ]
        assert all(
            any(int(a, 16) <= address < int(b, 16) for a, b in spans) for address in addresses
        )
        del batches
        reused = {batch["img"].data_ptr() for _ in range(4) for batch in loader}
        assert len(reused) < 4 * len(loader)


def test_memory_that_is_too_small_is_an_error_that_names_the_limit(tiny, monkeypatch):
    monkeypatch.setattr("fuelrail.loaders.serving.client.default_memory_bytes", lambda: 100_000)
    with (
        load_in_process(tiny, 1) as loader,
        pytest.raises(ConfigError, match="over the limit of 100000"),
    ):
        list(loader)


def test_breaks_other_epochs_and_a_second_iteration_are_as_in_threads(tiny):
    def run(loader):
        received = [copied(batch) for batch in islice(loader, 2)]
        received += [copied(batch) for batch in islice(loader, 3)]
        loader.set_epoch(7)
        received += [copied(batch) for batch in loader]
        first = iter(loader)
        received.append(copied(next(first)))
        received.append(copied(next(iter(loader))))
        with pytest.raises(FuelrailError, match="another iteration"):
            next(first)
        return received

    with (
        load(tiny, image=TINY) as in_threads,
        load_in_process(tiny, image=TINY) as in_process,
    ):
        assert unlike(run(in_threads), run(in_process)) == []


def test_the_tuner_and_the_trace_see_the_stages_of_the_process(tiny):
    events = []
    with load_in_process(
        tiny,
        1,
        image=TINY,
        num_workers="auto",
        trace=lambda *event: events.append(event),
    ) as loader:
        for _ in range(3):
            for _ in loader:
                pass
        loader.tune(loader.stats() and type(loader._runner._tuner.tuning)(3, 4))
        for _ in loader:
            pass
        assert [stage.name for stage in loader.stats().stages] == [
            "fetch",
            "parse",
            "decode",
            "collate",
            "receive",
        ]
        assert loader.stats().stages[2].num_threads == 3
    assert {"fetch", "decode", "receive", "wait"} <= {event[0] for event in events}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transform": lambda sample: sample}, "cannot be pickled"),
        ({"where": "elsewhere"}, "where='elsewhere' must be"),
        ({"where": "node"}, "LOCAL_WORLD_SIZE"),
    ],
)
def test_what_cannot_be_is_refused_with_the_way_out(tiny, options, message, monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(ConfigError, match=message):
        load(tiny, **{"where": "process", **options})


SCRIPT = """
import os, sys, time
import fuelrail as fr
if __name__ == "__main__":
    loader = fr.DataLoader(sys.argv[1], 1, where="process")
    for batch in loader:
        print(loader._client.transport.link.process.pid, flush=True)
        time.sleep(60)
"""


def test_the_process_ends_with_its_trainer_however_that_ends(tiny, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    before = shared_memory()
    with subprocess.Popen(
        [sys.executable, tmp_path / "train.py", tiny], stdout=subprocess.PIPE
    ) as trainer:
        pid = int(trainer.stdout.readline())
        assert psutil.pid_exists(pid)
        trainer.kill()
    wait_for_end(pid)
    assert shared_memory() <= before


def test_a_batch_of_any_content_comes_as_it_was():
    memory = SharedMemory(1 << 20)
    mapped = MappedMemory(pinned=False)
    image = torch.from_numpy(memory.new(24)).view(2, 3, 4)
    image.copy_(torch.arange(24, dtype=torch.uint8).view(2, 3, 4))
    batch = {
        "img": image,
        "turned": image.transpose(0, 2),
        "none": torch.empty(0, 3),
        "text": ["a", None],
        "small": torch.randn(3, 5, dtype=torch.float64).T,
        "flag": torch.tensor(True),
        "deep": [(1, {"x": image[1:]})],
    }
    exported, held = memory.export(batch)
    for number, (file, num_bytes) in memory.files.items():
        mapped.add(number, os.dup(file), num_bytes)
    opened = mapped.open(exported)
    assert unlike(batch, opened) == []
    assert opened["turned"].stride() == batch["turned"].stride()
    assert sorted(held) == sorted(exported.blocks())
    assert mapped.returned() == []
    small = opened["small"]
    del opened
    assert mapped.returned() == [exported.tensors[0][0]]
    del small
    assert len(mapped.returned()) == 1
