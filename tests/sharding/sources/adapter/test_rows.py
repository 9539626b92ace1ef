"""What a frame source keeps, leaves out and refuses; all faults of a source at once."""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest
import torch

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import Boxes, decode_arrays, decode_meta
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.adapter.frame import Clip
from fuelrail.sharding.sources.registry import SourceSpec
from support.batches import unlike
from support.neutral_source import Neutral, write_neutral
from support.sharding import scanned
from support.source_world import make_world, samples_of


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    write_neutral(make_world(), folder)
    return folder


def change(root, edit) -> None:
    file = root / "world.json"
    world = json.loads(file.read_text())
    edit(world)
    file.write_text(json.dumps(world))


def scan(root, kind="neutral", **options):
    return scan_source(SourceSpec(kind, str(root), options))


def test_a_missing_file_by_policy(root, tmp_path):
    (root / "drive-0/cam_left/1.jpg").unlink()
    with pytest.raises(SourceError, match=r"drive-0/cam_left/1.jpg.*missing_camera=mask"):
        scan(root)
    masked = scan(root, missing_camera="mask").report
    assert (masked.samples, masked.masked, masked.dropped_samples) == (
        8,
        {"cam_left": {"no file": 1}},
        {},
    )
    dropped = scan(root, missing_camera="drop").report
    assert (dropped.samples, dropped.dropped_samples) == (
        7,
        {"cam_left: no file": 1},
    )
    table = scanned("neutral", root, tmp_path, missing_camera="drop").table
    metas = [decode_meta(table.row(number).meta) for number in range(3)]
    assert [(meta.key, meta.prev_key, meta.next_key) for meta in metas] == [
        ("drive-0-000000", None, None),
        ("drive-0-000002", None, "drive-0-000003"),
        ("drive-0-000003", "drive-0-000002", None),
    ]


def test_faults_are_reported_together(root):
    (root / "drive-0/cam_left/1.jpg").unlink()
    (root / "drive-1/cam_back/0.jpg").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    (root / "drive-1/lidar_top-2.npy").unlink()
    with pytest.raises(SourceError) as caught:
        scan(root)
    for part in (
        "3 faults",
        "cam_left/1.jpg",
        "git-lfs pointer",
        "lidar_top-2.npy",
    ):
        assert part.lower() in str(caught.value).lower()


def test_a_size_that_is_half_stated_is_read_from_the_head(root, monkeypatch):
    """A width without a height; nothing is left out in silence."""
    frames = Neutral.frames
    halved = [
        msgspec.structs.replace(
            frame,
            images={
                name: msgspec.structs.replace(image, width=64)
                for name, image in frame.images.items()
            },
        )
        for frame in frames(Neutral(str(root), {}), Clip(name="drive-0"))
    ]
    monkeypatch.setattr(
        Neutral,
        "frames",
        lambda self, clip: halved if clip.name == "drive-0" else frames(self, clip),
    )
    assert scan(root).report.masked == {}


def test_no_more_than_twenty_faults_of_one_table_are_listed(tmp_path):
    write_neutral(make_world(1, 30), tmp_path)
    for file in tmp_path.glob("drive-0/cam_left/*.jpg"):
        file.write_bytes(b"")
    with pytest.raises(SourceError, match=r"30 faults") as caught:
        scan(tmp_path)
    assert str(caught.value).count("drive-0/cam_left") == 20
    assert "and 10 more of images" in str(caught.value)


def test_sweeps_without_a_pose_are_one_finding_with_the_remedy(tmp_path, monkeypatch):
    write_neutral(make_world(2, 30), tmp_path)
    frames = Neutral.frames
    poses = Neutral.poses

    def posed(capture, trajectory):
        (pose,) = trajectory.at(np.array([capture.timestamp_ns]))
        return msgspec.structs.replace(capture, ego2global=pose)

    def with_poses_but_of_sweeps(self, clip):
        trajectory = poses(self, clip)
        for frame in frames(self, clip):
            images = {name: posed(image, trajectory) for name, image in frame.images.items()}
            yield msgspec.structs.replace(posed(frame, trajectory), images=images)

    monkeypatch.setattr(Neutral, "frames", with_poses_but_of_sweeps)
    monkeypatch.setattr(Neutral, "poses", lambda self, clip: None)
    with pytest.raises(SourceError) as caught:
        scan(tmp_path)
    text = str(caught.value)
    assert text.count("has a sweep of lidar_top without an ego pose") == 1
    assert "and so 59 more times; the pose of each sweep" in text


