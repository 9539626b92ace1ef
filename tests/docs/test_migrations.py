"""Ten training scripts before and after their move to Fuelrail, run with the libraries that they are written for.

The scripts are in `migrations/`. Each picture is of one grey level, by which it is known: the label that comes with it
must be the same before and after. docs/guides/migrate.md says how many lines change.
"""

from __future__ import annotations

import difflib
import io
import os
import runpy
import sys
import tarfile
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fuelrail.__main__ import main
from support.manifest_world import write_video
from support.pages import ROOT

SCRIPTS = Path(__file__).parent / "migrations"
NUMBER = 8


def picture(number):
    return np.full((32, 48, 3), 10 * number + 20, np.uint8)


def encode_picture(number, form="jpg"):
    return cv2.imencode(f".{form}", picture(number))[1].tobytes()


def signs(folder):
    """Images and a table of labels; what a picture shows is its number plus two."""
    (folder / "signs").mkdir()
    rows = ["drive,time_us,path,sign"]
    for number in range(NUMBER):
        (folder / "signs" / f"{number}.jpg").write_bytes(encode_picture(number))
        rows.append(f"monday,{1_600_000_000_000_000 + number},{number}.jpg,{number * 7 % 5}")
    (folder / "signs" / "labels.csv").write_text("\n".join(rows) + "\n")
    return {number + 2: number * 7 % 5 for number in range(NUMBER)}


def tars(folder):
    (folder / "tars").mkdir()
    with tarfile.open(folder / "tars" / "train.tar", "w") as tar:
        for number in range(NUMBER):
            for extension, data in (
                ("jpg", encode_picture(number)),
                ("cls", b"%d" % (number % 3)),
                ("txt", f"a picture of {number}".encode()),
            ):
                info = tarfile.TarInfo(f"{number:06d}.{extension}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return {number + 2: number % 3 for number in range(NUMBER)}


def captions(folder):
    tars(folder)
    return {number + 2: f"a picture of {number}" for number in range(NUMBER)}


def images(folder):
    for number in range(NUMBER):
        file = folder / "images" / "train" / ("Zebra", "ant", "bee")[number % 3] / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encode_picture(number))
    return {number + 2: number % 3 for number in range(NUMBER)}


def robot(folder):
    """Two episodes: a video and a table of actions each."""
    truth = {}
    for name in ("data", "videos"):
        (folder / "robot" / name).mkdir(parents=True)
    for episode in range(2):
        numbers = range(4 * episode, 4 * episode + 4)
        actions = [[number / 2, -number] for number in numbers]
        table = {
            "timestamp": [frame / 10 for frame in range(4)],
            "action": actions,
        }
        pq.write_table(pa.table(table), folder / "robot" / "data" / f"{episode}.parquet")
        write_video(
            folder / "robot" / "videos" / f"{episode}.mp4",
            [picture(number) for number in numbers],
        )
        truth |= {
            number + 2: [actions[min(frame + step, 3)] for step in range(3)]
            for frame, number in enumerate(numbers)
        }
    return truth


def kitti(folder):
    truth = {}
    names = ["Car", "Cyclist", "DontCare", "Van"]
    root = folder / "root" / "Kitti" / "raw" / "training"
    for name in ("image_2", "label_2", "calib"):
        (root / name).mkdir(parents=True)
    camera = "40 0 24 0 0 40 16 0 0 0 1 0"
    lines = [f"P{position}: {camera}" for position in range(4)] + ["R0_rect: 1 0 0 0 1 0 0 0 1"]
    lines += [
        "Tr_velo_to_cam: 0 -1 0 0 0 0 -1 0 1 0 0 0",
        "Tr_imu_to_velo: 1 0 0 0 0 1 0 0 0 0 1 0",
    ]
    for number in range(NUMBER):
        (root / "image_2" / f"{number:06d}.png").write_bytes(encode_picture(number, "png"))
        (root / "calib" / f"{number:06d}.txt").write_text("\n".join(lines) + "\n")
        boxes = [
            (
                names[(number + position) % 4],
                4.0 + position,
                5.0,
                20.0 + number,
                25.5,
            )
            for position in range(number % 4)
        ]
        labels = [
            " ".join(
                map(
                    str,
                    (
                        *box[:1],
                        0,
                        0,
                        0,
                        *box[1:],
                        1.5,
                        1.6,
                        4,
                        0,
                        1,
                        20 + position,
                        0,
                    ),
                )
            )
            for position, box in enumerate(boxes)
        ]
        (root / "label_2" / f"{number:06d}.txt").write_text("".join(f"{line}\n" for line in labels))
        classes = {"Car": 0, "Cyclist": 5, "Van": 1}
        truth[number + 2] = [(classes[box[0]], *box[1:]) for box in boxes if box[0] in classes]
    return truth


