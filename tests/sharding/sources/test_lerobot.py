"""LeRobot datasets: frames by time, states, actions, tasks and splits of v2.1 and v3.0; damaged ones are named."""

from __future__ import annotations

import io
import json
import sys
import time
from typing import ClassVar

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import simplejpeg
from PIL import Image

import fuelrail as fr
from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.adapter.videos import Videos
from fuelrail.sharding.sources.registry import SourceSpec, parse_source
from fuelrail.sharding.sources.shared.video import video_frames
from fuelrail.sharding.verify.dataset import verify
from support.batches import load
from support.manifest_world import write_video
from support.source_suite import DAMAGES, SourceSuite
from support.source_world import samples_of

FPS = 10
TASKS = ["pick", "place"]
PATHS = {
    "v2.1": {
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
    },
    "v3.0": {
        "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    },
}
PATHS["v2.0"] = PATHS["v2.1"]


def pictures_of(lengths=(3, 5, 2)):
    """RGB pictures by episode and camera; the brightness of each is its number."""
    number = iter(range(1, 1000))
    return [
        {
            "top": [np.full((48, 64, 3), 12 * next(number), np.uint8) for _ in range(length)],
            "wrist": [np.full((32, 32, 3), 200 - 9 * index, np.uint8) for index in range(length)],
        }
        for length in lengths
    ]


def write_lerobot(root, episodes, version="v3.0", *, stored=False):
    """Write episodes of RGB pictures by camera, in the layout of a version; ``stored``: pictures in the tables."""
    cameras = {
        f"observation.images.{name}": pictures[0].shape for name, pictures in episodes[0].items()
    }
    dtype = "image" if stored else "video"
    features = {
        name: {"dtype": dtype, "shape": list(shape), "names": None}
        for name, shape in cameras.items()
    }
    features |= {
        "observation.state": {
            "dtype": "float32",
            "shape": [2],
            "names": {"motors": ["a", "b"]},
        },
        "action": {"dtype": "float64", "shape": [1, 2], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "note": {"dtype": "string", "shape": [1], "names": None},
        "depth": {
            "dtype": "video",
            "shape": [4, 4, 1],
            "info": {"video.is_depth_map": True},
        },
        "timestamp": {"dtype": "float32", "shape": [1]},
        "episode_index": {"dtype": "int64", "shape": [1]},
    }
    tables = []
    rows = []
    for number, episode in enumerate(episodes):
        length = len(next(iter(episode.values())))
        steps = np.arange(length)
        columns = {
            "observation.state": np.stack([steps, steps * 0.5 + number], 1)
            .astype(np.float32)
            .tolist(),
            "action": [[[float(index), -1.0]] for index in steps],
            "next.done": steps == length - 1,
            "note": [f"{number}/{index}" for index in steps],
            "timestamp": (steps / FPS).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(length, number),
            "task_index": np.full(length, number % 2),
        }
        if stored:
            columns |= {
                f"observation.images.{name}": [as_png(image) for image in episode[name]]
                for name in episode
            }
        tables.append(pa.table(columns))
        rows.append(
            {
                "episode_index": number,
                "length": length,
                "tasks": [TASKS[number % 2]],
            }
        )
    write = write_v3 if version == "v3.0" else write_v2
    (root / "meta").mkdir(parents=True)
    write(root, episodes, tables, rows, cameras if not stored else {})
    info = {
        "codebase_version": version,
        "fps": FPS,
        "features": features,
        "robot_type": "arm",
        **PATHS[version],
    }
    info["splits"] = {"train": "0:2", "validation": f"2:{len(episodes)}"}
    (root / "meta" / "info.json").write_text(json.dumps(info))
    return root


def as_png(picture):
    return {
        "bytes": cv2.imencode(".png", picture[..., ::-1])[1].tobytes(),
        "path": None,
    }


def write_v2(root, episodes, tables, rows, cameras):
    for name, lines in (
        ("episodes", rows),
        (
            "tasks",
            [{"task_index": index, "task": task} for index, task in enumerate(TASKS)],
        ),
    ):
        (root / "meta" / f"{name}.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines)
        )
    for number, (episode, table) in enumerate(zip(episodes, tables, strict=True)):
        put(
            root,
            PATHS["v2.1"]["data_path"].format(episode_chunk=0, episode_index=number),
            table,
        )
        for name in cameras:
            path = PATHS["v2.1"]["video_path"].format(
                episode_chunk=0, episode_index=number, video_key=name
            )
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            write_video(root / path, episode[name.rpartition(".")[2]])


def write_v3(root, episodes, tables, rows, cameras):
    """Two files of data; one video a camera, in which the episodes follow each other."""
    put(
        root,
        "meta/tasks.parquet",
        pa.table({"task_index": [0, 1], "__index_level_0__": TASKS}),
    )
    first = 0
    for number, row in enumerate(rows):
        row |= {"data/chunk_index": 0, "data/file_index": number // 2}
        for name in cameras:
            row |= {
                f"videos/{name}/chunk_index": 0,
                f"videos/{name}/file_index": 0,
            }
            row[f"videos/{name}/from_timestamp"] = first / FPS
        first += row["length"]
    put(
        root,
        "meta/episodes/chunk-000/file-000.parquet",
        pa.Table.from_pylist(rows),
    )
    for file in range(-(-len(tables) // 2)):
        put(
            root,
            f"data/chunk-000/file-{file:03d}.parquet",
            pa.concat_tables(tables[2 * file : 2 * file + 2]),
            rows=3,
        )
    for name in cameras:
        path = root / PATHS["v3.0"]["video_path"].format(
            video_key=name, chunk_index=0, file_index=0
        )
        path.parent.mkdir(parents=True)
        write_video(
            path,
            [image for episode in episodes for image in episode[name.rpartition(".")[2]]],
        )


def put(root, name, table, rows=None):
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, root / name, row_group_size=rows)


def scan(root, **options):
    return scan_source(SourceSpec("lerobot", str(root), options))


class _Suite(SourceSuite):
    kind = "lerobot"
    compare: ClassVar = None
    reads_heads = False
    refused: ClassVar = {"damaged_image": ("mask", "drop")}
    impossible = ("no record", *DAMAGES)
    version: ClassVar = "v3.0"

    def write(self, world, root):
        decoded = [
            {
                name: [simplejpeg.decode_jpeg(frame.images[name].jpeg) for frame in clip.frames]
                for name in world.cameras
            }
            for clip in world.clips
        ]
        write_lerobot(root / "episodes", decoded, self.version)
        return str(root / "episodes")


class TestV3(_Suite):
    def remove_image(self, root, camera, data):
        """Remove the one video of a camera, in which both episodes of four frames are."""
        next(root.rglob(f"*.{camera}/**/*.mp4")).unlink()
        return 8


class TestV2(_Suite):
    version: ClassVar = "v2.1"

    def remove_image(self, root, camera, data):
        """Remove the video of an episode of four frames."""
        next(root.rglob(f"*.{camera}/episode_000000.mp4")).unlink()
        return 4


@pytest.mark.costly
@pytest.mark.parametrize(
    ("version", "stored"),
    [("v2.0", True), ("v2.1", False), ("v3.0", False), ("v3.0", True)],
)
def test_every_frame_has_its_own_picture_state_action_and_task(tmp_path, version, stored):
    episodes = pictures_of()
    root = write_lerobot(tmp_path / "episodes", episodes, version, stored=stored)
    assert parse_source(f"lerobot:{root}", {}).kind == "lerobot"
    report = fr.shard(f"lerobot:{root}", tmp_path / "out", workers=1)
    assert report.scan.noted == {"feature depth left out, a video of depths": 1}
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    dataset = fr.open(tmp_path / "out")
    assert {name: split.num_samples for name, split in dataset.manifest.splits.items()} == {
        "train": 8,
        "val": 2,
    }
    assert [(camera.channel, camera.source_name) for camera in dataset.manifest.cameras] == [
        ("top", "top"),
        ("wrist", "wrist"),
    ]
    assert dataset.manifest.extra_channels[1].description == "a, b"
    loaded = {}
    channels = ["observation_state", "action", "task", "note"]
    attributes = ["episode_index", "task_index", "next_done"]
    for split in ("train", "val"):
        with load(tmp_path / "out", 1, split=split, select=[*channels, *attributes]) as loader:
            for batch in loader:
                loaded[int(batch["episode_index"]), int(batch["frame"])] = batch
    for number, episode in enumerate(episodes):
        for frame, _ in enumerate(episode["top"]):
            batch = loaded.pop((number, frame))
            assert int(batch["timestamp_ns"]) == frame * 10**9 // FPS
            assert batch["observation_state"][0].tolist() == [
                frame,
                frame * 0.5 + number,
            ]
            assert batch["action"][0].tolist() == [[frame, -1.0]]
            assert (batch["task"], batch["note"]) == (
                [TASKS[number % 2]],
                [f"{number}/{frame}"],
            )
            assert bool(batch["next_done"]) == (frame == len(episode["top"]) - 1)
            assert not {"intrinsics", "dist", "ego2global"} & batch.keys()
    assert not loaded
    numbers = dataset.table.column("episode_index").to_pylist()
    samples = list(samples_of(tmp_path / "out").values())
    for number, sample in zip(numbers, samples, strict=True):
        for name in ("top", "wrist"):
            picture = cv2.imdecode(np.frombuffer(sample.images[name], np.uint8), cv2.IMREAD_COLOR)
            expected = episodes[number][name][sample.meta.frame_idx]
            assert abs(picture.astype(int) - expected.astype(int)).max() <= (0 if stored else 3)


def test_at_a_lower_rate_of_frames_states_and_actions_keep_their_own(tmp_path):
    lengths = (6, 9, 1)
    root = write_lerobot(tmp_path / "episodes", pictures_of(lengths))
    fr.shard(f"lerobot:{root}", tmp_path / "out", options={"rate": 5}, workers=1)
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    window = {
        "action": {"from": -0.1, "to": 0.3, "hz": 10},
        "observation_state": [-0.05, 0],
    }
    loaded = []
    for split in ("train", "val"):
        options = {"select": ["action", "observation_state", "episode_index"]}
        with load(tmp_path / "out", 1, split=split, window=window, **options) as loader:
            for batch in loader:
                number = int(batch["episode_index"])
                now = int(batch["timestamp_ns"]) * FPS // 10**9
                loaded.append((number, now))
                rows = [
                    (now + step, 0 <= now + step < lengths[number]) for step in (-1, 0, 1, 2, 3)
                ]
                assert batch["action_valid"][0].tolist() == [is_known for _, is_known in rows]
                assert batch["action"].tolist() == [
                    [[[time, -1.0] if is_known else [0, 0]] for time, is_known in rows]
                ]
                assert batch["observation_state_valid"][0].tolist() == [
                    now > 0,
                    True,
                ]
                half = [now - 0.5, (now - 0.5) / 2 + number] if now else [0, 0]
                np.testing.assert_allclose(batch["observation_state"][0, 0], half, atol=1e-6)
    assert sorted(loaded) == [
        (number, frame) for number, length in enumerate(lengths) for frame in range(0, length, 2)
    ]


def test_keyframes_alone_take_one_decode_each(tmp_path, monkeypatch):
    root = write_lerobot(
        tmp_path / "episodes", pictures_of((6, 9, 4))
    )  # groups of four, over the episodes
    decoded = []
    init = Videos.__init__
    monkeypatch.setattr(
        Videos,
        "__init__",
        lambda self, *a, **k: (init(self, *a, **k), decoded.append(self))[0],
    )
    fr.shard(
        f"lerobot:{root}",
        tmp_path / "out",
        options={"frames": "keyframes"},
        workers=1,
    )
    samples = samples_of(tmp_path / "out").values()
    frames = [(sample.meta.clip_id, sample.meta.frame_idx) for sample in samples]
    starts = {f"episode-{number:06d}": first for number, first in enumerate((0, 6, 15))}
    assert sorted(starts[clip] + frame for clip, frame in frames) == [
        0,
        4,
        8,
        12,
        16,
    ]
    assert sum(members.num_decoded for members in decoded) == 2 * len(frames)  # of two cameras
    assert scan(root, frames="keyframes").report.dropped_samples == {"no camera image": 14}


BREAK = {
    "another version": (
        ("codebase_version", "v1.6"),
        r"codebase_version 'v1\.6'; v2\.0, v2\.1 and v3\.0 are read",
    ),
    "a field of another name": (
        ("data_path", "{episode_index.__class__}"),
        "data/chunk|cannot be|is not there",
    ),
    "an unknown field": (
        ("data_path", "data/{hour}.parquet"),
        r"the field 'hour', not of chunk_index",
    ),
    "a path out": (("data_path", "../secret.parquet"), "outside of the source"),
    "no rate": (("fps", 0), "fps 0.0"),
    "a split of words": (
        ("splits", {"train": "all"}),
        r"split 'train' is 'all', expected FIRST:END",
    ),
}


@pytest.mark.parametrize("name", BREAK)
def test_an_info_that_leads_nowhere_is_named(tmp_path, name):
    root = write_lerobot(tmp_path / "episodes", pictures_of((2, 2, 1)))
    ((key, value), says) = BREAK[name]
    info = json.loads((root / "meta" / "info.json").read_text())
    (root / "meta" / "info.json").write_text(json.dumps({**info, key: value}))
    with pytest.raises(SourceError, match=says):
        scan(root)


def test_damaged_pictures_of_the_tables_are_left_out(tmp_path):
    root = write_lerobot(tmp_path / "episodes", pictures_of((3, 2, 2)), stored=True)
    path = root / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    column = table.column_names.index("observation.images.top")
    pictures = table.column(column).to_pylist()
    pictures[0]["bytes"] = b""  # also the first one, by which the size of all is known
    pictures[4]["bytes"] = pictures[4]["bytes"][:-9]
    damaged = table.set_column(column, table.field(column), pa.array(pictures))
    pq.write_table(damaged, path)
    report = scan(root, damaged_image="drop", max_damaged=0.2).report
    assert (report.samples, report.damaged) == (5, {"top": 2})
    with pytest.raises(SourceError, match=r"more than the share of max_damaged=0\.01"):
        scan(root, damaged_image="drop")
    with pytest.raises(SourceError, match=r"row=0&observation\.images\.top': image is empty"):
        scan(root, check_images="ends")


def test_pngs_with_a_palette_in_the_tables_become_pngs_of_8_bits(tmp_path):
    """A damaged one of them is left out as others are."""
    root = write_lerobot(tmp_path / "episodes", pictures_of((3, 2, 2)), stored=True)
    path = root / "data" / "chunk-000" / "file-000.parquet"
    table = pq.read_table(path)
    column = table.column_names.index("observation.images.top")
    images = [
        Image.fromarray(np.random.default_rng(row).integers(0, 255, (48, 64, 3), np.uint8))
        for row in range(len(table))
    ]
    quantized = [image.quantize(200) for image in images]
    pictures = []
    for image in quantized:
        blob = io.BytesIO()
        image.save(blob, "png")
        pictures.append({"bytes": blob.getvalue(), "path": None})
    pictures[4]["bytes"] = pictures[4]["bytes"][:-200]
    pq.write_table(table.set_column(column, table.field(column), pa.array(pictures)), path)
    options = {"damaged_image": "drop", "max_damaged": 0.2}
    report = fr.shard(f"lerobot:{root}", tmp_path / "out", options=options, workers=1).scan
    assert (report.samples, report.damaged) == (6, {"top": 1})
    assert sum(count for text, count in report.noted.items() if "with a palette" in text) == 7
    assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
    stored = [
        np.asarray(Image.open(io.BytesIO(bytes(sample.images["top"]))).convert("RGB"))
        for sample in samples_of(tmp_path / "out").values()
    ]
    for row in (0, 1, 2, 3):
        expected = np.asarray(quantized[row].convert("RGB"))
        assert any(np.array_equal(expected, pixels) for pixels in stored), row


def test_tables_that_do_not_fit_are_named(tmp_path):
    root = write_lerobot(tmp_path / "episodes", pictures_of((2, 2, 1)))
    path = root / "data" / "chunk-000" / "file-000.parquet"
    content = pq.read_table(path)
    for table, says in (
        (
            content.slice(1),
            r"episode 0 has 1 rows, expected 2, with frame_index from 0",
        ),
        (content.drop_columns(["action"]), "has no column 'action'"),
        (
            content.set_column(0, "observation.state", pa.array([[1.0]] * 4)),
            r"no numbers of shape \[2\] in column",
        ),
        (
            content.set_column(0, "observation.state", pa.array([[1.0, None]] * 4)),
            "2 values are null",
        ),
    ):
        pq.write_table(table, path)
        with pytest.raises(SourceError, match=says):
            scan(root)
    pq.write_table(content, path)
    video = root / "videos" / "observation.images.top" / "chunk-000" / "file-000.mp4"
    video.unlink()
    with pytest.raises(
        SourceError,
        match=r"top '.*file-000\.mp4' \(no file\), and so 4 more times",
    ):
        scan(root)
    assert scan(root, missing_camera="mask").report.masked["top"] == {"no file": 5}


@pytest.mark.filterwarnings("ignore")  # of the library
def test_frames_are_those_that_the_library_reads(tmp_path):
    datasets = pytest.importorskip("lerobot.datasets.lerobot_dataset", reason="needs lerobot")
    features = {
        "observation.images.top": {
            "dtype": "video",
            "shape": (48, 64, 3),
            "names": ["height", "width", "channels"],
        },
        "action": {"dtype": "float32", "shape": (2,), "names": ["a", "b"]},
    }
    root = tmp_path / "episodes"
    written = datasets.LeRobotDataset.create("test/arm", fps=FPS, features=features, root=root)
    for number, episode in enumerate(pictures_of((6, 9, 4))):
        for frame, picture in enumerate(episode["top"]):
            action = np.array([frame, number], np.float32)
            written.add_frame(
                {
                    "observation.images.top": picture,
                    "action": action,
                    "task": TASKS[number % 2],
                }
            )
        written.save_episode()
    written.finalize()
    fr.shard(f"lerobot:{root}", tmp_path / "out", workers=1)
    samples = {
        (sample.meta.clip_id, sample.meta.frame_idx): sample
        for sample in samples_of(tmp_path / "out").values()
    }
    video = str(next(root.rglob("*.mp4")))
    jpegs = dict(video_frames(video, range(19)))
    read = datasets.LeRobotDataset("test/arm", root=root, video_backend="pyav")
    for item in (read[number] for number in range(len(read))):
        sample = samples.pop(
            (
                f"episode-{int(item['episode_index']):06d}",
                int(item["frame_index"]),
            )
        )
        data = bytes(sample.images["top"])
        assert data == jpegs[int(item["index"])]
        picture = simplejpeg.decode_jpeg(data).astype(float)
        assert (
            abs(picture - 255 * item["observation.images.top"].permute(1, 2, 0).numpy()).mean() < 2
        )
    assert not samples


def test_a_length_that_no_episode_has_is_named(tmp_path):
    """Nothing of that length is made."""
    root = write_lerobot(tmp_path / "episodes", pictures_of(), "v2.1", stored=True)
    lines = (root / "meta" / "episodes.jsonl").read_text()
    (root / "meta" / "episodes.jsonl").write_text(
        lines.replace('"length": 3', '"length": 99999999999')
    )
    with pytest.raises(SourceError, match="episode 0 has 3 rows, expected 99999999999"):
        scan(root)


@pytest.mark.parametrize("version", ["v2.1", "v3.0"])
def test_a_set_of_images_or_of_none_needs_no_decoder_of_videos(tmp_path, version, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    root = write_lerobot(tmp_path / "episodes", pictures_of(), version, stored=True)
    assert fr.shard(f"lerobot:{root}", tmp_path / "images", workers=1).num_samples == 10
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"] = {
        name: feature
        for name, feature in info["features"].items()
        if feature["dtype"] not in ("image", "video")
    }
    (root / "meta" / "info.json").write_text(json.dumps(info))
    assert fr.shard(f"lerobot:{root}", tmp_path / "states", workers=1).num_samples == 10
    info["features"]["observation.images.top"] = {
        "dtype": "video",
        "shape": [48, 64, 3],
    }
    (root / "meta" / "info.json").write_text(json.dumps(info))
    with pytest.raises(ConfigError, match=r"is video, which needs av, .*\[video\]"):
        fr.shard(f"lerobot:{root}", tmp_path / "videos", workers=1)


def test_tens_of_thousands_of_features_are_read_in_seconds(tmp_path):
    root = write_lerobot(tmp_path / "episodes", pictures_of(), "v2.1", stored=True)
    info = json.loads((root / "meta" / "info.json").read_text())
    info["features"] |= {
        f"more.{number}": {"dtype": "float32", "shape": [1]} for number in range(30_000)
    }
    (root / "meta" / "info.json").write_text(json.dumps(info))
    start = time.process_time()
    with pytest.raises(SourceError, match="the source has 30,010 attributes"):
        scan(root)
    assert time.process_time() - start < 5


def test_numbers_that_contradict_what_was_read_are_counted(tmp_path):
    root = write_lerobot(tmp_path / "episodes", pictures_of(), "v2.1", stored=True)
    info = json.loads((root / "meta" / "info.json").read_text())
    for total, is_noted in ((3, False), (4, True)):
        info |= {"total_episodes": total, "total_frames": 10}
        (root / "meta" / "info.json").write_text(json.dumps(info))
        noted = scan(root).report.noted
        assert any("states the total_episodes 4" in text for text in noted) == is_noted
