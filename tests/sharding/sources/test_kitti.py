"""KITTI's raw drives and object benchmark: the synthetic world, what is wrong with a drive, and a real one."""

from __future__ import annotations

import shutil
from typing import ClassVar

import cv2
import numpy as np
import pytest

import fuelrail as fr
from fuelrail.pipeline.channels.selection import decode_values
from fuelrail.pipeline.errors import SourceError
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.kitti.raw import EDGE_NS, with_edges
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.verify.dataset import verify
from support.kitti_files import FIRST, as_kitti, write_drive, write_object
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.source_world import make_world, samples_of, turn
from support.spoil import LFS_POINTER, content, gone

SIZES = {"image_02": (64, 48), "image_03": (64, 48)}


def kitti_world(**changes):
    changes["cameras"] = dict.fromkeys(SIZES, next(iter(changes.get("cameras", SIZES).values())))
    return as_kitti(make_world(**{"lidars": ("velodyne",), **changes}))


class TestKitti(AtUrl, SourceSuite):
    kind = "kitti"
    impossible = ("no record",)
    states_sizes = False
    compare: ClassVar = {"pose_m": 1e-3}

    def world(self, **changes):
        return kitti_world(**changes)

    def write(self, world, root):
        for number, clip in enumerate(world.clips):
            write_drive(root, number, clip)
        return str(root)


class TestKittiObject(AtUrl, SourceSuite):
    kind = "kitti_object"
    impossible = ("no record",)
    states_sizes = False
    options: ClassVar = {"right": True}
    compare = None  # there are no times and poses

    def world(self, **changes):
        return kitti_world(**changes)

    def write(self, world, root):
        for number, (_, _, frame) in enumerate(world.frames()):
            write_object(root / "training", number, frame)
        return str(root)

    def test_boxes_and_points_project_as_in_the_world(self, made):
        samples = samples_of(made.folder / "out")
        assert len(samples) == 8
        for sample in samples.values():
            number = int(sample.meta.clip_name.rpartition("-")[2])
            _, _, frame = list(made.world.frames())[number]
            assert sample.meta.timestamp_ns == number + 1
            np.testing.assert_array_equal(sample.geometry.ego2global, np.eye(4))
            np.testing.assert_array_equal(
                sample.points["velodyne"], frame.sweeps["velodyne"].points
            )
            to_ego = np.linalg.inv(frame.ego2global)
            assert len(sample.boxes.label) == len(frame.boxes)
            for row, box in zip(sample.boxes.boxes3d, frame.boxes, strict=True):
                np.testing.assert_allclose(
                    row[:3],
                    to_ego[:3, :3] @ box.centre + to_ego[:3, 3],
                    atol=1e-4,
                )
                np.testing.assert_allclose(row[3:6], box.size_lwh, atol=1e-4)
                nose = to_ego[:3, :3] @ (np.cos(box.yaw), np.sin(box.yaw), 0)
                assert abs(row[6] - np.arctan2(nose[1], nose[0])) < 1e-3
            for index, image in enumerate(frame.images.values()):
                np.testing.assert_allclose(sample.geometry.cam2ego[index], image.cam2ego, atol=1e-6)
                np.testing.assert_allclose(
                    sample.geometry.intrinsics[index],
                    image.intrinsics,
                    atol=1e-6,
                )
                assert bytes(list(sample.images.values())[index]) == image.jpeg

    def test_what_is_wrong_is_named(self, tmp_path):
        spec = self.spec(tmp_path)
        label = tmp_path / "source" / "training" / "label_2" / "000001.txt"
        label.write_text("Car 0 0 0 1 2 3 4 5\n")
        with pytest.raises(
            SourceError,
            match=r"000001\.txt': line 1 has 9 columns, wanted are 15",
        ):
            scan_source(spec)
        label.write_text("")
        assert scan_source(spec).num_samples == 8, "a frame may have no box"
        (tmp_path / "source" / "training" / "calib" / "000002.txt").unlink()
        with pytest.raises(SourceError, match=r"calib/000002\.txt"):
            scan_source(spec)

    def test_frames_of_the_test_have_no_boxes(self, tmp_path):
        spec = self.spec(tmp_path)
        (tmp_path / "source" / "training").rename(tmp_path / "source" / "testing")
        shutil.rmtree(tmp_path / "source" / "testing" / "label_2")
        info = scan_source(spec)
        assert set(info.splits) == {"test"}
        assert "boxes.safetensors" not in info.names


