"""Frames of video that a manifest names: staged clip by clip, each decoded once, and checked by the scan."""

from __future__ import annotations

import json
import struct
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import av
import fsspec
import numpy as np
import pytest
import simplejpeg
from av.stream import Disposition

import fuelrail as fr
from fuelrail.__main__ import main
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.api import check_source
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.adapter.videos import Videos
from fuelrail.sharding.sources.registry import SourceSpec, make_source
from fuelrail.sharding.sources.shared.files import LINKED
from fuelrail.sharding.sources.shared.video import VideoFile
from fuelrail.sharding.verify.dataset import verify
from fuelrail.sharding.write.images import scale_geometry, transcode
from fuelrail.sharding.write.staging import stage_clips
from support.manifest_world import (
    GROUPS,
    as_video,
    write_long,
    write_video,
    write_wide,
)
from support.shared_data import shared_data
from support.source_suite import DAMAGES, SourceSuite
from support.source_world import make_world, samples_of

if TYPE_CHECKING:
    from pathlib import Path

START_NS = 1_600_000_000_000_000_000


class TestWide(SourceSuite):
    kind = "manifest"
    options: ClassVar = {
        "boxes_in": "global",
        "lidar_columns": ["x", "y", "z", "intensity", "ring"],
    }
    compare: ClassVar = {"same_bytes": False}
    refused: ClassVar = {"damaged_image": ("mask", "drop")}
    impossible = ("no record", *DAMAGES)

    def write(self, world, root):
        write_wide(world, root, "jsonl")
        as_video(world, root, "frames")
        return str(root)

    def remove_image(self, root, camera, data):
        """Remove the video of a clip of four frames."""
        (root / f"drive-0-{camera}.mp4").unlink()
        return 4

    def test_each_frame_is_the_image_that_was_encoded(self, tmp_path):
        world = self.world()
        self.make(self.spec(tmp_path, world), tmp_path / "out")
        images = {
            (sample.meta.clip_name, sample.meta.frame_idx, name): data
            for sample in samples_of(tmp_path / "out").values()
            for name, data in sample.images.items()
        }
        for clip, number, frame in world.frames():
            for name, image in frame.images.items():
                decoded = simplejpeg.decode_jpeg(bytes(images[clip.name, number, name])).astype(
                    float
                )
                expected = simplejpeg.decode_jpeg(image.jpeg).astype(float)
                neighbours = [
                    simplejpeg.decode_jpeg(neighbour.images[name].jpeg).astype(float)
                    for neighbour in clip.frames
                ]
                distances = [
                    np.abs(decoded - neighbour_pixels).mean() for neighbour_pixels in neighbours
                ]
                assert np.argmin(distances) == number
                assert np.abs(decoded - expected).mean() < 40

    @pytest.mark.parametrize(
        "images",
        [{"size": [40, 26], "quality": 97}, {"resize": 0.5, "quality": 97}],
    )
    def test_smaller_images_are_scaled_and_encoded_once_as_they_are_decoded(
        self, tmp_path, monkeypatch, images
    ):
        """As a full-size JPEG of quality 100 that is scaled; geometry follows, and staging takes the smaller bytes."""
        spec = self.spec(tmp_path)
        options = {**self.options, "video_quality": 100}
        run = partial(
            shard,
            num_workers=1,
            progress=Quiet(),
            engine=LocalEngine(1, "threads"),
        )
        full = make_recipe(seed=7, shard_size_bytes=1 << 16, splits={"train": 1.0})
        small = make_recipe(
            seed=7,
            shard_size_bytes=1 << 16,
            splits={"train": 1.0},
            images=images,
        )
        run(spec._replace(options=options), tmp_path / "whole", full)
        expected = samples_of(tmp_path / "whole")
        staged = []

        def note(*arguments, **named):
            table = stage_clips(*arguments, **named)
            staged.append(sum(path.stat().st_size for path in table.parent.glob("*.bin")))
            return table

        monkeypatch.setattr("fuelrail.sharding.run.stage_clips", note)
        monkeypatch.setattr(
            "fuelrail.sharding.write.members.transcode", None
        )  # no second way through pixels
        run(spec, tmp_path / "small", small)
        monkeypatch.undo()
        assert not verify(tmp_path / "small", deep=True, num_threads=1).faults
        assert staged[0] <= fr.open(tmp_path / "small").manifest.num_bytes
        for key, sample in samples_of(tmp_path / "small").items():
            assert sample.images.keys() == expected[key].images.keys()
            recipe = small.images
            geometry = scale_geometry(expected[key].geometry, recipe)
            np.testing.assert_array_equal(sample.geometry.img_wh, geometry.img_wh)
            np.testing.assert_allclose(sample.geometry.intrinsics, geometry.intrinsics)
            for name, data in sample.images.items():
                scaled = transcode(expected[key].images[name], "jpg", recipe)
                # Of luma: chroma is scaled apart from it here, and there with it.
                luma, expected_luma = (
                    simplejpeg.decode_jpeg(bytes(jpeg), "GRAY").astype(float)
                    for jpeg in (data, scaled)
                )
                assert np.abs(luma - expected_luma).mean() < 1.5

    def test_a_check_says_what_jpegs_cost_against_the_video(self, tmp_path, capsys):
        world = self.world(num_frames=8)
        spec = self.spec(tmp_path, world)
        columns = ", ".join(self.options["lidar_columns"])
        arguments = [
            "-o",
            "boxes_in=global",
            "-o",
            f"lidar_columns=[{columns}]",
        ]
        command = [
            "shard",
            f"manifest:{spec.location}",
            "--check",
            "--images",
            "resize=0.5,quality=92",
            *arguments,
        ]
        assert main([*command, "-o", "rate=5"]) == 0
        said = capsys.readouterr().out
        report = check_source(
            f"manifest:{spec.location}",
            options={**spec.options, "rate": 5},
            recipe=make_recipe(images={"resize": 0.5, "quality": 92}),
        )
        video = report.video
        videos = list((tmp_path / "source").glob("*.mp4"))
        assert (video.num_videos, video.num_bytes) == (
            len(videos),
            sum(path.stat().st_size for path in videos),
        )
        assert video.num_frames == len(world.cameras) * sum(
            len(clip.frames) for clip in world.clips
        )
        assert f"video: {len(videos)} streams of {video.num_frames} frames" in said
        self.make(spec._replace(options={**spec.options, "rate": 5}), tmp_path / "out")
        jpegs = [
            data
            for sample in samples_of(tmp_path / "out").values()
            for data in sample.images.values()
        ]
        all_frames, full, half, as_given = video.options
        assert (
            all_frames.num_images,
            full.num_images,
            as_given.num_images,
        ) == (
            video.num_frames,
            len(jpegs),
            len(jpegs),
        )
        assert full.num_bytes == pytest.approx(sum(map(len, jpegs)), rel=0.15)
        assert half.num_bytes < full.num_bytes < all_frames.num_bytes
        assert min(option.cpu_hours for option in video.options) > 0
        assert f"resize=0.5,quality=92: {len(jpegs)} images" in said


