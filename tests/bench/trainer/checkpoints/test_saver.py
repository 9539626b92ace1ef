"""Checkpoints of one rank: what comes back, what is visible, and what is refused."""

from __future__ import annotations

import os
import re
import shutil

import msgspec
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
)

from fuelrail import DataLoader, ImageAugment, Transforms
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.checkpoints.store import (
    VERSION,
    FsspecReader,
    FsspecWriter,
    Store,
)
from fuelrail.bench.trainer.strategies.settings import ParallelSettings
from fuelrail.bench.trainer.strategies.step import Parallel
from fuelrail.pipeline.errors import FuelrailError, StateMismatchError
from support.datasets import build_dataset
from support.ranks import run_ranks

pytestmark = pytest.mark.slow

STEPS = 10


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for seed, name in enumerate(("one", "other")):
        build_dataset(folder / name, {"train": (5, 4)}, seed=seed)
    return folder


@pytest.fixture(autouse=True)
def _one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def trained(width=8, rate=1e-2):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, width),
        nn.BatchNorm1d(width),
        nn.Dropout(0.2),
        nn.Linear(width, 1),
    )
    optimiser = torch.optim.AdamW(model.parameters(), rate)
    parallel = Parallel(
        [model],
        optimiser,
        lambda _: (),
        settings=ParallelSettings(rate_warmup=7),
    )
    parallel.scaler = torch.amp.GradScaler("cpu", growth_interval=4)
    return parallel


def run(
    dataset,
    place,
    num_steps=STEPS,
    *,
    width=8,
    rate=1e-2,
    keep=3,
    every=2,
    identity="small",
):
    """Train from the newest checkpoint; returns where that was, and what each step saw."""
    parallel = trained(width, rate)
    checkpoints = Checkpoints(str(place), keep=keep, identity={"model": identity})
    done = []
    transforms = Transforms(image=ImageAugment(height=32, width=48))
    try:
        with DataLoader(str(dataset), 2, transforms=transforms, num_workers=1) as loader:
            restored = checkpoints.restore(parallel, loader)
            first = restored.step if restored else 0
            for step, batch in zip(range(first, num_steps), forever(loader), strict=False):
                loss = (
                    parallel.models[0](batch["img"].float().mean((1, 3, 4)) / 255).square().mean()
                )
                parallel.scaler.scale(loss).backward()
                parallel.scaler.step(parallel.optimiser)
                parallel.scaler.update()
                parallel.optimiser.zero_grad()
                parallel.schedule.step()
                rate = parallel.optimiser.param_groups[0]["lr"]
                done.append(
                    (
                        step,
                        batch["sample_key"],
                        loss.item(),
                        rate,
                        parallel.scaler.get_scale(),
                    )
                )
                if (step + 1) % every == 0:
                    checkpoints.save(step + 1, parallel, loader.state_dict())
    finally:
        checkpoints.close()
    return restored, done


def forever(loader):
    while True:
        yield from loader


def steps_of(place):
    return sorted(int(path.name[5:13]) for path in place.iterdir())


@pytest.fixture
def saved(datasets, tmp_path):
    """A run of five steps, with checkpoints of the steps 2 and 4."""
    place = tmp_path / "saved"
    run(datasets / "one", place, 5)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["folder", "local URL", "object store"])
def test_a_resumed_run_is_the_uninterrupted_one(datasets, tmp_path, kind):
    places = {
        "folder": str(tmp_path / "b"),
        "local URL": f"local://{tmp_path}/b",
        "object store": f"memory://{tmp_path.name}",
    }
    _, losses = run(datasets / "one", tmp_path / "a")
    first, before = run(datasets / "one", places[kind], 5)
    restored, after = run(datasets / "one", places[kind])
    assert first is None
    assert (restored.step, restored.world_size, restored.skipped) == (4, 1, [])
    # Dropout too: the generator's state is in the checkpoint.
    assert [*before[:4], *after] == losses


