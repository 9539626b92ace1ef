"""The official splits are those of the devkit; a splits.json comes first."""

from __future__ import annotations

import pytest

from fuelrail.pipeline.errors import SourceError
from fuelrail.sharding.sources.nuscenes.source import source_splits


def names(*numbers):
    return [f"scene-{number:04d}" for number in numbers]


def test_official_lists(tmp_path):
    splits = pytest.importorskip("nuscenes.utils.splits", reason="nuscenes-devkit is not installed")
    found = source_splits(tmp_path / "v1.0-trainval", [*splits.val, *splits.train])
    assert {name: set(scenes) for name, scenes in found.items()} == {"train": set(splits.train), "val": set(splits.val)}
    found = source_splits(tmp_path / "v1.0-mini", [*splits.mini_train, *splits.mini_val])
    assert found == {"train": splits.mini_train, "val": splits.mini_val}
    assert source_splits(tmp_path / "v1.0-test", splits.test) == {"test": splits.test}


def test_other_tables_have_none(tmp_path):
    assert source_splits(tmp_path / "v1.0-derived", names(61, 103)) is None
    assert source_splits(tmp_path / "v1.0-mini", names(61, 62)) is None
    assert source_splits(tmp_path / "v1.0-mini", names(9001, 9002)) is None
    assert source_splits(tmp_path / "v1.0-trainval", ["scene-0001", "my-drive"]) is None


def test_a_file_beside_the_tables_comes_first(tmp_path):
    folder = tmp_path / "v1.0-mini"
    folder.mkdir()
    (folder / "splits.json").write_text('{"train": ["scene-0103"], "val": ["scene-0061"]}')
    assert source_splits(folder, names(61, 103)) == {"train": ["scene-0103"], "val": ["scene-0061"]}
    for bad in ('{"train": "scene-0103"}', "[]", "{"):
        (folder / "splits.json").write_text(bad)
        with pytest.raises(SourceError, match=r"splits\.json"):
            source_splits(folder, names(61, 103))