class TestLong(TestWide):
    """Video beside a table of times: the rows of `sensor_data`."""

    def write(self, world, root):
        write_long(world, root, "jsonl")
        as_video(world, root, "sensor_data")
        return str(root)


def draw_number(number: int) -> np.ndarray:
    pixels = np.full((48, 96, 3), 60, np.uint8)
    for bit in range(6):
        pixels[:16, bit * 16 : bit * 16 + 16] = 255 * (number >> bit & 1)
    return pixels


def number_of(jpeg: bytes, bits: int = 6) -> int:
    image = simplejpeg.decode_jpeg(jpeg, "GRAY")[..., 0]
    return sum(
        int(image[4:12, bit * 16 + 4 : bit * 16 + 12].mean() > 127) << bit for bit in range(bits)
    )


def write_rows(root: Path, paths: dict[str, list[str | None]], **columns) -> None:
    """A table of one clip with cameras whose paths are given frame by frame."""
    rows = []
    for number in range(len(next(iter(paths.values())))):
        row = {
            "clip_id": "drive",
            "timestamp_ns": START_NS + number * 100_000_000,
            "speed_limit": 50,
        }
        for name, camera_paths in paths.items():
            row[f"cam.{name}.path"] = camera_paths[number]
            row[f"cam.{name}.intrinsics"] = [80.0, 0, 48, 0, 80, 24, 0, 0, 1]
            row[f"cam.{name}.cam2ego"] = [
                0.0,
                0,
                1,
                0,
                -1,
                0,
                0,
                0,
                0,
                -1,
                0,
                1,
                0,
                0,
                0,
                1,
            ]
        rows.append({**row, **columns})
    (root / "frames.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make(root: Path, out: Path, **options):
    recipe = make_recipe(splits={"train": 1.0})
    return shard(
        SourceSpec("manifest", str(root), options),
        out=out,
        recipe=recipe,
        num_workers=1,
        progress=Quiet(),
        engine=LocalEngine(1),
    )


def read_numbers(out: Path, bits: int = 6) -> dict[str, list[int | None]]:
    """Read the numbers in the images of each camera, in the order of frames."""
    samples = sorted(samples_of(out).values(), key=lambda sample: sample.meta.frame_idx)
    cameras = {name for sample in samples for name in sample.images}
    return {
        name: [
            number_of(bytes(sample.images[name]), bits) if name in sample.images else None
            for sample in samples
        ]
        for name in cameras
    }


def test_rows_may_name_frames_in_any_order_and_each_is_decoded_once(tmp_path, monkeypatch):
    write_video(tmp_path / "front.mp4", [draw_number(number) for number in range(30)])
    write_video(
        tmp_path / "back.h264",
        [draw_number(number) for number in range(30)],
        "h264",
    )
    numbers = [0, 21, 3, 29, 8, 9, 10]
    write_rows(
        tmp_path,
        {
            "front": [f"front.mp4#frame={number}" for number in numbers],
            "back": [f"back.h264#frame={number}" for number in numbers[::-1]],
        },
    )
    instances: list[Videos] = []
    init = Videos.__init__
    monkeypatch.setattr(
        Videos,
        "__init__",
        lambda self, *a, **k: (init(self, *a, **k), instances.append(self))[0],
    )
    make(tmp_path, tmp_path / "out")
    assert read_numbers(tmp_path / "out") == {
        "front": numbers,
        "back": numbers[::-1],
    }
    # 30 of the raw stream; of the other one groups 0 to 11 and 20 to 29, less those after the last wanted frame.
    assert sum(videos.num_decoded for videos in instances) <= 30 + 12 + 10


@pytest.mark.real
def test_real_pictures_with_b_frames_and_a_varying_rate(tmp_path, monkeypatch):
    root = shared_data("video-made")
    monkeypatch.setenv(LINKED, str(root))
    for name in (
        "front_h264_bframes_vfr.mp4",
        "left_h264_intra.mp4",
        "front_cut_without_moov.mp4",
    ):
        (tmp_path / name).symlink_to(root / name)
    rows = range(24)
    write_rows(
        tmp_path,
        {
            "front": [f"front_h264_bframes_vfr.mp4#frame={number}" for number in rows],
            "left": [f"left_h264_intra.mp4#frame={number}" for number in rows],
        },
    )
    make(tmp_path, tmp_path / "out")
    assert read_numbers(tmp_path / "out", bits=5) == {
        "front": [*rows],
        "left": [*rows],
    }
    write_rows(tmp_path, {"front": ["front_cut_without_moov.mp4#frame=0"]})
    with pytest.raises(
        SourceError,
        match=r"row 0, column cam\.\w+\.path: video .*front_cut_without_moov.*cut off",
    ):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))


