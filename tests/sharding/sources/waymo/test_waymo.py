"""Waymo's TFRecord files: the synthetic world, what is wrong with a file, and a real frame."""

from __future__ import annotations

import os
import struct
import zlib
from typing import ClassVar

import numpy as np
import pyarrow.parquet as pq
import pytest
import simplejpeg

import fuelrail as fr
from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from support.shared_data import shared_data
from support.source_at_url import AtUrl
from support.source_suite import SourceSuite
from support.source_world import samples_of
from support.waymo_files import (
    CAMERAS,
    add_sweep,
    field,
    frame_message,
    image_message,
    matrix,
    message,
    record,
    write_segment,
)


class TestWaymo(AtUrl, SourceSuite):
    kind = "waymo"
    impossible = ("no file",)
    compare: ClassVar = {"points_m": 1e-4}

    def world(self, **changes):
        sizes = {name: (64, 48) if number < 4 else (64, 32) for name, number in CAMERAS.items()}
        world = super().world(**{"cameras": sizes, "lidars": (), **changes})
        for _, _, frame in world.frames():
            add_sweep(frame)
            for box in frame.boxes:
                box.category = {"car": "vehicle"}.get(box.category, box.category)
        return world

    def write(self, world, root):
        for number, clip in enumerate(world.clips):
            folder = root / ("training", "validation")[number % 2]
            write_segment(
                folder / f"segment-{clip.name}_with_camera_labels.tfrecord",
                clip,
            )
        return str(root)

    def test_metadata_and_attributes(self, made):
        sample = next(iter(samples_of(made.folder / "out").values()))
        np.testing.assert_allclose(sample.geometry.dist[0][:5], [0.04, -0.3, 1e-3, -1e-3, 0])
        front = sample.meta.cameras["cam_front"]
        assert (front.dist_model, front.rolling_shutter) == (
            "opencv_radtan",
            "left_to_right",
        )
        assert front.exposure_ns == 2_500_000
        assert abs(front.readout_ns - 42_500_000) < 2000
        rows = pq.read_table(made.folder / "out" / "attributes.parquet").to_pylist()
        assert {(row["night"], row["rain"], row["location"]) for row in rows} == {
            (True, True, "location_sf")
        }


def one_segment(tmp_path, **options):
    """A file of one clip, and the world."""
    world = TestWaymo().world(num_clips=1)
    file = tmp_path / "segment-one_with_camera_labels.tfrecord"
    write_segment(file, world.clips[0], **options)
    return file, world


def scanned(file, **options):
    return scan_source(SourceSpec("waymo", str(file), options))


def test_one_file_is_a_source(tmp_path):
    file, _ = one_segment(tmp_path)
    info = scanned(file)
    assert [clip.clip_name for clip in info.clips] == ["one"]
    assert info.num_samples == 4


def test_less_than_a_hundredth_of_the_bytes_is_read(tmp_path, monkeypatch):
    world = TestWaymo().world(
        num_clips=1,
        noise=True,
        cameras=dict.fromkeys(CAMERAS, (480, 360)),
        num_boxes=40,
    )
    file = tmp_path / "one.tfrecord"
    write_segment(file, world.clips[0])
    assert bytes_read(file, monkeypatch) < file.stat().st_size / 100


def bytes_read(file, monkeypatch) -> int:
    """Bytes that indexing a file reads."""
    numbers = []
    pread = os.pread
    source = make_source(SourceSpec("waymo", str(file), {}))

    def counted(*arguments):
        data = pread(*arguments)
        numbers.append(len(data))
        return data

    monkeypatch.setattr(os, "pread", counted)
    for clip in source.clips():
        assert list(source.frames(clip))
    monkeypatch.undo()
    assert numbers
    return sum(numbers)


def test_boxes_when_a_camera_sees_them(tmp_path):
    file, _ = one_segment(tmp_path)
    assert scanned(file).report.boxes == 12
    assert scanned(file, boxes="camera_synced").report.boxes == 8, (
        "one box of each frame is seen by no camera"
    )


