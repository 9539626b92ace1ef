"""The metadata benchmark runs, and what it compares is the same work."""

from __future__ import annotations

import json
from dataclasses import fields

import numpy as np
import pyarrow as pa
import safetensors.numpy

from fuelrail.bench.gpu.cameras import CHANNELS, KEY, NUM_BOXES, sample_members
from fuelrail.bench.micro import metadata, timing
from fuelrail.pipeline.format.index.samples import SampleIndex, write_index
from fuelrail.pipeline.sample.schema import GEOMETRY, META, decode_sample


def test_it_runs_and_reports(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(metadata, "ROWS_PER_BATCH", 40)
    assert timing.main(["--quick", "--out", str(tmp_path / "out.json")], "metadata", metadata.measure) == 0
    report = json.loads((tmp_path / "out.json").read_text())
    assert [len(comparison["entries"]) for comparison in report["comparisons"]] == [2, 2, 2]
    assert all(entry["speedup"] > 0 for comparison in report["comparisons"] for entry in comparison["entries"])
    assert "metadata of one sample" in capsys.readouterr().out


def test_both_readers_find_the_same_metadata() -> None:
    members = sample_members()
    sample = decode_sample(KEY, members)
    assert sample.boxes is not None
    assert len(sample.boxes.boxes3d) == NUM_BOXES
    assert len(sample.geometry.intrinsics) == len(CHANNELS)
    theirs = safetensors.numpy.load(members[GEOMETRY])
    for f in fields(sample.geometry):
        np.testing.assert_array_equal(theirs[f.name], getattr(sample.geometry, f.name))
    assert json.loads(members[META])["cameras"]["cam_back"]["width"] == sample.meta.cameras["cam_back"].width


def test_both_readers_find_the_same_row(tmp_path) -> None:
    rows = list(metadata.index_rows(50))
    write_index(tmp_path / "index.arrow", rows, metadata._FIELDS, ["raw"])
    index = SampleIndex(tmp_path / "index.arrow")
    with pa.memory_map(str(tmp_path / "index.arrow")) as source:
        table = pa.ipc.open_file(source).read_all()
        for number in (0, 49):
            theirs = metadata.pyarrow_row(table, number, index.names, index.codecs)
            ours = index.row(number)
            assert ours == rows[number]
            stored = {**ours._asdict(), "members": [member._asdict() for member in ours.members]}
            assert theirs | {"is_part": False} == stored
