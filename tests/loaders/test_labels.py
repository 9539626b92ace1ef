"""Labels of image sets are in the batch; channels and attributes are selected by name alike, and are listed."""

from __future__ import annotations

import io
import json
import tarfile

import numpy as np
import pytest
import simplejpeg
import torch

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.loaders.integrations.map_style import MapView
from fuelrail.pipeline.errors import ConfigError
from support.datasets import build_dataset

NUM = 6
JPEG = simplejpeg.encode_jpeg(np.zeros((24, 32, 3), np.uint8))


def class_folders(root):
    for number in range(NUM):
        file = root / ["cats", "dogs", "owls"][number % 3] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(JPEG)
    return f"imagefolder:{root}"


def tars(root, members):
    """Tars of an image and these members, by extension, of each number."""
    root.mkdir()
    with tarfile.open(root / "a.tar", "w") as tar:
        for number in range(NUM):
            labels = {ending: make_member(number) for ending, make_member in members.items()}
            for ending, data in {"jpg": JPEG, **labels}.items():
                info = tarfile.TarInfo(f"{number:04}.{ending}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return f"webdataset:{root}"


def manifest(root):
    """A table of images with a column of their class."""
    root.mkdir()
    rows = []
    for number in range(NUM):
        (root / f"{number}.jpg").write_bytes(JPEG)
        row = {
            "clip_id": f"clip-{number}",
            "timestamp_ns": 10**18,
            "cam.front.path": f"{number}.jpg",
        }
        rows.append({**row, "label": number % 3, "night": bool(number % 2)})
    (root / "frames.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return f"manifest:{root}"


def encode_json(number) -> bytes:
    return json.dumps({"label": number % 3, "caption": f"picture {number}"}).encode()


SETS = {
    "class folders": (class_folders, "cls"),
    "tars, .cls": (
        lambda root: tars(root, {"cls": lambda number: b"%d" % (number % 3)}),
        "cls",
    ),
    "tars, JSON": (lambda root: tars(root, {"json": encode_json}), "label"),
    "a manifest": (manifest, "label"),
}


@pytest.fixture(scope="module", params=SETS)
def labelled(request, tmp_path_factory):
    """A dataset of images, and the name of its label."""
    make, name = SETS[request.param]
    folder = tmp_path_factory.mktemp("labels")
    fr.shard(make(folder / "source"), folder / "out", workers=1)
    return folder / "out", name


def loaded(dataset, **options):
    with fr.DataLoader(dataset, NUM, world=fr.World(), **options) as loader:
        (batch,) = loader
        return batch


def test_the_label_of_images_is_in_the_batch(labelled) -> None:
    dataset, name = labelled
    batch = loaded(dataset)
    assert batch[name].dtype == torch.int64 and batch[name].shape == (NUM,)
    assert sorted(batch[name].tolist()) == sorted(number % 3 for number in range(NUM))
    assert batch[f"{name}_valid"].all()
    named = loaded(dataset, transforms={"select": [name]})
    assert named.keys() == batch.keys() and torch.equal(named[name], batch[name])
    assert batch.keys() - loaded(dataset, transforms={"select": []}).keys() == {
        name,
        f"{name}_valid",
    }
    labels = [MapView(fr.open(dataset))[row][name] for row in range(NUM)]
    assert sorted(map(int, labels)) == sorted(batch[name].tolist())


def test_a_state_of_a_loader_with_the_label_fits_one_that_names_it(
    labelled,
) -> None:
    dataset, name = labelled
    state = fr.DataLoader(dataset, 2, world=fr.World()).state_dict()
    same = fr.DataLoader(dataset, 2, transforms={"select": [name]}, world=fr.World())
    same.load_state_dict(state)
    without = fr.DataLoader(dataset, 2, transforms={"select": []}, world=fr.World())
    with pytest.raises(fr.errors.StateMismatchError, match=f"channels: state has .*{name}"):
        without.load_state_dict(state)


@pytest.mark.parametrize("form", ["json", "txt"])
def test_a_caption_is_selected_alike_wherever_it_is(tmp_path, form, capsys) -> None:
    if form == "json":
        source = tars(tmp_path / "tars", {"json": encode_json})
    else:
        source = tars(
            tmp_path / "tars",
            {"txt": lambda number: f"picture {number}".encode()},
        )
    name = {"json": "caption", "txt": "txt"}[form]
    fr.shard(source, tmp_path / "out", workers=1)
    batch = loaded(tmp_path / "out", transforms={"select": [name]})
    assert sorted(batch[name]) == [f"picture {number}" for number in range(NUM)]
    with pytest.raises(ConfigError) as caught:
        loaded(tmp_path / "out", transforms={"select": ["captoin"]})
    text = str(caught.value)
    assert "has no channel or attribute 'captoin'" in text
    assert f"{'attributes' if form == 'json' else 'channels'}: " in text and name in text
    with fr.DataLoader(tmp_path / "out", 2, world=fr.World()) as loader:
        described = str(loader.describe())
    assert main(["inspect", str(tmp_path / "out"), "--batch"]) == 0
    assert capsys.readouterr().out.strip() == described
    head, _, rest = described.partition("not in the batch; Transforms(select=[NAME, ...])")
    kind = {"json": "attribute, string", "txt": "channel, text"}[form]
    (line,) = [line for line in rest.splitlines() if line.startswith(f"{name} ")]
    assert kind in line and name not in head


def test_channels_and_attributes_of_one_dataset_are_selected_together(
    tmp_path,
) -> None:
    members = {
        "txt": lambda number: f"text {number}".encode(),
        "json": encode_json,
    }
    fr.shard(tars(tmp_path / "tars", members), tmp_path / "out", workers=1)
    names = ["caption", "txt", "label", "key"]
    batch = loaded(tmp_path / "out", transforms={"select": names})
    assert batch.keys() >= set(names)
    assert "caption" not in loaded(tmp_path / "out")
    view = MapView(fr.open(tmp_path / "out"), ["image", "caption", "txt"])
    assert set(view[0]) == {"key", "image", "caption", "txt"}
    with pytest.raises(ConfigError, match="has no channel or attribute 'text'"):
        MapView(fr.open(tmp_path / "out"), ["text"])


def test_a_dataset_with_boxes_has_no_label_of_its_own(tmp_path) -> None:
    build_dataset(tmp_path / "d", {"train": (4,)})
    with fr.DataLoader(tmp_path / "d", 2, world=fr.World()) as loader:
        assert loader.selected == ()


def test_the_earlier_names_of_select_become_it():
    transforms = fr.Transforms(channels=["cls"], attributes=["label", "night"])
    assert transforms == fr.Transforms(select=["cls", "label", "night"])
    with pytest.raises(ConfigError, match="leave these out"):
        fr.Transforms(select=["cls"], attributes=["label"])