def one_drive(tmp_path):
    """The folder of a drive, and its source."""
    world = TestKitti().world(num_clips=1)
    root = tmp_path / "source"
    root.mkdir()
    write_drive(root, 0, world.clips[0])
    return root / FIRST / world.clips[0].name, SourceSpec("kitti", str(root), {})


def first_line(name, text):
    return content(name, lambda data: text.encode() + data[data.index(b"\n") + 1 :])


CAMERAS = "../calib_cam_to_cam.txt"
VELO = "../calib_velo_to_cam.txt"
BAD = {
    "no calibration": (
        gone(CAMERAS),
        r"drive_0001_sync has no calibration: .*nowhere",
    ),
    "a file of calibration missing": (
        gone("../calib_imu_to_velo.txt"),
        r"calib_imu_to_velo\.txt",
    ),
    "a line of calibration missing": (
        content(CAMERAS, lambda data: data.replace(b"P_rect_03", b"P_rect_04")),
        r"calib_cam_to_cam\.txt' has no line 'P_rect_03:'; it has R_rect_00, P_rect_02",
    ),
    "a rotation that is none": (
        first_line(VELO, "R: 2 0 0 0 2 0 0 0 2\nX: "),
        r"calib_velo_to_cam\.txt': .* is not a rotation",
    ),
    "too few numbers": (
        first_line(VELO, "R: 1 0 0\nX: "),
        r"'R' is \[.*wanted are 9",
    ),
    "no oxts": (gone("oxts/data"), r"oxts/data' has no rows of oxts"),
    "oxts cut off": (
        content("oxts/data/0000000001.txt", b"49.0 8.4 11"),
        r"1\.txt' has not 30 finite numbers",
    ),
    "oxts not numbers": (
        content("oxts/data/0000000001.txt", b"nan " * 30),
        r"has not 30 finite numbers",
    ),
    "times that are none": (
        first_line("image_02/timestamps.txt", "noon\n"),
        r"image_02/timestamps\.txt': .*noon",
    ),
    "too few times": (
        content("image_03/timestamps.txt", b"2011-09-26 13:02:25.951199337\n"),
        r"image_03/timestamps\.txt' has 1 rows, the sensor has a file of number 3",
    ),
    "times that go back": (
        first_line("oxts/timestamps.txt", "2031-09-26 13:02:25.951199337\n"),
        r"oxts/data': row \d has the time \d+, not later",
    ),
    "no images": (gone(*SIZES), r"has no images in image_02 or image_03"),
    "one image missing": (
        gone("image_02/data/0000000002.png"),
        r"frame 2 has no image of image_02",
    ),
    "LFS pointer as image": (
        content("image_02/data/0000000002.png", LFS_POINTER * 6),
        r"image '.*image_02/data/0000000002\.png'",
    ),
    "calibration that is not text": (
        content(VELO, b"R: \xff"),
        r"calib_velo_to_cam\.txt' is not text in UTF-8",
    ),
    "times that are not text": (
        content("image_02/timestamps.txt", b"\xff\n"),
        r"image_02/timestamps\.txt' is not text in UTF-8",
    ),
    "tracklets of an unknown encoding": (
        content(
            "tracklet_labels.xml",
            b"<?xml version='1.0' encoding='no-such'?><a/>",
        ),
        r"tracklet_labels\.xml' is not as tracklets are: line 1: .*no-such",
    ),
    "tracklets cut off": (
        content("tracklet_labels.xml", b"<boost_serialization><tracklets>"),
        r"tracklet_labels\.xml' is not as tracklets are",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_drive_is_named(tmp_path, name):
    drive, spec = one_drive(tmp_path)
    break_it, message = BAD[name]
    break_it(drive)
    with pytest.raises(SourceError, match=message):
        scan_source(spec)


def test_a_cut_sweep_is_named(tmp_path):
    drive, _ = one_drive(tmp_path)
    (drive / "velodyne_points" / "data" / "0000000001.bin").write_bytes(bytes(17))
    with pytest.raises(SourceError, match="17 bytes, not a multiple of 16"):
        fr.shard(f"kitti:{tmp_path / 'source'}", tmp_path / "out", workers=1)


def test_holes_in_the_lidar_and_drives_without_tracklets(tmp_path):
    drive, spec = one_drive(tmp_path)
    (drive / "velodyne_points" / "data" / "0000000001.bin").unlink()
    item = (
        "<objectType>Car</objectType><h>1</h><w>1</w><l>1</l><first_frame>0</first_frame><poses/>"
    )
    (drive / "tracklet_labels.xml").write_text(f"<a><tracklets><item>{item}</item></tracklets></a>")
    info = scan_source(spec)
    assert ("boxes.safetensors" in info.names, info.report.boxes) == (
        True,
        0,
    ), "labelled, and no track has a pose"
    (drive / "tracklet_labels.xml").unlink()
    info = scan_source(spec)
    assert info.report.masked == {"velodyne": {"no sweep": 1}}
    assert "boxes.safetensors" not in info.names


def without_time(drive, sensor, *numbers):
    """Empty the lines of a sensor's times, as those of some published drives are."""
    path = drive / sensor / "timestamps.txt"
    lines = path.read_text().splitlines()
    for number in numbers:
        lines[number] = ""
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.mark.parametrize("has_scan", [False, True])
def test_empty_times_of_the_lidar_leave_its_sweeps_out(tmp_path, has_scan):
    drive, spec = one_drive(tmp_path)
    without_time(drive, "velodyne_points", 1, 2)
    for number in () if has_scan else (1, 2):
        (drive / f"velodyne_points/data/{number:010d}.bin").unlink()
    report = scan_source(spec).report
    assert (report.samples, report.dropped_samples) == (4, {})
    reason = "no time" if has_scan else "no sweep"
    assert report.masked == {"velodyne": {reason: 2}}
    assert report.noted["frames without a time of their own, which have a camera's"] == 2
    fr.shard(
        f"kitti:{spec.location}",
        tmp_path / "out",
        workers=1,
        splits={"train": 1.0},
    )
    assert not fr.verify(tmp_path / "out", deep=True).faults


def test_empty_times_of_a_camera_are_for_the_policy_and_of_oxts_are_left_out(
    tmp_path,
):
    drive, spec = one_drive(tmp_path)
    without_time(drive, "image_02", 1)
    with pytest.raises(
        SourceError,
        match=r"image_02.*\(no time\); the option missing_camera=mask",
    ):
        scan_source(spec)
    masked = scan_source(spec._replace(options={"missing_camera": "mask"})).report
    assert masked.masked == {"image_02": {"no time": 1}}
    for sensor in ("image_02", "image_03", "velodyne_points"):
        without_time(drive, sensor, 1)
    without_time(drive, "oxts", 1)
    report = scan_source(spec).report
    assert report.samples == 3
    assert report.noted["frames without any time, left out"] == 1
    assert report.noted["rows of oxts without a time, left out"] == 1


def test_a_missing_scan_of_the_benchmark_is_counted(tmp_path):
    spec = TestKittiObject().spec(tmp_path)
    scan = next((tmp_path / "source").rglob("velodyne/*.bin"))
    scan.unlink()
    report = scan_source(spec).report
    assert report.masked == {"velodyne": {"no sweep": 1}}


def test_layouts_of_folders(tmp_path):
    drive, spec = one_drive(tmp_path)
    assert scan_source(spec._replace(location=str(drive.parent))).num_samples == 4, (
        "the folder of a date"
    )
    with pytest.raises(SourceError, match="is one drive; give the folder that holds it"):
        scan_source(spec._replace(location=str(drive)))
    root = tmp_path / "source"
    nested = root / f"{drive.name}" / FIRST
    nested.mkdir(parents=True)
    drive.rename(nested / drive.name)
    (root / FIRST).rename(root / "calibration")
    (root / f"{FIRST}_calib").mkdir()
    (root / "calibration").rename(root / f"{FIRST}_calib" / FIRST)
    assert scan_source(spec).num_samples == 4, "a date folder inside a folder of the zip's name"
    shutil.copytree(root / drive.name, root / f"{drive.name}_again")
    with pytest.raises(SourceError, match="is there twice"):
        scan_source(spec)


def test_the_pose_beyond_the_ends_of_oxts():
    row = np.zeros((1, 30))
    row[0, [6, 7, 10, 19]] = (
        3,
        4,
        1,
        0.5,
    )  # north, east, up [m/s]; turning left [rad/s]
    times, poses = with_edges(np.array([10**9]), row, np.eye(4)[None])
    assert times.tolist() == [10**9 - EDGE_NS, 10**9, 10**9 + EDGE_NS]
    np.testing.assert_allclose(poses[2, :3, 3], [0.4, 0.3, 0.1])
    np.testing.assert_allclose(poses[0, :3, 3], [-0.4, -0.3, -0.1])
    np.testing.assert_allclose(poses[2, :2, 0], [np.cos(0.05), np.sin(0.05)])


@pytest.mark.real
def test_a_real_drive(tmp_path):
    """Against the formulas of KITTI's readme and development kit; pictures and sweep are laid beside the real drive."""
    root = tmp_path / "source"
    shutil.copytree(shared_data("kitti-raw"), root)
    (drive,) = root.rglob("2011_09_26_drive_0001_sync/image_00")
    drive = drive.parent
    assert b"git-lfs" in (drive / "image_02" / "data" / "0000000000.png").read_bytes()
    with pytest.raises(SourceError, match=r"image_02/data/0000000000\.png"):
        scan_source(SourceSpec("kitti", str(root), {}))
    picture = cv2.imencode(".png", np.zeros((375, 1242, 3), np.uint8))[1].tobytes()
    for name in ("image_00", "image_01", "image_02", "image_03"):
        (drive / name / "data" / "0000000000.png").write_bytes(picture)
    scan = np.random.default_rng(0).uniform([5, -4, -1.5, 0], [40, 4, 1, 1], (200, 4)).astype("<f4")
    (drive / "velodyne_points" / "data" / "0000000000.bin").write_bytes(scan.tobytes())
    report = fr.shard(f"kitti:{root}", tmp_path / "out", workers=1, options={"gray": True})
    assert report.num_samples == 1
    (sample,) = samples_of(tmp_path / "out").values()
    geometry = sample.geometry
    calib = {
        path.stem: dict(line.split(": ", 1) for line in path.read_text().splitlines())
        for path in root.rglob("calib_*.txt")
    }

    def numbers(file, key, *shape):
        return np.array(calib[file][key].split(), float).reshape(shape)

    def moved(file):
        return np.block([[numbers(file, "R", 3, 3), numbers(file, "T", 3, 1)], [0, 0, 0, 1]])

    rect = np.eye(4)
    rect[:3, :3] = numbers("calib_cam_to_cam", "R_rect_00", 3, 3)
    points = np.concatenate([scan[:, :3].T, np.ones((1, len(scan)))])
    for index, name in enumerate(("image_02", "image_03", "image_00", "image_01")):
        pixels = (
            numbers("calib_cam_to_cam", f"P_rect_{name[-2:]}", 3, 4)
            @ rect
            @ moved("calib_velo_to_cam")
            @ points
        )
        ours = np.linalg.inv(geometry.cam2ego[index]) @ geometry.lidar2ego[0] @ points
        ours = geometry.intrinsics[index] @ ours[:3]
        np.testing.assert_allclose(ours[:2] / ours[2], pixels[:2] / pixels[2], atol=0.1)
        text = (drive / name / "timestamps.txt").read_text().splitlines()[0]
        assert geometry.cam_timestamp_ns[index] == np.datetime64(
            text.replace(" ", "T"), "ns"
        ).astype(np.int64)
    lat, lon, alt, roll, pitch, yaw, north, east = map(
        float, next(drive.glob("oxts/data/*")).read_text().split()[:8]
    )
    assert [lat, lon, alt] == [
        49.015003823272,
        8.4342971002335,
        116.43032836914,
    ]
    speed = np.hypot(north, east)
    late_s = (
        geometry.cam_timestamp_ns[0]
        - np.datetime64("2011-09-26T13:02:25.964389445", "ns").astype(int)
    ) * 1e-9
    np.testing.assert_allclose(
        np.linalg.norm(geometry.cam_ego2global[0][:2, 3]),
        -late_s * speed,
        atol=1e-4,
    )
    assert abs(np.arctan2(geometry.ego2global[1, 0], geometry.ego2global[0, 0]) - yaw) < 1e-3
    np.testing.assert_allclose(
        geometry.ego2global[2, :2],
        [-np.sin(pitch), np.cos(pitch) * np.sin(roll)],
        atol=1e-3,
    )
    np.testing.assert_array_equal(sample.points["velodyne"], scan)


@pytest.mark.real
def test_real_frames_and_labels(tmp_path):
    """Two frames of the tracking benchmark, laid out as the object benchmark has them, against their 2-D boxes."""
    real = shared_data("kitti-tracking") / "tracking" / "training"
    root = tmp_path / "source" / "training"
    for name in ("image_2", "image_3", "calib", "label_2"):
        (root / name).mkdir(parents=True)
    calib = (real / "calib" / "0001.txt").read_text()
    for old, new in (
        ("R_rect", "R0_rect"),
        ("Tr_velo_cam", "Tr_velo_to_cam"),
        ("Tr_imu_velo", "Tr_imu_to_velo"),
    ):
        calib = calib.replace(old, new)
    rows = [line.split() for line in (real / "label_02" / "0001.txt").read_text().splitlines()]
    for number in (0, 1):
        for side in (2, 3):
            shutil.copy(
                real / f"image_0{side}" / "0001" / f"{number:06d}.png",
                root / f"image_{side}",
            )
        (root / "calib" / f"{number:06d}.txt").write_text(calib)
        labels = [" ".join(row[2:]) + "\n" for row in rows if row[0] == str(number)]
        (root / "label_2" / f"{number:06d}.txt").write_text("".join(labels))
    report = fr.shard(
        f"kitti_object:{root.parent}",
        tmp_path / "out",
        workers=1,
        options={"right": True},
    )
    assert report.num_samples == 2
    num_seen = 0
    for sample in samples_of(tmp_path / "out").values():
        number = int(sample.meta.clip_name.rpartition("-")[2])
        labels = [row for row in rows if row[0] == str(number) and row[2] != "DontCare"]
        assert len(labels) == len(sample.boxes.label) > 5
        assert sample.geometry.img_wh.tolist() == [[1242, 375]] * 2
        for row, box in zip(labels, sample.boxes.boxes3d.astype(float), strict=True):
            labelled = np.array(row[6:10], float)
            if float(row[3]) > 0 or labelled[0] < 5 or labelled[2] > 1236 or labelled[3] > 369:
                continue  # it is cut off by the image
            length, width, height, yaw = box[3:]
            corners = np.array(
                [[x, y, z] for x in (-0.5, 0.5) for y in (-0.5, 0.5) for z in (-0.5, 0.5)]
            )
            corners = corners * (length, width, height) @ turn(yaw, "z").T + box[:3]
            in_cam = np.linalg.inv(sample.geometry.cam2ego[0]) @ np.c_[corners, np.ones(8)].T
            pixels = sample.geometry.intrinsics[0] @ in_cam[:3]
            u, v = pixels[:2] / pixels[2]
            np.testing.assert_allclose([u.min(), v.min(), u.max(), v.max()], labelled, atol=3)
            num_seen += 1
    assert num_seen > 10


def test_oxts_is_a_channel(tmp_path):
    world = kitti_world(num_clips=1)
    write_drive(tmp_path / "source", 0, world.clips[0])
    spec = SourceSpec("kitti", str(tmp_path / "source"), {"oxts": True})
    TestKitti().make(spec, tmp_path / "out")
    assert verify(tmp_path / "out", deep=True, num_threads=1).faults == []
    dataset = open_dataset(tmp_path / "out")
    (channel,) = dataset.manifest.extra_channels
    assert (channel.name, len(channel.columns), channel.units[-9]) == (
        "can_oxts",
        31,
        "rad/s",
    )
    samples = sorted(
        map(dataset.__getitem__, range(len(dataset))),
        key=lambda sample: sample.meta.timestamp_ns,
    )
    rows = np.concatenate(
        [
            decode_values(drive_sample.extra, (channel,), drive_sample.key)["can_oxts"]
            for drive_sample in samples
        ]
    )
    (folder,) = (tmp_path / "source").rglob("oxts/data")
    files = [np.loadtxt(path) for path in sorted(folder.iterdir())]
    np.testing.assert_array_equal(rows[:, 1:], files[: len(rows)])
    assert len(rows) >= len(samples)


def test_a_folder_of_another_kind_is_refused_with_what_this_kind_is(tmp_path):
    with pytest.raises(
        SourceError,
        match=r"no clips; looked for image_2, .*; in it is .*; the kind is for: KITTI's object",
    ):
        scan_source(SourceSpec("kitti_object", str(tmp_path), {}))
