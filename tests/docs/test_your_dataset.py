"""The page "Your dataset, our order": each block runs with the library that it names, stops, and continues exactly."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

import fuelrail as fr
from support.pages import ROOT, follow

pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.filterwarnings("ignore::Warning"),
]  # of the libraries

PAGE = ROOT / "docs" / "guides" / "your-dataset.md"
SEVEN = fr.OrderSpec(seed=7)


@pytest.fixture(autouse=True)
def desk(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def skip_without(package):
    pytest.importorskip(package, reason=f"{package} is not installed")


def test_torch(desk) -> None:
    names = follow(PAGE, "torch's DataLoader")
    sampler = fr.order.BatchSampler(1000, SEVEN, global_batch=64)
    assert [batch.tolist() for batch in names["rest"]] == [sampler[step] for step in range(10, 15)]
    ranks = [
        fr.order.BatchSampler(1000, SEVEN, global_batch=64, world=fr.World(rank, 4))
        for rank in range(4)
    ]
    for rank in ranks:
        rank.load_state_dict(names["state"])
    assert [row for rank in ranks for row in next(iter(rank))] == sampler[10]


def test_what_an_order_can_do() -> None:
    names = follow(PAGE, "What an order can do")
    assert min(names["columns"]["loss"][row] for row in names["night"][3]) > 0.5
    assert len({row // 100 for batch in range(3) for row in names["shards"][batch]}) <= 4
    assert sum(row >= 1000 for row in names["mixed"][2]) == 16
    shares = [sum(row >= 1000 for row in names["staged"][step]) for step in (0, 1000, 1999, 3000)]
    assert shares == [16, 24, 32, 32]
    nights = [
        np.mean([names["columns"]["night"][row] for row in names["darker"][step]])
        for step in range(3000)
    ]
    assert max(nights[:20]) <= 0.05
    assert (
        nights[0]
        < np.mean(nights[900:1100])
        < np.mean(nights[2000:])
        == pytest.approx(0.5, abs=0.01)
    )
    assert [entry.lane for entry in names["lanes"][5]] == list(range(8))


def test_grain() -> None:
    skip_without("grain")
    names = follow(PAGE, "Grain")
    order = names["order"]
    iterator = iter(names["loader"])
    assert [batch.tolist() for batch in names["batches"]] == [order[step] for step in range(20)]
    iterator.set_state(names["state"])
    assert [batch.tolist() for batch in iterator] == [order[step] for step in range(20, 45)]


def test_a_loop_of_its_own() -> None:
    names = follow(PAGE, "JAX, or a loop of your own")
    drawn = [rows for _ in range(3) for rows in names["sampler"].count()]
    assert names["batch"]["x"].tolist() == drawn[39]


def test_hugging_face_datasets() -> None:
    skip_without("datasets")
    names = follow(PAGE, "Hugging Face Datasets")
    sampler = names["sampler"]
    assert [batch["text"] for batch in names["batches"]] == [
        [f"text {row}" for row in sampler[step]] for step in range(len(sampler))
    ]
    labels = np.concatenate([batch["label"] for batch in names["batches"]])
    assert (len(labels), set(labels.tolist())) == (200, {0, 2})
    assert 125 <= (labels == 0).sum() <= 142  # two of three


def test_lance() -> None:
    skip_without("lance")
    names = follow(PAGE, "Lance")
    sampler = names["sampler"]
    batches = names["batches"]
    assert names["blocks"] == [100] * 6
    assert [batch["row"].tolist() for batch in batches] == [sampler[step] for step in range(30)]


def test_torchvision(desk) -> None:
    skip_without("torchvision")
    image = pytest.importorskip("PIL.Image")
    for number in range(12):
        file = desk / "images" / ("car" if number % 2 else "bus") / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.new("RGB", (4, 4), (number, 0, 0)).save(file)
    names = follow(PAGE, "torchvision's folders")
    expected = [names["folder"].targets[row] for step in range(3) for row in names["sampler"][step]]
    assert [label for _, labels in names["batches"] for label in labels.tolist()] == expected
    assert 9 <= sum(expected) <= 11  # 4 of 5 in 12


def test_tars_of_webdataset(desk) -> None:
    (desk / "tars").mkdir()
    for number in range(6):
        with tarfile.open(desk / "tars" / f"{number}.tar", "w") as tar:
            for row in range(number * 10, number * 10 + 10):
                info = tarfile.TarInfo(f"{row:04d}.cls")
                info.size = 1
                tar.addfile(info, io.BytesIO(b"%d" % (row % 10)))
    batches = follow(PAGE, "webdataset's tars")["batches"]
    keys = [key for batch in batches for key in batch[0]]
    assert sorted(keys) == [f"{row:04d}" for row in range(60)]
    assert [label for batch in batches for label in batch[1].tolist()] == [
        int(key) % 10 for key in keys
    ]