def test_points_of_a_damaged_range_image(tmp_path):
    file, world = one_segment(tmp_path)
    frame = world.clips[0].frames[0]
    for laser, text in (
        (
            message((1, 1), (2, message((2, b"no zlib")))),
            "range images cannot be read",
        ),
        (
            message((1, 1), (2, message((2, zlib.compress(bytes(99)))))),
            "range images cannot be read",
        ),
        (
            message(
                (1, 1),
                (2, message((2, matrix(np.ones((2, 2, 4), np.float32))))),
            ),
            "4 inclinations for 2 rows",
        ),
        (
            message(
                (1, 4),
                (2, message((2, matrix(np.ones((2, 2, 4), np.float32))))),
            ),
            "lidar 4 has no calibration",
        ),
    ):
        frame.lasers = [laser]
        file.write_bytes(record(frame_message("one", frame)))
        source = make_source(SourceSpec("waymo", str(file), {}))
        (read_frame,) = source.frames(next(iter(source.clips())))
        with pytest.raises(SourceError, match=text):
            source.points(read_frame.sweeps["lidar"].ref)


def test_a_file_without_range_images_has_no_sweeps(tmp_path):
    file, world = one_segment(tmp_path)
    frame = world.clips[0].frames[0]
    frame.lasers = [b""] * 5
    file.write_bytes(record(frame_message("one", frame)))
    assert scanned(file).report.masked == {"lidar": {"no sweep": 1}}


def test_without_labels_nothing_is_labelled(tmp_path):
    file, _ = one_segment(tmp_path, boxes=False)
    assert "boxes.safetensors" not in scanned(file).names


def flip_bit(offset: int):
    """Flip a bit of a byte of the file."""

    def change(data: bytes) -> bytes:
        position = offset % len(data)
        return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]

    return change


