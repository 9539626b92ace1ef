"""Plain tars by row: the samples of the library webdataset, in our order, resumed on other ranks."""

from __future__ import annotations

import io
import os
import pickle
import tarfile

import pytest
import torch

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.tar_rows import TarRows

SIZES = {"a.tar": 40, "b.tar": 60, "c.tar": 50}


def write_tar(path, begin, num_samples):
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for number in range(begin, begin + num_samples):
            members = {"txt": f"text {number}".encode() * (number % 7), "cls": b"%d" % (number % 3)}
            for extension, data in members.items():
                info = tarfile.TarInfo(f"folder/{number:05d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


@pytest.fixture
def folder(tmp_path):
    begin = 0
    for name, size in SIZES.items():
        write_tar(tmp_path / name, begin, size)
        begin += size
    return tmp_path


def test_rows_are_the_samples_of_webdataset(folder):
    tariterators = pytest.importorskip("webdataset.tariterators")
    samples = []
    for name in SIZES:
        with (folder / name).open("rb") as stream:
            files = tariterators.tar_file_expander([{"url": name, "stream": stream}])
            samples += tariterators.group_by_keys(files)
    for sample in samples:
        del sample["__url__"]
    rows = TarRows(folder)
    assert [rows[row] for row in range(len(rows))] == samples
    assert rows.blocks == list(SIZES.values())
    assert rows[-1] == samples[-1]
    assert TarRows(folder / "b.tar")[0] == samples[40]
    with pytest.raises(IndexError):
        rows[len(rows)]


def label(sample):
    return int(sample["__key__"].rpartition("/")[2]), int(sample["cls"])


@pytest.mark.process
@pytest.mark.slow
def test_windows_of_tars_continue_on_other_ranks(folder):
    rows = TarRows(folder, transform=label)
    order = fr.OrderSpec(kind="windowed", window=2, seed=7)

    def batches(rank, num_ranks, state=None):
        sampler = fr.order.BatchSampler(
            len(rows), order, blocks=rows.blocks, global_batch=12, world=fr.World(rank, num_ranks)
        )
        loader = sampler.count(
            torch.utils.data.DataLoader(rows, batch_sampler=sampler, num_workers=1)
        )
        if state:
            loader.load_state_dict(state)
        for numbers, _ in loader:
            yield numbers.tolist(), loader.state_dict()

    whole = [numbers for numbers, _ in batches(0, 1)]
    assert len({number for numbers in whole for number in numbers}) == 150 // 12 * 12
    for position in (3, 7):
        _, state = list(batches(0, 1))[position - 1]
        parts = [list(batches(rank, 2, state)) for rank in range(2)]
        joined = [a + b for (a, _), (b, _) in zip(*parts, strict=True)]
        assert joined == whole[position:]


def test_a_tar_that_changed_is_an_error(folder):
    rows = pickle.loads(pickle.dumps(TarRows(folder)))
    assert rows[0]["cls"] == b"0"
    write_tar(folder / "b.tar", 500, 60)
    os.utime(folder / "b.tar", ns=(1, 1))
    with pytest.raises(SourceError, match=r"b\.tar' has changed since its headers were read"):
        rows[50]


def test_a_cut_tar_and_a_compressed_one_are_refused(folder):
    whole = (folder / "b.tar").read_bytes()
    (folder / "b.tar").write_bytes(whole[:30_000])
    with pytest.raises(SourceError, match=r"b\.tar' is cut off|has no end"):
        TarRows(folder)
    (folder / "b.tar").write_bytes(whole)
    (folder / "d.tar.gz").write_bytes(b"")
    with pytest.raises(SourceError, match="compressed tars, of which no single sample"):
        TarRows(folder)


def test_joined_tars_are_read_on_if_asked(folder):
    joined = (folder / "a.tar").read_bytes() + (folder / "b.tar").read_bytes()
    (folder / "b.tar").unlink()
    (folder / "a.tar").write_bytes(joined)
    with pytest.raises(SourceError, match="joined by `cat`"):
        TarRows(folder)
    rows = TarRows(folder, ignore_zeros=True)
    assert rows.blocks == [100, 50]
    assert [rows[row]["__key__"] for row in (0, 99)] == ["folder/00000", "folder/00099"]
    assert sum(rows.noted.values()) == 1


def test_a_folder_without_samples_is_refused(tmp_path):
    with pytest.raises(SourceError, match="has no tars with samples"):
        TarRows(tmp_path)