def check_refused(tmp_path, path, match, **columns):
    write_rows(tmp_path, {"front": ["a.mp4#frame=0", path]}, **columns)
    with pytest.raises(SourceError, match=match):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))


def test_what_is_wrong_with_a_video_is_named_with_the_row(tmp_path):
    write_video(tmp_path / "a.mp4", [draw_number(number) for number in range(5)])
    content = (tmp_path / "a.mp4").read_bytes()
    check_refused(
        tmp_path,
        "a.mp4#frame=5",
        r"row 1, column cam\.\w+\.path: 'a.mp4#frame=5': the video has 5 frames, counted from 0",
    )
    check_refused(
        tmp_path,
        "b.mp4#frame=1",
        r"frame 1 has no image of front '.*b.mp4' \(no file\)",
    )
    check_refused(
        tmp_path,
        "a.mp4#frame=1",
        r"row 0, column cam.front.path: 'a.mp4#frame=0' is 96x48, and 640x480 is stated",
        **{"cam.front.width": 640, "cam.front.height": 480},
    )
    check_refused(
        tmp_path,
        "a.mp4#frame=1",
        r"row 0, column cam.front.byte_offset: .*is a frame of a video",
        **{"cam.front.byte_offset": 0, "cam.front.byte_length": 5},
    )
    (tmp_path / "b.mp4").write_bytes(b"no video")
    check_refused(
        tmp_path,
        "b.mp4#frame=1",
        r"row 1, column cam\.\w+\.path: video .*b.mp4' cannot be opened.*cut off, or no video",
    )
    (tmp_path / "b.mp4").write_bytes(b"")
    check_refused(
        tmp_path,
        "b.mp4#frame=1",
        r"row 1, column cam\.\w+\.path: video .*b.mp4' cannot be opened",
    )
    with av.open(str(tmp_path / "c.mp4"), "w", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width = 96
        stream.height = 48
        stream.pix_fmt = "yuv420p"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(draw_number(0), "rgb24")))
        file.mux(stream.encode(None))
    check_refused(
        tmp_path,
        "c.mp4#frame=0",
        r"row 1, column cam\.\w+\.path: video .*codec 'mpeg4'",
    )
    assert content == (tmp_path / "a.mp4").read_bytes()