SCENARIO = message((1, 0.1), (5, "scenario"), (2, b"track"))
EXAMPLE = message((1, message((1, message((1, "image/encoded"), (2, b""))))))
BAD = {
    "empty": (lambda data: b"", r"is empty"),
    "LFS pointer": (
        lambda data: b"version https://git-lfs.github.com/spec/v1\n",
        r"is a git-LFS pointer",
    ),
    "no TFRecord": (
        lambda data: bytes(range(200)),
        r"record 0 at byte 0 is not a TFRecord",
    ),
    "cut off": (
        lambda data: data[:-5],
        r"record 3 at byte \d+ is cut off: it ends at \d+, the file has",
    ),
    "cut off in a length": (
        lambda data: data + b"\x01\x02",
        r"record 4 at byte \d+ is cut off",
    ),
    "a flipped bit in a length": (
        flip_bit(3),
        r"record 0 at byte 0 is not a TFRecord: the CRC32C",
    ),
    "more than records": (
        lambda data: data + bytes(99),
        r"record 4 at byte \d+ does not begin with a length",
    ),
    "a Scenario": (
        lambda data: record(SCENARIO),
        r"record 0 is not a Frame .*field 1 is not context.*motion dataset",
    ),
    "a tf.Example": (
        lambda data: record(EXAMPLE),
        r"record 0 is not a Frame .*it has no timestamp_micros",
    ),
    "another message": (
        lambda data: record(b"\xff" * 40),
        r"record 0 is not a Frame .*does not end",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_named(tmp_path, name):
    file, _ = one_segment(tmp_path)
    change, text = BAD[name]
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(SourceError, match=text) as caught:
        scanned(file)
    assert file.name in str(caught.value)


def test_a_flipped_bit_in_a_picture_is_found_when_all_bytes_are_read(tmp_path):
    file, _ = one_segment(tmp_path)
    data = file.read_bytes()
    position = data.index(b"\xff\xd8\xff") + 500
    file.write_bytes(flip_bit(position)(data))
    assert scanned(file).num_samples == 4
    with pytest.raises(
        SourceError,
        match=r"record 0 at byte 0: the CRC32C of its \d+ bytes does not agree",
    ):
        scanned(file, payload_crc=True)


def test_frames_that_are_wrong(tmp_path):
    file, world = one_segment(tmp_path)
    frames = world.clips[0].frames
    second_record = record(frame_message("other", frames[1]))
    file.write_bytes(record(frame_message("one", frames[0])) + second_record)
    with pytest.raises(SourceError, match="record 1 is of other, those before of one"):
        scanned(file)
    file.write_bytes(record(frame_message("one", frames[0], without=("cam_side_left",))))
    with pytest.raises(
        SourceError,
        match="camera SIDE_LEFT has no calibration; the context has FRONT, FRONT_LEFT",
    ):
        scanned(file)
    front = field(4, image_message("cam_front", frames[0].images["cam_front"]))
    file.write_bytes(record(frame_message("one", frames[0]) + front))
    with pytest.raises(SourceError, match="record 0 has two images of FRONT"):
        scanned(file)
    images = dict(frames[0].images)
    frames[0].images.clear()
    file.write_bytes(record(frame_message("one", frames[0])))
    with pytest.raises(SourceError, match="none of the 1 frames has an image"):
        scanned(file)
    frames[0].images.update(images)
    del frames[1].images["cam_front"]
    file.write_bytes(b"".join(record(frame_message("one", frame)) for frame in frames))
    with pytest.raises(SourceError, match="frame 1 has no image of cam_front"):
        scanned(file)
    report = scanned(file, missing_camera="mask").report
    assert report.masked == {"cam_front": {"no image": 1}}


def decode(data: bytes) -> dict[int, list]:
    """All fields of a message by number, read from its first byte to its last."""
    fields: dict[int, list] = {}
    position = 0

    def number():
        nonlocal position
        value = 0
        shift = 0
        while True:
            byte = data[position]
            position = position + 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while position < len(data):
        key = number()
        if key & 7 == 0:
            value = number()
        else:
            length = {1: 8, 5: 4}.get(key & 7) or number() if key & 7 != 2 else number()
            value = data[position : position + length]
            position = position + length
        fields.setdefault(key >> 3, []).append(value)
    return fields


def doubles(values) -> list[float]:
    return [struct.unpack("<d", value)[0] for value in values]


@pytest.mark.real
def test_a_real_frame(tmp_path, monkeypatch):
    """Against a reading of every byte with the numbers of fields of `dataset.proto`."""
    file = shared_data("waymo-perception") / "pvps_data_one_frame.tfrecord"
    assert bytes_read(file, monkeypatch) < file.stat().st_size / 100
    report = fr.shard(
        f"waymo:{file}",
        tmp_path / "out",
        workers=1,
        options={"payload_crc": True},
    )
    assert (report.num_samples, report.num_clips) == (1, 1)
    assert not fr.verify(tmp_path / "out", deep=True).faults
    (sample,) = samples_of(tmp_path / "out").values()
    data = file.read_bytes()
    frame = decode(data[12 : 12 + int.from_bytes(data[:8], "little")])
    assert sample.meta.timestamp_ns == frame[2][0] * 1000
    np.testing.assert_array_equal(
        sample.geometry.ego2global.ravel(), doubles(decode(frame[3][0])[1])
    )
    calibrations = {
        calibration[1][0]: calibration for calibration in map(decode, decode(frame[1][0])[2])
    }
    looks = {1: (1, 0), 2: (0.7, 0.7), 3: (0.7, -0.7), 4: (0, 1), 5: (0, -1)}
    for image in map(decode, frame[4]):
        index = image[1][0] - 1
        name = list(CAMERAS)[index]
        geometry = sample.geometry
        assert bytes(sample.images[name]) == image[2][0]
        height, width = simplejpeg.decode_jpeg(image[2][0]).shape[:2]
        assert (
            geometry.img_wh[index].tolist()
            == [width, height]
            == [calibrations[index + 1][4][0], calibrations[index + 1][5][0]]
        )
        np.testing.assert_allclose(
            geometry.cam_ego2global[index].ravel(),
            doubles(decode(image[3][0])[1]),
            atol=1e-9,
        )
        assert abs(geometry.cam_timestamp_ns[index] / 1e9 - doubles(image[5])[0]) < 1e-6
        lens = doubles(calibrations[index + 1][2])
        k = geometry.intrinsics[index]
        np.testing.assert_allclose(
            [
                k[0, 0],
                k[1, 1],
                k[0, 2] + 0.5,
                k[1, 2] + 0.5,
                *geometry.dist[index][:5],
            ],
            lens,
        )
        assert geometry.cam2ego[index][:2, 2] @ looks[index + 1] > 0.95, f"{name} looks elsewhere"
        assert geometry.cam2ego[index][2, 1] < -0.95, "a camera's y is down"
    labels = list(map(decode, frame[6]))
    assert len(labels) == len(sample.boxes.label) == 75
    for index, label in enumerate(labels):
        box = {number: doubles(values)[0] for number, values in decode(label[1][0]).items()}
        expected = [box[number] for number in (1, 2, 3, 5, 4, 6)]
        np.testing.assert_allclose(sample.boxes.boxes3d[index, :6], expected, atol=1e-4)
        assert abs(np.angle(np.exp(1j * (sample.boxes.boxes3d[index, 6] - box[7])))) < 1e-4
        assert sample.boxes.num_lidar_pts[index] == label[7][0]
        assert sample.boxes.label[index] == label[3][0] - 1
