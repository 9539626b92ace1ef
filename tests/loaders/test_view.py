"""What `fuelrail view` draws."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import msgspec
import numpy as np
import pytest

import fuelrail
from fuelrail.__main__ import main
from fuelrail.pipeline.channels.table import Channel, Law
from fuelrail.pipeline.format.dataset import open_dataset
from support.browsing import drawn_channels
from support.edits import reseal, rewrite


@pytest.fixture(scope="module")
def root(build_once):
    return build_once({"train": (6,)})[0]


class TestCommand:
    def test_writes_the_picture_of_the_sample_asked_for(self, root, tmp_path, capsys):
        out = tmp_path / "sheet.png"
        words = ["--image", "bevdet-704x256", "--train", "--output", str(out)]
        assert main(["view", str(root), "clip-0001-000000", *words]) == 0
        assert "clip-0001-000000: 2 cameras, 4 boxes" in capsys.readouterr().out
        assert cv2.imread(str(out)).shape[1] == 2 * 704 + 3 * 4 + (
            256 + 2 * 4
        )  # and the view from above

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nobody", "--output", "x.png"], "no sample 'nobody'"),
            ([""], "has no sample ''; the first of its"),
            (["--output", "x.jpg"], "must end with .png"),
            (["--epoch", "-1"], "--epoch -1: must be a whole number >= 0"),
            (["--output", "no/such/folder/x.png"], "cannot be written"),
            (["--image", "no.yaml"], "no.yaml"),
            (["--train"], "train=True needs image settings"),
        ],
    )
    def test_mistakes_end_with_one_sentence(
        self, root, arguments, words, capsys, monkeypatch, tmp_path
    ):
        monkeypatch.chdir(tmp_path)
        assert main(["view", str(root), *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

    def test_the_function_draws_what_the_command_writes(self, root, tmp_path):
        report = fuelrail.view(root, image={"height": 64, "width": 176}, output=tmp_path / "x.png")
        written = cv2.imread(str(tmp_path / "x.png"))
        assert (written[..., ::-1] == report.sheet).all()
        assert (
            fuelrail.view(root, report.key, image={"height": 64, "width": 176}).sheet.shape
            == report.sheet.shape
        )
        with pytest.raises(fuelrail.errors.ConfigError, match=r"ViewOptions\.image"):
            fuelrail.view(root, image={"tall": 64})

    @pytest.mark.parametrize("side", [40_000, 1_000_000_000])
    def test_sizes_beyond_all_images_are_refused(self, root, side, capsys, tmp_path):
        settings = tmp_path / "f.yaml"
        settings.write_text(f"height: {side}\nwidth: {side}\n")
        assert (
            main(
                [
                    "view",
                    str(root),
                    "--image",
                    str(settings),
                    "--output",
                    str(tmp_path / "x.png"),
                ]
            )
            == 2
        )
        error = capsys.readouterr().err
        assert "at 'height': must be 1 to 16384 pixels" in error
        assert error.count("\n") == 1

    @pytest.mark.process
    def test_a_picture_that_memory_cannot_hold_is_refused(self, root, tmp_path):
        settings = tmp_path / "f.yaml"
        settings.write_text("height: 8192\nwidth: 8192\n")
        code = (
            "import resource, sys, cv2, torch; import fuelrail.loaders.view;"
            "from fuelrail.__main__ import main;"
            "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
            "resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20),) * 2);"
            "sys.exit(main(sys.argv[1:]))"
        )
        words = [
            "view",
            root,
            "--image",
            settings,
            "--output",
            tmp_path / "x.png",
        ]
        command = [sys.executable, "-c", code, *map(str, words)]
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2] / ".src"),
        }
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert done.returncode == 2, done.stderr
        assert "402653184 bytes: take a smaller batch_size" in done.stderr
        assert "Traceback" not in done.stderr


def test_layers_are_drawn_where_they_lie(root, tmp_path, capsys):
    depth = np.full((64, 96), -1.0, np.float32)
    depth[40:50, 20:30] = 7.0
    marks = np.array([[60, 30, 80, 50, 10, 40]], np.float32)
    with fuelrail.LayerWriter(root, tmp_path / "seen", channels=drawn_channels(64, 96)) as writer:
        for row in range(5):
            values = {
                "depth": depth,
                "marks": marks,
                "caption": f"row {row}",
                "loss": np.float32(row),
            }
            values["words"] = ["a", f"row {row}"]
            writer.write(row, values)
    writer.finish(partial=True)
    image = {
        "height": 64,
        "width": 96,
        "resize": 1.0,
        "crop_x": "left",
        "crop_y": "top",
    }
    bare = fuelrail.view(root, image=image)
    with_layer = fuelrail.view(root, image=image, layers={"seen": str(tmp_path / "seen")})
    assert with_layer.selected == (
        "seen.depth",
        "seen.marks",
        "seen.caption",
        "seen.words",
        "seen.loss",
    )
    assert len(with_layer.sheet) == len(bare.sheet) + 5 * 22
    assert all(
        strip.max() > 100 for strip in with_layer.sheet[len(bare.sheet) :].reshape(5, 22, -1)
    )
    drawn = (with_layer.sheet[4:68, 4:100] != bare.sheet[4:68, 4:100]).any(-1)
    assert (
        drawn[41:49, 21:29].mean() > 0.5
        and drawn[40, 10]
        and drawn[30, 62:78].all()
        and drawn[32:48, 80].all()
    )
    assert not drawn[52:].any() and not drawn[:28].any() and not drawn[35:45, 62:78].any()
    assert (
        main(
            [
                "view",
                str(root),
                "--layers",
                f"seen={tmp_path / 'seen'}",
                "--output",
                str(tmp_path / "a.png"),
            ]
        )
        == 0
    )
    assert "seen.depth, seen.marks" in capsys.readouterr().out
    lacking = fuelrail.view(root, "clip-0001-000001", layers={"seen": str(tmp_path / "seen")})
    assert (lacking.selected, lacking.missing[:2]) == (
        (),
        ("seen.depth", "seen.marks"),
    )
    assert lacking.as_text().endswith(
        "has no seen.depth, seen.marks, seen.caption, seen.words, seen.loss"
    )
    assert main(["view", str(root), "--layers", "seen"]) == 2


def test_channels_that_a_sample_lacks_are_named(build_once, tmp_path, capsys):
    notes, never = (
        Channel(
            name=name,
            kind="text",
            field=f"{name}.txt",
            law=Law("fixed"),
            optional=True,
        )
        for name in ("notes", "never")
    )
    root = shutil.copytree(build_once({"train": (2,)})[0], tmp_path / "d")
    rewrite(root, 1, lambda raw: [*raw.items(), ("notes.txt", b"wet")])
    reseal(
        root,
        lambda manifest: msgspec.structs.replace(
            manifest, channels=(*manifest.channels, notes, never)
        ),
    )
    first, second = (open_dataset(root).index.row(row).key for row in (0, 1))
    output = ("--output", str(tmp_path / "a.png"))
    assert main(["view", str(root), first, "--select", "notes", *output]) == 0
    assert "; this sample has no notes -> " in capsys.readouterr().out
    assert main(["view", str(root), second, "--select", "notes", *output]) == 0
    assert ", notes -> " in capsys.readouterr().out
    assert main(["view", str(root), "--select", "never", *output]) == 0
    assert "; this sample has no never -> " in capsys.readouterr().out
    assert main(["view", str(root), "--select", "other"]) == 2
    assert "has no channel or attribute 'other'" in capsys.readouterr().err


def test_view_draws_lidar_and_boxes_from_above_beside_the_cameras(root):
    report = fuelrail.view(root, image={"height": 48, "width": 64})
    height, width = report.sheet.shape[:2]
    assert width == 2 * (64 + 4) + 4 + (48 + 2 * 4)
    assert height == 48 + 2 * 4 + 26
