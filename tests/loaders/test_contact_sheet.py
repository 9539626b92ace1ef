"""What `fuelrail view` draws, and where."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fuelrail
from fuelrail.__main__ import main
from fuelrail.loaders import ImageAugment, World
from fuelrail.loaders import contact_sheet as sheet_module
from fuelrail.loaders.contact_sheet import NEAR_M, contact_sheet, decode_single, project_segment
from fuelrail.loaders.storage.reader import SampleReader
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.transforms.image_map import ida_mats
from support.datasets import build_dataset, make_boxes
from support.loaders import make_loader

K = np.array([[300.0, 0, 159.5], [0, 300.0, 99.5], [0, 0, 1]])
EGO2CAM = np.array([[0, -1, 0, 0], [0, 0, -1, 1.5], [1, 0, 0, 0], [0, 0, 0, 1.0]])
EGO2IMG = np.eye(4)
EGO2IMG[:3, :3] = K
EGO2IMG = EGO2IMG @ EGO2CAM

coordinates = st.floats(-50, 50, allow_subnormal=False)
points = st.tuples(coordinates, coordinates, coordinates).map(np.array)


@given(points, points)
def test_a_segment_projects_as_opencv_projects_its_ends(start, end):
    segment = project_segment(start, end, EGO2IMG)
    if start[0] < NEAR_M and end[0] < NEAR_M:
        assert segment is None
        return
    for point, pixel in zip((start, end), segment, strict=True):
        if point[0] < NEAR_M:  # cut: where the segment crosses the near plane
            share = (NEAR_M - start[0]) / (end[0] - start[0])
            point = start + share * (end - start)
        camera = (EGO2CAM @ np.append(point, 1))[:3]
        expected, _ = cv2.projectPoints(camera[None], np.zeros(3), np.zeros(3), K, None)
        np.testing.assert_allclose(pixel, expected[0, 0], rtol=1e-6, atol=1e-5)


def test_a_box_is_drawn_on_its_corners_and_nowhere_else():
    boxes = make_boxes(np.random.default_rng(0), 1)
    boxes.boxes3d[0] = (12, 1, 1.0, 4, 2, 1.6, 0.3)
    boxes.rotation_wxyz[0] = (np.cos(0.15), 0, 0, np.sin(0.15))
    images = np.zeros((1, 3, 200, 320), np.uint8)
    sheet = contact_sheet(images, EGO2IMG[None], ["cam_front"], boxes, ["car"])
    bare = contact_sheet(images, EGO2IMG[None], ["cam_front"], None, ["car"])
    drawn = (sheet[: len(bare)] != bare).any(-1)
    projected = np.append(boxes.corners()[0], np.ones((8, 1)), 1) @ EGO2IMG.T
    pixels = projected[:, :2] / projected[:, 2:3] + 4  # the sheet's border
    for u, v in pixels.round().astype(int):
        assert drawn[v - 1 : v + 2, u - 1 : u + 2].any()
    rows, columns = np.nonzero(drawn)
    assert columns.min() >= pixels[:, 0].min() - 2
    assert columns.max() <= pixels[:, 0].max() + 2
    assert rows.min() >= pixels[:, 1].min() - 2
    assert rows.max() <= pixels[:, 1].max() + 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("view") / "tiny"
    build_dataset(root, {"train": (6,)})
    return root


def test_the_augmentation_is_the_loaders(root):
    image = ImageAugment(height=48, width=64, train=True, resize_range=(0.5, 0.9), flip_prob=0.5, rotate_deg=(-9, 9))
    dataset = open_dataset(root)
    reader = SampleReader(dataset)
    cameras = [camera.channel for camera in dataset.manifest.cameras]
    with make_loader(dataset, 1, image=image, seed=5, world=World()) as loader:
        loader.set_epoch(2)
        for batch in loader:
            row = reader.find(batch["sample_key"][0])
            single = decode_single(reader.sample(row), cameras, image, seed=5, epoch=2, row=row)
            assert batch["img"].equal(single["img"])
            assert batch["ego2img"].equal(single["ego2img"])


class TestCommand:
    def test_writes_the_picture_of_the_sample_asked_for(self, root, tmp_path, capsys):
        out = tmp_path / "sheet.png"
        assert main(["view", str(root), "clip-0001-000000", "--train", "--output", str(out)]) == 0
        assert "clip-0001-000000: 2 cameras, 4 boxes" in capsys.readouterr().out
        assert cv2.imread(str(out)).shape[1] == 2 * 704 + 3 * 4 + (256 + 2 * 4)  # and the view from above

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            (["nobody", "--output", "x.png"], "no sample 'nobody'"),
            ([""], "has no sample ''; the first of its"),
            (["--output", "x.jpg"], "must end with .png"),
            (["--epoch", "-1"], "--epoch -1: Expected `int` >= 0"),
            (["--output", "no/such/folder/x.png"], "cannot be written"),
            (["--image", "no.yaml"], "no.yaml"),
        ],
    )
    def test_mistakes_end_with_one_sentence(self, root, arguments, words, capsys, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        assert main(["view", str(root), *arguments]) == 2
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1

    def test_the_function_draws_what_the_command_writes(self, root, tmp_path):
        report = fuelrail.view(root, image={"height": 64, "width": 176}, output=tmp_path / "x.png")
        written = cv2.imread(str(tmp_path / "x.png"))
        assert (written[..., ::-1] == report.sheet).all()
        assert fuelrail.view(root, report.key, image={"height": 64, "width": 176}).sheet.shape == report.sheet.shape
        with pytest.raises(fuelrail.ConfigError, match=r"ViewOptions\.image"):
            fuelrail.view(root, image={"tall": 64})

    @pytest.mark.parametrize("side", [40_000, 1_000_000_000])
    def test_l1_sizes_beyond_all_images_are_refused(self, root, side, capsys, tmp_path):
        settings = tmp_path / "f.yaml"
        settings.write_text(f"height: {side}\nwidth: {side}\n")
        assert main(["view", str(root), "--image", str(settings), "--output", str(tmp_path / "x.png")]) == 2
        error = capsys.readouterr().err
        assert f"height={side}, width={side}: each must be 1 to 16384 pixels" in error
        assert error.count("\n") == 1

    @pytest.mark.process
    def test_l1_a_picture_that_memory_cannot_hold_is_refused(self, root, tmp_path):
        settings = tmp_path / "f.yaml"
        settings.write_text("height: 8192\nwidth: 8192\n")
        code = (
            "import resource, sys, cv2, torch; import fuelrail.loaders.contact_sheet;"
            "from fuelrail.__main__ import main;"
            "now = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize();"
            "resource.setrlimit(resource.RLIMIT_AS, (now + (300 << 20),) * 2);"
            "sys.exit(main(sys.argv[1:]))"
        )
        command = [
            sys.executable,
            "-c",
            code,
            "view",
            str(root),
            "--image",
            str(settings),
            "--output",
            str(tmp_path / "x.png"),
        ]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2] / ".src")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2, done.stderr
        assert "no memory to draw 2 cameras of 8192x8192 pixels, 402653184 bytes" in done.stderr
        assert "Traceback" not in done.stderr


IMAGE_OF = {"frame": "image:cam_front", "dtype": "float32"}
DRAWN = [
    {"name": "depth", "kind": "array", "field": "depth.npy", "axes": ["height", "width"], "shape": [64, 96],
     "law": {"name": "image", "camera": "cam_front", "fill": -1.0}, **IMAGE_OF},
    {"name": "marks", "kind": "points", "field": "marks.npy", "axes": ["row", "column"], "shape": [None, 6],
     "columns": ["left", "top", "right", "bottom", "u", "v"], "units": ["px"] * 6,
     "law": {"name": "image_points", "camera": "cam_front",
             "roles": {"boxes": [["left", "top", "right", "bottom"]], "points": [["u", "v"]]}}, **IMAGE_OF},
    {"name": "caption", "kind": "text", "field": "caption.txt", "law": {"name": "fixed"}},
    {"name": "loss", "kind": "array", "field": "loss.npy", "dtype": "float32", "law": {"name": "fixed"}},
]  # fmt: skip


def test_layers_are_drawn_where_they_lie(root, tmp_path, capsys):
    depth = np.full((64, 96), -1.0, np.float32)
    depth[40:50, 20:30] = 7.0
    marks = np.array([[60, 30, 80, 50, 10, 40]], np.float32)
    with fuelrail.LayerWriter(root, tmp_path / "seen", channels=DRAWN) as writer:
        for row in range(5):
            values = {"depth": depth, "marks": marks, "caption": f"row {row}", "loss": np.float32(row)}
            writer.write(row, values)
    writer.finish(partial=True)
    image = {"height": 64, "width": 96, "resize": 1.0, "crop_x": "left", "crop_y": "top"}
    bare = fuelrail.view(root, image=image)
    seen = fuelrail.view(root, image=image, layers={"seen": str(tmp_path / "seen")})
    assert seen.channels == ("seen.depth", "seen.marks", "seen.caption", "seen.loss")
    assert len(seen.sheet) == len(bare.sheet) + 4 * 22
    assert all(strip.max() > 100 for strip in seen.sheet[len(bare.sheet) :].reshape(4, 22, -1))
    drawn = (seen.sheet[4:68, 4:100] != bare.sheet[4:68, 4:100]).any(-1)
    assert drawn[41:49, 21:29].mean() > 0.5 and drawn[40, 10] and drawn[30, 62:78].all() and drawn[32:48, 80].all()
    assert not drawn[52:].any() and not drawn[:28].any() and not drawn[35:45, 62:78].any()
    assert main(["view", str(root), "--layers", f"seen={tmp_path / 'seen'}", "--output", str(tmp_path / "a.png")]) == 0
    assert "seen.depth, seen.marks" in capsys.readouterr().out
    assert fuelrail.view(root, "clip-0001-000001", layers={"seen": str(tmp_path / "seen")}).channels == ()
    assert main(["view", str(root), "--layers", "seen"]) == 2


def box_at(*rows):
    boxes = make_boxes(np.random.default_rng(0), len(rows))
    for number, (x, y, yaw) in enumerate(rows):
        boxes.boxes3d[number] = (x, y, 1.0, 4, 2, 1.6, yaw)
        boxes.rotation_wxyz[number] = (np.cos(yaw / 2), 0, 0, np.sin(yaw / 2))
        boxes.label[number] = number
    return boxes


def test_a_box_behind_another_is_not_seen_through_it():
    images = np.full((1, 3, 200, 320), 90, np.uint8)
    near, far = box_at((9, 0, 0.0)), box_at((9, 0, 0.0), (30, 0, 0.0))
    sheets = [contact_sheet(images, EGO2IMG[None], ["cam_front"], boxes, ["car", "bus"])[:200] for boxes in (near, far)]
    np.testing.assert_array_equal(*sheets)
    beside = contact_sheet(images, EGO2IMG[None], ["cam_front"], box_at((9, 0, 0.0), (30, 9, 0.0)), ["car", "bus"])[
        :200
    ]
    assert (beside != sheets[0]).any()


@pytest.mark.parametrize("degrees", [-7.0, 0.0, 5.0])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_captions_say_what_turned_the_picture(degrees, flip):
    turned = (degrees, degrees + 1e-9)
    image = ImageAugment(height=40, width=60, train=True, flip_prob=flip, rotate_deg=turned)
    (image_map,) = image.draw([(100, 80)], seed=1, epoch=0, sample=0)
    caption = sheet_module._turned(ida_mats([image_map])[0])
    assert ("mirrored" in caption) == (flip == 1.0)
    assert (f"{degrees:+.1f} deg" in caption) == (degrees != 0.0)


def test_the_view_from_above_has_ahead_on_top_and_left_on_the_left():
    pane = sheet_module._from_above(512, None, None, np.array([[30.0, 20.0, 1.0], [80.0, 0.0, 1.0]]))
    bare = sheet_module._from_above(512, None, None, np.zeros((0, 3)))
    rows, columns = np.nonzero((pane != bare).any(-1))
    assert (rows.tolist(), columns.tolist()) == ([106], [156])  # 5 pixels for a metre, from the middle
    boxes = box_at((20, -10, np.pi / 2))
    drawn = sheet_module._from_above(512, boxes, boxes.corners().astype(np.float64), np.zeros((0, 3))) != bare
    rows, columns = np.nonzero(drawn.any(-1))
    assert abs((rows.min() + rows.max()) / 2 - 156) <= 2
    assert columns.max() <= 306 + 12  # 4 m along y
    assert columns.min() < 306 - 12, "the heading points to the left, beyond the front"


def test_view_draws_lidar_and_boxes_from_above_beside_the_cameras(root):
    report = fuelrail.view(root, image={"height": 48, "width": 64})
    height, width = report.sheet.shape[:2]
    assert width == 2 * (64 + 4) + 4 + (48 + 2 * 4)
    assert height == 48 + 2 * 4 + 26
