"""What every source must do; a test module inherits `SourceSuite` and says how its format is written."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from fuelrail.pipeline.errors import ConfigError, SourceError
from fuelrail.pipeline.sample.schema import Geometry, decode_arrays, decode_meta
from fuelrail.sharding.engines.local import LocalEngine
from fuelrail.sharding.planning.recipe import make_recipe
from fuelrail.sharding.progress import Quiet
from fuelrail.sharding.run import scan_source, shard
from fuelrail.sharding.sources.registry import SourceSpec, make_source, options_of_texts, source_kinds
from fuelrail.sharding.sources.scan_table import ScanTable, ScanWriter
from fuelrail.sharding.sources.source import PlacedSource
from fuelrail.sharding.verify.dataset import verify
from support.sharding import Interrupt, digests
from support.source_world import World, check_same, make_world

MATRICES = ("cam2ego", "cam_ego2global", "ego2global", "lidar2ego", "lidar_ego2global")


class SourceSuite:
    """Inherit, and define :meth:`write`. ``compare`` are arguments of `check_same`; None: samples are not compared.

    ``reads_heads`` False: images are in one file with the tables, or the scan must read what holds them.
    """

    kind: str
    options: ClassVar[dict] = {}
    compare: ClassVar[dict | None] = {}
    reads_heads = True

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
        return SourceSpec(self.kind, self.write(world or self.world(), root), dict(self.options))

    def make(self, spec: SourceSpec, out: Path, workers: int = 1, progress: Quiet | None = None):
        """Shard into small shards."""
        recipe = make_recipe(seed=7, shard_size_bytes=1 << 16, splits={"train": 1.0})
        engine = LocalEngine(workers, "threads")
        return shard(spec, out, recipe, workers, progress or Quiet(), engine)

    def scan(self, spec: SourceSpec, tmp_path: Path):
        """The source, the result of its scan, and the table."""
        source = make_source(spec)
        with ScanWriter(tmp_path / "scan.arrow", source.attribute_types) as out:
            info = source.scan(out)
        return source, info, ScanTable(tmp_path / "scan.arrow")

    def test_the_samples_are_those_of_the_world(self, tmp_path):
        if self.compare is None:
            pytest.skip("this format is compared by tests of its own")
        world = self.world()
        self.make(self.spec(tmp_path, world), tmp_path / "out")
        assert not verify(tmp_path / "out", deep=True, num_threads=1).faults
        check_same(world, tmp_path / "out", **self.compare)

    def test_the_same_bytes_for_one_and_four_workers(self, tmp_path):
        spec = self.spec(tmp_path)
        self.make(spec, tmp_path / "one")
        self.make(spec, tmp_path / "four", workers=4)
        assert digests(tmp_path / "one") == digests(tmp_path / "four")

    def test_the_same_bytes_after_an_interruption(self, tmp_path):
        spec = self.spec(tmp_path, self.world(noise=True))
        outcome = self.make(spec, tmp_path / "whole")
        assert outcome.num_written > 1, "one shard cannot be interrupted in between"
        with pytest.raises(KeyboardInterrupt):
            self.make(spec, tmp_path / "out", progress=Interrupt(1))
        again = self.make(spec, tmp_path / "out")
        assert again.num_kept
        assert digests(tmp_path / "whole") == digests(tmp_path / "out"), "other bytes, or something is left behind"

    def test_references_open_to_their_stated_bytes(self, tmp_path):
        source, _, table = self.scan(self.spec(tmp_path), tmp_path)
        num_opened = 0
        for number in range(len(table)):
            for member in table.row(number).members:
                data = bytes(source.open(member.ref))
                num_opened += 1
                if member.width and not member.is_estimate:
                    assert len(data) == member.bytes, member
                place = source.place(member.ref) if isinstance(source, PlacedSource) else None
                if place is not None:
                    whole = Path(place.path).read_bytes()
                    end = len(whole) if place.length is None else place.offset + place.length
                    assert whole[place.offset : end] == data, member
        assert num_opened

    def test_keys_neighbours_and_times_ascend(self, tmp_path):
        _, info, table = self.scan(self.spec(tmp_path), tmp_path)
        assert info.num_samples == len(table) > 0
        for clip in info.clips:
            metas = [decode_meta(table.row(clip.first_row + at).meta) for at in range(clip.num_samples)]
            assert [meta.key for meta in metas] == sorted({meta.key for meta in metas})
            assert all(meta.clip_id == clip.clip_id for meta in metas)
            times = [meta.timestamp_ns for meta in metas]
            assert times == sorted(set(times))
            keys = {meta.frame_idx: meta.key for meta in metas}
            for meta in metas:
                assert meta.prev_key == keys.get(meta.frame_idx - 1)
                assert meta.next_key == keys.get(meta.frame_idx + 1)
                assert meta.num_frames > meta.frame_idx

    def test_every_matrix_is_a_rotation(self, tmp_path):
        for geometry in self._geometries(tmp_path):
            for name in MATRICES:
                for matrix in getattr(geometry, name).reshape(-1, 4, 4):
                    if np.isnan(matrix).all():
                        continue
                    np.testing.assert_allclose(matrix[:3, :3] @ matrix[:3, :3].T, np.eye(3), atol=1e-6, err_msg=name)
                    assert np.linalg.det(matrix[:3, :3]) > 0, name
                    assert matrix[3].tolist() == [0, 0, 0, 1], name

    def test_unknown_is_nan_or_minus_one(self, tmp_path):
        for geometry in self._geometries(tmp_path):
            absent = geometry.cam_valid == 0
            assert (geometry.img_wh[~absent] > 0).all()
            assert ((geometry.img_wh[absent] == -1) | (geometry.img_wh[absent] > 0)).all()
            for name in (*MATRICES, "intrinsics"):
                values = getattr(geometry, name)
                assert np.any(values.reshape(-1, values.shape[-1] ** 2), axis=1).all(), f"zeros in {name}"
            assert (geometry.cam_timestamp_ns != 0).all()
            assert (geometry.lidar_timestamp_ns != 0).all()
            assert not (geometry.dist == 0).all(1).any(), "coefficients of a lens that has none are NaN"
            for name in ("ego_velocity", "ego_accel", "ego_rates"):
                assert np.any(getattr(geometry, name)), f"zeros in {name}: unknown is NaN"

    def _geometries(self, tmp_path):
        _, _, table = self.scan(self.spec(tmp_path), tmp_path)
        return [decode_arrays(table.row(number).geometry, Geometry) for number in range(len(table))]

    def test_options_round_trip(self, tmp_path):
        spec = self.spec(tmp_path)
        options = make_source(spec).options
        assert json.loads(json.dumps(options)) == options
        assert make_source(spec._replace(options=options)).options == options
        (kind,) = source_kinds(self.kind)
        assert {option.name for option in kind.options} <= options.keys()
        plain = {name: value for name, value in options.items() if isinstance(value, bool | int | str)}
        texts = [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in plain.items()]
        assert options_of_texts(self.kind, texts) == plain

    def test_an_unknown_option_is_named(self, tmp_path):
        spec = self.spec(tmp_path)
        with pytest.raises(ConfigError, match=r"colour.*allowed"):
            make_source(spec._replace(options={"colour": 1}))
        with pytest.raises(ConfigError, match=r"colour.*allowed"):
            options_of_texts(self.kind, ["colour=1"])

    def test_an_empty_source_and_a_missing_root_are_named(self, tmp_path):
        (tmp_path / "empty").mkdir()
        for name in ("empty", "missing"):
            with pytest.raises((SourceError, ConfigError), match=name):
                scan_source(SourceSpec(self.kind, str(tmp_path / name), dict(self.options)))

    @pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bytes read are counted in /proc")
    def test_the_scan_reads_no_pixel_beyond_heads(self, tmp_path):
        if not self.reads_heads:
            pytest.skip("the scan of this format must read what holds its images")
        world = self.world(noise=True, cameras=dict.fromkeys(self.world().cameras, (480, 360)))
        spec = self.spec(tmp_path, world)
        self.scan(spec, tmp_path)  # modules that are imported on the way are not counted
        before = bytes_read()
        self.scan(spec, tmp_path)
        num_bytes = sum(len(image.jpeg) for _, _, frame in world.frames() for image in frame.images.values())
        assert bytes_read() - before < num_bytes / 4


def bytes_read() -> int:
    """What this process has read so far."""
    with contextlib.suppress(FileNotFoundError):
        for line in Path("/proc/self/io").read_text().splitlines():
            if line.startswith("rchar"):
                return int(line.split()[1])
    pytest.skip("this system does not count the bytes that a process reads")
