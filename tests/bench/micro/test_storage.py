"""The storage benchmark still runs, and measures what it says."""

from __future__ import annotations

import json

import pytest

from fuelrail.bench.micro.datasets import make_dataset
from fuelrail.bench.micro.storage import PARTS, main
from fuelrail.bench.micro.storage_remote import stream
from fuelrail.loaders.storage import open_storage
from fuelrail.pipeline.format.tar import iter_members

pytestmark = [pytest.mark.slow, pytest.mark.network]


def test_its_dataset_is_one(tmp_path):
    dataset = make_dataset(tmp_path / "made", 7, 3, scale=0.01)
    assert [shard.num_samples for shard in dataset.shards] == [3, 3, 1]
    storage = open_storage(dataset)
    for index in range(7):
        storage.span(index, dataset.index.row(index))
    for shard in dataset.shards:
        data = (dataset.root / shard.name).read_bytes()
        assert len(list(iter_members(data, shard=shard.name))) == 9 * shard.num_samples
    for look_ahead in (1, 2, 64):
        assert stream(dataset, "pread", look_ahead).spans == 7


@pytest.mark.parametrize("part", PARTS)
def test_each_part_runs(tmp_path, part, capsys):
    if part == "http":
        pytest.importorskip("aiohttp")
    if part == "s3":
        for name in ("moto", "flask", "s3fs"):
            pytest.importorskip(name)
    out = tmp_path / "report.json"
    assert main(["--quick", "--parts", part, "--folder", str(tmp_path), "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    printed = capsys.readouterr().out
    if part == "cache":
        rates = report["hit_rates"]
        assert rates["run"] == rates["simulated"]
        assert rates["lru_run"] == rates["lru_simulated"]
        assert rates["lru_run"]["by_bytes"] < rates["run"]["by_bytes"] <= rates["bound_by_bytes"]
    else:
        assert report["comparisons"]
        for comparison in report["comparisons"]:
            assert comparison["title"] in printed
            assert all(entry["speedup"] > 0 for entry in comparison["entries"])
    if part == "http":
        assert report["faults"]["order_kept_nothing_lost"]
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
