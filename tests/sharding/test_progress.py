"""What a run reports while it runs."""

from __future__ import annotations

import json

from fuelrail.sharding import progress as module
from fuelrail.sharding.append import append
from fuelrail.sharding.progress import JsonLines
from fuelrail.sharding.write.shard_writer import ShardDone
from support.nuscenes_tables import build_nuscenes
from support.sharding import shard_nuscenes

TWO = ("CAM_FRONT", "CAM_BACK")


def events_of(capsys):
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_bytes_rate_time_to_go_and_the_current_shard(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines = JsonLines()
    lines.planned(30, ["train-000000", "train-000001", "val-000000"], 4000)
    for num_bytes, seconds in ((600, 0.5), (400, 1.5)):
        now[0] += seconds
        lines.advanced(num_bytes)
    lines.shard_done(ShardDone(1, "train-000001.tar.zst", 700, kept=False))
    lines.shard_done(ShardDone(0, "train-000000.tar.zst", 300, kept=True))
    now[0] += 2
    lines.advanced(0)
    planned, first, *_, last = events_of(capsys)
    assert planned == {"event": "planned", "samples": 30, "shards": 3, "bytes": 4000}
    assert first == {
        "event": "progress", "bytes": 1000, "total_bytes": 4000, "bytes_per_s": 500, "eta_s": 6.0, "shards": 0,
        "total_shards": 3, "current": "train-000000",
    }  # fmt: skip
    assert (last["shards"], last["current"], last["bytes_per_s"], last["eta_s"]) == (2, "val-000000", 250, 12.0)


def test_appending_shows_its_shards_too(tmp_path, capsys):
    for name, clips in (("one", {"a": 2}), ("two", {"b": 2})):
        source = build_nuscenes(tmp_path / f"source-{name}", clips, cameras=TWO)
        shard_nuscenes(source.root, tmp_path / name, name="d")
    with JsonLines() as lines:
        append([str(tmp_path / "one"), str(tmp_path / "two")], tmp_path / "both", lines)
    planned, *shards = events_of(capsys)
    sizes = [(tmp_path / name / "train-000000.tar").stat().st_size for name in ("one", "two")]
    assert planned == {"event": "planned", "samples": 4, "shards": 2, "bytes": sum(sizes)}
    assert shards == [
        {"event": "shard", "name": f"train-00000{number}.tar", "bytes": size, "kept": False}
        for number, size in enumerate(sizes)
    ]
