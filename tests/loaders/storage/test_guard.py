"""Shards and indices that are cut or rewritten in place while they are read: an error with a name, never SIGBUS."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import signal
import subprocess
import sys

import pytest

from fuelrail.loaders.storage import guard, mapped, open_storage
from fuelrail.loaders.storage.mapped import MappedShards
from fuelrail.loaders.storage.pread import PreadShards
from fuelrail.pipeline.errors import ChecksumError, StorageError, TruncatedShardError
from fuelrail.pipeline.format.dataset import open_dataset
from support.datasets import build_dataset
from support.storage_suite import rows_of, spans_of

needs_guard = pytest.mark.skipif(not guard.is_guarding(), reason="the native library is not built here")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

EPOCHS = """
import os, shutil, sys
from fuelrail.loaders import DataLoader, ImageAugment
from fuelrail.pipeline.errors import BadSamplesError, ChecksumError, TruncatedShardError

source, folder, on_error = sys.argv[1:]
for turn, how in [(turn, how) for turn in range(3) for how in ("cut", "half", "copied over itself", "zeroed")]:
    root = f"{folder}/{how}-{turn}"
    shutil.copytree(source, root)
    tars = sorted(f"{root}/{name}" for name in os.listdir(root) if name.endswith(".tar"))
    image = ImageAugment(height=64, width=176)
    bad_samples = {"on_error": on_error, "file": None}
    with DataLoader(
        root, 1, shuffle=True, transforms={"image": image}, seed=turn, storage="mapped", num_workers=2,
        bad_samples=bad_samples,
    ) as loader:
        try:
            for number, batch in enumerate(loader):
                if number == 1 + turn % 3:
                    for tar in tars:
                        if how == "cut":
                            os.truncate(tar, 1000)
                        elif how == "half":
                            os.truncate(tar, os.path.getsize(tar) // 2)
                        elif how == "copied over itself":
                            shutil.copyfile(f"{source}/{os.path.basename(tar)}", tar)
                        elif how == "zeroed":
                            with open(tar, "r+b") as file:
                                file.write(bytes(os.path.getsize(tar)))
            print(how, "ok", sep="|")
        except (ChecksumError, TruncatedShardError, BadSamplesError) as error:
            print(how, f"{type(error).__name__} {error}", sep="|")
"""


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    root = tmp_path_factory.mktemp("guard") / "pristine"
    build_dataset(root, {"train": (10, 10, 10)}, size=(320, 240), layout="none")
    return root


@pytest.fixture
def own(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "own")


def run(code, *arguments):
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.process
@needs_guard
@pytest.mark.parametrize("on_error", ["raise", "substitute"])
def test_a_shard_changed_during_an_epoch_is_a_named_error_or_no_harm(pristine, tmp_path, on_error):
    done = run(EPOCHS, pristine, tmp_path, on_error)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line.split("|") for line in done.stdout.splitlines()]
    assert len(found) == 12
    for how, line in found:
        assert line == "ok" or ("train-0000" in line and "clip-" in line), how
        assert on_error == "substitute" or not line.startswith("BadSamplesError"), how
        if how != "copied over itself" and on_error == "raise":  # else others may have taken all places
            assert line != "ok", how


@needs_guard
class TestMappedShards:
    def test_zeros_in_the_place_of_a_lost_page_are_never_taken_for_data(self, own):
        """Cut after the digest was checked, before the bytes are decoded."""
        dataset = open_dataset(own)
        storage = MappedShards(dataset)
        index, row = rows_of(dataset)[7]
        view = storage.span(index, row)
        storage.recheck([index])
        os.truncate(own / "train-000000.tar", row.offset)
        assert len(bytes(view)) == row.length  # no signal
        for _ in range(2):
            with pytest.raises(TruncatedShardError, match=r"cut .*in use.*train-000000\.tar, offset .*clip-") as caught:
                storage.recheck([index])
            assert (caught.value.offset, caught.value.key) == (row.offset, row.key)
        other, good = rows_of(dataset)[12]
        assert bytes(storage.span(other, good)) == spans_of(own)[12]
        storage.recheck([other])

    def test_a_shard_that_is_whole_again_is_read_again(self, own, pristine):
        dataset = open_dataset(own)
        storage = MappedShards(dataset)
        index, row = rows_of(dataset)[7]
        view = storage.span(index, row)
        os.truncate(own / "train-000000.tar", 0)
        bytes(view)
        with pytest.raises(TruncatedShardError):
            storage.span(index, row)
        del view
        shutil.copyfile(pristine / "train-000000.tar", own / "train-000000.tar")
        index, row = rows_of(dataset)[3]
        with pytest.raises(TruncatedShardError):  # what was read of this file as zeros stays suspect
            storage.span(*rows_of(dataset)[7])
        assert bytes(MappedShards(dataset).span(index, row)) == spans_of(pristine)[3]

    @pytest.mark.parametrize(("is_copied_over", "expected"), [(True, TruncatedShardError), (False, StorageError)])
    def test_a_shard_that_was_short_for_a_moment_is_damaged_not_a_failing_disk(
        self, own, pristine, monkeypatch, is_copied_over, expected
    ):
        storage = MappedShards(open_dataset(own))
        index, row = rows_of(open_dataset(own))[7]
        storage.span(index, row)  # opens the shard
        monkeypatch.setattr(mapped._MappedFile, "may_be_touched", lambda *_: False)
        monkeypatch.setattr(mapped._MappedFile, "populate", lambda *_: errno.EFAULT)  # what the kernel says of both
        if is_copied_over:
            shutil.copyfile(pristine / "train-000000.tar", own / "train-000000.tar")
        with pytest.raises(expected) as caught:
            storage.span(index, row)
        assert type(caught.value) is expected

    def test_bytes_changed_in_place_after_their_check_are_found_before_they_are_handed_out(self, own):
        dataset = open_dataset(own)
        storage = MappedShards(dataset)
        index, row = rows_of(dataset)[7]
        view = storage.span(index, row)
        os.utime(own / "train-000000.tar", ns=(1, 1))  # touched, not changed
        storage.recheck([index])
        with (own / "train-000000.tar").open("r+b") as file:
            file.seek(row.offset + row.length // 2)
            file.write(b"other")
        assert bytes(view) != spans_of(own)[6]
        with pytest.raises(ChecksumError, match="written to while in use"):
            storage.recheck([index])
        MappedShards(dataset, verify=False).recheck([index])

    def test_without_the_library_auto_reads_into_memory_of_its_own(self, pristine, monkeypatch):
        assert isinstance(open_storage(open_dataset(pristine)), MappedShards)
        monkeypatch.setattr("fuelrail.loaders.storage.is_guarding", lambda: False)
        assert isinstance(open_storage(open_dataset(pristine)), PreadShards)
        monkeypatch.setattr(guard, "_library", lambda: None)
        dataset = open_dataset(pristine)
        storage = MappedShards(dataset)
        index, row = rows_of(dataset)[7]
        assert bytes(storage.span(index, row)) == spans_of(pristine)[7]
        storage.recheck([index])


FOREIGN = """
import faulthandler, mmap, os, shutil, sys
from fuelrail.loaders.storage.mapped import MappedShards
from fuelrail.pipeline.format.dataset import open_dataset

def case(root, when, what):
    if when == "before":
        faulthandler.enable()
    dataset = open_dataset(root)
    storage = MappedShards(dataset)
    view = storage.span(0, dataset.index.row(0))
    if when == "after":
        faulthandler.enable()
        storage.session().close()
    if what == "ours":
        os.truncate(os.path.join(root, "train-000000.tar"), 0)
        os.write(1, b"%d" % len(bytes(view)))
    elif what == "sent":
        os.kill(os.getpid(), 7)
    elif what == "index":
        os.truncate(os.path.join(root, "index.arrow"), 0)
        dataset.index.row(3)
    else:
        with open(os.path.join(root, "other"), "w+b") as file:
            file.truncate(8192)
            other = mmap.mmap(file.fileno(), 8192)
            file.truncate(0)
        print(other[5000])

source, folder = sys.argv[1:3]
for one in sys.argv[3:]:
    shutil.copytree(source, f"{folder}/{one}")
    child = os.fork()
    if child == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{one}.{name}", os.O_CREAT | os.O_WRONLY), number)
        try:
            case(f"{folder}/{one}", *one.split("-"))
            os._exit(0)
        finally:
            os._exit(1)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.fixture(scope="module")
def outcomes(pristine, tmp_path_factory):
    """Status, output and errors by when another handler was set and what was touched, each in a process of its own."""
    folder = tmp_path_factory.mktemp("handlers")
    names = [f"{when}-{what}" for when in ("never", "before", "after") for what in ("ours", "foreign", "sent", "index")]
    done = run(FOREIGN, pristine, folder, *names)
    assert done.returncode == 0, done.stderr
    return {
        name: (int(status), *((folder / f"{name}.{kind}").read_text() for kind in ("out", "err")))
        for name, status in zip(names, done.stdout.split(), strict=True)
    }


@pytest.mark.process
@needs_guard
@pytest.mark.parametrize("when", ["never", "before", "after"])
def test_our_mappings_are_ours_when_another_handles_the_signal_and_all_else_ends_as_it_would_have(outcomes, when):
    status, output, errors = outcomes[f"{when}-ours"]
    assert (status, errors) == (0, "")
    assert int(output) > 0
    for what in ("foreign", "sent", "index"):
        status, _, errors = outcomes[f"{when}-{what}"]
        assert status == -signal.SIGBUS, what
        assert ("Fatal Python error: Bus error" in errors) == (when != "never"), what
        assert ("/index.arrow' was cut or cannot be read" in errors) == (what == "index"), what


@needs_guard
def test_slots_are_used_again(tmp_path):
    """More maps than the table has slots, one after the other."""
    file = tmp_path / "file"
    file.write_bytes(bytes(2 * mmap.PAGESIZE))
    with file.open("r+b") as stream:
        for number in range(20_000):
            mapped = guard.GuardedMap(stream.fileno(), 2 * mmap.PAGESIZE)
            mapped.guard(number, [])
            assert mapped._slot >= 0
        gone = []
        mapped = guard.GuardedMap(stream.fileno(), 2 * mmap.PAGESIZE)
        mapped.guard(5, gone)
        stream.truncate(mmap.PAGESIZE)
        view = mapped.view()
        assert view[0] == view[2 * mmap.PAGESIZE - 1] == 0
        assert mapped.hull() == (5, mmap.PAGESIZE, 2 * mmap.PAGESIZE)
        del mapped, view
        assert gone == [(5, mmap.PAGESIZE, 2 * mmap.PAGESIZE)]
