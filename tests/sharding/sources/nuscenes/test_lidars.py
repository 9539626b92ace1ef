"""Rigs with several lidars: each is a channel of its own, with its own geometry and sweeps."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

import fuelrail as fr
from fuelrail.pipeline.sample.schema import (
    Geometry,
    Sweeps,
    decode_arrays,
    decode_points,
)
from fuelrail.sharding.run import scan_source
from fuelrail.sharding.sources.registry import SourceSpec
from fuelrail.sharding.sources.shared.files import FolderFiles
from support.nuscenes_radar import add_radar_files
from support.nuscenes_tables import Dataroot, build_nuscenes, token
from support.sharding import scanned

LIDARS = ("LIDAR_TOP", "LIDAR_FRONT_LEFT", "LIDAR_REAR")


def with_more_lidars(nuscenes: Dataroot) -> dict[str, np.ndarray]:
    """Give the rig two more lidars, each with its own place, times and points; returns points by file."""
    rng = np.random.default_rng(0)
    tables = nuscenes.tables
    written = {}
    rows = [row for row in tables["sample_data"] if "/LIDAR_TOP/" in row["filename"]]
    scene_of = {row["token"]: row["scene_token"] for row in tables["sample"]}
    for number, lidar in enumerate(LIDARS):
        if number:
            tables["sensor"].append(
                {
                    "token": token("sensor", lidar),
                    "channel": lidar,
                    "modality": "lidar",
                }
            )
            calibrated = copy.deepcopy(
                next(
                    r
                    for r in tables["calibrated_sensor"]
                    if r["token"] == token("calibrated", "LIDAR_TOP")
                )
            )
            calibrated.update(
                token=token("calibrated", lidar),
                sensor_token=token("sensor", lidar),
            )
            calibrated["translation"] = [3.0, 0.5 * number, 0.7]
            tables["calibrated_sensor"].append(calibrated)
        last: dict[str, dict[str, Any]] = {}
        for row in sorted(rows, key=lambda row: row["timestamp"]):
            if number:
                row = copy.deepcopy(row)
                row.update(
                    token=token(lidar, row["token"]),
                    calibrated_sensor_token=token("calibrated", lidar),
                )
                row["timestamp"] += 1000 * number
                row["filename"] = row["filename"].replace("LIDAR_TOP", lidar)
                tables["sample_data"].append(row)
            if scene_of[row["sample_token"]] in last:
                row["prev"] = last[scene_of[row["sample_token"]]]["token"]
            last[scene_of[row["sample_token"]]] = row
            written[row["filename"]] = rng.normal(0, 9, (int(rng.integers(5, 20)), 5)).astype("<f4")
            path = nuscenes.root / row["filename"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(written[row["filename"]].tobytes())
    nuscenes.write()
    return written


def test_every_lidar_of_a_rig_is_in_batches(tmp_path) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"scene-0061": 3}, cameras=("CAM_FRONT",))
    with_more_lidars(nuscenes)
    fr.shard(f"nuscenes:{nuscenes.root}", tmp_path / "out", workers=1)
    ego = fr.BevAugment(train=True, rotate_deg=(20, 30), scale=(0.9, 0.95))
    transforms = fr.Transforms(
        image=fr.ImageAugment(height=32, width=48),
        ego=ego,
        points=True,
        select=["lidar_rear", "lidar_front_left"],
    )
    with fr.DataLoader(tmp_path / "out", 3, transforms=transforms) as loader:
        (batch,) = loader
    dataset = fr.open(tmp_path / "out")
    for row, key in enumerate(batch["sample_key"]):
        stored = dataset[key]
        bda = batch["bda_mat"][row].double().numpy()
        for lidar_index, name in ((1, "lidar_front_left"), (2, "lidar_rear")):
            lidar2ego = stored.geometry.lidar2keyego(lidar_index)
            moved = np.linalg.inv(lidar2ego) @ bda @ lidar2ego
            expected = stored.points[name][:, :3] @ moved[:3, :3].T + moved[:3, 3]
            np.testing.assert_allclose(batch[name][row][:, :3], expected, atol=1e-4)
            np.testing.assert_array_equal(batch[name][row][:, 3:], stored.points[name][:, 3:])


def test_every_lidar_of_a_rig_is_stored_with_its_sweeps(tmp_path) -> None:
    nuscenes = build_nuscenes(tmp_path / "root", {"scene-0061": 3}, cameras=("CAM_FRONT",))
    written = with_more_lidars(nuscenes)
    source, info, table = scanned("nuscenes", nuscenes.root, tmp_path, sweeps=1)
    names = ("lidar_top", "lidar_front_left", "lidar_rear")
    assert [lidar.channel for lidar in info.lidars] == list(names)
    for number in range(3):
        row = table.row(number)
        geometry = decode_arrays(row.geometry, Geometry)
        members = {member.name: member.ref for member in row.members}
        rows = nuscenes.tables["sample_data"]
        for lidar_index, (name, lidar) in enumerate(zip(names, LIDARS, strict=True)):
            lidar_row = next(r for r in rows if f"points:{r['filename']}" == members[f"{name}.npy"])
            calibrated = next(
                r
                for r in nuscenes.tables["calibrated_sensor"]
                if r["token"] == token("calibrated", lidar)
            )
            assert lidar_row["calibrated_sensor_token"] == calibrated["token"]
            assert geometry.lidar_timestamp_ns[lidar_index] == lidar_row["timestamp"] * 1000
            np.testing.assert_allclose(
                geometry.lidar2ego[lidar_index, :3, 3],
                calibrated["translation"],
            )
            np.testing.assert_array_equal(
                decode_points(source.open(members[f"{name}.npy"])),
                written[lidar_row["filename"]],
            )
            sweeps = decode_arrays(source.open(members[f"{name}_sweeps.safetensors"]), Sweeps)
            before = next(r for r in rows if r["token"] == lidar_row["prev"])
            assert sweeps.timestamp_ns.tolist() == [before["timestamp"] * 1000]
            np.testing.assert_array_equal(sweeps.points, written[before["filename"]])


def test_files_are_looked_at_many_at_a_time(tmp_path, monkeypatch) -> None:
    """Sweeps, radars and channels' own files too: where a look takes long, all of a batch are asked for at once."""
    nuscenes = build_nuscenes(tmp_path / "source", {"a": 3})
    with_more_lidars(nuscenes)
    add_radar_files(nuscenes)
    together: list[str] = []
    looks = FolderFiles.facts_of
    facts = FolderFiles.facts

    def look_at_single(self, name):
        raise AssertionError(f"'{name}' is looked at alone")

    def look_at_batch(self, names):
        together.extend(names)
        with monkeypatch.context() as inside:
            inside.setattr(FolderFiles, "facts", facts)
            return looks(self, names)

    monkeypatch.setattr(FolderFiles, "facts_of", look_at_batch)
    monkeypatch.setattr(FolderFiles, "facts", look_at_single)
    info = scan_source(
        SourceSpec(
            "nuscenes",
            str(nuscenes.root),
            {"sweeps": 2, "channels": ["radar"], "radar_sweeps": 2},
        )
    )
    assert info.num_samples == 3
    assert len(together) == len(set(together))
    assert {name.split("/")[1] for name in together} >= {
        *LIDARS,
        "CAM_FRONT",
        "RADAR_FRONT",
    }