def test_a_video_cut_behind_its_index_is_named_by_the_scan(tmp_path):
    write_video(tmp_path / "plain.mp4", [draw_number(number) for number in range(5)])
    with (
        av.open(str(tmp_path / "plain.mp4")) as source,
        av.open(str(tmp_path / "a.mp4"), "w", options={"movflags": "faststart"}) as file,
    ):
        stream = file.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(video=0):
            if packet.size:
                packet.stream = stream
                file.mux(packet)
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[:-20])
    check_refused(
        tmp_path,
        "a.mp4#frame=1",
        r"row 0, column cam\.\w+\.path: video .*is cut off: it has \d+ bytes, its index",
    )


def test_frames_before_the_first_keyframe_are_absent_and_counted(tmp_path):
    """A part of a stream that was cut out between keyframes."""
    write_video(
        tmp_path / "whole.mp4",
        [draw_number(number) for number in range(12)],
        options={**GROUPS, "bf": "0"},
    )
    with (
        av.open(str(tmp_path / "whole.mp4")) as source,
        av.open(str(tmp_path / "a.mkv"), "w") as file,
    ):
        stream = file.add_stream_from_template(source.streams.video[0])
        for number, packet in enumerate(packet for packet in source.demux(video=0) if packet.size):
            if number >= 2:
                packet.stream = stream
                file.mux(packet)
    write_rows(tmp_path, {"front": [f"a.mkv#frame={number}" for number in range(10)]})
    spec = SourceSpec("manifest", str(tmp_path), {"missing_camera": "drop"})
    assert scan_source(spec).report.dropped_samples == {
        "no camera image (no keyframe before it)": 2
    }
    make(tmp_path, tmp_path / "out", missing_camera="drop")
    assert read_numbers(tmp_path / "out") == {"front": [4, 5, 6, 7, 8, 9, 10, 11]}


def test_the_recipe_has_the_libraries_and_refuses_others(tmp_path):
    write_video(tmp_path / "a.mp4", [draw_number(number) for number in range(5)])
    write_rows(tmp_path, {"front": ["a.mp4#frame=0"]})
    options = make_source(SourceSpec("manifest", str(tmp_path), {})).options
    assert "libavcodec" in options["libraries"]
    with pytest.raises(ConfigError, match=r"decoded with PyAV 1\.0"):
        make_source(SourceSpec("manifest", str(tmp_path), {**options, "libraries": "PyAV 1.0"}))
    write_wide(make_world(), tmp_path, "jsonl")
    source = make_source(SourceSpec("manifest", str(tmp_path), {}))
    assert (source.options["libraries"], source.reads) == ("", "random")


def test_a_raw_stream_without_a_keyframe_at_its_start_has_no_numbers(tmp_path):
    write_video(
        tmp_path / "whole.h264",
        [draw_number(number) for number in range(12)],
        "h264",
        {**GROUPS, "bf": "0"},
    )
    with av.open(str(tmp_path / "whole.h264")) as file:
        packets = [bytes(packet) for packet in file.demux(video=0) if packet.size]
    (tmp_path / "a.h264").write_bytes(b"".join(packets[2:]))
    write_rows(tmp_path, {"front": ["a.h264#frame=0"]})
    with pytest.raises(
        SourceError,
        match=r"row 0, column cam\.\w+\.path: .*does not begin with a keyframe.*cut it",
    ):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))