def test_the_newest_are_kept_and_what_killed_runs_left_is_removed_with_a_warning(
    datasets, saved, caplog
):
    unfinished = saved / "step-00000009.0123abcd"
    shutil.copytree(next(saved.glob("step-00000004.*")), unfinished)
    (unfinished / "checkpoint.json").rename(unfinished / ".checkpoint.json.0123abcd")
    (saved / "notes.txt").write_text("mine")
    restored, _ = run(datasets / "one", saved, keep=2)
    assert restored.step == 4
    assert (
        f"'{unfinished}' has no checkpoint.json: its save did not finish; it is removed"
        in caplog.messages
    )
    (saved / "notes.txt").unlink()
    assert steps_of(saved) == [8, 10]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def remove(path):
    path.unlink()


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def loop(path):
    path.unlink()
    path.symlink_to(path.name)


def endless(path):
    """Make it a terabyte of zeros, which takes no room."""
    os.truncate(path, 1 << 40)


def folder(path):
    path.unlink()
    path.mkdir()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "damage", "said"),
    [
        (
            "__0_0.distcp",
            cut,
            r"__0_0.distcp does not match its digest; of (\d+) bytes it has (?!\1)\d+",
        ),
        ("__0_0.distcp", flip, "__0_0.distcp does not match its digest"),
        ("__0_0.distcp", remove, "__0_0.distcp is missing"),
        (".metadata", flip, ".metadata does not match its digest"),
        ("checkpoint.json", cut, "checkpoint.json is not a manifest"),
        ("checkpoint.json", flip, "checkpoint.json"),
        ("checkpoint.json", pipe, "checkpoint.json is not a regular file"),
        ("checkpoint.json", folder, "checkpoint.json is a folder, not a file"),
        ("__0_0.distcp", pipe, "__0_0.distcp is not a regular file"),
        (".metadata", folder, ".metadata is a folder, not a file"),
        (".metadata", loop, ".metadata is missing"),
        (
            "__0_0.distcp",
            endless,
            r"__0_0.distcp does not match its digest; of \d+ bytes it has 1099511627776",
        ),
        (
            "checkpoint.json",
            endless,
            "checkpoint.json takes 1099511627776 bytes when it is decoded, at most 16777216 are read",
        ),
    ],
)
def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(
    datasets, saved, name, damage, said
):
    (newest,) = saved.glob("step-00000004.*")
    damage(newest / name)
    restored, done = run(datasets / "one", saved)
    assert restored.step == 2
    assert [entry[0] for entry in done] == list(range(2, STEPS))
    (skipped,) = restored.skipped
    assert skipped.startswith(newest.name)
    assert re.search(said, skipped)
    assert (newest / "damaged.json").exists()
    # The same step was saved again, in a folder of its own.
    assert run(datasets / "one", saved)[0].step == STEPS


def test_a_manifest_of_another_form_is_set_aside(datasets, saved):
    (newest,) = saved.glob("step-00000004.*")
    sealed = msgspec.json.decode((newest / "checkpoint.json").read_bytes())
    body = msgspec.json.encode({**sealed["manifest"], "world_size": 0})
    xxh3 = xxhash.xxh3_64_hexdigest(f"{VERSION}\n".encode() + body)
    (newest / "checkpoint.json").write_bytes(
        msgspec.json.encode({**sealed, "xxh3": xxh3, "manifest": msgspec.Raw(body)})
    )
    restored, _ = run(datasets / "one", saved)
    assert restored.step == 2
    assert (
        "is not a manifest: at 'world_size': must be a whole number >= 1; got 0"
        in restored.skipped[0]
    )


def test_a_checkpoint_under_the_name_of_another_step_is_set_aside(datasets, saved):
    (newest,) = saved.glob("step-00000004.*")
    newest.rename(saved / "step-00000099.0123abcd")
    restored, _ = run(datasets / "one", saved)
    assert restored.step == 2
    assert restored.skipped == ["step-00000099.0123abcd: checkpoint.json is of step 4"]