FRAMES = "sed '1s/.*/clip_id,timestamp_us,cam.front.path,sign/' signs/labels.csv > signs/frames.csv"
OF_SIGNS = (signs, [FRAMES, "fuelrail shard manifest:signs dataset"])
CASES = {
    "torch_script": ("torch, with a `Dataset` of one's own", *OF_SIGNS),
    "webdataset": (
        "webdataset, with labels",
        tars,
        ["fuelrail shard webdataset:tars dataset"],
    ),
    "imagefolder": (
        "torchvision's `ImageFolder`",
        images,
        ["fuelrail shard imagefolder:images dataset"],
    ),
    "accelerate": ("Hugging Face Accelerate", *OF_SIGNS),
    "hf_trainer": ("Hugging Face Trainer", *OF_SIGNS),
    "lightning": ("Lightning, with limited batches", *OF_SIGNS),
    "mmengine": ("MMEngine's Runner", *OF_SIGNS),
    "episodes": (
        "a robot's episodes: video, actions",
        robot,
        [
            "python episodes_prepare.py",
            "fuelrail shard manifest:robot dataset -o time_base=relative",
        ],
    ),
    "detector": (
        "a detector of one camera: torchvision's `Kitti`",
        kitti,
        ["fuelrail shard kitti_object:root/Kitti/raw dataset -o boxes2d=true"],
    ),
    "captions": (
        "webdataset, with captions",
        captions,
        ["fuelrail shard webdataset:tars dataset"],
    ),
}
NEEDS = {
    "webdataset": ("webdataset", "PIL"),
    "captions": ("webdataset", "PIL"),
    "imagefolder": ("torchvision",),
    "accelerate": ("accelerate",),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning": ("lightning.pytorch",),
    "mmengine": ("mmengine",),
    "episodes": ("av",),
    "detector": ("torchvision",),
}
TRAINERS = "pip install -e '.[trainers]'"
INSTALL = {
    "torchvision": "pip install torchvision, from the index that torch is from",
    "PIL": "pip install pillow",
}
LIMITED = {"lightning"}


def read_code_lines(name):
    return [
        line
        for line in (SCRIPTS / f"{name}.py").read_text(encoding="utf-8").splitlines()
        if line.strip()
    ]


def count_changed_lines(name):
    """The lines that are new and those that are gone; blank ones, and the arguments of a reformatted call, included."""
    steps = list(difflib.ndiff(read_code_lines(f"{name}_before"), read_code_lines(f"{name}_after")))
    return sum(step.startswith("+ ") for step in steps), sum(
        step.startswith("- ") for step in steps
    )


def run_script(name):
    """Run a script in this process; return what the model was given."""
    model = sys.modules["model"].Model
    model.records = []
    runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    return model.records


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::Warning")  # of the libraries
@pytest.mark.parametrize("name", CASES)
def test_labels_are_the_same_before_and_after(name, tmp_path, monkeypatch, capsys) -> None:
    for package in NEEDS.get(name, ()):
        try:
            pytest.importorskip(
                package,
                reason=f"{package} is not installed; {INSTALL.get(package, TRAINERS)}",
            )
        except RuntimeError as error:
            pytest.skip(f"{package} does not fit this torch: {error}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for module in ("model", "signs"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    __import__("model")
    _, make, commands = CASES[name]
    truth = make(tmp_path)
    before = run_script(f"{name}_before")
    for command in commands:
        kind, _, rest = command.partition(" ")
        if kind == "fuelrail":
            assert main(rest.split()) == 0, capsys.readouterr().err
        elif kind == "python":
            runpy.run_path(str(SCRIPTS / rest), run_name="__main__")
        else:
            assert os.system(command) == 0
    after = run_script(f"{name}_after")
    assert len(before) == len(after) == 2 * NUMBER
    for number, label in (*before, *after):
        assert label == truth[number], number
    if name not in LIMITED:
        for epoch in (before[:NUMBER], after[:NUMBER]):
            assert sorted(number for number, _ in epoch) == sorted(truth), (
                "an epoch has each picture once"
            )
    for name in ("model", "signs"):
        sys.modules.pop(name, None)


def test_the_page_counts_the_lines_that_change() -> None:
    lengths = [len(read_code_lines(f"{name}_before")) for name in CASES]
    changes = [count_changed_lines(name) for name in CASES]
    new, gone = zip(*changes, strict=True)
    num_commands = {len(commands) for _, _, commands in CASES.values()}
    page = (ROOT / "docs" / "guides" / "migrate.md").read_text(encoding="utf-8")
    text = " ".join(page.split())
    assert f"scripts of {min(lengths)} to {max(lengths)} lines" in text
    assert f"adds {min(new)} to {max(new)} lines" in text
    assert f"removes {min(gone)} to {max(gone)};" in text
    assert "{} or {} commands".format(*sorted(num_commands)) in text