def test_a_clip_whose_video_has_changed_is_staged_again(tmp_path):
    write_video(tmp_path / "a.mp4", [draw_number(number) for number in range(5)])
    write_rows(tmp_path, {"front": [f"a.mp4#frame={number}" for number in range(5)]})

    class Stop(Quiet):
        def planned(self, num_samples, shards, num_bytes):
            raise KeyboardInterrupt

    spec = SourceSpec("manifest", str(tmp_path), {})
    recipe = make_recipe(splits={"train": 1.0})
    with pytest.raises(KeyboardInterrupt):
        shard(
            spec,
            out=tmp_path / "out",
            recipe=recipe,
            num_workers=1,
            progress=Stop(),
            engine=LocalEngine(1),
        )
    assert list((tmp_path / "out" / ".fuelrail" / "staging").glob("*.bin"))
    write_video(tmp_path / "a.mp4", [draw_number(number + 20) for number in range(5)])
    make(tmp_path, tmp_path / "out")
    assert read_numbers(tmp_path / "out") == {"front": [20, 21, 22, 23, 24]}


def test_a_rotation_flag_is_refused_by_name(tmp_path):
    """The matrix of the track's header (ISO/IEC 14496-12, 8.3.2), turned by 90 degrees."""
    write_video(tmp_path / "a.mp4", [draw_number(number) for number in range(5)])
    data = bytearray((tmp_path / "a.mp4").read_bytes())
    position = data.index(b"tkhd") + 4 + 40
    unit = 1 << 16
    assert struct.unpack_from(">9i", data, position) == (
        unit,
        0,
        0,
        0,
        unit,
        0,
        0,
        0,
        1 << 30,
    )
    struct.pack_into(">9i", data, position, 0, unit, 0, -unit, 0, 0, 0, 0, 1 << 30)
    (tmp_path / "a.mp4").write_bytes(data)
    write_rows(tmp_path, {"front": ["a.mp4#frame=0"]})
    with pytest.raises(SourceError, match=r"a.mp4' has a rotation flag of -?90 degrees"):
        make(tmp_path, tmp_path / "out")


def test_a_video_at_a_url_is_refused(tmp_path):
    write_rows(tmp_path, {"front": ["a.mp4#frame=0"]})
    url = "memory://test_video_at_a_url"
    fs = fsspec.filesystem("memory")
    fs.pipe_file(
        "/test_video_at_a_url/frames.jsonl",
        (tmp_path / "frames.jsonl").read_bytes(),
    )
    try:
        with pytest.raises(
            SourceError,
            match=r"row 0, column cam\.\w+\.path: video 'a.mp4' is at the URL .*copy the source",
        ):
            scan_source(SourceSpec("manifest", url, {}))
    finally:
        fs.rm("/test_video_at_a_url", recursive=True)


def test_of_several_streams_the_one_that_ffmpeg_takes_is_decoded(tmp_path):
    """A small preview stands before the video."""
    write_video(
        tmp_path / "small.mp4",
        [draw_number(number)[:64, :64] for number in range(6)],
    )
    write_video(tmp_path / "large.mp4", [draw_number(number) for number in range(6)])
    with (
        av.open(str(tmp_path / "small.mp4")) as small,
        av.open(str(tmp_path / "large.mp4")) as large,
        av.open(str(tmp_path / "a.mp4"), "w") as file,
    ):
        pairs = [
            (
                container,
                file.add_stream_from_template(container.streams.video[0]),
            )
            for container in (small, large)
        ]
        pairs[1][1].disposition = Disposition.default  # else the first of an mp4 is
        for source, stream in pairs:
            for packet in source.demux(video=0):
                if packet.size:
                    packet.stream = stream
                    file.mux(packet)
    with av.open(str(tmp_path / "large.mp4")) as large:
        size = large.streams.video[0].width, large.streams.video[0].height
    assert VideoFile(str(tmp_path / "a.mp4")).facts()[:2] == size
    (tmp_path / "small.mp4").unlink()
    (tmp_path / "large.mp4").unlink()
    write_rows(tmp_path, {"front": [f"a.mp4#frame={number}" for number in range(6)]})
    make(tmp_path, tmp_path / "out")
    assert read_numbers(tmp_path / "out") == {"front": list(range(6))}


@pytest.mark.costly
def test_a_table_of_a_terabyte_of_zeros_is_named_and_not_searched_for_videos(
    tmp_path,
):
    with (tmp_path / "frames.jsonl").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        SourceError,
        match=r"frames\.jsonl': a row after row 0 has \d+ bytes, of which at most",
    ):
        scan_source(SourceSpec("manifest", str(tmp_path), {}))