def test_a_resumed_run_has_the_learning_rate_that_it_asks_for(datasets, saved):
    _, done = run(datasets / "one", saved, 6, rate=2e-2)
    assert [rate for _, _, _, rate, _ in done] == [2e-2 * (step + 2) / 7 for step in (4, 5)]


def test_where_all_are_damaged_the_run_does_not_start_again_unasked(datasets, saved):
    for path in saved.glob("*/__0_0.distcp"):
        flip(path)
    with pytest.raises(
        FuelrailError,
        match=r"no checkpoint in .* is whole \(step-00000004.*; step-00000002.*another",
    ):
        run(datasets / "one", saved)


@pytest.mark.parametrize(
    ("dataset", "changes", "message"),
    [
        (
            "one",
            {"identity": "large"},
            r"model: checkpoint has small, this run has large",
        ),
        (
            "one",
            {"width": 16},
            r"0.bias: checkpoint has \[8\], this run has \[16\]",
        ),
        ("other", {}, r"dataset: state has '.*', loader has '.*'"),
    ],
)
def test_another_model_or_dataset_is_refused_with_both_sides(
    datasets, saved, dataset, changes, message
):
    with pytest.raises(StateMismatchError, match=message):
        run(datasets / dataset, saved, **changes)


def test_a_newer_version_is_refused_with_both_sides(datasets, saved, monkeypatch):
    store = Store(str(saved))
    manifest = store.read(store.complete()[0])
    folder = store.folder(6, "0123abcd")
    (saved / folder).mkdir()
    monkeypatch.setattr("fuelrail.bench.trainer.checkpoints.store.VERSION", VERSION + 1)
    store.publish(folder, msgspec.structs.replace(manifest, step=6))
    monkeypatch.undo()
    with pytest.raises(
        StateMismatchError,
        match=rf"has version {VERSION + 1}; this Fuelrail reads version {VERSION}",
    ):
        run(datasets / "one", saved)


@pytest.mark.parametrize(("kind", "method"), [(Store, "publish"), (FileSystemWriter, "write_data")])
def test_a_save_that_fails_is_reported_and_leaves_the_one_before(
    datasets, saved, monkeypatch, kind, method
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with (
        monkeypatch.context() as patch,
        pytest.raises(FuelrailError, match=r"step 6 could not .*No space left.*make room"),
    ):
        patch.setattr(kind, method, full)
        run(datasets / "one", saved)
    assert run(datasets / "one", saved)[0].step == 4


def test_torch_writes_files_by_fsspec():
    """The names that the store imports were moved between releases of torch."""
    assert issubclass(FsspecWriter, FileSystemWriter)
    assert issubclass(FsspecReader, FileSystemReader)


SILENT_RANK = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from fuelrail.bench.trainer.checkpoints.saver import Checkpoints
from fuelrail.bench.trainer.strategies.step import Parallel

place, done = Path(sys.argv[1]), Path(sys.argv[1]) / "done"
dist.init_process_group("gloo")
checkpoints = Checkpoints(str(place), keep=1, identity={}, timeout_s=2)
if dist.get_rank() == 0:
    model = torch.nn.Linear(2, 2)
    parallel = Parallel([model], torch.optim.SGD(model.parameters()), lambda _: ())
    try:
        if sys.argv[2] == "restore":
            checkpoints.restore(parallel, None)
        checkpoints.save(1, parallel, {})
        checkpoints.wait()
    except Exception as error:
        print(error, flush=True)
    done.touch()
while not done.exists():
    time.sleep(0.1)
os._exit(0)  # the group is broken
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("restore", "timed out"),
        (
            "save",
            r"earlier .* whole; a rank did not answer for 2 s \(timeout_s",
        ),
    ],
)
def test_a_rank_that_is_silent_ends_the_others_waiting(tmp_path, method, said):
    script = tmp_path / "silent.py"
    script.write_text(SILENT_RANK)
    assert re.search(said, run_ranks(2, script, tmp_path, method), re.IGNORECASE)