def test_missing_images_of_a_camera_are_one_finding(tmp_path):
    write_neutral(make_world(1, 30), tmp_path)
    for file in tmp_path.glob("drive-0/cam_left/*.jpg"):
        file.unlink()
    (tmp_path / "drive-0/cam_back/3.jpg").unlink()
    with pytest.raises(SourceError, match="2 faults") as caught:
        scan(tmp_path)
    text = str(caught.value)
    assert text.count("missing_camera=mask") == 2
    assert "cam_left/0.jpg' (no file), and so 29 more times; the option" in text
    assert "cam_back/3.jpg' (no file); the option" in text


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (
            lambda rows: rows[1].update(t=rows[0]["t"]),
            r"frame 1, 16\d+ ns, is not later than",
        ),
        (
            lambda rows: rows[0]["images"]["cam_left"].update(
                cam2ego=np.full((4, 4), np.nan).tolist()
            ),
            "sensor2ego",
        ),
        (
            lambda rows: rows[0]["images"]["cam_left"].update(cam2ego=np.eye(3).tolist()),
            r"sensor2ego is \[3, 3\]",
        ),
        (
            lambda rows: rows[0]["images"]["cam_left"].update(cam2ego=(2 * np.eye(4)).tolist()),
            "not a rotation",
        ),
        (
            lambda rows: rows[0]["images"]["cam_left"].update(k=np.zeros((3, 3)).tolist()),
            "intrinsics",
        ),
        (
            lambda rows: rows[0]["images"]["cam_left"].update(file="../x.jpg"),
            "not inside the source",
        ),
        (
            lambda rows: rows[0]["images"].update(cam_new=rows[0]["images"]["cam_left"]),
            "cam_new.*the rig has",
        ),
        (
            lambda rows: rows[2].update(pose=(np.eye(4) * np.nan).tolist()),
            "row .* is not a rotation",
        ),
        (lambda rows: rows[0]["boxes"][0].__setitem__(1, [0, 1, 1]), "size"),
    ],
)
def test_bad_input_is_named(root, edit, match):
    change(root, lambda world: edit(world["clips"][0]["frames"]))
    with pytest.raises(SourceError, match=match) as caught:
        scan(root)
    assert "drive-0" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "data", "match"),
    [
        ("cam_left/1.jpg", b"", r"image '.*1.jpg': image is empty"),
        (
            "cam_left/1.jpg",
            b"\xff\xd8\xff\xdb\0\x43",
            r"1.jpg': JPEG header is broken: segment 0xffdb .* 67 bytes",
        ),
        (
            "lidar_top-1.npy",
            b"",
            r"lidar file '.*lidar_top-1.npy' is empty; the option points=false",
        ),
    ],
)
def test_an_empty_or_cut_file_is_named(root, name, data, match):
    (root / "drive-0" / name).write_bytes(data)
    with pytest.raises(SourceError, match=match):
        scan(root)


def test_a_camera_that_one_clip_lacks_is_masked_there(root):
    def without(world):
        for row in world["clips"][1]["frames"]:
            del row["images"]["cam_back"]

    change(root, without)
    assert scan(root).report.masked == {"cam_back": {"not in the clip": 4}}


def test_classes(root, tmp_path):
    assert scan(root).classes == ["car", "pedestrian"]
    assert scan(root, classes="nuscenes10").classes[0] == "car"
    (tmp_path / "map.yaml").write_text("car: vehicle\npedestrian: null\n")
    info = scan(root, classes=str(tmp_path / "map.yaml"))
    assert info.classes == ["vehicle"]
    assert info.report.outside_classes == {"pedestrian": 8}
    (tmp_path / "map.yaml").write_text("truck: vehicle\n")
    with pytest.raises(
        SourceError,
        match=r"none of the 24 boxes has a class.*car 16.*classes=source",
    ):
        scan(root, classes=str(tmp_path / "map.yaml"))
    with pytest.raises(ConfigError, match=r"classes=nowhere: allowed are source, nuscenes10"):
        scan(root, classes="nowhere")


