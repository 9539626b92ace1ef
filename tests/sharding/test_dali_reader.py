"""NVIDIA DALI's own tar reader (``fn.readers.webdataset``) reads our shards, with our indices and without."""

from __future__ import annotations

import importlib.util
import json

import numpy as np
import pytest

from fuelrail.pipeline.format import codecs
from fuelrail.pipeline.format.dataset import open_dataset
from fuelrail.pipeline.sample.arrays import write_npy
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes

if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
    pytest.skip("NVIDIA DALI is not installed", allow_module_level=True)

from nvidia.dali import fn, pipeline_def


def with_channels(source):
    """Two further channels for each sample."""
    weights = {
        "name": "weights",
        "kind": "array",
        "field": "weights.npy",
        "dtype": "float32",
        "axes": ["class"],
    }
    table = [
        weights | {"shape": [3], "law": {"name": "fixed"}},
        {
            "name": "scan",
            "kind": "bytes",
            "field": "scan.pcd",
            "law": {"name": "fixed"},
        },
    ]
    (source.root / source.version / "channels.json").write_text(json.dumps(table))
    for number, row in enumerate(source.tables["sample"]):
        for name, data in (
            ("weights.npy", write_npy(np.full(3, number, np.float32))),
            ("scan.pcd", b"%d" % number),
        ):
            channel, _, extension = name.partition(".")
            path = source.root / "channels" / channel / f"{row['token']}.{extension}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def members_by_fuelrail(root):
    """Return each sample in its stored order: field as stored to stored bytes."""
    dataset = open_dataset(root)
    members = []
    for number in range(len(dataset.index)):
        row = dataset.index.row(number)
        span = dataset.shard_path(row).read_bytes()[row.offset : row.offset + row.length]
        members.append(
            {
                m.name + codecs.suffix(m.codec): span[m.offset : m.offset + m.stored_bytes]
                for m in row.members
            }
        )
    return members


def members_by_dali(root, fields, count, *, with_index):
    shards = sorted(root.glob("*.tar"))

    @pipeline_def(batch_size=count, num_threads=2, device_id=None)
    def reading():
        members = fn.readers.webdataset(
            paths=[str(shard) for shard in shards],
            index_paths=[str(shard.with_suffix(".idx")) for shard in shards] if with_index else [],
            ext=fields,
            missing_component_behavior="empty",
            random_shuffle=False,
        )
        return tuple(members)

    pipe = reading()
    pipe.build()
    outputs = pipe.run()
    return [
        {
            field: np.asarray(output[number]).tobytes()
            for field, output in zip(fields, outputs, strict=True)
        }
        for number in range(count)
    ]


@pytest.mark.parametrize("layout", ["member", "none"])
@pytest.mark.parametrize("with_index", [True, False])
def test_it_hands_out_the_stored_bytes_of_every_member(tmp_path, layout, with_index):
    with_channels(build_nuscenes(tmp_path / "source", {"a": 5, "b": 3}, num_points=61))
    shard_nuscenes(
        tmp_path / "source",
        tmp_path / "out",
        shard_size_bytes=20_000,
        layout=layout,
    )
    assert len(list((tmp_path / "out").glob("*.tar"))) > 1
    expected = members_by_fuelrail(tmp_path / "out")
    fields = list(expected[0])
    assert fields[-2:] == ["weights.npy", "scan.pcd"]
    assert (
        members_by_dali(tmp_path / "out", fields, len(expected), with_index=with_index) == expected
    )
