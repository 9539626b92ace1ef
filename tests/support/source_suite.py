"""What every source must do; a test module inherits `SourceSuite` and says how its format is written."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import ClassVar, NamedTuple

import numpy as np
import pytest
from PIL import Image

from fuelrail.pipeline.errors import ConfigError, ImageError, SourceError
from fuelrail.pipeline.sample.schema import (
    Geometry,
    decode_arrays,
    decode_meta,
    encode_arrays,
)
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.registry import (
    SourceSpec,
    make_source,
    options_of_texts,
    sources,
)
from fuelrail.sharding.sources.source import PlacedSource
from fuelrail.sharding.verify.dataset import verify
from support.sharding import Interrupt, Scanned, digests, scanned
from support.source_world import World, check_same, make_world, samples_of

LATER = {"ignore_zeros", "gather"}
DAMAGES = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) - 9],
    "half": lambda data: data[: len(data) // 2],
    "not an image": lambda data: b"\x93NUMPY" + bytes(200),
    "LFS pointer": lambda data: (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 1\n"
    ),
    "HTML page": lambda data: b"<!DOCTYPE html><html><head><title>404</title></head></html>",
    "of another size": lambda data: smaller(data),
}
"""What becomes of the bytes of a damaged image."""
FAULTS = {
    "missing_camera": ("no record", "no file"),
    "damaged_image": tuple(DAMAGES),
}
"""The options that all sources of frames have for faulty images, and the faults that each is for."""
QUICK = ("no record", "no file", "empty")
ANSWERS = ("error", "mask", "drop")
OWN_POLICIES = {
    "dangling_links": "cut",
    "damaged": "skip",
    "clock_jumps": "drop",
}
"""Such options of single kinds, with what leaves the fault out."""
OF_DAMAGED = {"damaged_image", "max_damaged", "check_images"}
MATRICES = (
    "cam2ego",
    "cam_ego2global",
    "ego2global",
    "lidar2ego",
    "lidar_ego2global",
)


class Made(NamedTuple):
    """The world as a source, its scan, and its dataset in ``folder / "out"``."""

    folder: Path
    world: World
    spec: SourceSpec
    scan: Scanned

    def geometries(self) -> list[Geometry]:
        return [
            decode_arrays(self.scan.table.row(row).geometry, Geometry)
            for row in range(len(self.scan.table))
        ]


_DATASETS: dict[type, Made] = {}


class SourceSuite:
    """Inherit, and define :meth:`write`. ``compare`` are arguments of `check_same`; None: samples are not compared.

    ``reads_heads`` False: images are in one file with the tables, or the scan must read what holds them.
    ``refused`` are answers that an option on faulty images does not take for this source, ``impossible``
    faults that the format cannot have. ``states_sizes``: the format says how large each image is.
    """

    kind: str
    options: ClassVar[dict] = {}
    compare: ClassVar[dict | None] = {}
    reads_heads = True
    refused: ClassVar[dict[str, tuple[str, ...]]] = {}
    impossible: ClassVar[tuple[str, ...]] = ()
    states_sizes = True

    def world(self, **changes) -> World:
        """The world, as far as the format has it."""
        return make_world(**changes)

    def write(self, world: World, root: Path) -> str:
        """Write the world into the new folder ``root``; return the source's location."""
        raise NotImplementedError

    def spec(self, tmp_path: Path, world: World | None = None) -> SourceSpec:
        """A source of the world; its folder is ``tmp_path / "source"``."""
        root = tmp_path / "source"
        root.mkdir(exist_ok=True)
        return SourceSpec(
            self.kind,
            self.write(world or self.world(), root),
            dict(self.options),
        )

    def remove_image(self, root: Path, camera: str, data: bytes) -> int:
        """Remove the file of an image with these bytes; return how many frames lack one by that."""
        (file,) = [path for path in root.rglob("*") if path.is_file() and path.read_bytes() == data]
        file.unlink()
        return 1

    def faulty(self, option: str, tmp_path: Path) -> SourceSpec | None:
        """A source with a fault that an option of `OWN_POLICIES` is for; None: the kind refuses it."""
        return None

    def make(
        self,
        spec: SourceSpec,
        out: Path,
        workers: int = 1,
        progress: Quiet | None = None,
    ):
        """Shard into small shards."""
        recipe = make_recipe(seed=7, shard_size_bytes=1 << 16, splits={"train": 1.0})
        engine = LocalEngine(workers, "threads")
        return shard(
            spec,
            out=out,
            recipe=recipe,
            num_workers=workers,
            progress=progress or Quiet(),
            engine=engine,
        )

    @pytest.fixture
    def made(self, tmp_path_factory) -> Made:
        """Made once for all tests of a class, which only read it."""
        if type(self) not in _DATASETS:
            folder = tmp_path_factory.mktemp("made")
            world = self.world(noise=True)
            spec = self.spec(folder, world)
            assert self.make(spec, folder / "out").num_written > 1, (
                "one shard cannot be interrupted in between"
            )
            _DATASETS.clear()
            _DATASETS[type(self)] = Made(
                folder,
                world,
                spec,
                scanned(spec.kind, spec.location, folder, **spec.options),
            )
        return _DATASETS[type(self)]

    def test_the_samples_are_those_of_the_world(self, made):
        assert not verify(made.folder / "out", deep=True, num_threads=1).faults
        if self.compare is not None:  # else by tests of the format's own
            check_same(made.world, made.folder / "out", **self.compare)

    @pytest.mark.costly
    def test_the_same_bytes_from_four_workers_after_an_interruption(self, made, tmp_path):
        with pytest.raises(KeyboardInterrupt):
            self.make(made.spec, tmp_path / "out", workers=4, progress=Interrupt(1))
        assert self.make(made.spec, tmp_path / "out", workers=4).num_kept
        assert digests(made.folder / "out") == digests(tmp_path / "out"), (
            "other bytes, or something is left behind"
        )

    def test_references_open_to_their_stated_bytes(self, made):
        source, _, table = made.scan
        num_opened = 0
        for number in range(len(table)):
            for member in table.row(number).members:
                data = bytes(source.open(member.ref))
                num_opened += 1
                if member.width and not member.is_estimate:
                    assert len(data) == member.bytes, member
                place = source.place(member.ref) if isinstance(source, PlacedSource) else None
                if place is not None:
                    file_bytes = Path(place.path).read_bytes()
                    end = len(file_bytes) if place.length is None else place.offset + place.length
                    assert file_bytes[place.offset : end] == data, member
        assert num_opened

    def test_keys_neighbours_and_times_ascend(self, made):
        _, info, table = made.scan
        assert info.num_samples == len(table) > 0
        for clip in info.clips:
            metas = [
                decode_meta(table.row(clip.first_row + row).meta) for row in range(clip.num_samples)
            ]
            assert [meta.key for meta in metas] == sorted({meta.key for meta in metas})
            assert all(meta.clip_id == clip.clip_id for meta in metas)
            times = [meta.timestamp_ns for meta in metas]
            assert times == sorted(set(times))
            keys = {meta.frame_idx: meta.key for meta in metas}
            for meta in metas:
                assert meta.prev_key == keys.get(meta.frame_idx - 1)
                assert meta.next_key == keys.get(meta.frame_idx + 1)
                assert meta.num_frames > meta.frame_idx

    def test_one_camera_alone_is_that_of_the_whole_rig(self, made, tmp_path):
        rig = [camera.channel for camera in made.scan.info.cameras]
        camera_scan = scanned(
            made.spec.kind,
            made.spec.location,
            tmp_path,
            **(made.spec.options | {"cameras": rig[-1:]}),
        )
        assert [camera.channel for camera in camera_scan.info.cameras] == rig[-1:]
        on_others = {
            channel.field for channel in made.scan.info.channels if channel.law.camera in rig[:-1]
        }
        assert not on_others & {channel.field for channel in camera_scan.info.channels}
        rig_rows = {row.key: row for row in map(made.scan.table.row, range(len(made.scan.table)))}
        camera_rows = {
            row.key: row for row in map(camera_scan.table.row, range(len(camera_scan.table)))
        }
        for key, row in rig_rows.items():
            geometry = decode_arrays(row.geometry, Geometry).of_cameras([len(rig) - 1])
            if not geometry.cam_valid[0]:
                assert key not in camera_rows, "a frame without any image"
                continue
            mine = camera_rows[key]
            assert (mine.boxes, mine.geometry) == (
                row.boxes,
                encode_arrays(geometry),
            )
            left_out = [
                member
                for member in row.members
                if member.name.partition(".")[0] in rig[:-1] or member.name in on_others
            ]
            assert mine.members == tuple(member for member in row.members if member not in left_out)
            assert decode_meta(mine.meta).cameras.keys() == {rig[-1]}
        with pytest.raises(ConfigError, match=f"has no camera 'cam_x'.*; it has: .*{rig[0]}"):
            scan_source(made.spec._replace(options=made.spec.options | {"cameras": ["cam_x"]}))

    @pytest.mark.parametrize(
        ("option", "fault"),
        [
            pytest.param(
                option,
                fault,
                id=fault.replace(" ", "-"),
                marks=() if fault in QUICK else pytest.mark.costly,
            )
            for option, faults in FAULTS.items()
            for fault in faults
        ],
    )
    @pytest.mark.parametrize("answer", ANSWERS)
    def test_each_policy_holds_or_is_refused(self, option, fault, answer, tmp_path):
        """The matrix of policies, faults and sources: one image of one frame is faulty."""
        is_refused = answer in self.refused.get(option, ())
        if fault in self.impossible and not is_refused:
            pytest.skip(f"this format cannot have the fault '{fault}'")
        world = self.world()
        names = list(world.cameras)
        name = names[-1]
        image = world.clips[0].frames[1].images[name]
        sound = image.jpeg
        if not is_refused and fault in DAMAGES:
            image.jpeg = DAMAGES[fault](sound)
        if not is_refused and fault == "no record":
            del world.clips[0].frames[1].images[name]
        spec = self.spec(tmp_path, world)
        spec = spec._replace(options={**spec.options, option: answer})
        if option == "damaged_image":
            spec.options["max_damaged"] = 0.5
        if is_refused:
            with pytest.raises(ConfigError, match=option):
                scan_source(spec)
            return
        num_faulty = 1
        if fault == "no file":
            num_faulty = self.remove_image(tmp_path / "source", name, sound)
        if fault == "of another size" and not self.states_sizes:
            num_faulty = 0
        if answer == "error" and num_faulty:
            with pytest.raises((SourceError, ImageError), match=option):
                self.make(spec, tmp_path / "out")
            assert not (tmp_path / "out" / "dataset.json").exists()
            return
        if answer == "drop" and num_faulty == len(list(world.frames())):
            with pytest.raises(SourceError, match=r"no frame of the .* is kept"):
                self.make(spec, tmp_path / "out")
            return
        self.make(spec, tmp_path / "out")
        assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
        info = scan_source(spec)
        report = info.report
        channel = info.cameras[names.index(name)].channel
        samples = samples_of(tmp_path / "out").values()
        lacking = [sample for sample in samples if channel not in sample.images]
        is_masked = answer == "mask" and len(names) > 1
        assert len(lacking) == (num_faulty if is_masked else 0)
        assert sum(report.masked.get(channel, {}).values()) == len(lacking)
        assert all(
            sample.geometry.cam_valid.sum() == len(names) - 1
            and sample.meta.sync["dropped"] == [channel]
            for sample in lacking
        )
        assert sum(report.dropped_samples.values()) == num_faulty - len(lacking)
        assert (
            len(samples)
            == report.samples
            == len(list(world.frames())) - sum(report.dropped_samples.values())
        )
        is_damaged = option == "damaged_image" and num_faulty
        assert report.damaged == ({channel: 1} if is_damaged else {})
        if fault in DAMAGES:
            stored = [
                bytes(sample.images[channel]) for sample in samples if channel in sample.images
            ]
            assert stored.count(image.jpeg) == (0 if num_faulty else 1)

    @pytest.mark.parametrize("option", OWN_POLICIES)
    def test_a_policy_of_single_kinds_holds_or_is_refused(self, option, tmp_path):
        spec = self.faulty(option, tmp_path)
        answered = spec or self.spec(tmp_path)
        answered = answered._replace(options={**answered.options, option: OWN_POLICIES[option]})
        if spec is None:
            with pytest.raises(ConfigError, match=rf"\b{option}\b"):
                scan_source(answered)
            return
        with pytest.raises(SourceError, match=f"{option}={OWN_POLICIES[option]}"):
            scan_source(spec)
        report = scan_source(answered).report
        assert report.samples
        assert report.noted or report.cut_links

    def test_the_matrix_has_each_policy_of_the_kind(self):
        (kind,) = sources(self.kind)
        policies = {option.name for option in kind.options if "error" in option.type.split(" or ")}
        assert policies <= {*FAULTS, *OWN_POLICIES}

    def test_every_matrix_is_a_rotation(self, made):
        for geometry in made.geometries():
            for name in MATRICES:
                for matrix in getattr(geometry, name).reshape(-1, 4, 4):
                    if np.isnan(matrix).all():
                        continue
                    np.testing.assert_allclose(
                        matrix[:3, :3] @ matrix[:3, :3].T,
                        np.eye(3),
                        atol=1e-6,
                        err_msg=name,
                    )
                    assert np.linalg.det(matrix[:3, :3]) > 0, name
                    assert matrix[3].tolist() == [0, 0, 0, 1], name

    def test_unknown_is_nan_or_minus_one(self, made):
        for geometry in made.geometries():
            absent = geometry.cam_valid == 0
            assert (geometry.img_wh[~absent] > 0).all()
            assert ((geometry.img_wh[absent] == -1) | (geometry.img_wh[absent] > 0)).all()
            for name in (*MATRICES, "intrinsics"):
                values = getattr(geometry, name)
                assert np.any(values.reshape(-1, values.shape[-1] ** 2), axis=1).all(), (
                    f"zeros in {name}"
                )
            if made.scan.info.time_base == "unix":  # else the first frame of a clip may be at 0
                assert (geometry.cam_timestamp_ns != 0).all()
                assert (geometry.lidar_timestamp_ns != 0).all()
            assert not (geometry.dist == 0).all(1).any(), (
                "coefficients of a lens that has none are NaN"
            )
            for name in ("ego_velocity", "ego_accel", "ego_rates"):
                assert np.any(getattr(geometry, name)), f"zeros in {name}: unknown is NaN"

    def test_options_round_trip(self, made):
        spec = made.spec
        options = make_source(spec).options
        assert json.loads(json.dumps(options)) == options
        assert make_source(spec._replace(options=options)).options == options
        (kind,) = sources(self.kind)
        unrecorded = {option.name for option in kind.options} - options.keys()
        assert unrecorded <= {"root", *OF_DAMAGED, *LATER}
        if unrecorded:
            masked_options = make_source(
                spec._replace(options={**options, "damaged_image": "mask"})
            ).options
            assert masked_options.keys() >= OF_DAMAGED, (
                "bytes depend on them where damaged images are left out"
            )
        plain = {
            name: value for name, value in options.items() if isinstance(value, bool | int | str)
        }
        texts = [
            f"{name}={str(value).lower() if isinstance(value, bool) else value}"
            for name, value in plain.items()
        ]
        assert options_of_texts(self.kind, texts) == plain
        with pytest.raises(ConfigError, match=r"colour.*allowed"):
            make_source(spec._replace(options={"colour": 1}))
        with pytest.raises(ConfigError, match=r"colour.*allowed"):
            options_of_texts(self.kind, ["colour=1"])

    def test_an_empty_source_and_a_missing_root_are_named(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for name in ("empty", "missing"):
            with pytest.raises((SourceError, ConfigError), match=name):
                scan_source(SourceSpec(self.kind, str(tmp_path / name), dict(self.options)))

    @pytest.mark.skipif(
        not sys.platform.startswith("linux"),
        reason="bytes read are counted in /proc",
    )
    @pytest.mark.costly
    def test_the_scan_reads_no_pixel_beyond_heads(
        self, made, tmp_path
    ):  # modules that it needs are imported by `made`
        if not self.reads_heads:
            pytest.skip("the scan of this format must read what holds its images")
        world = self.world(noise=True, cameras=dict.fromkeys(self.world().cameras, (480, 360)))
        spec = self.spec(tmp_path, world)
        before = bytes_read()
        scan_source(spec)
        num_bytes = sum(
            len(image.jpeg) for _, _, frame in world.frames() for image in frame.images.values()
        )
        assert bytes_read() - before < num_bytes / 4


def smaller(data: bytes) -> bytes:
    """An image of half the width and height."""
    with Image.open(io.BytesIO(data)) as picture:
        half = picture.resize((picture.width // 2, picture.height // 2))
        out = io.BytesIO()
        half.save(out, picture.format)
    return out.getvalue()


def bytes_read() -> int:
    """What this process has read so far."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("rchar"):
                return int(line.split()[1])
    pytest.skip("this system does not count the bytes that a process reads")