def test_a_source_without_poses(root, tmp_path):
    spec = f"neutral_without_poses:{root}"
    fr.shard(spec, tmp_path / "out", workers=1, splits={"train": 1.0})
    manifest = fr.open(tmp_path / "out").manifest
    assert manifest.provenance["facts"] == {"poses": "none"}
    assert not manifest.has_poses
    sample = next(iter(samples_of(tmp_path / "out").values()))
    assert np.array_equal(sample.geometry.cam_ego2global, np.tile(np.eye(4), (3, 1, 1)))
    assert np.isnan(sample.geometry.ego_velocity).all()
    fr.reshard(tmp_path / "out", tmp_path / "again", workers=1)
    assert not fr.open(tmp_path / "again").manifest.has_poses
    options = {
        "split": "train",
        "transforms": {"image": {"height": 32, "width": 32}},
    }
    with fr.DataLoader(tmp_path / "again", 1, **options) as loader:
        batch = next(iter(loader))
    assert "ego2global" not in batch
    assert "ego2img" in batch
    with pytest.raises(ConfigError, match=r"no ego poses.*earlier lidar sweeps"):
        options["transforms"] |= {"points": {"num_sweeps": 1}}
        fr.DataLoader(tmp_path / "again", 1, **options)


@pytest.mark.costly
def test_windows_without_poses_have_all_but_the_motion_between_frames(root, tmp_path):
    for kind in ("neutral", "neutral_without_poses"):
        fr.shard(f"{kind}:{root}", tmp_path / kind, workers=1, splits={"train": 1.0})
    options = {
        "shuffle": False,
        "window": {"frames": [-1, 0]},
        "transforms": {
            "image": {"height": 32, "width": 32},
            "points": True,
            "ego": {"train": True, "rotate_deg": [-9, 9]},
        },
    }
    motion = {"ego2global", "ego2key", "cam2keyego"}
    with (
        fr.DataLoader(tmp_path / "neutral_without_poses", 4, **options) as loader,
        fr.DataLoader(tmp_path / "neutral", 4, **options) as posed,
    ):
        for batch, posed_batch in zip(loader, posed, strict=True):
            assert batch.keys() == posed_batch.keys() - motion
            assert batch["img"].shape[1] == 2
            for name in (
                "img",
                "frame_valid",
                "frame_global_index",
                "intrinsics",
                "timestamp_ns",
                "points",
            ):
                assert not unlike(batch[name], posed_batch[name]), name
            # Each frame is in its own ego, under the sample's augmentation.
            cam2img = batch["ego2img"] @ batch["bda_mat"][:, None, None] @ batch["cam2ego"]
            assert torch.allclose(cam2img[..., :3, :3], batch["intrinsics"], atol=1e-2)
        assert loader.show(batch).pixels.shape == posed.show(posed_batch).pixels.shape


def test_check_writes_nothing(root, tmp_path, capsys):
    from fuelrail.__main__ import main

    before = sorted(tmp_path.rglob("*"))
    assert main(["shard", f"neutral:{root}", "--check", "-o", "points=false"]) == 0
    said = capsys.readouterr().out
    assert "8 samples of 2 clips" in said
    assert "largest time offsets" in said
    assert sorted(tmp_path.rglob("*")) == before
    assert main(["shard", f"neutral:{root}"]) == 2
    assert "needs an output folder" in capsys.readouterr().err


@pytest.mark.parametrize(("points", "valid", "unknown"), [(0, 0, 0), (3, 1, 0), (-1, 1, 24)])
def test_boxes_without_a_known_lidar_point_are_not_valid_where_radar_is_unknown(
    root, tmp_path, points, valid, unknown
):
    def edit(world):
        for clip in world["clips"]:
            for row in clip["frames"]:
                row["boxes"] = [[*box[:5], points] for box in row["boxes"]]

    change(root, edit)
    _, info, table = scanned("neutral", root, tmp_path)
    boxes = decode_arrays(table.row(0).boxes, Boxes)
    assert {*boxes.num_radar_pts.tolist()} == {-1}
    assert {*boxes.valid.tolist()} == {valid}
    assert info.report.unknown_points == unknown


def test_holes_of_a_clip_are_reported(root):
    def edit(world):
        for row in world["clips"][1]["frames"][2:]:
            row["t"] += 7_200_000_000_000
            for reading in (*row["images"].values(), *row["sweeps"].values()):
                reading["t"] += 7_200_000_000_000

    assert not scan(root).report.noted
    change(root, edit)
    ((said, number),) = scan(root, kind="neutral_without_poses").report.noted.items()
    assert number == 1
    assert said.startswith("holes in clips")
